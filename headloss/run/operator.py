"""`head_stats` inside a compiled graph: a registered operator, so that the graph need not break.

N positions, T of them scored, V vocabulary, K candidates. Schedule: recompute. Adapters' features
are made in the graph; what the operator gets are pairs of features and weights. The batch is made
anew inside, of its targets, `candidates` (candidate_ids [N, K], or nothing) and `support`
(support_ids [N, K], or ids and offsets, or nothing). The last argument of either operator spells
its options, as `_spelt` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch.batch import IGNORE, Batch
from ..head.head import Head, Lora, autocast_dtype
from ..kernels.interface import Measured
from ..objective.bound import without_constants
from ..objective.elsewhere import CANDIDATE, READ, gradient_of, loss_elsewhere
from ..objective.statistics import CANDIDATES, Normalizer, Statistics
from ..options import Options
from ..softmax.linear import RawSoftmax
from .calls import Call, linear_call
from .checks import check_targets
from .loop import refuse_second_derivatives, sweep
from .pull_back import pull_back
from .work import Swept

SPELT = ("backend", "chunk_tokens", "memory_budget", "static", "skip_rows")  # options that it takes


def in_graph(
    hidden: Tensor, head: Head, given: object, options: Options, gradients: frozenset[str]
) -> list[Tensor]:
    """logp, lse and entropy of every position, and [.., K + 1] log-probs of candidates and the rest
    where the batch names some.

    Raises:
        ValueError: an option that the operator does not take.
    """
    compute = autocast_dtype(hidden)
    head.validate(hidden, compute_dtype=compute)
    candidates: list[Any] = []
    support: list[Tensor] = []
    if isinstance(given, Batch):
        if "candidate_ids" in given.fields:
            candidates = [given.fields["candidate_ids"].flatten(0, -2)]  # type: ignore[union-attr]
        if given.support is not None:
            support = list(given.support.tensors)
            if given.support.width is not None:
                support = [support[0].flatten(0, -2)]
        given = given.targets
    targets = check_targets(given, hidden, options).targets
    x = hidden.reshape(-1, hidden.shape[-1])
    if compute is not None:
        x = x.to(compute)
    if head.lora:  # poison in unscored rows must not reach the adapters' weights
        x = torch.where((targets.reshape(-1) != IGNORE).unsqueeze(1), x, 0)
    pairs = head.factors(x)
    temperature = head.temperature
    tensor = temperature.reshape(-1) if isinstance(temperature, Tensor) else None
    found = _head_stats(
        [f for f, _ in pairs],
        [w if compute is None else w.to(compute) for _, w in pairs],
        head.bias,
        tensor,
        targets.reshape(-1),
        candidates,
        support,
        head.vocabulary,
        head.logit_scale,
        head.softcap,
        1.0 if tensor is not None else float(temperature),  # type: ignore[arg-type]
        _spelt(options, CANDIDATE[1] in gradients),
    )
    stats = [
        (t if name in gradients else t.detach()).view(targets.shape)
        for name, t in zip(READ, found, strict=False)
    ]
    return [*stats, found[-2].unflatten(0, targets.shape)] if candidates else stats


def _spelt(options: Options, tail: bool) -> str:
    if options.schedule not in ("auto", "recompute"):
        raise ValueError(
            f'schedule: got "{options.schedule}", but a compiled graph is served by recompute'
        )
    default = Options()
    refused = ["logits_dtype", "accumulate_dtype", "sequence_parallel"]
    refused += ["main_grad", "batch_invariant"]
    for name in refused:
        if getattr(options, name) is not getattr(default, name):
            raise ValueError(f"{name}: got {getattr(options, name)}, which no compiled graph takes")
    return " ".join([f"{getattr(options, name)}" for name in SPELT] + [f"{tail}"])


def _options(spelt: str) -> tuple[Options, bool]:
    """What the text spells, and whether the candidates' rest is asked for."""
    known: dict[str, Any] = {"None": None, "True": True, "False": False}
    words = [int(word) if word.isdecimal() else known.get(word, word) for word in spelt.split()]
    values: dict[str, Any] = dict(zip(SPELT, words, strict=False))
    return Options(schedule="recompute", **values), words[-1:] == [True]


