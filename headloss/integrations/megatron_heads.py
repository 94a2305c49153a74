"""Reading the heads that Megatron's output layers compute, without calling the layers.

V vocabulary rows of this rank, H hidden width, r the rank of an adapter.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..head.head import Head, Lora
from ..options import Options
from .shared import refuse

INSTEAD = "Megatron without output_processor"


def head_of(
    layer: Any,
    tied: Tensor | None,
    config: Any,
    options: Options,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    detached: bool = False,
) -> tuple[Head, Options]:
    """Return the head of an output layer, and the options for its loss.

    The returned `Options` copy `sequence_parallel` from the output layer, and `main_grad` from the
    layer's weight if the weight's gradient is accumulated in `weight.main_grad`.

    Args:
        layer: an output layer that `check_layer` accepts.
        tied: [V, H], the embeddings' weight, which replaces the layer's weight; or None.
        config: the model's configuration.
        temperature, vocab_size: arguments of `Head`.
        detached: whether the head gets no gradient.
    """
    linear = linear_of(layer)
    weight: Any = linear.weight if tied is None else tied
    bias = linear.bias if linear.bias is not None and linear.bias.numel() else None
    lora = (_lora(layer.adapter, linear.tp_group),) if _has_lora(layer) else ()
    options = replace(options, sequence_parallel=bool(linear.sequence_parallel))
    if detached:
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        lora = tuple(replace(x, a=x.a.detach(), b=x.b.detach()) for x in lora)
    elif (
        _is_fused(linear)
        and hasattr(weight, "main_grad")
        and weight.requires_grad
        and torch.is_grad_enabled()
    ):
        options = replace(options, main_grad=weight.main_grad)
        weight = _InMainGrad.apply(weight)
    head = Head(
        weight,
        bias,
        temperature,
        softcap=_softcap(linear),
        logit_scale=config.mup_output_mult if getattr(config, "use_mup", False) else 1.0,
        vocab_size=vocab_size,
        vocab_group=linear.tp_group if linear.tp_group.size() > 1 else None,
        lora=lora,
    )
    return head, options


def check_layer(
    layer: Any,
    inference_context: Any,
    config: Any,
    hidden: Tensor,
    tied: Tensor | None = None,
    handed_on: bool = False,
) -> None:
    """Check that `head_of` can read an output layer.

    A layer of a class other than Megatron's is called once without labels, on one row of each rank,
    and its logits are compared with the product of hidden states and weight.

    Args:
        hidden: [s, b, H], or [s / tp, b, H] under sequence parallelism.
        tied: [V, H], the embeddings' weight that replaces the layer's weight; or None.
        handed_on: whether the layer has already been called, so that its forward pre-hooks have
            run.

    Raises:
        TypeError: the layer's logits differ from hidden states times weight, or the layer's adapter
            is unknown.
        ValueError: an unsupported setting is on; the message names the setting.
    """
    linear = linear_of(layer)
    if lacking := [name for name in READ if not hasattr(linear, name)]:
        raise TypeError(
            f"output_layer: got {type(linear).__name__} without {', '.join(lacking)}, want "
            "ColumnParallelLinear"
        )
    weight: Any = linear.weight
    refuse(
        INSTEAD,
        inference_context=inference_context is not None,
        defer_embedding_wgrad_compute=config.defer_embedding_wgrad_compute,
        disable_grad_reduce=linear.disable_grad_reduce,
        gtp_remat=getattr(linear, "gtp_remat_size", 1) > 1,  # New in Megatron-Core 0.19.
        **{
            "Megatron-FSDP": any(hasattr(p, "__fsdp_param__") for p in layer.parameters()),
            "hooks of output_layer": any(_has_hooks(m, handed_on) for m in layer.modules()),
            "FP8 parameters of output_layer": weight is not None and _is_quantised(weight),
            "a soft cap with MuP": _softcap(linear) is not None
            and getattr(config, "use_mup", False),
        },
    )
    if _has_lora(layer):
        _check_adapter(layer.adapter)
    if not _is_known(linear) and linear not in COMPARED:
        _compare(linear, hidden.detach()[:1, :1], weight if tied is None else tied)
        COMPARED.add(linear)


# ---------------------------------------------------------------------- class of the layer

READ = ("weight", "bias", "tp_group", "sequence_parallel", "disable_grad_reduce")
# Output layers that passed the check that their logits equal hidden states times weight.
COMPARED: WeakSet[Any] = WeakSet()
HANDS_ON = "hands_on"  # A replaced `forward` stores the original `forward` in this attribute.
LARGEST = 100.0  # Scale of the test logits, large enough to reveal any common soft cap.


def _is_known(linear: Any) -> bool:
    """Return whether an output layer's forward is Megatron's, or a forward known to `head_of`."""
    plain = import_module("megatron.core.tensor_parallel").ColumnParallelLinear
    replaced = vars(linear).get("forward")
    if replaced is not None and not hasattr(replaced, HANDS_ON):
        return False
    return type(linear) is plain or _name_of(linear) in (MXFP8, *CAPPED)


@torch.no_grad()
def _compare(linear: Any, row: Tensor, weight: Any) -> None:
    """Raise TypeError if the layer's logits of a row [1, 1, H] differ from the logits of
    `head_of`."""
    bias = linear.bias if linear.bias is not None and linear.bias.numel() else None
    largest = nn.functional.linear(row, weight).abs().amax()
    row = row * (LARGEST / largest.clamp_min(1e-2))
    want = nn.functional.linear(row, weight, bias)
    name = type(linear).__name__
    forward = getattr(vars(linear).get("forward"), HANDS_ON, linear)
    try:
        logits, _ = forward(row, weight=weight, runtime_gather_output=False)
    except Exception as error:
        raise TypeError(f"output_layer: {name} without labels raises {error!r}") from error
    # Index of this rank's row in the logits: sequence parallelism gathers the rows of all ranks.
    place = linear.tp_group.rank() if linear.sequence_parallel else 0
    difference, size = (logits[place] - want[0]).norm(), want.norm()
    if not difference <= size * max(4 * torch.finfo(want.dtype).eps, 1e-3):
        raise TypeError(
            f"output_layer: got {name}, whose logits are off the product of hidden states and "
            f"weight by {float(difference / size):.2g}, want ColumnParallelLinear"
        )


# Identify an output layer by its `forward` function, not by its class name: a Megatron-Bridge class
# with the name of Megatron's class adds a soft cap.
BRIDGE = "megatron.bridge"
MXFP8 = "megatron.core.extensions.transformer_engine.TELMHeadColumnParallelLinear.forward"
CAPPED = (
    f"{BRIDGE}.models.gemma.gemma2_provider.Gemma2OutputLayer.forward",
    f"{BRIDGE}.models.gemma.modeling_gemma4.Gemma4OutputLayer.forward",
)
LORA = f"{BRIDGE}.peft.lora_layers.LoRALinear.forward"
ADAPTER = f"{BRIDGE}.peft.utils.ParallelLinearAdapter.forward"


def _name_of(layer: Any) -> str:
    forward = type(layer).forward
    return f"{forward.__module__}.{forward.__qualname__}"


def linear_of(layer: Any) -> Any:
    """Return the layer inside LoRA's wrapper; without a wrapper, the layer."""
    return layer.to_wrap if _name_of(layer) == LORA else layer


