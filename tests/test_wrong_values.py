"""Wrong values for every argument raise only a ValueError or TypeError that names the argument."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headloss as hl
from headloss.losses.term import Objective

T, H, V = 6, 4, 9
LENGTHS = (4, 2)
EIGHT_BITS = torch.float8_e4m3fn

NUMBERS = [None, True, "abc", "", -1, 0, 3, 2**70, 10**400, math.nan, math.inf, -0.5, 0.5, 1j]
NUMBERS += [Decimal("0.5"), Fraction(1, 2), np.float32(0.5), np.float64("nan"), np.int64(3)]
OTHERS = [(), [], {}, [[1, 2], [3]], (1,), {1}, b"x", object(), int, np.ones(T), np.arange(T)]
OTHERS += [np.array(1.0), torch.float32, hl.CURRENT, hl.Totals(T, 1), hl.Options(), hl.grpo]
OTHERS += [hl.cross_entropy(), (torch.arange(T), None), (torch.arange(T),) * 3]


def tensors() -> list[Any]:
    """Return tensors of many shapes, dtypes and layouts."""
    ones, ids = torch.ones(T), torch.arange(T)
    found = [torch.tensor(0.5), torch.tensor(3), torch.zeros(0), ones, ids, ones.bool(), ones * 1j]
    found += [ones.half(), ones.double(), ones.to(EIGHT_BITS), ones * math.nan, ids.to(torch.uint8)]
    found += [torch.ones(2), torch.ones(1, T), torch.ones(T, 1), torch.ones(T, 2)]
    found += [torch.ones(T, 0), torch.zeros(T, 0).long(), torch.ones(T, V, dtype=torch.bool)]
    found += [ones.to("meta"), ids.to("meta"), ones.to_sparse(), ids.to_sparse()]
    found += [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), ones[:0].long()]
    return [*found, torch.quantize_per_tensor(ones, 1.0, 0, torch.qint8), torch.ones(V, H).char()]


def hidden() -> Tensor:
    return torch.randn(T, H, requires_grad=True)


def head(**given: Any) -> hl.Head:
    return hl.Head(torch.randn(V, H, requires_grad=True), **given)


def batch(**given: Any) -> hl.Batch:
    """Return a batch with every field that library terms read."""
    names = ("old_logps", "ref_logps", "sampling_logps", "teacher_logps")
    fields: dict[str, Any] = {name: -torch.rand(T) for name in names}
    names = ("advantages", "draws", "returns", "old_values", "reference_kl")
    fields |= {name: torch.rand(T) for name in (*names, "importance_sampling_ratio")}
    fields |= {"desirable": torch.tensor([True, False]), "labels": torch.zeros(T).long()}
    fields["segments"] = hl.Segments.from_lengths(LENGTHS)
    return hl.Batch(**{"targets": torch.arange(T), **fields, **given})


def used(given: hl.Batch, objective: Any, **more: Any) -> None:
    """Run a whole step and read all its results."""
    out = hl.head_loss(hidden(), more.pop("head", None) or head(), given, objective, **more)
    declared = more["options"].upstream if "options" in more else None
    out.loss.backward(None if declared is None else torch.tensor(float(declared)))
    _ = out.logps, out.entropies, out.terms, out.metrics.compute()


def check(name: str, call: Callable[[Any], Any], values: list[Any], says: tuple[str, ...]) -> None:
    for value in values:
        shown = f"{name} <- {value!r:.70}" if not isinstance(value, Tensor) else f"{name} <- tensor"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                call(value)
            except (ValueError, TypeError) as error:
                text = str(error)
            except Exception as error:
                raise AssertionError(f"{shown}: {type(error).__name__}: {error}") from error
            else:
                continue
        assert any(word in text for word in says), f"{shown}: {text}"


CE = hl.cross_entropy()
FIELDS: dict[str, Any] = {
    "targets": CE, "segments": CE, "totals": CE, "ignore_index": CE, "candidate_ids": CE,
    "support_ids": CE, "advantages": hl.reinforce(), "old_logps": hl.grpo(), "ref_logps": hl.kl(),
    "sampling_logps": hl.grpo().corrected("token_mask"), "kept": CE.where("kept"),
    "share": CE.weighted("share"), "teacher_logits": hl.distillation(), "unread": CE,
    "desirable": hl.kto(), "reference_kl": hl.kto(), "draws": hl.clip_cov(),
    "prompts": CE.over("prompt_mean"),
    "teacher_hidden": hl.distillation(teacher_head=hl.Head(torch.ones(V, H))),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_fields_of_a_batch(name: str) -> None:
    # Targets or segments whose size does not match the other fields raise an error.
    says = {"targets": ("targets", "per token"), "segments": ("segments", "per segment")}
    call = lambda v: used(batch(**{name: v}), FIELDS[name])  # noqa: E731
    check(name, call, [*NUMBERS, *OTHERS, *tensors()], says.get(name, (name,)))


def test_batches_made_otherwise() -> None:
    values = [*NUMBERS, *OTHERS, *tensors()]
    check("labels", lambda v: hl.Batch.from_labels(v), values, ("labels",))
    check("support_ids", lambda v: batch().with_fields(support_ids=v), values, ("support_ids",))
    moves = [torch.float32, torch.int32, torch.tensor(0.5), True]
    for value in moves:
        with pytest.raises(TypeError, match="to: got torch"):
            batch().to(value)


def makes_segments() -> dict[str, Callable[[Any], Any]]:
    make, segments, ids = hl.Segments, hl.Segments.from_lengths(LENGTHS), torch.arange(T)
    return {
        "lengths": make.from_lengths,
        "cu_seqlens": make.from_cu_seqlens,
        "lengths of a list": lambda v: make.from_lengths([1, v]),
        "ids": make.from_ids,
        "count": lambda v: make.from_ids(torch.arange(T), v),
        "group": lambda v: make.from_ids(torch.arange(T), T, v),
        "rows": lambda v: make.rows(v, 1),
        "length": lambda v: make.rows(1, v),
        "segments.ids": lambda v: used(hl.Batch(ids, make(v, T)), CE),
        "segments.count": lambda v: used(hl.Batch(ids, make(torch.zeros(T).long(), v)), CE),
        "values": segments.mean,
        "values of sum": segments.sum,
        "values of expand": segments.expand,
        "tokens": lambda v: hl.Totals(v, 1),
        "segments": lambda v: hl.Totals(1, v),
        "prompts": lambda v: hl.Totals(1, 1, prompts=v),
        "kept": lambda v: hl.Totals(1, 1, v),
        "kept['a']": lambda v: hl.Totals(1, 1, {"a": v}),
        "batch": hl.Totals.of,
        "group of totals": hl.Totals(1, 1).all_reduce,
        "group of metrics": hl.Metrics().all_reduce,
        "gradients": lambda v: hl.Totals(1, 1).all_reduce(None, v),
        "name": lambda v: hl.Reduction(v, lambda *_: torch.ones(T)),
        "weigh": lambda v: hl.Reduction("mine", v),
    }


@pytest.mark.parametrize("name", makes_segments())
def test_segments_and_totals(name: str) -> None:
    says = (name.partition(" of ")[0], "Default process group")
    words = says if "." not in name else ("segments: got",)
    check(name, makes_segments()[name], [*NUMBERS, *OTHERS, *tensors()], (*says, *words))


@pytest.mark.parametrize("name", list(inspect.signature(hl.Head).parameters))
def test_a_head(name: str) -> None:
    def call(value: Any) -> None:
        own = hl.Head(**{"weight": torch.randn(V, H, requires_grad=True), name: value})
        used(hl.Batch(torch.zeros(T).long()), CE, head=own)
        hl.head_topk(hidden(), own, 1), hl.head_stats(hidden(), own, torch.arange(T))

    says = (name, "0 <= target < 3") if name == "vocab_size" else (name,)
    check(name, call, [*NUMBERS, *OTHERS, *tensors(), torch.ones(V).to(EIGHT_BITS)], says)


@pytest.mark.parametrize("name", list(inspect.signature(hl.Lora).parameters))
def test_an_adapter(name: str) -> None:
    fine = {"a": torch.ones(2, H), "b": torch.ones(V, 2), "scaling": 1.0}
    call = lambda v: used(batch(), CE, head=head(lora=(hl.Lora(**{**fine, name: v}),)))  # noqa: E731
    check(name, call, [*NUMBERS, *OTHERS, *tensors()], ("lora.", "lora["))


@pytest.mark.parametrize("name", list(inspect.signature(hl.Options).parameters))
def test_options(name: str) -> None:
    call = lambda v: used(batch(), CE, options=hl.Options(**{name: v}))  # noqa: E731
    check(name, call, [*NUMBERS, *OTHERS, *tensors()], (name,))


def verbs() -> dict[str, Callable[[Any], Any]]:
    def loss(logps: Tensor, entropies: Tensor) -> Tensor:
        return -logps.sum()

    given, own, ids = batch(), head(), torch.arange(T)
    logits = torch.randn(T, V)
    return {
        "hidden": lambda v: hl.head_loss(v, own, given, CE),
        "head": lambda v: hl.head_loss(hidden(), v, given, CE),
        "batch": lambda v: hl.head_loss(hidden(), own, v, CE),
        "objective": lambda v: v is None or hl.head_loss(hidden(), own, given, v),
        "options": lambda v: hl.head_loss(hidden(), own, given, CE, v),
        "logits": lambda v: hl.logits_loss(v, given, CE),
        "temperature": lambda v: hl.logits_loss(logits, given, CE, temperature=v),
        "softcap": lambda v: hl.logits_loss(logits, given, CE, softcap=v),
        "logit_scale": lambda v: hl.logits_loss(logits, given, CE, logit_scale=v),
        "vocab_group": lambda v: hl.logits_loss(logits, given, CE, vocab_group=v),
        "inplace": lambda v: hl.logits_loss(logits.clone(), given, CE, inplace=v),
        "hidden of head_stats": lambda v: hl.head_stats(v, own, ids),
        "targets of head_stats": lambda v: hl.head_stats(hidden(), own, v),
        "gradients": lambda v: hl.head_stats(hidden(), own, ids, None, v),
        "gradients of a tuple": lambda v: hl.head_stats(hidden(), own, ids, None, (v,)),
        "hidden of head_topk": lambda v: hl.head_topk(v, own, 1),
        "k": lambda v: hl.head_topk(hidden(), own, v),
        "hidden of plan": lambda v: hl.plan(v, own, given, CE),
        "hidden of head_function": lambda v: hl.head_function(v, own, given, loss, "token"),
        "loss_fn of nothing": lambda v: callable(v) or hl.head_function(hidden(), own, given, v),
        "loss_fn of a value": lambda v: hl.head_function(hidden(), own, given, lambda *_: v),
        "separable": lambda v: hl.head_function(hidden(), own, given, loss, v),
        "term": lambda v: (callable(v) and not isinstance(v, hl.Term)) or hl.check_term(v),
        "advantages": lambda v: hl.check_term(hl.reinforce(), advantages=v),
    }


@pytest.mark.parametrize("name", verbs())
def test_verbs(name: str) -> None:
    word = name.partition(" of ")[0]
    says = {"logits": ("logits", "targets"), "advantages": ("advantages", "reinforce: is NaN")}
    check(name, verbs()[name], [*NUMBERS, *OTHERS, *tensors()], says.get(word, (word,)))


LOSSES: dict[str, dict[str, Any]] = {
    "kl_shaped": {"term": hl.grpo(), "beta": 0.1},
    "rlsd_shaped": {"term": hl.grpo()},
    "rejection_mask": {"batch": batch(), "measure": "k3", "max": 1.0},
    "value_loss": {"values": torch.ones(T, requires_grad=True), "batch": batch()},
    "bradley_terry": {"rewards": torch.ones(2, requires_grad=True), "batch": batch()},
    "classification": {"logits": torch.ones(T, 3, requires_grad=True), "batch": batch()},
}
FACTORIES = [name for name in hl.losses.__all__ if inspect.isfunction(getattr(hl, name))]


@pytest.mark.parametrize("name", [name for name in FACTORIES if name != "term"])
def test_options_of_terms(name: str) -> None:
    """Accepted numbers also run."""
    make = getattr(hl, name)
    given = batch()
    for option in inspect.signature(make).parameters:

        def call(value: Any, option: str = option) -> None:
            made = make(**{**LOSSES.get(name, {}), option: value})
            if isinstance(made, hl.Term) and made.reduction is not None:
                logits = {"teacher_logits": torch.zeros(T, V)} if made.teacher else {}
                used(given.with_fields(**logits), made)

        check(f"{name}: {option}", call, [*NUMBERS, *OTHERS, *tensors()], (option, name))


def test_what_terms_are_made_of() -> None:
    one, values = hl.grpo(), [*NUMBERS, *OTHERS, *tensors()]
    for option in ("mode", "min", "max", "live", "normalized"):
        given = {"mode": "token_mask"}
        check(option, lambda v, o=option, g=given: one.corrected(**{**g, o: v}), values, (option,))
    for option in ("measure", "level", "min", "max", "live"):
        given = {"measure": "k3", "max": 1}
        check(option, lambda v, o=option, g=given: one.rejected(**{**g, o: v}), values, (option,))
    calls: dict[str, Callable[[Any], Any]] = {
        "quantile": lambda v: one.top_entropy(v),
        "threshold": lambda v: one.top_entropy(threshold=v),
        "group": lambda v: one.top_entropy(0.5, group=v),
        "reduction": one.over,
        "field": one.where,
        "modifier": one.modified,
        "parts": Objective,
        "parts of a coefficient": lambda v: Objective(((v, one),)),
        "parts of a term": lambda v: Objective(((1.0, v),)),
        "function": lambda v: (callable(v) and not isinstance(v, hl.Term)) or hl.term(v),
        "scope": lambda v: hl.term(scope=v),
        "per": lambda v: hl.term(per=v),
        "name": lambda v: hl.term(name=v),
        "segments_per_unit": lambda v: hl.term(segments_per_unit=v),
    }
    for option, make in calls.items():
        words = option.partition(" of ")[0], "want a finite coefficient", "top_entropy: got"
        check(option, make, values, words)
    for value in (10**400, math.nan, math.inf):
        with pytest.raises(ValueError, match="want a finite coefficient"):
            value * one
    with pytest.raises(ValueError, match="want a finite coefficient"):
        one / 0


# ---------------------------------------------------------------------- valid edge cases


def test_a_boolean_field_with_several_values_per_token() -> None:
    """A boolean field with several values per token is valid, and adds no count to
    `Totals.of(batch)`."""
    allowed = torch.rand(T, 3) > 0.5
    given = hl.Batch(torch.arange(T), allowed=allowed)
    assert hl.Totals.of(given) == hl.Totals(torch.tensor(T), 1)

    @hl.term
    def some(stats, batch):
        return -stats.logp * batch.allowed.any(1)

    x, own = hidden(), head()
    out = hl.head_loss(x, own, given, some())
    logps = own.logits(x).log_softmax(-1)[torch.arange(T), torch.arange(T)]
    torch.testing.assert_close(out.loss, -(logps * allowed.any(1)).mean())


def test_large_integers_act_as_floats() -> None:
    x, own, given = hidden(), head(), batch()
    for huge, same in ((2**70, float(2**70)), (-(2**70), -float(2**70))):
        options = (hl.Options(upstream=value) for value in (huge, same))
        found = [hl.head_loss(x, own, given, CE, option).loss for option in options]
        assert torch.equal(*found)
    wide, narrow = (hl.grpo(epsilon_high=value) for value in (2**70, 1e20))
    assert torch.equal(*(hl.head_loss(x, own, given, t).loss for t in (wide, narrow)))
    out = hl.head_loss(x, own, given, hl.gmpo(epsilon_high=1000))
    assert out.loss.isfinite() and out.metrics.compute()["gmpo/clip_high"] == 0


def test_a_term_of_a_partial_has_a_name() -> None:
    def scaled(stats, batch, *, by):
        return -by * stats.logp

    x, own, given = hidden(), head(), batch()
    made = hl.term(functools.partial(scaled, by=2.0))()
    out = hl.head_loss(x, own, given, made)
    assert list(out.terms) == ["partial"]
    torch.testing.assert_close(out.loss, 2 * hl.head_loss(x, own, given, CE).loss)


def test_a_teacher_of_eight_bits() -> None:
    """A teacher's 8-bit states equal their float32 values."""
    x, own, states = hidden(), head(), torch.randn(T, H).to(EIGHT_BITS)
    objective = hl.distillation(teacher_head=hl.Head(torch.randn(V, H)))
    calls = (batch(teacher_hidden=given) for given in (states, states.float()))
    assert torch.equal(*(hl.head_loss(x, own, given, objective).loss for given in calls))


