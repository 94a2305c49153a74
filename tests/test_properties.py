"""Loss, gradients and metrics do not depend on how tokens are split into calls.

N positions, S segments. A `Base` describes a batch token by token; a `Piece` lists which tokens one
call gets, in which shape and order. Calls are in float64, so that only rounding of 1e-11 is
allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import matrix
import matrix_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix_cases import CASES, Case
from torch import Tensor

import headloss as hl
from headloss.batch.batch import IGNORE
from headloss.statistics.metrics import Metrics
from headloss.testing import trained_looking

pytestmark = pytest.mark.usefixtures("skip_small_rows")

V, H = 19, 6
TOLERANCE = 1e-11
# Number of random batches for each objective.
FEW = settings(max_examples=max(2, settings().max_examples // 4))
# Number of random batches for each objective in tests that add the objective's index to the seed:
# one fewer than in `FEW`, so that two objectives never share a batch.
ONE = settings(max_examples=FEW.max_examples - 1)
SPLITTABLE = [name for name, case in CASES.items() if case.objective().scope != "batch"]

# ---------------------------------------------------------------------- batches and their pieces


@dataclass(frozen=True, kw_only=True)
class Base:
    """N positions in S segments, some unscored, with every field: `hidden` [N, H], `weight` [V, H],
    `targets` [N]."""

    lengths: tuple[int, ...]
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    per_token: dict[str, Tensor]
    per_segment: dict[str, Tensor]
    objective: hl.Objective
    current: bool

    def places(self, segment: int) -> Tensor:
        """Return the positions of one segment, in order."""
        start = sum(self.lengths[:segment])
        return torch.arange(start, start + self.lengths[segment])


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The tokens and segments of one call: their indices in the batch described by `Base`; -1 is
    padding."""

    places: Tensor
    segments: hl.Segments
    order: Sequence[int]


@dataclass(kw_only=True)
class Result:
    """Results of the calls on all pieces of a batch, joined in the token order of the undivided
    batch."""

    loss: Tensor
    terms: dict[str, Tensor]
    hidden: Tensor
    weight: Tensor
    logps: Tensor
    entropies: Tensor
    metrics: Metrics = field(default_factory=Metrics)


def make_base(case: Case, lengths: Sequence[int], seed: int) -> Base:
    generator = torch.Generator().manual_seed(seed)
    lengths = tuple(lengths)
    count, n = len(lengths), sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, targets = trained_looking(n, H, V, torch.float64, seed=seed)
    unscored = torch.rand(n, generator=generator) < 0.25
    logps = (hidden @ weight.t()).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    per_token = {
        "advantages": normal(n) * (torch.rand(n, generator=generator) > 0.2),
        "old_logps": (logps + 0.4 * normal(n)).clamp_max(0),
        "ref_logps": (logps + 0.3 * normal(n)).clamp_max(0),
        "sampling_logps": (logps + 0.2 * normal(n)).clamp_max(0),
        "weight": normal(n).abs(),
        "kept": torch.rand(n, generator=generator) > 0.4,
        **matrix.teacher_fields(case, targets, V, torch.float64),
    }
    more = matrix_cases.others(n, count)
    for name in ("teacher_logps", "draws"):
        per_token.setdefault(name, more.pop(name).double())
    per_segment = {
        **more,
        "segment_weight": normal(count).abs(),
        "segment_kept": torch.rand(count, generator=generator) > 0.3,
    }
    teacher = hl.Head(normal(V, 5)) if case.teacher == "hidden" else None
    return Base(
        lengths=lengths,
        hidden=hidden,
        weight=weight,
        targets=targets.masked_fill(unscored, IGNORE),
        per_token=per_token,
        per_segment=per_segment,
        objective=case.objective(teacher),
        current=case.current,
    )


def batch_of(base: Base, piece: Piece, totals: hl.Totals | None = None) -> hl.Batch:
    """Make the `hl.Batch` of one call, with NaN at padding in floating-point fields."""
    padding, places = piece.places < 0, piece.places.clamp_min(0)
    fields = {}
    for name, values in base.per_token.items():
        taken = (
            values[places] if len(values) else values.new_zeros(*places.shape, *values.shape[1:])
        )
        if taken.is_floating_point():
            taken = taken.clone()
            taken[padding] = math.nan
        fields[name] = taken
    fields |= {name: values[list(piece.order)] for name, values in base.per_segment.items()}
    if base.current:
        fields["old_logps"] = hl.CURRENT
    targets = base.targets[places] if len(base.targets) else places.new_zeros(places.shape)
    return hl.Batch(targets.masked_fill(padding, IGNORE), piece.segments, totals=totals, **fields)


