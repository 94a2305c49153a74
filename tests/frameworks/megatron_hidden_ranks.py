"""Comparison of Megatron-Core models with an output layer that returns hidden states, on every
rank.

Log-probs from the hidden states are compared with log-probs from the model's logits. R ranks share
the vocabulary; b rows of s positions.
"""

from __future__ import annotations

from typing import Any

import megatron_mtp_ranks as mtp
import torch
from megatron_heads_ranks import CAPS, capped_by, with_lora
from megatron_ranks import (
    B,
    S,
    V,
    config_of,
    gradients,
    inputs,
    mask_of,
    model_of,
    off,
    parallel,
    worst,
)
from torch import Tensor


def hybrid_of(config: Any, tied: bool) -> Any:
    """Return Megatron's `HybridModel` with one attention layer and no norms, since Mamba needs a
    GPU."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
    hybrid_block.TENorm = IdentityOp
    parts = hybrid_block.HybridStackSubmodules(attention_layer=layer)
    torch.manual_seed(0)
    return HybridModel(
        config,
        ModuleSpec(module=hybrid_block.HybridStack, submodules=parts),
        vocab_size=V,
        max_sequence_length=S,
        hybrid_layer_pattern="*",
        share_embeddings_and_output_weights=tied,
    )


def losses(kind: str, size: int, spread: bool, tied: bool, more: dict[str, Any]) -> dict[str, Any]:
    """Compare the model's [b, s] losses and gradients with and without returned hidden states."""
    from headloss.integrations.megatron_hidden import hand_on

    parallel(size)
    config = config_of(size, sequence_parallel=spread, **more)
    model = (hybrid_of if kind == "hybrid" else model_of)(config, tied)
    mask, found, forward = mask_of(), [], type(model.output_layer).forward
    for ours in (False, True):
        door = hand_on(model) if ours else None
        values = model(**inputs())
        (3 * (values * mask).sum() / mask.sum()).backward()
        found.append((values.detach(), gradients(model)))
        if door is not None:
            door.close()
    assert model.output_layer.forward.__func__ is forward
    return {"loss": off(found[1][0], found[0][0]), "gradient": worst(found[1][1], found[0][1])}


def statistics(size: int, spread: bool, half: bool) -> dict[str, float]:
    """Compare log-probs and entropies at token temperatures, from the model's output in place of
    logits.

    With `half` the model computes in bfloat16, and `Float16Module` converts its output to float32.
    """
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from megatron.core.transformer.module import Float16Module

    from headloss.integrations.megatron_hidden import hand_on, latest

    parallel(size)
    more: Any = {"bf16": True, "params_dtype": torch.bfloat16} if half else {}
    config = config_of(size, sequence_parallel=spread, **more)
    model = model_of(config)
    model = Float16Module(config, model) if half else model
    given = inputs()
    labels = given.pop("labels")
    heat = 0.5 + torch.rand(B, S, generator=torch.Generator().manual_seed(2))
    logits = gather_from_tensor_model_parallel_region(model(**given)) / heat[..., None]
    table = logits.log_softmax(-1)
    logp = table.gather(-1, labels[..., None])[..., 0]
    entropy = -(table.exp() * table).sum(-1)
    up = torch.randn(2, B, S, generator=torch.Generator().manual_seed(3))
    (up[0] * logp + up[1] * entropy).sum().backward()
    want = gradients(model)
    door = hand_on(model)
    hidden = model(**given)
    assert hidden.dtype == torch.float32 and latest() is door
    stats = door.stats(hidden, labels, heat)
    (up[0] * stats.logp + up[1] * stats.entropy).sum().backward()
    pairs = {"logp": (stats.logp, logp), "entropy": (stats.entropy, entropy)}
    found = {name: off(*pair) for name, pair in pairs.items()}
    return found | {"gradient": worst(gradients(model), want)}


def layers(kind: str) -> dict[str, float]:
    """Compare an output layer that has Megatron-Bridge's soft cap or LoRA, with and without
    headloss."""
    from headloss.integrations.megatron_hidden import hand_on

    parallel(2)
    config = config_of(2, init_method_std=0.5)
    config.final_logit_softcapping = 1.5
    model = model_of(config)
    if kind == "lora":
        with_lora(model, config, frozen=False)
    else:
        capped_by(model, CAPS[0])
    found = []
    for ours in (False, True):
        if ours:
            hand_on(model)
        values = model(**inputs())
        values.sum().backward()
        found.append((values.detach(), gradients(model)))
    return {"loss": off(found[1][0], found[0][0]), "gradient": worst(found[1][1], found[0][1])}


def depths() -> dict[str, float]:
    """Compare a model with multi-token prediction, with the functions of
    `megatron_mtp_ranks.py`."""
    from headloss.integrations import megatron_mtp
    from headloss.integrations.megatron_hidden import hand_on

    parallel(2)
    model = mtp.model_of(mtp.mtp_config(2))
    mask, found = mask_of(), []
    mtp.scaled()
    for ours in (False, True):
        if ours:
            megatron_mtp.install()
            hand_on(model)
        values = model(**mtp.inputs(), loss_mask=mask)
        (values * mask).sum().mul(mtp.SCALE).backward()
        found.append((values.detach(), gradients(model), mtp.logged()))
    megatron_mtp.uninstall()
    (loss, grads, log), (our_loss, our_grads, our_log) = found
    return {
        "loss": off(our_loss, loss),
        "gradient": worst(our_grads, grads),
        "logged": off(our_log, log),
    }


def refusals() -> dict[str, str]:
    """Return the error text of each unsupported call, and the shape of inference's output."""
    from headloss.integrations.megatron_hidden import hand_on

    parallel(2)
    found: dict[str, str] = {}

    def said(name: str, call: Any) -> None:
        try:
            found[name] = str(call())
        except (TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    given = inputs()
    labels = given.pop("labels")
    deep = mtp.model_of(mtp.mtp_config(2))
    hand_on(deep)
    said("mtp", lambda: deep(**mtp.inputs()))
    model = model_of(config_of(2))
    logits: Tensor = model(**given)
    door = hand_on(model)
    assert door is not None
    said("twice", lambda: hand_on(model))
    hidden = model(**given)
    said("logits", lambda: door.stats(logits, labels))
    said("inference", lambda: tuple(model(**given, runtime_gather_output=True).shape))
    model.output_layer.register_forward_hook(lambda *a: None)
    hidden = model(**given)
    said("hooks", lambda: door.stats(hidden, labels))
    return found