class _Given(NamedTuple):
    """What both operators take."""

    features: Sequence[Tensor]  # [N, ..] each
    weights: Sequence[Tensor]  # [V, ..] each
    bias: Tensor | None
    temperature: Tensor | None  # [N]
    targets: Tensor  # [N]
    candidates: Sequence[Tensor]
    support: Sequence[Tensor]
    vocabulary: int
    scale: float
    softcap: float | None
    divisor: float
    options: str

    def open(self, wanted: Sequence[bool] = ()) -> tuple[Call, RawSoftmax]:
        """The call that these are of, and its logits; `wanted`: features and weights pairwise,
        bias."""
        wanted = wanted or [False] * (2 * len(self.features) + 1)

        def leaf(tensor: Tensor, at: int) -> Tensor:
            return tensor.detach().requires_grad_(wanted[at])

        hidden, *features = [leaf(f, 2 * i) for i, f in enumerate(self.features)]
        weight, *weights = [leaf(w, 2 * i + 1) for i, w in enumerate(self.weights)]
        plain = Head(
            weight,
            None if self.bias is None else leaf(self.bias, -1),
            self.divisor if self.temperature is None else self.temperature.detach(),
            self.softcap,
            self.scale,
            self.vocabulary,
        )
        # Adapters' inner sides, which stay in the graph, only tell that a gradient is wanted.
        inner = [w.new_empty(w.shape[1], hidden.shape[1]) for w in weights]
        for a, given in zip(inner, features, strict=True):
            a.requires_grad_(given.requires_grad)
        lora = tuple(Lora(a=a, b=b, scaling=1.0) for a, b in zip(inner, weights, strict=True))
        options, tail = _options(self.options)
        names = (*READ, *CANDIDATE[: 1 + tail]) if self.candidates else READ
        objective = loss_elsewhere(frozenset(names), candidates=bool(self.candidates))
        chosen = self.candidates[0] if self.candidates else None
        kept: Any = tuple(self.support) if len(self.support) > 1 else next(iter(self.support), None)
        with torch.set_grad_enabled(any(wanted)):
            batch = Batch(self.targets, candidate_ids=chosen, support_ids=kept)
            whole = replace(plain, lora=lora)
            call = linear_call(hidden, whole, batch, objective, options, "head_stats")
        index = call.packing.index
        packed = features if index is None else [f[index] for f in features]
        pairs = [t for pair in zip(packed, weights, strict=True) for t in pair]
        x, own, *_, bias = call.tensors
        tensors = [x, own, *pairs, bias]
        return call, call.work.open([None if t is None else t.detach() for t in tensors])


