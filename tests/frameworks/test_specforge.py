"""Draft models of SpecForge agree with their own losses if headloss's losses replace them."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from draft_case import agree_in_metrics, block_inputs, flat, frozen, installing, train
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

import headloss.integrations.specforge as adapter

pytest.importorskip("specforge.core", reason="SpecForge is not installed")

V, V_DRAFT, H, K, T = 97, 65, 32, 4, 24
SIZES = {
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MARKOV = {"markov_rank": 8, "confidence_head_alpha": 1.0, "confidence_head_with_markov": True}
DOMINO = {"emb_dim": 12, "gru_hidden_dim": 8, "pure_draft_prefix_len": 1}


def block_model(kind: str, options: dict[str, Any], **more: Any) -> Any:
    """Return a one-layer draft over blocks of K positions, with a frozen head of V tokens."""
    from specforge.algorithms.common import dflash_family_model as family
    from specforge.modeling.draft import dflash, domino, dspark

    classes = {
        "dflash": (dflash.DFlashDraftModel, family.OnlineDFlashModel),
        "domino": (domino.DominoDraftModel, family.OnlineDominoModel),
        "dspark": (dspark.DSparkDraftModel, family.OnlineDSparkModel),
    }
    draft, online = classes[kind]
    config = Qwen3Config(vocab_size=V, num_target_layers=4, block_size=K, **SIZES)
    config.dflash_config = {"target_layer_ids": [0, 1, 2], "mask_token_id": 1, **options}
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    heads = frozen(V, H)
    sizes = {"block_size": K, "attention_backend": "sdpa", "num_anchors": 6}
    return online(draft(config), *heads, 1, **sizes, objective_chunk_blocks=2, **more)


@pytest.fixture
def installed() -> Any:
    yield from installing(adapter)


BLOCKS = [
    ("dflash", {}, {}),
    ("dflash", {}, {"loss_decay_gamma": 2.0}),
    ("dflash", {}, {"loss_type": "dpace"}),
    ("dflash", {}, {"loss_type": "dpace-continuation-value-only"}),
    ("domino", DOMINO, {"loss_decay_gamma": 2.0}),
    ("dspark", {"markov_rank": 0}, {"dspark_l1_loss_alpha": 0.0}),
    *(
        ("dspark", MARKOV | {"markov_head_type": kind}, {"loss_decay_gamma": 2.0})
        for kind in ("vanilla", "gated", "rnn")
    ),
]


@pytest.mark.parametrize(("kind", "options", "more"), BLOCKS)
def test_blocks(installed: Any, kind: str, options: dict, more: dict) -> None:
    """DFlash, Domino and DSpark give equal losses, metrics and gradients with and without
    headloss."""
    model = block_model(kind, options, **more)
    batch: dict[str, Any] = block_inputs(V, H, "hidden_states", taught=kind == "dspark")
    if kind == "domino":
        batch["lambda_base"] = 0.3
    first = operator.itemgetter(0)
    agree_in_metrics(train(model, first, **batch), installed(model, first, **batch))


# ---------------------------------------------------------------------- EAGLE-3


def eagle(lk: str | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return SpecForge's EAGLE-3 model with a reduced draft vocabulary; PyTorch operations replace
    its Triton kernel for soft cross-entropy."""
    from specforge.algorithms.eagle3 import model as eagle3
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    class SoftCrossEntropy:
        @staticmethod
        def apply(logits: Tensor, target: Tensor, mask: Tensor) -> Tensor:
            return -(mask * target * logits.float().log_softmax(-1)).sum(2).mean()

    monkeypatch.setattr(eagle3, "LogSoftmaxLoss", SoftCrossEntropy)
    config = LlamaConfig(vocab_size=V, draft_vocab_size=V_DRAFT, pad_token_id=0, **SIZES)
    torch.manual_seed(0)
    draft = LlamaForCausalLMEagle3(config)
    draft.lm_head.weight.data.copy_(0.3 * torch.randn(V_DRAFT, H))
    draft.t2d.copy_(torch.arange(V) % 3 != 1)
    draft.d2t.copy_(draft.t2d.nonzero().squeeze(1) - torch.arange(V_DRAFT))
    return eagle3.OnlineEagle3Model(draft, length=7, lk_loss_type=lk, kl_decay=2.0)


def eagle_inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(V, (2, T), generator=generator),
        "attention_mask": torch.ones(2, T, dtype=torch.long),
        "target": None,
        "loss_mask": (torch.rand(2, T, 1, generator=generator) < 0.8).float(),
        "hidden_states": torch.randn(2, T, 3 * H, generator=generator),
        "target_hidden_for_compact": torch.randn(2, T, H, generator=generator),
        "target_head_weight": 0.3 * torch.randn(V, H, generator=generator),
    }


def of_steps(decay: float) -> Any:
    return lambda out: sum(decay**i * loss for i, loss in enumerate(out[0]))


@pytest.mark.parametrize("lk", [None, "alpha", "lambda"])
def test_eagle(installed: Any, monkeypatch: pytest.MonkeyPatch, lk: str | None) -> None:
    """EAGLE-3 agrees with SpecForge in the losses, acceptances and counts of each step, for a
    verifier with a larger vocabulary."""
    model = eagle(lk, monkeypatch)
    loss = of_steps(0.8)
    batch = eagle_inputs()
    agree_in_metrics(train(model, loss, **batch), installed(model, loss, **batch))


def test_a_loss_decay_other_than_installed_is_refused(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward pass with step weights other than the decay passed to `install` raises
    RuntimeError."""
    with pytest.raises(RuntimeError, match=r"EAGLE-3, by install\(ploss_decay=..\): got gradients"):
        installed(eagle(None, monkeypatch), of_steps(0.5), **eagle_inputs())


def test_finite_where_a_draft_and_a_verifier_share_no_mass(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The EAGLE-3 acceptance loss, metrics and gradients are finite for peaked draft and verifier
    distributions without common probability mass."""
    model, batch = eagle("alpha", monkeypatch), eagle_inputs()
    with torch.no_grad():
        model.draft_model.lm_head.weight.mul_(300)
    batch["target_head_weight"] = batch["target_head_weight"] * 300
    loss, out, gradients = installed(model, of_steps(0.8), **batch)
    assert loss.isfinite() and all(value.isfinite().all() for value in flat(out))
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_logits_of_a_verifier_are_refused(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch with the verifier's logits in place of hidden states raises ValueError."""
    batch = eagle_inputs() | {"target": torch.randn(2, T, V), "target_hidden_for_compact": None}
    with pytest.raises(ValueError, match="got the verifier's logits, want its hidden states"):
        installed(eagle(None, monkeypatch), of_steps(0.8), **batch)