def test_no_vocabulary() -> None:
    nothing = hl.Batch(torch.full((T,), -100))
    with pytest.raises(ValueError, match="vocabulary: got a weight without rows"):
        hl.head_loss(hidden(), hl.Head(torch.ones(0, H)), nothing, CE)
    with pytest.raises(ValueError, match="logits without columns"):
        hl.logits_loss(torch.ones(T, 0), nothing, CE)


@pytest.mark.parametrize("name", ["teacher_logits", "candidate_ids"])
def test_what_both_acts_read_may_not_change_in_between(name: str) -> None:
    """If forward and backward read the same batch field, changing the field in between raises an
    error."""
    chosen = hl.term(lambda stats, batch: -stats.candidate_logps[:, 0], name="chosen")
    values = {"teacher_logits": torch.randn(T, V), "candidate_ids": torch.arange(T)[:, None] + 1}
    objective = {"teacher_logits": hl.distillation(), "candidate_ids": chosen()}[name]
    recompute = hl.Options(schedule="recompute")
    out = hl.head_loss(hidden(), head(), batch(**{name: values[name]}), objective, recompute)
    values[name].copy_(values[name].flip(0))
    with pytest.raises(RuntimeError, match=f"batch.{name}: it, or a tensor whose"):
        out.loss.backward()
    with torch.inference_mode():
        value = values[name].clone()
    used(batch(**{name: value}), objective, options=recompute)