def run(base: Base, pieces: Sequence[Piece], options: hl.Options | None = None) -> Result:
    """Run one call for each piece, with the token totals of all pieces, and put the results
    together."""
    n = len(base.targets)
    totals = sum(hl.Totals.of(batch_of(base, piece)) for piece in pieces)
    result = Result(
        loss=torch.zeros((), dtype=torch.float64),
        terms={},
        hidden=torch.zeros(n, H, dtype=torch.float64),
        weight=torch.zeros(V, H, dtype=torch.float64),
        logps=torch.zeros(n, dtype=torch.float64),
        entropies=torch.zeros(n, dtype=torch.float64),
    )
    for piece in pieces:
        padding, places = piece.places < 0, piece.places.clamp_min(0)
        hidden = base.hidden[places] if n else base.hidden.new_zeros(*places.shape, H)
        hidden[padding] = math.nan
        hidden.requires_grad_()
        weight = base.weight.clone().requires_grad_()
        batch = batch_of(base, piece, totals if len(pieces) > 1 else None)
        out = hl.head_loss(hidden, hl.Head(weight), batch, base.objective, options)
        out.loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        assert not hidden.grad[padding].any()
        real = piece.places[~padding]
        result.loss = result.loss + out.loss.detach()
        for name, value in out.terms.items():
            result.terms[name] = result.terms.get(name, 0) + value
        result.hidden[real] = hidden.grad[~padding].double()
        result.weight += weight.grad
        result.logps[real] = out.logps[~padding].double()
        result.entropies[real] = out.entropies[~padding].double()
        result.metrics = result.metrics.merge(out.metrics)
    return result


def whole(base: Base) -> Piece:
    return packed(base, range(len(base.lengths)))


def padded(base: Base) -> Piece:
    width = max(1, *base.lengths)
    places = torch.full((len(base.lengths), width), -1)
    for i, length in enumerate(base.lengths):
        shift = (width - length) // 2
        places[i, shift : shift + length] = base.places(i)
    return Piece(
        places=places,
        segments=hl.Segments.rows(*places.shape),
        order=range(len(base.lengths)),
    )


def packed(base: Base, order: Sequence[int]) -> Piece:
    """Return the segments `order` of the batch as a `Piece`, one after another, without padding."""
    ids = [i for i, segment in enumerate(order) for _ in range(base.lengths[segment])]
    places = torch.cat([base.places(i) for i in order] or [torch.arange(0)])
    return _from_ids(places, torch.tensor(ids, dtype=torch.int64), order)


def _from_ids(places: Tensor, ids: Tensor, order: Sequence[int]) -> Piece:
    """Return a `Piece` of the batch with the given segment ids. If there are as many tokens as
    segments, a padding token is added, since otherwise a field with one value per token could be
    mistaken for a field with one value per segment."""
    if len(places) == len(order) > 0:
        places = torch.cat([places, torch.tensor([-1])])
        ids = torch.cat([ids, torch.tensor([len(order) - 1])])
    segments = hl.Segments.from_ids(ids, count=len(order))
    return Piece(places=places, segments=segments, order=order)


def interleaved(base: Base, seed: int) -> Piece:
    """Return the whole batch as one `Piece`, with interleaved segments; the tokens of each segment
    stay in order."""
    ids = torch.arange(len(base.lengths)).repeat_interleave(torch.tensor(base.lengths))
    shuffled = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
    places = shuffled.argsort(stable=True).argsort()
    return _from_ids(places, shuffled, range(len(base.lengths)))


UNIT = 4  # segments that must stay in one call: a chosen answer with up to three rejected answers


