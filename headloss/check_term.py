"""`check_term`: tests of the engine's assumptions about a term, on a random batch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from .batch.batch import Batch
from .batch.packing import PackedBatch, Packing, outside_inference
from .batch.segments import Chunk, Segments
from .losses.teacher import INPUTS
from .losses.term import Term
from .losses.trial import Piece, Reads, check_pieces, name_of
from .objective.reads import reads, sample_statistics
from .objective.weighted import differentiate
from .statistics.softmax import (
    BESIDE,
    CANDIDATES,
    DIFFERENTIABLE,
    STATISTICS,
    ByStatistic,
    Statistics,
)

LENGTHS = (5, 1, 7, 4, 3, 8)


@dataclass(frozen=True, kw_only=True)
class TermReport:
    """The report of `check_term`.

    Attributes:
        statistics: the statistics that the term reads, and the kinds of the term's divergences from
            a teacher.
        fields: the batch fields that the term reads.
        gradients: the statistics on which the term's value depends differentiably.
        cuts: the ways to divide the batch (such as at segment borders) for which the term, called
            on each part, gave the same values as on the whole batch.
    """

    statistics: tuple[str, ...]
    fields: tuple[str, ...]
    gradients: tuple[str, ...]
    cuts: tuple[str, ...]


@torch.inference_mode(False)
@torch.no_grad()
def check_term(term: Term | Callable[[], Term], **fields: Tensor) -> TermReport:
    """Check a term on a random batch of 28 tokens in 6 segments, in float64.

    The term must give equal values on the whole batch, on every division of the batch that the
    term's scope allows, and on permuted segments. Two evaluations of the term on the same input
    must give equal values, and must not change the input. The term must have a gradient with
    respect to at least one statistic, and to no other input.

    Args:
        term: the term, or its factory.
        **fields: tensors for batch fields for which the default values, random normal numbers, are
            not valid. As the random batch has 28 tokens in 6 segments, a tensor is [28] with one
            value per token, [6] with one value per segment, or [28, K] with K values per token. By
            default, `check_term` passes four candidates per token to a term that reads candidates,
            two prompts to a term that reads prompts, and random numbers in place of divergences to
            a term with a teacher.

    Returns:
        A `TermReport`: the statistics and fields that the term reads, and the ways to divide the
            batch that do not change the term's values.

    Raises:
        ValueError: for a term that fails a check, which the message names.
        TypeError: for anything but a term.

    >>> import headloss as hl
    >>> hl.check_term(hl.reinforce()).fields
    ('advantages',)
    """
    if callable(term) and not isinstance(term, Term | type):
        try:
            inspect.signature(term).bind()
        except TypeError as error:
            raise TypeError(
                "term: got a function of (stats, batch), want a Term: hl.term(function)() "
                f"({error})"
            ) from error
        term = term()
    if not isinstance(term, Term):
        raise TypeError(f"term: got {type(term).__name__}, want a Term (call the factory)")
    batch, traced = _batch(term, fields)
    # Multiply the statistics of each token by a random factor in [0.5, 1], so that tokens differ.
    kinds = batch.kinds()
    device = batch.targets.device
    stats = sample_statistics(torch.float64, device, kinds, term.teacher, len(batch))
    # Reading a divergence from `stats.extras` creates an entry, which `stats.map` below needs to
    # change the divergence.
    for measure in traced.measures:
        _ = stats.extras[term.teacher, measure]
    shares = {"generator": torch.Generator().manual_seed(1), "device": device}
    stats = stats.map(lambda t: t.detach() * (1 - torch.rand(t.shape, **shares) / 2))
    stats = replace(stats, top1=(stats.top1 > 0.75).double())
    values = _pure(term, stats, batch)
    _check_gradient(term, traced, stats, batch)
    cuts = _cuts(term, batch)
    for cut, pieces in cuts.items():
        check_pieces(term, stats, values, pieces, cut, 1e-9)
    beside = {name for name in traced.statistics if BESIDE.get(name) in traced.gradients}
    measures = {measure.kind for measure in traced.measures}
    return TermReport(
        statistics=tuple(sorted(traced.statistics & {*STATISTICS, *BESIDE} | measures)),
        fields=tuple(sorted(traced.fields - {"segments", "targets", "as_given"})),
        gradients=tuple(sorted(traced.gradients - {CANDIDATES} | beside)),
        cuts=tuple(cuts),
    )


def _batch(term: Term, named: dict[str, Tensor]) -> tuple[PackedBatch, Reads]:
    """Return a packed batch with every field that the term reads, and the term's `Reads` (the
    statistics and fields that it reads)."""
    unit = term.segments_per_unit
    # Repeat the segment lengths, so that the number of segments is a multiple of
    # `segments_per_unit` (2 for a loss on pairs of segments).
    lengths = LENGTHS if len(LENGTHS) % unit == 0 else LENGTHS * unit
    tokens = sum(lengths)
    segments = Segments.from_lengths(torch.tensor(lengths, device="cpu"))
    generator = torch.Generator().manual_seed(0)
    fields = {}
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}, want a tensor")
        fields[name] = outside_inference(value)
    if term.kept_field is not None:
        restricted = torch.rand(tokens, generator=generator, device="cpu") > 0.3
        fields.setdefault(term.kept_field, restricted)
    integers = {
        "candidate_ids": torch.arange(4, device="cpu").expand(tokens, 4),
        "prompts": torch.arange(len(lengths), device="cpu") % 2,
    }
    if term.teacher is not None and not fields.keys() & {n for of in INPUTS.values() for n in of}:
        name = "teacher_logits" if term.teacher.head is None else "teacher_hidden"
        fields[name] = torch.zeros(tokens, 2, dtype=torch.float64, device="cpu")
    # Each iteration of the loop finds one batch field that the term reads and `fields` lacks, and
    # adds the field to `fields`.
    for _ in range(64):
        targets = torch.zeros(tokens, dtype=torch.int64, device="cpu")
        batch = Batch(targets, segments, **fields)  # type: ignore[arg-type]
        # Check ids but not probabilities, because the random numbers used as probabilities do not
        # sum to 1.
        batch.with_fields(candidate_probs=None, teacher_topk_logps=None)._survey().check(1 << 31)
        packed = Packing(batch).view(batch, torch.float64)
        try:
            return packed, reads(
                term._objective(), packed.kinds(), torch.float64, targets.device, observe=False
            )[term.name]
        except ValueError as error:
            absent = re.search(r"batch\.(\w+),? (which )?was not given", str(error))
            if absent is None:
                raise
            if (value := integers.get(name := absent[1])) is None:
                value = torch.randn(tokens, generator=generator, dtype=torch.float64, device="cpu")
                value = -value.abs() if name.endswith("logps") else value
            fields[name] = value
    raise ValueError(f"term {term.name}: asks for more than 64 fields")


def _cuts(term: Term, batch: PackedBatch) -> dict[str, list[Piece]]:
    """Return a dict of lists of sub-batches: "segment borders" (the batch cut between segments),
    "single tokens" (the batch cut into tokens) and "permuted segments" (the whole batch with the
    segments in reverse order). The dict leaves out a cut that the term's scope forbids."""
    ends = batch.segments.lengths.cumsum(0).tolist()

    def piece(start: int, stop: int) -> Piece:
        chunk = Chunk.between(ends, start, stop)
        return chunk.rows, batch.slice(chunk)

    unit = term.segments_per_unit
    borders = {}
    if term.scope != "batch":
        borders["segment borders"] = [0, *ends[unit - 1 :: unit]]
    if term.scope == "token":
        borders["single tokens"] = [*range(ends[-1] + 1)]
    cuts = {name: [piece(*both) for both in pairwise(at)] for name, at in borders.items()}
    # Reverse the order of the units (groups of segments that a term needs together).
    count = batch.segments.count
    turned = torch.arange(count, device="cpu").view(-1, unit).flip(0).flatten()
    segments = Segments.from_ids(turned[batch.segments.ids], count)
    fields = {name: getattr(batch, name) for name in batch.kinds()}
    if (prompts := batch.as_given("prompts")) is not None:
        # Segment i of the permuted batch is segment turned[i] of `batch`, because the permutation
        # `turned` is its own inverse.
        fields["prompts"] = prompts[turned]
    permuted = Batch(batch.targets, segments, **fields)
    packed = Packing(permuted).view(permuted, torch.float64)
    rows = slice(None) if packed.index is None else packed.index
    return {**cuts, "permuted segments": [(rows, packed)]}


