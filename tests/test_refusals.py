"""Misuse is refused with an error that names the input.

N positions, H hidden width, V vocabulary, S segments.
"""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headloss as hl

N, H, V, S = 12, 4, 9, 3


def weight(**kwargs) -> Tensor:
    return torch.randn(V, H, **kwargs).requires_grad_()


def targets() -> Tensor:
    return torch.randint(V, (N,))


def batch(**fields) -> hl.Batch:
    given = {"advantages": torch.randn(N), "old_logps": -torch.rand(N) - 2, **fields}
    segments = hl.Segments.from_lengths([4, 3, 5])
    return hl.Batch(given.pop("targets", targets()), segments, **given)


def call(objective=None, head=None, data=None, hidden=None, **options):
    head = hl.Head(weight()) if head is None else head
    data = batch() if data is None else data
    hidden = torch.randn(N, H) if hidden is None else hidden
    objective = hl.grpo() if objective is None else objective
    return hl.head_loss(hidden, head, data, objective, hl.Options(**options))


def made(make):
    """Call `make`, and return (its result, ""), or (None, the text of the error that it raises)."""
    try:
        return make(), ""
    except (TypeError, ValueError) as error:
        return None, str(error)


# ---------------------------------------------------------------------- field names


def names_of_what_a_term_sees() -> list[str]:
    """Return the names of all attributes of a term's batch."""
    seen: set[str] = set()

    @hl.term
    def look(stats, batch):
        seen.update(dir(batch))
        return stats.logp

    call(look())
    return sorted(name for name in seen if not name.startswith("__"))


NAMES = ("index", "wide", "stats", "on", "live", "slice", "get", "fields", "totals_of_this_batch")


def reads_what_was_given(name: str) -> None:
    """Check that a batch with a field called `name` raises an error that contains `name`, or that a
    term reads the field's values correctly."""
    values = torch.linspace(1.0, 2.0, N)
    data, error = made(lambda: batch(**{name: values}))
    if data is None:
        assert name in error
        return

    @hl.term
    def read(stats, batch):
        return stats.logp * getattr(batch, name)

    out = call(read(), data=data)
    torch.testing.assert_close(out.loss.detach(), (out.logps * values).mean())


@pytest.mark.parametrize("name", [*NAMES, "_temperature", "_fits"])
def test_no_field_is_shadowed(name: str) -> None:
    reads_what_was_given(name)


def test_no_attribute_of_a_batch_shadows_a_field() -> None:
    for name in {*names_of_what_a_term_sees(), *dir(batch())} - set(dir(object)):
        if name not in ("targets", "segments", "advantages", "old_logps", "totals"):
            reads_what_was_given(name)


@pytest.mark.parametrize("per_token", [False, True], ids=["number", "per token"])
@pytest.mark.parametrize("schedule", ["auto", "recompute", "static"])
def test_no_field_replaces_the_heads_temperature(schedule: str, per_token: bool) -> None:
    hidden, w, data = torch.randn(N, H), weight(), batch()
    temperature = torch.rand(N) + 0.5 if per_token else 0.8
    options = {"static": True} if schedule == "static" else {"schedule": schedule}
    want = call(head=hl.Head(w, temperature=temperature), data=data, hidden=hidden, **options)
    for name in ("_temperature", "temperature", "temperature_", "_TEMPERATURE"):
        fields = {"advantages": data.advantages, "old_logps": data.old_logps}
        fields[name] = torch.full((N,), 9.0)
        given, error = made(lambda f=fields: hl.Batch(data.targets, data.segments, **f))
        if given is None:
            assert name in error
            continue
        head = hl.Head(w, temperature=temperature)
        got = call(head=head, data=given, hidden=hidden, **options)
        torch.testing.assert_close(got.loss, want.loss, rtol=0, atol=0)
        torch.testing.assert_close(got.logps, want.logps, rtol=0, atol=0)


MISSPELT = {
    "oldlogps": "old_logps",
    "old_logprobs": "old_logps",
    "Ref_Logps": "ref_logps",
    "sampling_logp": "sampling_logps",
    "importance_sampling_ratios": "importance_sampling_ratio",
    "my_score": "my_scores",
}


