"""Comparison of Megatron-Core's and headloss's `process_mtp_loss` in `GPTModel`, on every rank.

b rows of s positions, D prediction depths.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from types import ModuleType
from typing import Any

import megatron_ranks
import torch
from megatron_ranks import (
    B,
    S,
    config_of,
    gradients,
    mask_of,
    off,
    parallel,
    scheduled,
    worst,
)
from torch import Tensor

import headloss as hl

D, SCALE = 2, 3.0
V = 8  # a small vocabulary, so that the model's likeliest token is often the label


def model_of(config: Any, tied: bool = False, attention: bool = True, length: int = S) -> Any:
    """Return a model of one layer and D multi-token-prediction layers, without norms, since torch's
    norm refuses sequence parallelism."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
    if not attention:  # Megatron's unfused attention rejects packed sequences, so replace it.
        # An attribute read by Megatron's multi-token-prediction layer.
        kind = {"attn_mask_type": AttnMaskType.causal}
        layer.submodules.self_attention = ModuleSpec(module=IdentityOp, params=kind)
        layer.submodules.self_attn_bda = IdentityFuncOp
    depths = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    for depth in depths.layer_specs:
        norms = depth.submodules
        norms.enorm = norms.hnorm = norms.layer_norm = IdentityOp
    torch.manual_seed(0)
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer], layer_norm=None),
        vocab_size=V,
        max_sequence_length=length,
        share_embeddings_and_output_weights=tied,
        mtp_block_spec=depths,
    )


def inputs(b: int = B, s: int = S, seed: int = 1) -> dict[str, Tensor]:
    given = megatron_ranks.inputs(b, s, seed)
    return {**given, "input_ids": given["input_ids"] % V, "labels": given["labels"] % V}


def mtp_config(size: int, **options: Any) -> Any:
    given = {"mtp_num_layers": D, "mtp_loss_scaling_factor": 0.4, "init_method_std": 0.2}
    return config_of(size, **{**given, **options})


@contextlib.contextmanager
def headloss_installed(on: bool = True):
    from headloss.integrations import megatron_mtp

    if on:
        megatron_mtp.install()
    try:
        yield
    finally:
        megatron_mtp.uninstall()