def _pure(term: Term, stats: Statistics, batch: PackedBatch) -> Tensor:
    """Return the term's value; ValueError if two evaluations differ or change their inputs."""
    inputs: ByStatistic = {n: getattr(batch, n) for n in batch.kinds()}
    inputs |= {**stats.tensors(), **stats.extras}
    before = {name: value.clone() for name, value in inputs.items()}
    values, again = (term(stats, batch) for _ in range(2))
    for name, value in inputs.items():
        if not torch.isclose(value, before[name], 0, 0, equal_nan=True).all():
            raise ValueError(f"term {term.name}: changes {name} in place; it must be pure")
    if values.isnan().any():
        raise ValueError(f"term {term.name}: is NaN at some of its values, want numbers")
    if not torch.equal(again, values):
        raise ValueError(f"term {term.name}: gives two values for one input; it must be pure")
    return values


def _check_gradient(term: Term, traced: Reads, stats: Statistics, batch: PackedBatch) -> None:
    if not traced.gradients:
        raise ValueError(
            f"term {term.name}: its value does not depend differentiably on any statistic, so it "
            "has no gradient (is everything detached, or read out with .item()?)"
        )
    leaves = stats.map(lambda t: t.clone().requires_grad_())
    named = {**leaves.tensors(), **leaves.extras}
    beside = [CANDIDATES, term.teacher, *((term.teacher, m) for m in traced.measures)]
    inputs = {n: named[n] for n in (*DIFFERENTIABLE, *beside) if n in named}
    with torch.enable_grad():
        total = term(leaves, batch).sum()
    for key, gradient in differentiate(total, inputs).items():
        if not gradient.isfinite().all():
            of = name_of(key)
            raise ValueError(f"term {term.name}: has a non-finite gradient with respect to {of}")