@hl.term
def reads_scores(stats, batch):
    scores = batch.get("my_scores")
    return stats.logp if scores is None else stats.logp * scores


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_field_is_named(name: str) -> None:
    objective = hl.reinforce() + reads_scores()
    data = hl.Batch(targets(), advantages=torch.randn(N), **{name: -torch.rand(N)})
    with pytest.warns(UserWarning, match=f"{name}: .*{MISSPELT[name]}"):
        call(objective, data=data)
    logits = torch.randn(N, V)
    with pytest.warns(UserWarning, match=f"{name}: .*{MISSPELT[name]}"):
        hl.logits_loss(logits, data, objective)


def test_fields_that_nobody_misspelt_are_not_named() -> None:
    """A field that no term reads causes no spelling warning if the batch also has the field whose
    name it resembles."""
    data = batch(
        ref_logps=-torch.rand(N),
        sampling_logps=-torch.rand(N),
        rewards=torch.rand(S),
        mask=torch.rand(N) > 0.5,
        new_logps=-torch.rand(N),
        old_logps_2=-torch.rand(N),
        weights=torch.rand(N),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(hl.grpo().weighted("weights").where("mask"), data=data)
        call(hl.cross_entropy(), data=data)


# ---------------------------------------------------------------------- temperatures

BAD_TEMPERATURES = [0.0, -1.0, math.nan, math.inf, -math.inf]


def heated(bad: float, position: int = 5) -> Tensor:
    temperature = torch.full((N,), 0.7)
    temperature[position] = bad
    return temperature


@pytest.mark.parametrize("bad", BAD_TEMPERATURES)
def test_a_temperature_that_is_none(bad: float) -> None:
    hidden, data = torch.randn(N, H), batch()
    head = hl.Head(weight(), temperature=heated(bad))
    match = rf"temperature: got {re.escape(str(bad))}.* want a finite number > 0"
    for verb in (
        lambda: hl.head_loss(hidden, head, data, hl.cross_entropy()),
        lambda: call(head=head, schedule="recompute"),
        lambda: hl.plan(hidden, head, data, hl.cross_entropy()),
        lambda: hl.logits_loss(
            hidden @ head.weight.T, data, hl.cross_entropy(), temperature=heated(bad)
        ),
        lambda: hl.logits_loss(
            hidden @ head.weight.T, data, hl.cross_entropy(), temperature=torch.tensor(bad)
        ),
        lambda: hl.head_stats(hidden, head, data.targets),
        lambda: hl.head_topk(hidden, head, 2),
    ):
        with pytest.raises(ValueError, match=match):
            verb()


@pytest.mark.parametrize("bad", BAD_TEMPERATURES)
def test_a_temperature_at_an_unscored_position_may_be_anything(bad: float) -> None:
    hidden, w, y = torch.randn(N, H), weight(), targets()
    y[5] = -100
    found = []
    for at in (0.7, bad):
        for options in ({}, {"static": True}):
            head, data = hl.Head(w, temperature=heated(at)), hl.Batch(y)
            out = call(hl.cross_entropy(), head, data, hidden, **options)
            found.append(out.loss.detach())
        found.append(hl.head_stats(hidden, head, y).logp.sum().detach() / (1 - N))
    for loss in found:
        torch.testing.assert_close(loss, found[0])


# ---------------------------------------------------------------------- objectives and totals


@pytest.mark.parametrize("value", [10**400, math.nan, math.inf])
def test_numbers_that_no_float_holds(value):
    with pytest.raises(ValueError, match=r"^grpo: epsilon_low: got .*, want >= 0$"):
        hl.grpo(epsilon_low=value)
    with pytest.raises(ValueError, match=r"^gradient_tolerance: got .*, want a finite number >= 0"):
        hl.Options(gradient_tolerance=value)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_a_coefficient_that_is_no_number(factor: float) -> None:
    for make in (
        lambda: factor * hl.cross_entropy(),
        lambda: hl.cross_entropy() * factor,
        lambda: hl.grpo() + factor * (hl.entropy() + hl.z_loss()),
        lambda: hl.grpo() - factor * hl.entropy(),
        lambda: hl.entropy() / math.nan,
        lambda: 1e200 * (1e200 * hl.z_loss()),
    ):
        with pytest.raises(ValueError, match=r"(entropy|z_loss)\(.* want a finite coefficient"):
            make()


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, "tokens: got -4, want a finite number >= 0", (-4, 1)),
        (ValueError, "segments: got -1", (4, -1)),
        (ValueError, "tokens: got inf", (math.inf, 1)),
        (ValueError, "segments: got nan", (4, math.nan)),
        (ValueError, r"kept\['mask'\]: got -2", (4, 1, {"mask": (2, -2)})),
        (TypeError, "tokens: got '4'", ("4", 1)),
        (TypeError, "tokens: got None", (None, 1)),
        (TypeError, "segments: got True", (4, True)),
        (TypeError, r"tokens: got a .* shape \(2,\), want .* 0-dim", (torch.ones(2), 1)),
        (TypeError, "tokens: got a torch.bool", (torch.tensor(True), 1)),
    ],
)
def test_totals(error, match, arguments) -> None:
    with pytest.raises(error, match=match):
        hl.Totals(*arguments)


