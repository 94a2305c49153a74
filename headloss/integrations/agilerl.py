"""AgileRL's log-probs of language models by headloss, for GRPO, GSPO, CISPO, PPO and REINFORCE.

`install()` replaces AgileRL's functions where `use_liger_loss=False` is set, while AgileRL still
computes the losses. `uninstall()` restores AgileRL's functions.

LoRA on `lm_head` is part of the log-probs, and is trained. B rows of T positions, H hidden width, V
vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..head.head import Head, Lora
from ..head.reading import LORA_KINDS
from ..head_stats import head_stats
from .seams import Seams, part
from .sharding import gathered

BASE = "agilerl.algorithms.core.base"
HOME = "agilerl.algorithms.core.llm_ops.fused_logprobs"
ALGORITHM = f"{BASE}:LLMAlgorithm"


def install() -> None:
    """Replace AgileRL's log-prob functions in this process, until `uninstall()`.

    Raises:
        RuntimeError: AgileRL lacks a replaced function, or the function has unexpected arguments.
    """
    SEAMS.install()


class LogProbs:
    """Replacement of AgileRL's `FusedLinearLogProbsFunction`."""

    @staticmethod
    def apply(
        hidden: Tensor,  # Hidden states [B, T, H].
        head_w: Tensor,  # The weight [V, H], either whole or sharded by FSDP2.
        head_b: Tensor | None,
        target_ids: Tensor,  # [B, T]
        temperature: float,
        cast_to_fp32: bool,
        chunk_rows: int,
    ) -> Tensor:
        """Return float32 log-probs [B, T]; the argument `cast_to_fp32` has no effect."""
        return log_probs(hidden, head_w, head_b, target_ids, temperature)


def log_probs(
    hidden: Tensor,
    head_w: Tensor,
    head_b: Tensor | None,
    target_ids: Tensor,
    temperature: float,
    lora: tuple[Lora, ...] = (),
) -> Tensor:
    weight, bias = gathered(head_w), gathered(head_b)
    # If hidden states and weight differ in dtype, AgileRL multiplies them in the wider dtype.
    if weight.dtype != hidden.dtype:
        wide = torch.promote_types(weight.dtype, hidden.dtype)
        hidden, weight = hidden.to(wide), weight.to(wide)
    head = Head(weight, bias, temperature, lora=lora)
    return head_stats(hidden, head, target_ids.long(), gradients=("logp",)).logp


def logprobs_chunked(
    hidden: Tensor,
    head_w: Tensor,
    head_b: Tensor | None,
    target_ids: Tensor,
    temperature: float = 1.0,
    cast_to_fp32: bool = True,
    *,
    chunk_rows: int,
) -> Tensor:
    """Return log-probs without a gradient, in place of `fused_linear_logprobs_chunked`."""
    with torch.no_grad():
        return LogProbs.apply(
            hidden, head_w, head_b, target_ids, temperature, cast_to_fp32, chunk_rows
        )


def fused_logprob_fn_and_head(self: Any) -> tuple[Callable[..., Tensor], Tensor, Tensor | None]:
    """Return the log-prob function, weight and bias of a head with its adapters.

    Replaces AgileRL's `LLMAlgorithm._fused_logprob_fn_and_head`, which ignores LoRA adapters on the
    head.
    """
    layer = self._get_lm_head()
    if getattr(self, "use_liger_loss", False):
        warnings.warn(
            "use_liger_loss: is True, AgileRL's default: its loss is Liger's, and headloss gives "
            "the log-probs without a gradient alone; want use_liger_loss=False",
            stacklevel=2,
        )
    if not hasattr(layer, "base_layer"):
        return SEAMS.theirs[ALGORITHM, "_fused_logprob_fn_and_head"](self)
    function = functools.partial(log_probs_of_layer, layer, torch.is_grad_enabled())
    return function, layer.weight, layer.bias


def log_probs_of_layer(
    layer: Any,
    with_gradient: bool,
    hidden: Tensor,  # Hidden states [B, T, H].
    head_w: Tensor,  # The weight [V, H] of PEFT's base layer.
    head_b: Tensor | None,
    target_ids: Tensor,  # The target ids [B, T].
    temperature: float = 1.0,
    cast_to_fp32: bool = True,
    chunk_rows: int | None = None,
) -> Tensor:
    """Return log-probs [B, T] float32 of a PEFT layer whose adapter AgileRL chooses for each row.

    If gradients are on, all rows use the actor's LoRA adapter: the first name in AgileRL's list of
    adapters per row.
    """
    routing, rows = part("agilerl", "agilerl.lora.fused", "ROUTING_STATE").get(layer), len(hidden)
    if routing is None:  # If AgileRL has not assigned adapters to rows, use PEFT's active adapters.
        names = () if layer.disable_adapters or layer.merged else tuple(layer.active_adapters)
        runs = [(names, rows)]
    elif with_gradient:
        runs = [((routing[0],), rows)]
    else:
        runs = [((name,), len(list(run))) for name, run in itertools.groupby(routing)]
    parts, first = [], 0
    for names, count in runs:
        here = slice(first, first := first + count)
        lora = tuple(adapter(layer, name) for name in names if name in layer.lora_A)
        parts.append(log_probs(hidden[here], head_w, head_b, target_ids[here], temperature, lora))
    if first != rows:
        raise ValueError(f"lm_head: got {rows} rows, want the {first} that AgileRL has routed")
    return torch.cat(parts)


def adapter(layer: Any, name: str) -> Lora:
    kind = f"{type(layer).forward.__module__}.{type(layer).forward.__qualname__}"
    if LORA_KINDS.get(kind, ("", None))[0] != "lora_A" or name in layer.lora_variant:
        raise ValueError(
            f"lm_head: its adapter {name!r} is no plain LoRA, whose log-probs headloss cannot "
            "take; leave lm_head out of target_modules"
        )
    fields = LORA_KINDS[kind][1](layer, name)
    return Lora(**{**fields, "a": gathered(fields["a"]), "b": gathered(fields["b"])})


OURS: dict[str, Any] = {
    "FusedLinearLogProbsFunction": LogProbs,
    "fused_linear_logprobs_chunked": logprobs_chunked,
}
SEAMS = Seams(
    {(owner, name): ours for owner in (HOME, BASE) for name, ours in OURS.items()}
    | {(ALGORITHM, "_fused_logprob_fn_and_head"): fused_logprob_fn_and_head},
    "agilerl",
)
uninstall, check = SEAMS.uninstall, SEAMS.check
