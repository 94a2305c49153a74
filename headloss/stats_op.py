"""`head_stats`: logp, lse and entropy as a differentiable operator for any other trainer's loss.

It is a registered operator, so that a compiled function that calls it does not break. N positions,
T of them scored, H hidden width, V vocabulary. Schedule: recompute (law 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels
from .autograd import refuse_second_derivatives
from .batch import IGNORE, Batch
from .checks import check_eager
from .head import Head, autocast_dtype, check_head
from .kernels.transform import Transform
from .logits import NO_GRADIENT, LinearLogits, Wants
from .objective import Bound, Gradient, power_of_two
from .options import Options
from .packing import pack
from .parallel import named
from .plan import Problem, make_plan
from .schedules import Call
from .shards import join_positions, local_head
from .stats import Normalizer, Statistics, pull_back
from .sweeps import sweep, sweep_gradient

NEEDS = frozenset({"logp", "lse", "entropy"})


class HeadStats(NamedTuple):
    """Statistics of each position, in the targets' shape; 0 where unscored."""

    logp: Tensor
    lse: Tensor
    entropy: Tensor


def head_stats(
    hidden: Tensor,  # [.., H]
    head: Head,
    targets: Tensor,  # [..] int64, already shifted; -100 is not scored
) -> HeadStats:
    """Log-prob of the target, log-sum-exp and entropy at each position; all differentiable.

    float32 (float64 for float64 inputs), without the logits: statistics from tiles, gradients from
    a second sweep in the backward pass. Unscored positions get 0 and give no gradient.

    Raises:
        ValueError, TypeError: as `head_loss`.
    """
    check_head(head)
    check_eager("head_stats", hidden, head.weight)
    head = local_head(head)
    compute = autocast_dtype(hidden)

    def check() -> None:
        head.validate(hidden, compute_dtype=compute)
        if not isinstance(targets, Tensor):
            more = ": batch.targets" if isinstance(targets, Batch) else ""
            got = type(targets).__name__
            raise TypeError(f"targets: got {got}, want an int64 tensor [..]{more}")
        if targets.device != hidden.device:
            raise ValueError(
                f"targets: got device {targets.device}, want that of hidden, {hidden.device}"
            )
        if targets.shape != hidden.shape[:-1]:
            raise ValueError(
                f"targets: got shape {tuple(targets.shape)}, want hidden's "
                f"{tuple(hidden.shape[:-1])}"
            )

    place = join_positions(head, hidden, check, targets)
    x = hidden.reshape(-1, hidden.shape[-1])
    if compute is not None:
        x = x.to(compute)
    if head.lora:  # poison in unscored rows must not reach the adapters' weights
        x = torch.where((targets.reshape(-1) != IGNORE).unsqueeze(1), x, 0)
    slices = place.slices(None, x.device)
    pairs = slices.factors(head, x)
    temperature = head.temperature
    tensor = temperature.reshape(-1) if isinstance(temperature, Tensor) else None
    weights = [w if compute is None else w.to(compute) for _, w in pairs]
    found = _head_stats(
        [f for f, _ in pairs],
        weights,
        head.bias,
        tensor,
        targets.reshape(-1),
        place.vocabulary,
        head.logit_scale,
        head.softcap,
        1.0 if tensor is not None else float(temperature),
        slices.name,
    )
    return HeadStats(*(t.view(targets.shape) for t in found[:3]))