def test_totals_that_are_right() -> None:
    """`Totals` accepts counts of 0 (which act as 1), fractions (averages over ranks), and numpy
    numbers."""
    data = batch()
    want = call(data=data, objective=hl.cross_entropy())
    numbers = [(0, 0), (0.5, 0.25), (np.int64(7), np.float32(2)), (torch.tensor(7), 2)]
    for tokens, segments in numbers:
        totals = hl.Totals(tokens, segments)
        given = hl.Batch(data.targets, data.segments, totals=totals)
        out = hl.logits_loss(torch.zeros(N, V), given, hl.cross_entropy())
        expected = N * math.log(V) / (float(tokens) or 1)
        assert float(out.loss) == pytest.approx(expected, rel=1e-6)
    assert want.loss.isfinite()


@pytest.mark.parametrize("schedule", ["one_pass", "recompute", "auto"])
def test_a_memory_budget_that_nothing_fits_in_is_named(schedule: str) -> None:
    hidden, head, data = torch.randn(N, H).requires_grad_(), hl.Head(weight()), batch()
    least, some = V * 4, {"schedule": schedule}
    with pytest.warns(UserWarning, match=f"memory_budget: got {least - 1} .* at least {least}"):
        out = call(hl.cross_entropy(), head, data, hidden, memory_budget=least - 1, **some)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fits = call(hl.cross_entropy(), head, data, hidden, memory_budget=least, **some)
    torch.testing.assert_close(out.loss, fits.loss)


# ---------------------------------------------------------------------- static shapes


@hl.term(scope="batch")
def centred(stats, batch):
    return (stats.logp - stats.logp.mean()).square()


@hl.term(scope="batch")
def centred_on_live_rows(stats, batch):
    if batch.live is None:
        return (stats.logp - stats.logp.mean()).square()
    mean = (stats.logp * batch.live).sum() / batch.live.sum()
    return (stats.logp - mean).square()


def with_prompt() -> hl.Batch:
    y = targets()
    y[:4] = -100
    return hl.Batch(y, advantages=torch.randn(N), old_logps=-torch.rand(N))


@pytest.mark.parametrize("modified", [False, True], ids=["alone", "with top_entropy"])
def test_no_batch_scoped_term_sees_a_dead_row(modified: bool) -> None:
    """With static shapes, a batch-scoped term gives correct values at scored rows, or raises an
    error."""
    hidden, head, data = torch.randn(N, H), hl.Head(weight()), with_prompt()
    for make in (centred, centred_on_live_rows):
        term = make().top_entropy(quantile=0.6) if modified else make()
        want = call(term, head, data, hidden)
        out, error = made(lambda t=term: call(t, head, data, hidden, static=True))
        if out is None:
            assert re.search(rf"static: got True with term {term.name}", error)
            assert make is centred
            # With `static=True`, `logits_loss` raises an error for a batch-scoped term that ignores
            # `batch.live`, as `head_loss` does.
            with pytest.raises(ValueError, match="static"):
                hl.logits_loss(torch.randn(N, V), data, term, options=hl.Options(static=True))
            continue
        torch.testing.assert_close(out.loss, want.loss)