def logged() -> Tensor:
    """Return Megatron's logged values per depth since the last query, [n, D]."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    helper = MTPLossLoggingHelper
    names = ("loss_values", "values", "loss_sums", "num_tokens", "correct_values", "total_values")
    names = [n for n in names if n in helper.tracker]
    found = torch.stack([helper.tracker[name].clone() for name in names])
    helper.tracker.clear()
    return found


def scaled(by: float = SCALE) -> None:
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    MTPLossAutoScaler.set_loss_scale(torch.ones(1) * by)


def both(
    model: Any, forward: Any, processors: tuple[Any, Any] = (None, None), hits: int = 2
) -> dict[str, float]:
    """Compare Megatron's and headloss's losses, gradients and logged values; the likeliest token
    must be the label at least `hits` times."""
    found = []
    scaled()
    for ours, processor in zip((False, True), processors, strict=True):
        with headloss_installed(ours):
            losses = forward(model, processor)
            losses.sum().mul(SCALE).backward()
        found.append((losses.detach(), gradients(model), logged()))
    (loss, grads, log), (our_loss, our_grads, our_log) = found
    assert (our_log[1:] == log[1:]).all(), (our_log, log)
    assert log[0].min() > 0 and (len(log) == 1 or log[-2].sum() >= hits), log
    return {
        "loss": off(our_loss, loss),
        "gradient": worst(our_grads, grads),
        "logged": off(our_log, log),
    }


# ---------------------------------------------------------------------- cases


def depths(size: int, spread: bool, tied: bool, processor: bool, more: dict[str, Any]) -> Any:
    """Compare the multi-token-prediction losses, with Megatron's main loss or with headloss's
    output processor `TokenLosses`."""
    from headloss.integrations.megatron import TokenLosses

    parallel(size)
    model = model_of(mtp_config(size, sequence_parallel=spread, **more), tied)
    mask = 0.5 + mask_of()  # token weights
    mask[0, 3] = 0

    def forward(model: Any, processor: Any) -> Tensor:
        losses = model(**inputs(), loss_mask=mask, output_processor=processor)
        return losses * mask / mask.sum()

    pair = None, TokenLosses() if processor else None
    return both(model, forward, pair, hits=1 if "use_mup" in more else 2)


def one_call(size: int, spread: bool, policy: bool, totals: bool) -> Any:
    """Compare one `head_loss` call for the main prediction and all further depths with Megatron's
    two losses."""
    from headloss.integrations.megatron import HeadLoss

    parallel(size)
    model = model_of(mtp_config(size, sequence_parallel=spread))
    mask, outputs = mask_of(), []
    torch.manual_seed(3)
    old, push = -2 + torch.rand(B, S), torch.randn(B, S)
    count = 40.0 if totals else mask.sum()

    def forward(model: Any, processor: Any) -> Tensor:
        context = {"totals": hl.Totals(40.0, 4)} if totals else {}
        context |= {"old_logps": old, "advantages": push} if policy else {}
        found = model(
            **inputs(), loss_mask=mask, output_processor=processor, output_processor_context=context
        )
        if processor is None:
            ratio = (-found - old).exp()
            clipped = -torch.minimum(ratio * push, ratio.clamp(0.8, 1.2) * push)
            return ((clipped if policy else found) * mask).sum() / count
        outputs.append(found)
        return found.loss

    loss = hl.dapo(epsilon_low=0.2, epsilon_high=0.2) if policy else hl.cross_entropy()
    found = both(model, forward, (None, HeadLoss(loss)))
    (out,) = outputs
    assert out.logps.shape == (S, B) and len(out.terms) == 1, out
    assert out.plan.tokens == scored(mask), out.plan  # includes all rows
    return found


def scored(mask: Tensor) -> int:
    """Return the number of scored rows, summed over the main prediction and all
    multi-token-prediction depths."""
    return int(sum((mask[:, k:] > 0).sum() for k in range(1 + D)))


def two_calls(more: dict[str, Any], segments: bool) -> Any:
    """Compare cases in which headloss needs one call for the main loss and another for the
    multi-token-prediction losses."""
    from headloss.integrations.megatron import HeadLoss

    parallel(2)
    model = model_of(mtp_config(2, sequence_parallel=True, **more))
    mask, old, push = mask_of(), -2 + torch.rand(B, S), torch.randn(B)

    def forward(model: Any, processor: Any) -> Tensor:
        context = {"old_logps": old, "advantages": push} if segments else None
        found = model(
            **inputs(), loss_mask=mask, output_processor=processor, output_processor_context=context
        )
        if processor is not None:
            return found.loss
        if not segments:
            return (found * mask).sum() / mask.sum()
        ratio = (((-found - old) * mask).sum(1) / mask.sum(1)).exp()
        return -torch.minimum(ratio * push, ratio.clamp(0.8, 1.2) * push).mean()

    loss = hl.gspo(epsilon_low=0.2, epsilon_high=0.2) if segments else hl.cross_entropy()
    return both(model, forward, (None, HeadLoss(loss)))


def packed(context_parallel: bool) -> Any:
    """Compare packed documents, across whose borders nothing is predicted; with context parallelism
    a rank has a chunk from the front and one from the back."""
    from megatron.core.packed_seq_params import PackedSeqParams

    size = 2 if context_parallel else 1
    parallel(3 - size, context_parallel_size=size)
    length, ends = 16, torch.tensor([0, 8, 16]) if context_parallel else torch.tensor([0, 5, 7, 16])
    config = mtp_config(3 - size, context_parallel_size=size)
    model = model_of(config, attention=False, length=length * size)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends * size)
    mask = mask_of(1, length)

    def forward(model: Any, processor: Any) -> Tensor:
        seed = torch.distributed.get_rank() if context_parallel else 0
        given = inputs(1, length, seed)
        losses = model(**given, loss_mask=mask, packed_seq_params=params)
        return losses * mask / mask.sum()

    return both(model, forward, hits=0)


def under_verl() -> Any:
    """Compare Megatron's and headloss's multi-token-prediction losses after verl has patched the
    model's postprocessing and imported `process_mtp_loss` under a second name."""
    import verl_platform  # noqa: F401
    from verl.models.mcore import mtp_patch

    parallel(2)
    model, mask = model_of(mtp_config(2)), mask_of()
    mtp_patch.patch_postprocess(model)
    theirs, held = mtp_patch._process_mtp_loss, []

    def forward(model: Any, processor: Any) -> Tensor:
        held.append(mtp_patch._process_mtp_loss is theirs)
        return model(**inputs(), loss_mask=mask).float().square()

    found = both(model, forward)
    assert held == [True, False] and mtp_patch._process_mtp_loss is theirs
    return found