def _has_lora(layer: Any) -> bool:
    return linear_of(layer) is not layer and layer._adapter_enabled


def _is_fused(linear: Any) -> bool:
    """Return whether a flag of Megatron or Transformer Engine adds the weight's gradient to
    `main_grad`."""
    name = "fuse_wgrad_accumulation"
    return bool(getattr(linear, name, getattr(linear, "gradient_accumulation_fusion", False)))


def _softcap(linear: Any) -> float | None:
    capped = _name_of(linear) in CAPPED
    return (linear.config.final_logit_softcapping or None) if capped else None


def _is_quantised(weight: Any) -> bool:
    """Return whether a weight is one of Transformer Engine's tensor classes, also inside a
    parameter."""
    kinds = {type(weight), type(weight.data)}
    return any(kind.__module__.partition(".")[0] != "torch" for kind in kinds)


def _has_hooks(module: Any, handed_on: bool) -> bool:
    return bool(module._forward_hooks or (module._forward_pre_hooks and not handed_on))


# ---------------------------------------------------------------------- LoRA


def _check_adapter(adapter: Any) -> None:
    if _name_of(adapter) != ADAPTER:
        name = type(adapter).__name__
        raise TypeError(f"output_layer.adapter: got {name}, want ParallelLinearAdapter")
    refuse(
        INSTEAD,
        **{
            "an activation in LoRA": not isinstance(adapter.activation, torch.nn.Identity),
            "dropout_position='post'": adapter.dropout_position == "post" and _dropout(adapter) > 0,
            "LoRA with input_is_parallel": adapter.input_is_parallel,
            "LoRA with gather_output": adapter.linear_out.gather_output,
        },
    )


def _dropout(adapter: Any) -> float:
    dropout = adapter.dropout
    return getattr(dropout, "p", 0.0) if dropout.training else 0.0


def _lora(adapter: Any, group: Any) -> Lora:
    """Return the adapter as a `Lora`, with LoRA's matrix A gathered from the tensor-parallel ranks.

    Each rank gets the whole gradient of LoRA's A from `head_loss`, and keeps its rows of the
    gradient. A gather through the adapter wrapper's `weight` attribute would lose the gradient.
    """
    a = adapter.linear_in.weight  # LoRA's A, a shard [r / tp, H].
    if group.size() > 1:
        gather = import_module("megatron.core.tensor_parallel").gather_from_sequence_parallel_region
        a = gather(a, tensor_parallel_output_grad=False, group=group)
    b = adapter.linear_out.weight  # Shape [V, r].
    return Lora(a=a, b=b, scaling=adapter.alpha / adapter.dim, dropout=_dropout(adapter))


# ---------------------------------------------------------------------- gradients


class _InMainGrad(torch.autograd.Function):
    """The weight, unchanged. The backward tells Megatron's hooks that `main_grad` has the gradient.

    Megatron's hooks run only if a gradient arrives, so the backward returns a dummy gradient.
    """

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        weight = ctx.weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        if getattr(weight, "zero_out_wgrad", False):
            return torch.zeros_like(weight)
        return torch.empty_like(weight)