def cuts(base: Base, seed: int) -> dict[str, list[Piece]]:
    """Return several ways to split a batch into calls, which must all give the same result."""
    segments = len(base.lengths)
    units = list(range(0, segments, UNIT))
    flipped = [s for unit in reversed(units) for s in range(unit, unit + UNIT)]
    each = [packed(base, range(unit, unit + UNIT)) for unit in units]
    middle = UNIT * (len(units) // 2)
    return {
        "padded": [padded(base)],
        "permuted": [packed(base, flipped)],
        "interleaved": [interleaved(base, seed)],
        "a call per unit": each,
        "two calls, the later first": [
            packed(base, range(middle, segments)),
            packed(base, range(middle)),
        ],
    }


def same(got: Result, want: Result, tolerance: float = TOLERANCE) -> None:
    for name in ("loss", "hidden", "weight", "logps", "entropies"):
        scale = 1 + float(getattr(want, name).abs().max()) if getattr(want, name).numel() else 1
        torch.testing.assert_close(
            getattr(got, name),
            getattr(want, name),
            rtol=tolerance,
            atol=tolerance * scale,
            msg=name,
        )
    for name in want.terms:
        torch.testing.assert_close(got.terms[name], want.terms[name], rtol=1e-9, atol=1e-9)
    matrix.same_metrics(got.metrics, want.metrics, 1e-9)


def random_lengths(seed: int) -> list[int]:
    """Return token counts of four to twelve segments, some empty."""
    generator = torch.Generator().manual_seed(seed)
    units = int(torch.randint(1, 4, (), generator=generator))
    return torch.randint(0, 7, (UNIT * units,), generator=generator).tolist()


SEEDS = st.integers(0, 2**16)
LENGTHS = SEEDS.map(random_lengths)

# ---------------------------------------------------------------------- exactness


@pytest.mark.parametrize("name", SPLITTABLE)
@ONE
@given(lengths=LENGTHS, seed=SEEDS)
def test_every_cut_gives_the_same(name, lengths, seed):
    seed += list(CASES).index(name)
    base = make_base(CASES[name], lengths, seed)
    want = run(base, [whole(base)])
    for cut, pieces in cuts(base, seed).items():
        try:
            same(run(base, pieces), want)
        except AssertionError as error:
            raise AssertionError(f"{cut}: {error}") from error


@pytest.mark.parametrize("name", sorted(CASES.keys() - SPLITTABLE))
@FEW
@given(lengths=LENGTHS, seed=SEEDS)
def test_batch_scope_does_not_care_for_layout(name, lengths, seed):
    base = make_base(CASES[name], lengths, seed)
    want = run(base, [whole(base)])
    for cut in ("padded", "interleaved", "permuted"):
        same(run(base, cuts(base, seed)[cut]), want)


@pytest.mark.parametrize("name", CASES)
@ONE
@given(seed=SEEDS)
def test_every_chunk_size_and_schedule_gives_the_same(name, seed):
    """The results do not depend on the schedule, or on the chunk size: one token, fewer tokens than
    a segment has, or more tokens than the batch has."""
    seed += list(CASES).index(name)
    base = make_base(CASES[name], random_lengths(seed), seed)
    pieces = [whole(base)]
    want = run(base, pieces)
    for options in (
        hl.Options(memory_budget=1),  # one token per chunk
        hl.Options(chunk_tokens=3),
        hl.Options(schedule="recompute"),
        hl.Options(schedule="recompute", chunk_tokens=1),
        hl.Options(static=True),
        hl.Options(skip_rows=False, chunk_tokens=1000),
    ):
        same(run(base, pieces, options), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@FEW
@given(lengths=LENGTHS, seed=SEEDS)
def test_lower_precision_agrees_to_its_own_rounding(dtype, lengths, seed):
    """Log-probs and losses agree to float32 precision in any input dtype, gradients to the inputs'
    precision."""
    base = make_base(CASES["mix"], lengths, seed)
    low = Base(
        **{
            **base.__dict__,
            "hidden": base.hidden.to(dtype),
            "weight": base.weight.to(dtype),
        }
    )
    want = run(low, [whole(low)])
    for options in (None, hl.Options(chunk_tokens=2), hl.Options(schedule="recompute")):
        for pieces in cuts(low, seed).values():
            got = run(low, pieces, options)
            torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(got.logps, want.logps, rtol=1e-5, atol=1e-6)
            rounding = 1e-5 if dtype == torch.float32 else 2e-2
            for a, b in ((got.hidden, want.hidden), (got.weight, want.weight)):
                assert (a - b).norm() <= rounding * b.norm() + 1e-6


# ---------------------------------------------------------------------- segments in any order


@given(lengths=LENGTHS, seed=SEEDS)
def test_interleaved_segments_equal_sorted_ones(lengths, seed):
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    order = torch.randperm(len(ids))
    values = torch.randn(len(ids), dtype=torch.float64)
    straight = hl.Segments.from_lengths(lengths)
    mixed = hl.Segments.from_ids(ids[order], count=len(lengths))
    torch.testing.assert_close(mixed.lengths, straight.lengths)
    torch.testing.assert_close(mixed.sum(values[order]), straight.sum(values))
    torch.testing.assert_close(mixed.mean(values[order]), straight.mean(values))
    at_token = straight.expand(straight.sum(values))
    torch.testing.assert_close(mixed.expand(mixed.sum(values[order])), at_token[order])


# ---------------------------------------------------------------------- metrics


@pytest.mark.parametrize("name", ["gspo", "grpo_sequence", "sapo_sequence", "gmpo", "vespo"])
def test_empty_segments_do_not_count_in_metrics(name):
    """Segments without scored tokens do not count in metrics, since they have no ratio."""
    base = make_base(CASES[name], (5, 0, 3, 4), seed=1)
    base.targets[5:8] = IGNORE  # leave all tokens of the third segment unscored
    term = name if "_" not in name else name.partition("_")[0]
    found = run(base, [whole(base)]).metrics
    full = make_base(CASES[name], (5, 0, 3, 4), seed=1)
    full.targets[5:8] = IGNORE
    want = run(full, [packed(full, (0, 3))]).metrics
    assert {n for n in found if n.startswith(term)} == {n for n in want if n.startswith(term)}
    for metric in found.keys() & want.keys() - {"segments"}:
        torch.testing.assert_close(found[metric].value, want[metric].value, msg=metric)
    assert found["segments"].value == 4 and want["segments"].value == 2


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["gspo", "grpo", "vespo", "dpo", "sequence_truncate", "kl_k3"])
def test_metrics_of_a_restricted_term_count_what_is_kept(name, static):
    """Metrics of a per-segment term under `.where(kept)` count only segments with a kept token."""
    base = make_base(CASES[name], (5, 2, 3, 4), seed=2)
    base.per_segment["segment_kept"][:] = torch.tensor([True, True, False, False])
    ((coefficient, term),) = base.objective.parts
    restricted = Base(**{**base.__dict__, "objective": coefficient * term.where("segment_kept")})
    got = run(restricted, [whole(base)], hl.Options(static=static)).metrics
    want = run(base, [packed(base, (0, 1))]).metrics
    for metric in (m for m in want if "/" in m):
        torch.testing.assert_close(got[metric].value, want[metric].value, msg=metric)


# ---------------------------------------------------------------------- `where` and `weighted`


@pytest.mark.parametrize("name", ["cross_entropy", "grpo", "kl_k3", "reinforce", "sapo"])
@FEW
@given(lengths=LENGTHS, seed=SEEDS)
def test_where_equals_leaving_the_others_unscored(name, lengths, seed):
    """For a per-token term, `.where(mask)` equals targets of -100 outside of the mask; only
    segments with a token in the mask count."""
    base = make_base(CASES[name], lengths, seed)
    ((_, term),) = base.objective.parts
    kept = base.per_token["kept"]
    for reduction in ("token_mean", "sequence_mean"):
        objective = hl.Objective.of(term.over(reduction).where("kept"))
        got = run(Base(**{**base.__dict__, "objective": objective}), [whole(base)])
        left = base.targets.masked_fill(~kept, IGNORE)
        some = Base(
            **{
                **base.__dict__,
                "targets": left,
                "objective": hl.Objective.of(term.over(reduction)),
            }
        )
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        present = [i for i in range(len(lengths)) if (left[ids == i] != IGNORE).any()]
        want = run(some, [packed(some, present)])
        torch.testing.assert_close(got.loss, want.loss)
        torch.testing.assert_close(got.hidden, want.hidden)
        torch.testing.assert_close(got.weight, want.weight)


@pytest.mark.parametrize("name", ["grpo", "gspo_token", "kl_k3", "dapo", "sapo", "token_truncate"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poison_in_tokens_that_where_leaves_out(name, poison):
    base = make_base(CASES[name], (5, 2, 0, 4), seed=3)
    ((_, term),) = base.objective.parts
    objective = hl.Objective.of(term.where("kept"))
    # In a term with one value per segment, excluded tokens still count in the segment's mean
    # log-ratio, so only their advantages are set to NaN or infinity.
    left_out = ~base.per_token["kept"]
    names = ["advantages", "old_logps", "ref_logps", "sampling_logps"]
    if term.scope != "token":
        names = ["advantages"]
    clean, dirty = (
        Base(
            **{
                **base.__dict__,
                "objective": objective,
                "per_token": base.per_token
                | {n: base.per_token[n].masked_fill(left_out, value) for n in names},
            }
        )
        for value in (0.0, poison)
    )
    got, want = run(dirty, [whole(base)]), run(clean, [whole(base)])
    assert torch.equal(got.loss, want.loss) and want.loss.isfinite()
    assert torch.equal(got.hidden, want.hidden)
    assert torch.equal(got.weight, want.weight)


@given(lengths=LENGTHS, seed=SEEDS)
def test_weighted_multiplies_and_keeps_the_denominator(lengths, seed):
    base = make_base(CASES["cross_entropy"], lengths, seed)
    scored = base.targets != IGNORE
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    factor = base.per_token["weight"] * base.per_segment["segment_weight"][ids]
    objective = hl.Objective.of(hl.cross_entropy().weighted("weight").weighted("segment_weight"))
    got = run(Base(**{**base.__dict__, "objective": objective}), [whole(base)])
    want = -(factor * got.logps)[scored].sum() / max(1, int(scored.sum()))
    torch.testing.assert_close(got.loss, want)


def test_weight_of_one_half_is_half_the_gradient():
    base = make_base(CASES["gspo"], (5, 2, 3, 4), seed=4)
    base.per_segment["segment_weight"][:] = 0.5
    weighted = hl.Objective.of(hl.gspo().weighted("segment_weight"))
    half = run(Base(**{**base.__dict__, "objective": weighted}), [whole(base)])
    one = run(base, [whole(base)])
    torch.testing.assert_close(half.loss, one.loss / 2)
    torch.testing.assert_close(half.hidden, one.hidden / 2)


# ---------------------------------------------------------------------- bitwise equality


@pytest.mark.parametrize("schedule", ["one_pass", "small_chunks", "recompute", "static"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_two_runs_give_the_same_bits(schedule, dtype):
    row = ("mix", "padded", schedule, dtype, "everything", "plain", "far")
    inputs = matrix.make_inputs(row)
    (a, first), (b, second) = (inputs.run(matrix.SCHEDULES[schedule]) for _ in range(2))
    assert torch.equal(a.loss, b.loss)
    assert torch.equal(a.logps, b.logps)
    assert a.metrics.compute() == b.metrics.compute()
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---------------------------------------------------------------------- NaN in unused values


@pytest.mark.covering
@pytest.mark.parametrize("case", ["mix", "grpo", "dpo", "distillation_logits_js", "where"])
@pytest.mark.parametrize(
    "schedule", ["one_pass", "small_chunks", "recompute", "static", "static_recompute"]
)
@pytest.mark.parametrize(("head", "poison"), [("plain", math.inf), ("everything", math.nan)])
def test_poison_where_nothing_is_scored_changes_nothing(case, schedule, head, poison):
    row = (case, "padded", schedule, "float32", head, "plain", "near")
    clean = matrix.make_inputs(row)
    batch = clean.batch
    unscored = batch.targets == IGNORE
    hidden = clean.hidden.detach().clone()
    hidden[unscored] = poison
    fields = {}
    for name, value in batch.fields.items():
        assert isinstance(value, Tensor)
        if value.is_floating_point() and value.shape[: unscored.dim()] == unscored.shape:
            value = value.clone()
            value[unscored] = poison
        fields[name] = value
    dirty = matrix.Inputs(
        hidden=hidden.requires_grad_(),
        head=clean.head,
        batch=hl.Batch(batch.targets, batch.segments, **fields),
        objective=clean.objective,
    )
    options = matrix.SCHEDULES[schedule]
    (want, theirs), (got, ours) = clean.run(options), dirty.run(options)
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(got.logps, want.logps) and torch.equal(got.entropies, want.entropies)
    assert got.metrics.compute() == want.metrics.compute()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    assert not ours["hidden"][unscored].any()
    assert not got.logps[unscored].any() and not got.entropies[unscored].any()


@pytest.mark.parametrize("inplace", [False, True])
def test_poison_in_given_logits(inplace):
    inputs = matrix.make_inputs(("mix", "padded", "one_pass", "float32", "plain", "plain", "near"))
    unscored = inputs.batch.targets == IGNORE
    logits = inputs.head.logits(inputs.hidden).detach()
    found = []
    for poison in (0.0, math.nan):
        dirty = logits.clone()
        dirty[unscored] = poison
        dirty.requires_grad_()
        out = hl.logits_loss(dirty * 1, inputs.batch, inputs.objective, inplace=inplace)
        (gradient,) = torch.autograd.grad(out.loss, dirty)
        assert not gradient[unscored].any()
        found.append((out.loss, gradient))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


# ---------------------------------------------------------------------- empty batches


@pytest.mark.covering
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lengths", [(0, 0, 0, 0), (3, 2, 0, 1)])
@pytest.mark.parametrize("options", [hl.Options(), hl.Options(schedule="recompute")])
def test_nothing_scored(name, lengths, options):
    """Without scored tokens the loss is 0 and all gradients exist and are zero."""
    base = make_base(CASES[name], lengths, seed=5)
    base.targets[:] = IGNORE
    result = run(base, [whole(base)], options)
    assert result.loss == 0
    assert not result.hidden.any() and not result.weight.any()
    assert result.metrics["tokens"].value == 0
    assert result.metrics["segments"].value == len(lengths)
