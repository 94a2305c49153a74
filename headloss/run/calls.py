"""From arguments to what the loop runs: agreed between ranks, prepared, packed, planned, opened.

N positions, T of them scored, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..batch.batch import Batch
from ..batch.packing import Packing, packing_of
from ..batch.reduction import Totals
from ..head.head import Head
from ..kernels.transform import Transform
from ..losses.term import Objective
from ..objective.bound import Bound, bind
from ..objective.tolerance import Tolerance
from ..options import Options
from ..ranks.agreement import agree_early, settle
from ..ranks.place import Place, of_given, of_linear, own_facts
from ..ranks.segments import over_segments, voted
from ..softmax.given import GivenSoftmax, GivenSums, IntoLogits, WalkSoftmax
from ..softmax.linear import ExpSoftmax, LinearSoftmax, Tokens
from ..softmax.sums import Hidden, Into, RowSums
from ..softmax.support import SupportSoftmax
from .checks import Given, GivenLogits, check_masks, check_temperatures
from .loop import GatherRows
from .plan import Plan
from .prepare import Prepared, prepare_given, prepare_linear
from .teachers import with_beside
from .work import Work, slope_of

# What to do for a call, and the tensors of its logits: features and weights pairwise, bias; or the
# given logits.
Call = tuple[Work, list[Tensor | None]]


def _linear_work(given: Given) -> Work:
    """What the arguments of `head_loss` come to before a logit is looked at."""
    hidden, head, batch, _, options, _ = given
    return _agreed(
        given, prepare_linear, of_linear, hidden, head, batch, options, _transform(head),
        head.vocab_group
    )


def _agreed(
    given: Any, check: Callable[[Any], tuple[Prepared, Objective]],
    same: Callable[[Any, Objective], dict[str, Any]], value: Tensor, head: Head | None,
    batch: Batch, options: Options, transform: Transform, group: Any
) -> Work:
    """A call that the ranks of its groups agree on: checked, packed, planned.

    Args:
        same: facts that are to be the same on all ranks of the vocabulary's group.
        value: hidden states, or (without a head) logits.
    """
    over = isinstance(batch, Batch) and batch.segments.group is not None
    wait = (over or group is not None) and (
        not (isinstance(batch, Batch) and isinstance(options, Options))
        or options.sequence_parallel or (over and options.static)
    )

    def packed() -> Work:
        """Without a collective over the segments' group."""
        if group is None:
            ready = check(given)
            place = Place(value.shape[-1] if head is None else head.vocabulary)
        else:
            own = partial(own_facts, value, head, batch, options)
            act, facts = partial(check, given), lambda ready: same(given, ready[1])
            ready, said = agree_early("vocab_group", group, act, own, facts, wait, quiet=over)
            place = Place.of(group, said, head and head.vocab_size)
            if options.sequence_parallel:
                place.check_tokens(batch)
        prepared, objective = ready
        unit = prepared.problem.segments_per_unit
        packing = packing_of(batch, place.vocabulary, options.static, unit)
        if prepared.masks and not options.static:
            check_masks(batch, prepared.masks, packing.view(batch, prepared.wide))
        plan = prepared.plan(options, packing, place)
        return Work(
            prepared, objective, batch, options, place, packing, plan, prepared.per_segment,
            transform, bool, _bound
        )

    return _completed(over_segments(batch, options, packed, group, wait) if over else packed())


def linear_plan(given: Given) -> Plan:
    """What `head_loss` would run; hidden states may be on the meta device."""
    work = _linear_work(given)
    _ = _tokens(work)  # what it is made of is checked
    return work.plan


def _transform(head: Head) -> Transform:
    return Transform(scale=head.logit_scale, softcap=head.softcap, temperature=head.temperature)


def linear_call(given: Given) -> Call:
    """The call that `head_loss` makes of its arguments."""
    (hidden, head, _, _, options, _), work = given, _linear_work(given)
    prepared, packing, plan = work.prepared, work.packing, work.plan
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
    of_tokens = _tokens(work)
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
    logits, batch, _, transform, group, _, options = given
    of = logits, None, batch, options, transform, group
    work = _agreed(given, prepare_given, of_given, *of)
    of_tokens = _tokens(work)
    packing, inplace = work.packing, work.prepared.problem.inplace
    work.into = into = IntoLogits(packing.order, inplace)
    if work.plan.rows:
        work.open = partial(WalkSoftmax, tokens=of_tokens, index=packing.index, into=into)
        work.sums = lambda source, *_: source
    else:
        work.open = partial(GivenSoftmax, tokens=of_tokens, index=packing.index)
        work.sums = GivenSums
    return work, [logits]


def _completed(work: Work) -> Work:
    """With what the loop needs beside, once the ranks agree."""
    prepared, packing, plan, batch = work.prepared, work.packing, work.plan, work.given
    options, transform, group = work.options, work.transform, batch.segments.group
    if group is not None and options.static:  # by a collective, which cannot wait
        work.batch = voted(packing, batch, prepared.wide, group)
    device, spread = batch.targets.device, packing if options.sequence_parallel else None
    work.slices = (place := work.place).slices(spread, device, work.confirm)
    if isinstance(transform.temperature, Tensor):
        work.transform = transform = _of_tokens(transform, batch, packing, prepared.wide)
    if plan.rows and plan.schedule == "one_pass" and prepared.slopes:
        work.at_once = not (place.group or group)
    if options.gradient_tolerance:
        # Of nothing where leaving rows out would save no product: those of a frozen head are made
        # before any coefficient is known.
        saves = plan.skip_rows and plan.pull not in ("unit", "never")
        share = options.gradient_tolerance if saves else 0.0
        none = packing.targets.new_zeros((), dtype=torch.float64)
        work.tolerance = Tolerance(share, transform, work.vocabulary, none)
    return work


def _tokens(work: Work) -> Tokens:
    """What every source takes."""
    prepared, packing, transform = work.prepared, work.packing, work.transform
    targets, whole = packing.targets, work.place.group is None and packing.live is None
    given = targets, transform, prepared.needs, work.slices, work.vocabulary, whole
    found = Tokens(prepared.acts, *given)
    return with_beside(found, work) if prepared.beside else found


def _bound(work: Work) -> Bound:
    """The objective bound to its totals, while the first product runs. (What is bound holds no
    `work`, which holds it.)"""
    prepared, objective, packing, batch = work.prepared, work.objective, work.packing, work.given
    if batch.segments.group is not None:
        settle(batch.segments.group)  # before its collectives
    options, totals, view = work.options, batch.totals, work.batch
    if totals is None:  # packing may have read them
        read = prepared.counted and packing.live is None
        totals = Totals(len(packing), packing.count) if read else Totals.of(batch)
    vocabulary, plan, transform = work.place.vocabulary, work.plan, work.transform
    rescaled = prepared.problem.rescaled and not prepared.problem.fitted

    bound = bind(
        objective, view, totals, vocabulary, prepared.wide, declared=options.upstream,
        closed=prepared.slopes, logp_only=plan.pull == "unit",
    )  # fmt: skip
    return bound.scaled(view.targets.device, partial(slope_of, transform)) if rescaled else bound


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