@torch.library.custom_op("headloss::head_stats", mutates_args=())
def _head_stats(
    features: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    temperature: Tensor | None,
    targets: Tensor,
    vocabulary: int,
    scale: float,
    softcap: float | None,
    divisor: float,
    place: str,  # of a slice in the whole vocabulary, by name
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logp, lse, entropy, and the normalizer's two parts; [N] each."""
    numbers = (vocabulary, scale, softcap, divisor, place)
    call = _call(features, weights, bias, temperature, targets, *numbers)
    source = _source(call, features, weights, bias)
    stats, normalizer = sweep(call, source)
    assert stats.logp is not None and stats.lse is not None and stats.entropy is not None
    vectors = (stats.logp, stats.lse, stats.entropy, *normalizer)
    return tuple(_own(call.packed.scatter(v), v) for v in vectors)  # type: ignore[return-value]


def _own(value: Tensor, other: Tensor) -> Tensor:
    """An operator's outputs may not share memory with one another."""
    return value.clone() if value.data_ptr() == other.data_ptr() else value


@_head_stats.register_fake
def _(features, weights, bias, temperature, targets, *numbers):
    dtype = torch.float64 if features[0].dtype == torch.float64 else torch.float32
    return tuple(targets.new_empty(targets.shape, dtype=dtype) for _ in range(5))


@torch.library.custom_op("headloss::head_stats_backward", mutates_args=())
def _head_stats_backward(
    features: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    temperature: Tensor | None,
    targets: Tensor,
    vocabulary: int,
    scale: float,
    softcap: float | None,
    divisor: float,
    place: str,
    measured: Sequence[Tensor],  # logp, entropy, and the normalizer's two parts
    upstream: Sequence[Tensor],  # of logp, lse, entropy
    wanted: Sequence[bool],  # features and weights pairwise, bias
) -> list[Tensor]:
    """The wanted gradients, in the order of `wanted`."""
    wants = Wants(features=tuple(wanted[:-1:2]), weights=tuple(wanted[1:-1:2]), bias=wanted[-1])
    numbers = (vocabulary, scale, softcap, divisor, place)
    call = _call(features, weights, bias, temperature, targets, *numbers, wants)
    index = call.packed.index
    pick = (lambda t: t) if index is None else (lambda t: t[index])
    slopes: dict[str, Tensor] = {}
    for name, slope in zip(("logp", "lse", "entropy"), upstream, strict=True):
        slopes[name] = pick(slope)
    logp, entropy, *normalizer = map(pick, measured)
    stats = Statistics(logp=logp, entropy=entropy)
    coefficients = pull_back(slopes, stats, vocabulary)
    factor = None
    if features[0].dtype == torch.float16:
        near_one = power_of_two([c.abs().max() for c in coefficients.tensors().values() if len(c)])
        coefficients, factor = coefficients.map(lambda t: t * near_one), 1 / near_one
    gradients = sweep_gradient(
        call,
        _source(call, features, weights, bias),
        stats,
        Normalizer(*normalizer),
        Gradient(coefficients, {}, logp),
        factor,
    )
    if index is not None:
        for i, found in enumerate(gradients[:-1:2]):
            if found is not None:
                full = torch.zeros_like(features[i])
                gradients[2 * i] = full.index_copy_(0, index, found)
    return [g for g, want in zip(gradients, wanted, strict=True) if want and g is not None]


@_head_stats_backward.register_fake
def _(features, weights, bias, *rest):
    wanted = rest[-1]
    tensors = [t for pair in zip(features, weights, strict=True) for t in pair] + [bias]
    return [torch.empty_like(t) for t, want in zip(tensors, wanted, strict=True) if want]


def _call(
    features: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    temperature: Tensor | None,
    targets: Tensor,
    vocabulary: int,
    scale: float,
    softcap: float | None,
    divisor: float,
    place: str,
    wants: Wants = NO_GRADIENT,
) -> Call:
    x = features[0]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    backend = kernels.choose("auto", x.device, x.dtype)
    alone = len(features) == 1 and bias is None
    terms = alone and kernels.can_hold_terms(backend, x.dtype, weights[0])
    fields: dict[str, Any] = {}
    if temperature is not None:
        fields["temperature_"] = temperature.detach()
    divisors = divisor if temperature is None else temperature
    packed = pack(Batch(targets, **fields), vocabulary, wide, temperature=divisors)
    rows = packed.batch.get("temperature_", divisor)
    slices = named(place)
    problem = Problem(
        tokens=len(packed),
        width=x.shape[1],
        vocabulary=slices.widest or vocabulary,
        scope="token",
        lengths=packed.lengths,
        element_size=x.element_size(),
        weight_size=weights[0].element_size(),
        row_bytes=2 if terms else wide.itemsize,
        on_gpu=x.is_cuda,
        terms=terms,
    )
    options = Options(schedule="recompute")
    return Call(
        packed=packed,
        bind=lambda _: Bound((), vocabulary),
        plan=make_plan(problem, options, backend),
        options=options,
        kernels=kernels.load(backend),
        transform=Transform(scale=scale, softcap=softcap, temperature=rows),  # type: ignore[arg-type]
        needs=NEEDS,
        wants=wants,
        vocabulary=vocabulary,
        gradient_dtype=x.dtype if x.element_size() == 2 else None,
        slices=slices,
    )


def _source(call: Call, features, weights, bias: Tensor | None) -> LinearLogits:
    """The packed rows' logits."""
    index = call.packed.index
    picked = [f.detach() if index is None else f.detach()[index] for f in features]
    bias = None if bias is None else bias.detach()
    columns = call.slices.size or call.vocabulary
    return LinearLogits(picked, [w.detach() for w in weights], bias, columns)


def _setup_context(ctx, inputs, output) -> None:
    features, weights, bias, temperature, targets, *numbers = inputs
    ctx.pairs, ctx.numbers = len(features), numbers
    logp, _, entropy, peak, log_sum = output
    ctx.mark_non_differentiable(peak, log_sum)
    measured = (logp, entropy, peak, log_sum)
    ctx.save_for_backward(*features, *weights, bias, temperature, targets, *measured)
    tensors = [t for pair in zip(features, weights, strict=True) for t in pair] + [bias]
    ctx.wanted = [t is not None and t.requires_grad for t in tensors]


def _backward(ctx, g_logp, g_lse, g_entropy, *_):
    refuse_second_derivatives("head_stats")
    n = ctx.pairs
    saved = ctx.saved_tensors
    features, weights = list(saved[:n]), list(saved[n : 2 * n])
    bias, temperature, targets, *measured = saved[2 * n :]
    found = iter(
        _head_stats_backward(
            features,
            weights,
            bias,
            temperature,
            targets,
            *ctx.numbers,
            measured,
            [g_logp, g_lse, g_entropy],
            ctx.wanted,
        )
    )
    gradients = [next(found) if wanted else None for wanted in ctx.wanted]
    return gradients[:-1:2], gradients[1:-1:2], gradients[-1], *[None] * 7


_head_stats.register_autograd(_backward, setup_context=_setup_context)