def without_labels() -> Any:
    """Compare multi-token-prediction training of a model called without labels, which returns
    logits and takes the labels of its depths from the input ids."""
    parallel(2)
    model = model_of(mtp_config(2))
    given = inputs()
    del given["labels"]
    return both(model, lambda model, _: model(**given).float().square())


def main_grad(processor: bool) -> dict[str, float]:
    """Compare `main_grad` of two micro-batches under Megatron's DDP with unfused gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from headloss.integrations.megatron import HeadLoss

    parallel(2)
    config, found, mask = mtp_config(2), [], mask_of()
    scaled(1.0)
    for ours in (False, True):
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, bucket_size=None)
        model = DistributedDataParallel(config, settings, model_of(config))
        model.zero_grad_buffer()
        model.module.output_layer.gradient_accumulation_fusion = ours
        process = HeadLoss(hl.cross_entropy()) if ours and processor else None
        for seed in (1, 2):
            with headloss_installed(ours):
                # Megatron's fused layer needs APEX to return the main logits.
                model.module.output_layer.gradient_accumulation_fusion = ours and processor
                out = model(**inputs(seed=seed), loss_mask=mask, output_processor=process)
                (out.loss if process else (out * mask).sum() / mask.sum()).backward()
        model.finish_grad_sync()
        assert all(p.grad is None for p in model.parameters())
        found.append([p.main_grad.clone() for p in model.parameters()])
        logged()
    return {"gradient": worst(found[1], found[0])}


def a_step(processor: bool) -> dict[str, float]:
    """Compare one step of Megatron's pipeline schedule over two micro-batches; the schedule sets
    the scale of the multi-token-prediction losses."""

    from headloss.integrations.megatron import HeadLoss

    parallel(2)
    config = mtp_config(2)
    config.grad_scale_func = lambda loss: loss * 8.0
    found, mask = [], mask_of()
    for ours in (False, True):
        model = model_of(config)
        process = HeadLoss(hl.cross_entropy()) if ours and processor else None

        def forward_step(data, model, process=process):
            out = model(**next(data), loss_mask=mask, output_processor=process)

            def loss(out):
                mean = out.loss if process else (out * mask).sum() / mask.sum()
                return mean, {"loss": mean.detach().clone()}

            return out, loss

        with headloss_installed(ours):
            reported = scheduled(model, forward_step, [inputs(seed=1), inputs(seed=2)])
        found.append((reported, gradients(model), logged()))
    assert (found[0][2][1:] == found[1][2][1:]).all(), found
    return {
        "loss": off(found[1][0], found[0][0]),
        "gradient": worst(found[1][1], found[0][1]),
        "logged": off(found[1][2], found[0][2]),
    }


def bound() -> dict[str, bool]:
    """Check that `install()` replaces `process_mtp_loss` in every module that imported it, and that
    `uninstall()` restores Megatron's function there."""
    from megatron.core.models.gpt import gpt_model
    from megatron.core.models.hybrid import hybrid_model
    from megatron.core.transformer import multi_token_prediction as home

    parallel(2)
    other = sys.modules.setdefault("of_another_name", ModuleType("of_another_name"))
    other._process = theirs = home.process_mtp_loss
    holders = [(m, "process_mtp_loss") for m in (home, gpt_model, hybrid_model)]
    holders.append((other, "_process"))
    with headloss_installed():
        ours = home.process_mtp_loss
        all_ours = all(getattr(m, n) is not theirs for m, n in holders)
        same = inspect.signature(ours) == inspect.signature(theirs)
    back = all(getattr(m, n) is theirs for m, n in holders)
    model = model_of(mtp_config(2)).eval()
    with headloss_installed(), torch.no_grad():
        # fails if called: no logits are made for depths without a loss
        model.output_layer.forward = None
        hidden = torch.ones((1 + D) * S, B, 16)
        main = home.process_mtp_loss(
            hidden, inputs()["labels"], None, model.output_layer, None, None, False, None,
            model.config,
        )  # fmt: skip
    return {"all ours": all_ours, "signature": same, "back": back, "eval": main.shape[0] == S}
