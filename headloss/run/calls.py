"""From arguments to what the loop runs: agreed between ranks, prepared, packed, planned, opened.

N positions, T of them scored, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ..batch.batch import Batch
from ..batch.packing import PackedBatch, Packing, packing_of
from ..batch.reduction import Totals
from ..head.head import Head
from ..kernels.transform import Transform
from ..losses.term import Objective
from ..objective.bound import Bound, bind
from ..objective.tape import Taped
from ..objective.tolerance import Tolerance
from ..options import Options
from ..ranks.agreement import agree_early, settle
from ..ranks.place import Place, of_given, of_linear, own_facts, own_of_linear
from ..ranks.segments import Joined, over_segments, voted
from ..softmax.given import GivenSoftmax, GivenSums, IntoLogits, WalkSoftmax
from ..softmax.linear import ExpSoftmax, LinearSoftmax, Tokens
from ..softmax.sums import Hidden, Into, RowSums
from ..softmax.support import SupportSoftmax
from .checks import Given, GivenLogits, check_temperatures
from .loop import GatherRows
from .plan import Plan
from .prepare import Prepared, known, prepare_given, prepare_linear
from .signature import of_linear as signature_of
from .teachers import with_beside
from .work import Work, slope_of

# What to do for a call, and the tensors of its logits: features and weights pairwise, bias; or the
# given logits.
Call = tuple[Work, list[Tensor | None]]


def _linear_joined(given: Given, early: bool = False) -> Joined:
    """What the arguments of `head_loss` come to before a logit is looked at."""
    hidden, head, batch, _, options, _ = given
    over = isinstance(batch, Batch) and batch.segments.group is not None
    plain = early and not (head.lora or isinstance(head.temperature, Tensor))

    def alone() -> Joined:
        return _joined(_checked(given), Place(head.vocabulary), batch, options, plain)

    if head.vocab_group is None and not over:
        return alone()
    known_batch = isinstance(batch, Batch) and isinstance(options, Options)
    wait = not known_batch or options.sequence_parallel or (over and options.static)

    def joined() -> Joined:
        if head.vocab_group is None:
            return alone()
        ready, own = agree_early(
            "vocab_group",
            head.vocab_group,
            partial(_checked, given),
            lambda ready: own_of_linear(hidden, head, batch, options, ready[0].problem.memory),
            lambda ready: of_linear(hidden, head, batch, ready[1], options),
            wait,
            quiet=over,
        )
        place = Place.of(head.vocab_group, own, head.vocab_size)
        if options.sequence_parallel:
            place.check_tokens(batch)
        return _joined(ready, place, batch, options, plain and not options.sequence_parallel)

    return over_segments(batch, options, joined, head.vocab_group, wait) if over else joined()


def _checked(given: Given) -> tuple[Prepared, Objective]:
    hidden, head, batch, objective, options, _ = given
    whole = Objective.of(objective)
    key = signature_of(hidden, head, batch, whole, options)
    found = None if key is None else known(key)
    if found is None or found.per_call or batch.segments.count % found.problem.segments_per_unit:
        found = prepare_linear(given, whole, key)
    return found, whole


def linear_plan(given: Given) -> Plan:
    """What `head_loss` would run; hidden states may be on the meta device."""
    (_, head, batch, _, options, _), joined = given, _linear_joined(given)
    work = _work(joined, batch, _transform(head), options)
    _ = _tokens(work, joined)  # what it is made of is checked
    if batch.segments.group is not None:
        _ = work.bound  # and what its ranks' totals and weights are
    return joined.plan


def _transform(head: Head) -> Transform:
    make = Transform if isinstance(head.temperature, Tensor) else _of_numbers
    return make(scale=head.logit_scale, softcap=head.softcap, temperature=head.temperature)


# Those of many calls are the same, and a record that checks or freezes takes its time.
_of_numbers = lru_cache(maxsize=256, typed=True)(Transform)
_totals = lru_cache(maxsize=256)(Totals)


def linear_call(given: Given, early: bool = False) -> Call:
    """The call that `head_loss` makes of its arguments; with `early` it may be one that `confirm`s
    its batch as it runs (`in_step`)."""
    (hidden, head, batch, _, options, _), joined = given, _linear_joined(given, early)
    prepared, packing, plan = joined.prepared, joined.packing, joined.plan
    work = _work(joined, batch, _transform(head), options)
    slices, index = work.slices, packing.index
    x = hidden if hidden.dim() == 2 else hidden.flatten(0, -2)  # else autograd gets a step more
    if prepared.compute_dtype is not None:
        x = x.to(prepared.compute_dtype)
    if slices.group is not None:
        x, index = slices.given(x), slices.index(index)
    if index is not None:
        x = GatherRows.apply(x, index, packing.live)
    elif (plan.terms or prepared.problem.differences) and not prepared.readable:
        x = x.clone(memory_format=torch.contiguous_format)
    if plan.resends and (again := _resends(joined, options, work, head.bias)) is not None:
        strides = x.stride(0), head.weight.stride(0)
        kind = again.kind(x.shape[0], strides, packing.targets)
        work.again = again.known(kind)
        if work.again is not None:
            return work, [x, head.weight, head.bias]
        work.record = partial(again.record, kind)
    of_tokens = _tokens(work, joined)
    fixed = prepared.acts.fixed_product if options.batch_invariant else None
    tensors = [x, head.weight]
    if head.lora:
        tensors = [tensor for pair in slices.factors(head, x, fixed) for tensor in pair]
    work.open = partial(
        ExpSoftmax if plan.terms else LinearSoftmax,
        tokens=of_tokens,
        spread=slices.open if slices.is_spread else list,
        compute_dtype=prepared.compute_dtype,
        logits_dtype=options.logits_dtype,
        fixed=fixed,
        measured=prepared.problem.rescaled and prepared.backend == "triton" and not slices.group,
    )
    if (support := packing.support) is not None:
        whole = work.open  # `work` itself would be in a cycle
        work.open = lambda tensors: SupportSoftmax(whole(tensors), support)
    final = options.upstream is not None or prepared.problem.scope == "elsewhere"
    work.into = Into(
        prepared.wants, options.accumulate_dtype, options.main_grad,
        final and not prepared.problem.rescaled,  # coefficients hold the upstream gradient
        Hidden if slices.group is None else slices.hidden,
    )
    work.sums = RowSums
    return work, [*tensors, head.bias]


def given_call(given: GivenLogits) -> Call:
    """The call that `logits_loss` makes of its arguments."""
    logits, batch, _, transform, vocab_group, inplace, options = given
    over = isinstance(batch, Batch) and batch.segments.group is not None

    def joined() -> Joined:
        early = not isinstance(transform.temperature, Tensor)
        if vocab_group is None:
            ready = prepare_given(given)
            # What is known beforehand may go by ids: anything, where a position is not scored.
            early = early and (batch.segments.made or not (inplace and ready[0].slopes))
            return _joined(ready, Place(logits.shape[-1]), batch, options, early)
        ready, own = agree_early(
            "vocab_group",
            vocab_group,
            partial(prepare_given, given),
            lambda ready: own_facts(
                logits.shape[-1], batch, ready[0].problem.memory, static=options.static
            ),
            lambda ready: of_given(logits, transform, batch, ready[1], options, inplace),
            wait=over and getattr(options, "static", True),
            quiet=over,
        )
        return _joined(ready, Place.of(vocab_group, own), batch, options, early)

    found = over_segments(batch, options, joined, vocab_group) if over else joined()
    work = _work(found, batch, transform, options)
    of_tokens = _tokens(work, found)
    packing, inplace = work.packing, found.prepared.problem.inplace
    work.into = into = IntoLogits(packing.order, inplace)
    if found.plan.rows:
        work.open = partial(WalkSoftmax, tokens=of_tokens, index=packing.index, into=into)
        work.sums = lambda source, *_: source
    else:
        work.open = partial(GivenSoftmax, tokens=of_tokens, index=packing.index)
        work.sums = GivenSums
    return work, [logits]


def _joined(
    ready: tuple[Prepared, Objective], place: Place, batch: Batch, options: Options, early: bool
) -> Joined:
    """Packed and planned, without a collective over the segments' group; `early`: nothing but
    packing depends on the batch's values."""
    prepared, objective = ready
    misses = prepared.misses if early and not batch.segments.group else [True]
    of_batch = options.static, prepared.problem.segments_per_unit, None if misses else misses
    packing, confirm = packing_of(batch, place.vocabulary, *of_batch)
    plan = prepared.plan(options, packing, place)
    return Joined(prepared, objective, place, packing, plan, confirm, prepared.per_segment)