def test_terms_that_keep_static_shapes() -> None:
    hidden, head, data = torch.randn(N, H), hl.Head(weight()), with_prompt()
    for objective in (hl.grpo().top_entropy(quantile=0.5), hl.gspo() + hl.entropy(), hl.vespo()):
        want = call(objective, head, data, hidden).loss
        torch.testing.assert_close(call(objective, head, data, hidden, static=True).loss, want)


def test_a_modifier_of_ones_own_that_sees_dead_rows() -> None:
    def above_mean(stats, batch):
        return (stats.logp >= stats.logp.mean()).to(stats.logp.dtype).detach()

    modifier = hl.Modifier(name="above_mean", factor=above_mean, scope="batch")
    term, data = hl.cross_entropy().modified(modifier), with_prompt()
    assert call(term, data=data).loss.isfinite()
    with pytest.raises(ValueError, match="static: got True with term cross_entropy"):
        call(hl.entropy() + term, data=data, static=True)
    with pytest.raises(ValueError, match="static: got True with term cross_entropy"):
        call(term, data=data, static=True)


# ---------------------------------------------------------------------- options, batches, segments


@pytest.mark.parametrize(
    ("error", "match", "value"),
    [
        (ValueError, "upstream: got nan", math.nan),
        (ValueError, "upstream: got inf", math.inf),
        (TypeError, "upstream: got 'x', want a number", "x"),
        (TypeError, "upstream: got True", True),
    ],
)
def test_upstream(error, match, value) -> None:
    with pytest.raises(error, match=match):
        hl.Options(upstream=value)


@pytest.mark.parametrize("name", ["advantages", "old_logps", "ref_logps", "sampling_logps"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool])
def test_fields_of_a_dtype_that_makes_no_sense(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"{name}: got {dtype}, want a floating tensor"):
        hl.Batch(targets(), **{name: torch.zeros(N).to(dtype)})


@pytest.mark.parametrize("hidden", [torch.ones(N + 1, 3).long(), [1.0], None])
def test_hidden_states_of_a_wrong_type_are_named_before_their_shape(hidden: Any) -> None:
    head, data = hl.Head(torch.zeros(V, 3)), hl.Batch(targets())
    for call in (
        lambda: hl.head_stats(hidden, head, data.targets),
        lambda: hl.head_stats(hidden, head, data),
        lambda: hl.head_loss(hidden, head, data, hl.cross_entropy()),
    ):
        with pytest.raises(TypeError, match="hidden: got .* want a floating tensor"):
            call()


def test_integer_advantages_are_numbers() -> None:
    data = hl.Batch(torch.zeros(N, dtype=torch.int64), advantages=torch.full((N,), 3))
    out = hl.logits_loss(torch.zeros(N, V), data, hl.reinforce())
    assert float(out.loss) == pytest.approx(3 * math.log(V), rel=1e-6)


def test_main_grad_of_a_weight_without_gradient() -> None:
    options = {"main_grad": torch.zeros(V, H)}
    frozen, hidden = hl.Head(weight().detach()), torch.randn(N, H).requires_grad_()
    with pytest.raises(ValueError, match="main_grad: .* requires no gradient"):
        call(head=frozen, hidden=hidden, **options)
    with torch.no_grad():  # evaluation with training options
        assert call(head=frozen, hidden=hidden, **options).loss.isfinite()


def test_main_grad_of_given_logits() -> None:
    options = hl.Options(main_grad=torch.zeros(V, H))
    with pytest.raises(ValueError, match="main_grad: .* given logits have no weight"):
        hl.logits_loss(torch.randn(N, V), batch(), hl.grpo(), options=options)


SEGMENTS = {
    "lengths: got None": lambda: hl.Segments.from_lengths(None),
    "cu_seqlens: got 3": lambda: hl.Segments.from_cu_seqlens(3),
    "lengths: got 1.5": lambda: hl.Segments.from_lengths([1.5, 2]),
    "lengths: got '2'": lambda: hl.Segments.from_lengths(["2"]),
    "lengths: got True": lambda: hl.Segments.from_lengths([True, 2]),
    "lengths: got torch.float32": lambda: hl.Segments.from_lengths(torch.tensor([1.0, 2.0])),
    "cu_seqlens: got 0.0": lambda: hl.Segments.from_cu_seqlens([0.0, 3.0]),
    "count: got 2.0": lambda: hl.Segments.from_ids(torch.tensor([0, 1]), count=2.0),
    "count: got '2'": lambda: hl.Segments.from_ids(torch.tensor([0, 1]), count="2"),
    "rows: got 1.0": lambda: hl.Segments.rows(1.0, 3),
    "length: got '3'": lambda: hl.Segments.rows(1, "3"),
}


