"""`head_stats`: logp, lse and entropy as a differentiable operator for any other trainer's loss.

It is a registered operator, so that a compiled function that calls it does not break. N positions,
T of them scored, H hidden width, V vocabulary. Schedule: recompute (law 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels
from .batch.batch import IGNORE, Batch
from .batch.packing import Packing, packing_of
from .head.head import Head, autocast_dtype, check_head
from .kernels.interface import Measured
from .kernels.transform import Transform
from .objective.bound import Bound, Gradient, power_of_two
from .objective.statistics import Normalizer, Statistics, pull_back
from .options import Options
from .ranks.dtensor import local_head
from .ranks.place import join_positions
from .ranks.vocabulary import named
from .run.autograd import refuse_second_derivatives
from .run.checks import check_eager, check_temperatures
from .run.loop import Work, in_slabs, join, measure
from .run.plan import Problem, make_plan
from .softmax.linear import NO_GRADIENT, ExpSoftmax, LinearSoftmax, Tokens, Wants
from .softmax.products import sum_dtype
from .softmax.sums import Into

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
    packing, work, source = _open(features, weights, bias, temperature, targets, *numbers)
    found = [measure(work, source, block.rows)[0] for block in work.plan.blocks]
    stats, normalizer, _ = join(work, source, found)
    assert stats.logp is not None and stats.lse is not None and stats.entropy is not None
    vectors = (stats.logp, stats.lse, stats.entropy, *normalizer)
    return tuple(_own(packing.scatter(v), v) for v in vectors)  # type: ignore[return-value]


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
    packing, work, source = _open(features, weights, bias, temperature, targets, *numbers, wants)
    index = packing.index
    pick = (lambda t: t) if index is None else (lambda t: t[index])
    slopes = {n: pick(g) for n, g in zip(("logp", "lse", "entropy"), upstream, strict=True)}
    logp, entropy, *normalizer = map(pick, measured)
    stats = Statistics(logp=logp, entropy=entropy)
    coefficients = pull_back(slopes, stats, vocabulary)
    factor = None
    if features[0].dtype == torch.float16:
        near_one = power_of_two([c.abs().max() for c in coefficients.tensors().values() if len(c)])
        coefficients, factor = coefficients.map(lambda t: t * near_one), 1 / near_one
    whole = Measured(stats, Normalizer(*normalizer), logp)
    gradients = in_slabs(work, source, whole, Gradient(coefficients, {}, logp), factor)
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


def _open(
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
) -> tuple[Packing, Work, LinearSoftmax]:
    """The packed rows' logits, and what the loop is to do with them."""
    x = features[0]
    wide = sum_dtype(x.dtype)
    backend = kernels.choose("auto", x.device, x.dtype)
    alone = len(features) == 1 and bias is None
    terms = alone and kernels.can_hold_terms(backend, x.dtype, weights[0])
    packing = packing_of(Batch(targets), vocabulary)
    index, slices = packing.index, named(place)
    plan = make_plan(
        Problem(
            tokens=len(packing),
            width=x.shape[1],
            vocabulary=slices.widest or vocabulary,
            scope="token",
            lengths=packing.lengths,
            element_size=x.element_size(),
            weight_size=weights[0].element_size(),
            row_bytes=2 if terms else wide.itemsize,
            on_gpu=x.is_cuda,
            rescaled=x.dtype == torch.float16,
            terms=terms,
        ),
        Options(schedule="recompute"),
        backend,
    )
    work = Work(
        plan=plan,
        batch=packing.view(Batch(targets), wide),
        bind=lambda: Bound((), vocabulary),
        slices=slices,
        vocabulary=vocabulary,
        needs=NEEDS,
        sums=Into(wants),
    )
    rows: float | Tensor = divisor
    if temperature is not None:
        rows = temperature.detach() if index is None else temperature.detach()[index]
        check_temperatures(rows, index)
        rows = rows.to(wide)
    transform = Transform(scale=scale, softcap=softcap, temperature=rows)
    source = (ExpSoftmax if terms else LinearSoftmax)(
        [f.detach() if index is None else f.detach()[index] for f in features],
        [w.detach() for w in weights],
        None if bias is None else bias.detach(),
        slices.size or vocabulary,
        kernels.load(backend),
        Tokens(packing.targets, transform, NEEDS),
        first=slices.first,
    )
    return packing, work, source


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