def _work(joined: Joined, batch: Batch, transform: Transform, options: Options) -> Work:
    """What the loop is to do."""
    prepared, _, place, packing, plan, confirm, per_segment = joined
    group = batch.segments.group
    view: Callable[[], PackedBatch] = partial(packing.view, batch, prepared.wide, per_segment)
    if group is not None and options.static:  # by a collective, which cannot wait
        found = voted(packing, batch, prepared.wide, group)
        view = lambda: found  # noqa: E731
    spread = packing if options.sequence_parallel else None
    slices = place.slices(spread, batch.targets.device, confirm)
    if isinstance(transform.temperature, Tensor):
        transform = _of_tokens(transform, batch, packing, prepared.wide)
    vocabulary, tolerance = place.vocabulary, None
    if options.gradient_tolerance:
        # Of nothing where leaving rows out would save no product: those of a frozen head are made
        # before any coefficient is known.
        saves = plan.skip_rows and plan.pull not in ("unit", "never")
        share = options.gradient_tolerance if saves else 0.0
        none = packing.targets.new_zeros((), dtype=torch.float64)
        tolerance = Tolerance(share, transform, vocabulary, none)
    return Work(
        prepared=prepared,
        plan=plan,
        packing=packing,
        view=view,
        bind=partial(_bound, joined, batch, options, transform),
        slices=slices,
        vocabulary=vocabulary,
        transform=transform,
        at_once=plan.rows and plan.schedule == "one_pass"
        and prepared.slopes and not (place.group or group),
        tolerance=tolerance,
        confirm=confirm,
    )


