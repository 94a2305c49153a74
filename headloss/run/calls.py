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
from ..ranks.agreement import agree, attempt
from ..ranks.facts import of_segments, of_vocabulary, per_segment
from ..ranks.place import Place
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
    transform = Transform(
        scale=head.logit_scale, softcap=head.softcap, temperature=head.temperature
    )
    return _agreed(
        given, prepare_linear, hidden, head, batch, options, transform, head.vocab_group
    )


def _agreed(
    given: Any, check: Callable[[Any], tuple[Prepared, Objective]], value: Tensor,
    head: Head | None, batch: Batch, options: Options, transform: Transform, group: Any
) -> Work:
    """A call that the ranks of its groups agree on: checked, packed, planned. An error waits until
    all of them have heard of it.

    Args:
        value: hidden states, or (without a head) logits.
    """
    ready, error = attempt(None, check, given)
    if group is None:
        place, error = attempt(error, lambda: Place(head.vocabulary if head else value.shape[-1]))
    else:
        of = value, head, transform, batch, options
        facts, error = attempt(error, lambda: of_vocabulary(*of, *ready))
        said, error = agree("vocab_group", group, facts, error)
        place, error = attempt(error, lambda: Place.of(group, said, head and head.vocab_size))
    work, error = attempt(error, lambda: _packed(batch, options, transform, place, *ready))
    over = batch.segments.group if isinstance(batch, Batch) else None
    if over is not None:
        facts, error = attempt(error, lambda: of_segments(batch, options, work.plan, *ready))
        said, error = agree("segments.group", over, facts, error)
        forms, error = attempt(error, lambda: per_segment(said))
        if error is None:
            work.per_segment = forms
    if error is not None:
        raise error
    return work  # type: ignore[no-any-return]


def _packed(
    batch: Batch, options: Options, transform: Transform, place: Place, prepared: Prepared,
    objective: Objective
) -> Work:
    unit = prepared.problem.segments_per_unit
    packing = packing_of(batch, place.vocabulary, options.static, unit)
    place.check_batch(batch, options.sequence_parallel)
    if prepared.masks and not options.static:
        check_masks(batch, prepared.masks, packing.view(batch, prepared.wide))
    plan, of_segment = prepared.plan(options, packing, place), prepared.per_segment
    return _completed(
        Work(
            prepared, objective, batch, options, place, packing, plan, of_segment, transform, _bound
        )
    )


def linear_plan(given: Given) -> Plan:
    """What `head_loss` would run; hidden states may be on the meta device."""
    work = _linear_work(given)
    _ = _tokens(work)  # what it is made of is checked
    return work.plan


def linear_call(given: Given) -> Call:
    """The call that `head_loss` makes of its arguments."""
    (hidden, head, _, _, options, _), work = given, _linear_work(given)
    prepared, packing, plan = work.prepared, work.packing, work.plan
    slices, index = work.slices, packing.index
    x = hidden if hidden.dim() == 2 else hidden.flatten(0, -2)  # else autograd gets a step more
    if prepared.compute_dtype is not None:
        x = x.to(prepared.compute_dtype)
    if options.sequence_parallel:
        x = slices.given(x)
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
    work = _agreed(given, prepare_given, logits, None, batch, options, transform, group)
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
    work.slices = (place := work.place).slices()
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
    options, totals, view = work.options, batch.totals, work.batch
    if totals is None:  # packing may have read them
        read = prepared.counted and packing.live is None
        totals = Totals(len(packing), packing.count) if read else Totals.of(batch)
    vocabulary, plan, transform = work.place.vocabulary, work.plan, work.transform
    bound = bind(
        objective, view, totals, vocabulary, prepared.wide, declared=options.upstream,
        closed=prepared.slopes, logp_only=plan.pull == "unit",
    )  # fmt: skip
    if not prepared.problem.rescaled:
        return bound
    return bound.scaled(view.targets.device, partial(slope_of, transform))


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
