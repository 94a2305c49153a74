"""Draft models of NeMo Automodel agree with their own losses if headloss's losses replace them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draft_case import agree_in_metrics, block_inputs, frozen, installing, train
from transformers import Qwen3Config

pytest.importorskip("nemo_automodel.components.speculative", reason="Automodel is not installed")
import headloss.integrations.nemo_automodel_drafts as adapter

V, H, K = 97, 32, 4
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
    sizes = {"block_size": K, "attention_backend": "sdpa", "num_anchors": 6}
    heads = frozen(V, H)
    return DFlashTrainerModule(Qwen3DFlashDraftModel(config), *heads, 1, **sizes, **more)


def loss_of(out: Any) -> torch.Tensor:
    return out.loss


@pytest.fixture
def installed() -> Any:
    yield from installing(adapter)


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
    """DSpark training gives equal losses, metrics and gradients with and without headloss."""
    model = dspark(options, **more)
    batch = block_inputs(V, H, "target_hidden_states", taught=True)
    agree_in_metrics(train(model, loss_of, **batch), installed(model, loss_of, **batch))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("gamma", [None, 2.0])
def test_dflash(installed: Any, softcap: float | None, gamma: float | None) -> None:
    """DFlash training gives equal losses, metrics and gradients with and without headloss, also
    with a soft cap of the logits."""
    model = dflash(softcap, loss_decay_gamma=gamma)
    batch = block_inputs(V, H, "hidden_states", taught=False)
    agree_in_metrics(train(model, loss_of, **batch), installed(model, loss_of, **batch))


def test_unsupported_losses_and_heads_are_refused_by_name(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_automodel.components.speculative.eagle.core import Eagle3TrainerModule

    batch = block_inputs(V, H, "hidden_states", taught=False)
    with pytest.raises(ValueError, match="got loss_type='variable_prefix', want 'dflash'"):
        installed(dflash(loss_type="variable_prefix"), loss_of, **batch)
    model = dspark(PLAIN)
    kind = type(model.draft_model)
    monkeypatch.setattr(kind, "compute_logits", lambda self, h: self.lm_head(h).tanh())
    batch = block_inputs(V, H, "target_hidden_states", taught=True)
    with pytest.raises(ValueError, match="Qwen3DSparkModel.compute_logits: got a soft cap"):
        installed(model, loss_of, **batch)
    adapter.install()
    with pytest.raises(ValueError, match="Eagle3TargetBatch does not have"):
        Eagle3TrainerModule.forward(object(), *[None] * 4)