def _tokens(work: Work, joined: Joined) -> Tokens:
    """What every source takes."""
    prepared, packing, transform = work.prepared, work.packing, work.transform
    targets, whole = packing.targets, joined.place.group is None and packing.live is None
    if packing.order.facts is not None and prepared.backend == "reference":
        targets = targets.clamp(0, work.vocabulary - 1)  # until it is read they may be anything
    given = targets, transform, prepared.needs, work.slices, work.vocabulary, whole
    found = Tokens(prepared.acts, *given)
    return with_beside(found, work, joined.objective.teachers) if prepared.beside else found


def _resends(joined: Joined, options: Options, work: Work, bias: Tensor | None) -> Any:
    """What calls of this signature and transform send again, if they do."""
    prepared, transform = joined.prepared, work.transform
    if not prepared.taped or isinstance(transform.temperature, Tensor):
        return None
    of = transform, prepared.problem.width, work.vocabulary, joined.packing.targets.device, bias
    return prepared.again(joined.objective, options.metrics, *of)


def _bound(
    joined: Joined, batch: Batch, options: Options, transform: Transform, view: PackedBatch
) -> Bound | Taped:
    """The objective bound to its totals, while the first product runs."""
    if batch.segments.group is not None:
        settle(batch.segments.group)  # before its collectives
    prepared, objective, place, packing, plan, *_ = joined
    vocabulary, totals = place.vocabulary, batch.totals
    if totals is None:  # packing may have read them
        read = prepared.counted and packing.live is None
        totals = _totals(packing.targets.shape[0], packing.count) if read else Totals.of(batch)
    problem, declared = prepared.problem, options.upstream
    rescaled = problem.rescaled and not problem.fitted

    def by_autograd() -> Bound:
        given, closed = (objective, view, totals, vocabulary, prepared.wide), prepared.slopes
        found = bind(*given, declared=declared, closed=closed, logp_only=plan.pull == "unit")
        of = partial(slope_of, transform)
        return found.scaled(view.targets.device, of) if rescaled else found

    if not prepared.taped or prepared.tape(objective, options.metrics, True) is None:
        return by_autograd()
    return Taped(
        objective=objective,
        batch=view,
        totals=totals,
        vocabulary=vocabulary,
        find=partial(prepared.tape, objective),
        observe=options.metrics,
        by_autograd=by_autograd,
        rescaled=rescaled,
        declared=declared,
    )


def _of_tokens(
    transform: Transform, batch: Batch, packing: Packing, wide: torch.dtype
) -> Transform:
    """With the temperatures of packed tokens."""
    temperature = transform.temperature
    assert isinstance(temperature, Tensor)
    if temperature.dim() == 0:
        rows = temperature.expand(len(packing))
    elif temperature.shape != batch.targets.shape:
        raise ValueError(
            f"temperature: got shape {tuple(temperature.shape)}, want a number or one value per "
            f"token, {tuple(batch.targets.shape)}"
        )
    else:
        rows = temperature.reshape(-1)
        rows = rows if packing.index is None else rows[packing.index]
    if packing.live is not None:  # else a division by the 0 of an unscored row
        rows = torch.where(packing.live, rows, 1)
    else:
        check_temperatures(rows, packing.index)
    return replace(transform, temperature=rows.to(wide))