@pytest.mark.parametrize("match", SEGMENTS)
def test_segments_of_no_integers(match: str) -> None:
    with pytest.raises(TypeError, match=match):
        SEGMENTS[match]()


def test_segments_of_negative_numbers() -> None:
    with pytest.raises(ValueError, match="rows: got -1, want >= 0"):
        hl.Segments.rows(-1, 3)
    with pytest.raises(ValueError, match="length: got -3, want >= 0"):
        hl.Segments.rows(1, -3)
    with pytest.raises(ValueError, match="count: got -1, want >= 0"):
        hl.Segments.from_ids(torch.tensor([0, 1]), count=-1)


def test_segments_of_all_kinds_of_integers() -> None:
    ids = [0, 1, 1, 1]
    for lengths in ([1, 3], (1, 3), np.array([1, 3]), torch.tensor([1, 3]), [torch.tensor(1), 3]):
        assert hl.Segments.from_lengths(lengths).ids.tolist() == ids
    assert hl.Segments.from_cu_seqlens(np.array([0, 1, 4])).ids.tolist() == ids
    assert hl.Segments.from_ids(torch.tensor(ids), count=np.int64(2)).count == 2
    assert hl.Segments.rows(np.int64(2), 3).lengths.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("error", "value"),
    [(TypeError, "a"), (TypeError, True), (ValueError, math.inf), (ValueError, 0)],
)
def test_fixed_length(error, value) -> None:
    with pytest.raises(error, match="length: got .*, want"):
        hl.fixed_length(value)


@pytest.mark.parametrize("k", [True, 2.0, "2", 0, V + 1])
def test_head_topk_wants_k_from_1_to_the_vocabulary(k) -> None:
    with pytest.raises((ValueError, TypeError), match="k: got .*, want an integer in 1..9"):
        hl.head_topk(torch.randn(N, H), hl.Head(weight()), k)


def test_float64_hidden_states_are_not_sent_to_autocast() -> None:
    for context in (torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False)):
        with context, pytest.raises(ValueError, match="torch.float64.*cast one of them") as caught:
            call(hidden=torch.randn(N, H, dtype=torch.float64))
        assert "autocast" not in str(caught.value)
    with pytest.raises(ValueError, match="cast one of them or run under torch.autocast"):
        call(hidden=torch.randn(N, H, dtype=torch.bfloat16))


def own_term(**options) -> hl.losses.Term:
    return hl.term(lambda stats, batch: -stats.logp, **options)()


POLICY = hl.losses.grpo()
OF_ANOTHER_TYPE = {
    "segments: got str, want headloss.Segments": lambda: hl.Batch.from_labels(
        torch.arange(3), "rows"
    ),
    "batch: got Tensor, want headloss.Batch": lambda: hl.Totals.of(torch.arange(3)),
    "slopes: got int, want a function": lambda: own_term(slopes=3),
    "segments_per_unit: got 0, want an integer >= 1": lambda: own_term(segments_per_unit=0),
    "segments_per_unit: got 2.0, want an integer": lambda: own_term(segments_per_unit=2.0),
    "modifier: got function, want a Modifier": lambda: POLICY.modified(lambda s, b: 1),
    "corrected: live: got 'no', want True or False": lambda: POLICY.corrected(
        "token_mask", live="no"
    ),
    "corrected: normalized: got 1, want True": lambda: POLICY.corrected("token_mask", normalized=1),
    "rejected: live: got 0, want True or False": lambda: POLICY.rejected("k3", max=1.0, live=0),
    "kl_shaped: centred: got 1": lambda: hl.losses.kl_shaped(POLICY, beta=0.1, centred=1),
}


@pytest.mark.parametrize("match", OF_ANOTHER_TYPE)
def test_parts_of_terms_and_batches_of_another_type_are_named(match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        OF_ANOTHER_TYPE[match]()
