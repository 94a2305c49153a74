"""Draft models of NeMo Automodel agree with their own losses if headloss's losses replace them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config

pytest.importorskip("nemo_automodel.components.speculative", reason="Automodel is not installed")
import headloss.integrations.nemo_automodel_drafts as adapter

V, H, K, T = 97, 32, 4, 24
SIZES = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "block_size": K,
    "num_target_layers": 4,
    "mask_token_id": 1,
}
PLAIN = {"markov_rank": 0, "enable_confidence_head": False}
MARKOV = {"markov_rank": 8, "enable_confidence_head": True, "confidence_head_with_markov": True}


def dspark(options: dict[str, Any], **more: Any) -> Any:
    from nemo_automodel.components.speculative.dspark.core import DSparkTrainerModule
    from nemo_automodel.components.speculative.dspark.draft_qwen3 import Qwen3DSparkModel

    config = Qwen3Config(**SIZES, target_layer_ids=[0, 1, 2], num_anchors=6, **options)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    draft = Qwen3DSparkModel(config)
    draft.lm_head.weight.data.copy_(0.3 * torch.randn(V, H))
    draft.lm_head.requires_grad_(False)
    return DSparkTrainerModule(draft, **more)


def dflash(softcap: float | None = None, **more: Any) -> Any:
    from nemo_automodel.components.speculative.dflash.core import DFlashTrainerModule
    from nemo_automodel.components.speculative.dflash.draft_qwen3 import Qwen3DFlashDraftModel

    config = Qwen3Config(**SIZES)
    config.dflash_config = {"target_layer_ids": [0, 1, 2], "mask_token_id": 1, "block_size": K}
    if softcap is not None:
        config.dflash_config |= {"final_logit_softcapping": softcap, "output_multiplier": 0.5}
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    head, embed = nn.Linear(H, V, bias=False), nn.Embedding(V, H)
    head.weight.data.copy_(0.3 * torch.randn(V, H))
    for module in (head, embed):
        module.requires_grad_(False)
    sizes = {"block_size": K, "attention_backend": "sdpa", "num_anchors": 6}
    return DFlashTrainerModule(Qwen3DFlashDraftModel(config), head, embed, 1, **sizes, **more)


def inputs(states: str, taught: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    batch = {
        "input_ids": torch.randint(V, (2, T), generator=generator),
        states: torch.randn(2, T, 3 * H, generator=generator),
        "loss_mask": (torch.rand(2, T, generator=generator) < 0.8).float(),
    }
    if taught:
        batch["target_last_hidden_states"] = torch.randn(2, T, H, generator=generator)
    return batch


def train(model: Any, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(5)  # anchors are random
    out = model(**batch)
    out.loss.backward()
    metrics = {f.name: getattr(out, f.name).detach() for f in dataclasses.fields(out)}
    return metrics, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def installed() -> Any:
    def call(*args: Any) -> Any:
        adapter.install()
        try:
            return train(*args)
        finally:
            adapter.uninstall()

    yield call
    adapter.uninstall()


def agree(theirs: Any, ours: Any) -> None:
    assert ours[0].keys() == theirs[0].keys()
    for name, value in theirs[0].items():
        assert torch.allclose(ours[0][name].double(), value.double(), rtol=2e-6, atol=2e-6), name
    assert ours[1].keys() == theirs[1].keys() and len(ours[1]) > 5
    for name, gradient in theirs[1].items():
        assert (ours[1][name] - gradient).norm() <= 4e-6 * gradient.norm() + 1e-9, name


@pytest.mark.parametrize(
    ("options", "more"),
    [
        (PLAIN, {}),
        (PLAIN, {"l1_loss_alpha": 0.0, "ce_loss_alpha": 1.0}),
        (MARKOV | {"markov_head_type": "vanilla"}, {"loss_decay_gamma": 2.0}),
        (MARKOV | {"markov_head_type": "gated"}, {"loss_decay_gamma": 2.0}),
    ],
)
def test_dspark(installed: Any, options: dict, more: dict) -> None:
    model, batch = dspark(options, **more), inputs("target_hidden_states", taught=True)
    agree(train(model, batch), installed(model, batch))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("gamma", [None, 2.0])
def test_dflash(installed: Any, softcap: float | None, gamma: float | None) -> None:
    model = dflash(softcap, loss_decay_gamma=gamma)
    batch = inputs("hidden_states", taught=False)
    agree(train(model, batch), installed(model, batch))


def test_what_is_not_served_is_refused_by_name(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_automodel.components.speculative.eagle.core import Eagle3TrainerModule

    with pytest.raises(ValueError, match="got loss_type='variable_prefix', want 'dflash'"):
        installed(dflash(loss_type="variable_prefix"), inputs("hidden_states", taught=False))
    model = dspark(PLAIN)
    kind = type(model.draft_model)
    monkeypatch.setattr(kind, "compute_logits", lambda self, h: self.lm_head(h).tanh())
    with pytest.raises(ValueError, match="Qwen3DSparkModel.compute_logits: got a soft cap"):
        installed(model, inputs("target_hidden_states", taught=True))
    adapter.install()
    with pytest.raises(ValueError, match="Eagle3TargetBatch does not have"):
        Eagle3TrainerModule.forward(object(), *[None] * 4)