@pytest.mark.parametrize("schedule", ["frozen", "one_pass"])
def test_candidates_of_a_frozen_head_may_not_change_in_between(schedule: str) -> None:
    """Changing `candidate_ids` between forward and backward raises for a frozen head, whose
    backward pass reads them."""
    chosen = hl.term(lambda stats, batch: -stats.candidate_logps[:, 0], name="chosen")
    ids, frozen = torch.arange(T)[:, None] + 1, hl.Head(head().weight.detach())
    options = hl.Options(schedule=schedule)
    out = hl.head_loss(hidden(), frozen, batch(candidate_ids=ids), chosen(), options)
    ids.copy_(ids.flip(0))
    if schedule == "one_pass":
        return out.loss.backward()
    with pytest.raises(RuntimeError, match="batch.candidate_ids: it, or a tensor whose"):
        out.loss.backward()


def test_integers_of_numpy_are_integers():
    options = hl.Options(chunk_tokens=np.int64(3), memory_budget=np.int32(1 << 20))
    head = hl.Head(torch.zeros(9, 4), vocab_size=np.int64(7))
    numbers = options.chunk_tokens, options.memory_budget, head.vocab_size
    assert numbers == (3, 1 << 20, 7) and {type(number) for number in numbers} == {int}


@pytest.mark.parametrize("name", ["teacher_topk", "candidate"])
def test_logits_in_the_place_of_probabilities(name: str) -> None:
    """Teacher or candidate probabilities that sum to more than 1.01 at a scored token raise an
    error, as do log-probs in the place of probabilities. Unused entries and unscored positions may
    hold anything."""
    fields = {"teacher_topk": "teacher_topk_logps", "candidate": "candidate_probs"}
    field, term = fields[name], hl.distillation() if name == "teacher_topk" else CE
    ids = torch.tensor([0, 1, -1]).expand(T, 3)
    values = torch.tensor([0.4, 0.6, 9.0]).expand(T, 3).clone()
    values[0] = torch.nan
    if name == "teacher_topk":
        values[1:] = values[1:].log()
    targets = (torch.arange(T) % 2).masked_fill(torch.arange(T) == 0, -100)

    def loss(values: Tensor) -> Tensor:
        batch = hl.Batch(targets, **{f"{name}_ids": ids, field: values})
        x = torch.randn(T, 4, generator=torch.Generator().manual_seed(0))
        return hl.head_loss(x, hl.Head(torch.ones(V, 4)), batch, term).loss

    assert loss(values).isfinite() and loss(values.bfloat16()).isfinite()
    values[2, 1] += 0.02
    with pytest.raises(ValueError, match=rf"{field}: got \[.*\] at position 2, want .*of logits"):
        loss(values)
    values[2] = torch.tensor([-0.9, -0.5, 0.0])
    if name == "candidate":
        with pytest.raises(ValueError, match=rf"{field}: got \[.*\] at position 2, want .*>= 0"):
            loss(values)