@torch.library.custom_op("headloss::head_stats", mutates_args=())
def _head_stats(
    features: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    temperature: Tensor | None,
    targets: Tensor,
    candidates: Sequence[Tensor],
    support: Sequence[Tensor],
    vocabulary: int,
    scale: float,
    softcap: float | None,
    divisor: float,
    options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logp, lse, entropy, and the normalizer's two parts, [N] each; log-probs of candidates and the
    rest [N, K + 1], and the rest's normalizer [N, 2], of no columns where there are none."""
    given = (bias, temperature, targets, candidates, support)
    numbers = (vocabulary, scale, softcap, divisor, options)
    call, source = _Given(features, weights, *given, *numbers).open()
    whole = sweep(call.work, source).whole
    vectors = [*(getattr(whole.stats, name) for name in READ), *whole.normalizer]
    vectors += [whole.stats.divergences[part.key] for part in source.beside]
    vectors += [part.rest.t() for part in source.beside]
    found = [call.packing.scatter(v, alone=True) for v in vectors]
    found += [found[0].new_empty(len(targets), 0) for _ in range(7 - len(found))]
    return tuple(found)  # type: ignore[return-value]


@_head_stats.register_fake
def _(features, weights, bias, temperature, targets, candidates, support, *numbers):
    dtype = torch.float64 if features[0].dtype == torch.float64 else torch.float32
    shapes = [targets.shape] * 5 + [(*targets.shape, 0)] * 2
    if candidates:
        shapes[5:] = [(*targets.shape, candidates[0].shape[1] + 1), (*targets.shape, 2)]
    return tuple(targets.new_empty(shape, dtype=dtype) for shape in shapes)


@torch.library.custom_op("headloss::head_stats_backward", mutates_args=())
def _head_stats_backward(
    features: Sequence[Tensor],
    weights: Sequence[Tensor],
    others: Sequence[Tensor | None],  # bias, temperature, targets
    candidates: Sequence[Tensor],
    support: Sequence[Tensor],
    vocabulary: int,
    numbers: Sequence[float],  # scale, soft cap (0: none), divisor
    options: str,
    measured: Sequence[Tensor],  # logp, entropy, the normalizer's two parts, candidates, their rest
    upstream: Sequence[Tensor],  # of logp, lse, entropy, candidates
    wanted: Sequence[bool],  # features and weights pairwise, bias
) -> list[Tensor]:
    """The wanted gradients, in the order of `wanted`."""
    bias, temperature, targets = others
    scale, softcap, divisor = numbers
    assert targets is not None
    given = (bias, temperature, targets, candidates, support)
    fixed = (vocabulary, scale, softcap or None, divisor, options)
    call, source = _Given(features, weights, *given, *fixed).open(wanted)
    packing, work = call.packing, call.work
    logp, entropy, *normalizer, chosen, rest = map(packing.gather, measured)
    stats = Statistics(logp=logp, entropy=entropy)
    slopes = dict(zip((*READ, CANDIDATES), map(packing.gather, upstream), strict=True))
    for part in source.beside:
        stats.divergences[part.key], part.rest = chosen, rest.t()
        slopes[CANDIDATES] = without_constants(slopes[CANDIDATES], stats, work.batch)
    if not candidates:
        del slopes[CANDIDATES]
    gradient, scale = gradient_of(slopes, stats, vocabulary, call.prepared.problem.rescaled)
    swept = Swept(Measured(stats, Normalizer(*normalizer)), [])
    found = pull_back(work, source, swept, gradient, None if scale is None else 1 / scale)
    for i, value in enumerate(found[:-1:2]):
        if value is not None and packing.index is not None:
            full = torch.zeros_like(features[i])
            found[2 * i] = full.index_copy_(0, packing.index, value)
    return [g for g, want in zip(found, wanted, strict=True) if want and g is not None]


@_head_stats_backward.register_fake
def _(features, weights, others, *rest):
    wanted = rest[-1]
    tensors = [t for pair in zip(features, weights, strict=True) for t in pair] + [others[0]]
    return [torch.empty_like(t) for t, want in zip(tensors, wanted, strict=True) if want]


def _setup_context(ctx, inputs, output) -> None:
    features, weights, bias, temperature, targets, candidates, support, *numbers = inputs
    ctx.pairs, ctx.numbers = len(features), numbers
    ctx.ids = len(candidates), len(support)
    logp, _, entropy, peak, log_sum, chosen, rest = output
    ctx.mark_non_differentiable(peak, log_sum, rest)
    measured = (logp, entropy, peak, log_sum, chosen, rest)
    given = (bias, temperature, targets, *measured, *candidates, *support)
    ctx.save_for_backward(*features, *weights, *given)
    tensors = [t for pair in zip(features, weights, strict=True) for t in pair] + [bias]
    ctx.wanted = [t is not None and t.requires_grad for t in tensors]


def _backward(ctx, *upstream):
    refuse_second_derivatives("head_stats")
    n, saved = ctx.pairs, list(ctx.saved_tensors)
    vocabulary, scale, softcap, divisor, options = ctx.numbers
    k, rest = ctx.ids[0], saved[2 * n :]
    others, measured, ids = rest[:3], rest[3:9], rest[9:]
    numbers = (ids[:k], ids[k:], vocabulary, [scale, softcap or 0.0, divisor], options)
    slopes = [*upstream[:3], upstream[5]]
    made = iter(
        _head_stats_backward(
            saved[:n], saved[n : 2 * n], others, *numbers, measured, slopes, ctx.wanted
        )
    )
    found = [next(made) if wanted else None for wanted in ctx.wanted]
    nothing = (None, None, *([None] * count for count in ctx.ids), *[None] * 5)
    return found[:-1:2], found[1:-1:2], found[-1], *nothing


_head_stats.register_autograd(_backward, setup_context=_setup_context)
