"""From arguments to a call that the loop can run: agreed between ranks, prepared, packed, planned.

N positions, T of them scored, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..batch.batch import Batch
from ..batch.packing import Packing, packing_of
from ..head.head import Head
from ..kernels.transform import Transform
from ..losses.term import Objective, Term
from ..objective.tolerance import Tolerance
from ..options import Options
from ..ranks.place import Place, given_facts, join, linear_facts
from ..ranks.segments import Joined, over_segments, voted
from ..softmax.given import GivenSoftmax, WalkSoftmax
from ..softmax.linear import ExpSoftmax, LinearSoftmax, RawSoftmax, Tokens
from ..softmax.sums import Into
from ..softmax.support import SupportSoftmax
from .autograd import GatherRows
from .bind import binder
from .checks import check_temperatures, teachers_of
from .loop import Work
from .plan import Plan
from .prepare import Prepared, prepare_given, prepare_linear
from .teachers import open_beside, open_teacher

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call that was validated, packed and planned; the values of the logits are not known yet."""

    objective: Objective
    prepared: Prepared
    packing: Packing
    tokens: Tokens
    teachers: tuple[Any, ...]
    beside: tuple[Any, ...]
    work: Work

    @property
    def plan(self) -> Plan:
        return self.work.plan

    def open_linear(
        self, hidden: Tensor, head: Head, options: Options
    ) -> tuple[Any, list[Tensor | None]]:
        """A function that makes the source of a linear head, and the tensors that it takes."""
        slices, prepared = self.work.slices, self.prepared
        x = hidden.reshape(-1, hidden.shape[-1])
        if prepared.compute_dtype is not None:
            x = x.to(prepared.compute_dtype)
        x = slices.given(x)
        index = slices.index(self.packing.index)
        if index is not None:
            x = GatherRows.apply(x, index, self.packing.live)
        fused = self.plan.terms
        if fused and not prepared.acts.can_fuse(x, x):  # its product cannot read this layout
            x = x.clone(memory_format=torch.contiguous_format)
        fixed = prepared.acts.fixed_product if options.batch_invariant else None
        factors = slices.factors(head, x, fixed)

        def open_source(tensors: Sequence[Any]) -> RawSoftmax:
            source = (ExpSoftmax if fused else LinearSoftmax)(
                slices.open(tensors[:-1:2]),
                tensors[1:-1:2],
                tensors[-1],
                slices.size or head.vocabulary,
                prepared.acts,
                self.tokens,
                first=slices.first,
                teachers=self.teachers,
                beside=self.beside,
                compute_dtype=prepared.compute_dtype,
                logits_dtype=options.logits_dtype,
                fixed=fixed,
            )
            support = self.packing.support
            if support is None:
                return source
            return SupportSoftmax(source, support, self.work.vocabulary)

        return open_source, [*(tensor for pair in factors for tensor in pair), head.bias]

    def open_given(self, logits: Tensor) -> tuple[Any, list[Tensor | None]]:
        """The same for given logits."""
        acts, first = self.prepared.acts, self.work.slices.first

        def open_source(tensors: Sequence[Any]) -> RawSoftmax:
            given = (tensors[0], self.packing.index, acts, self.tokens)
            if not self.plan.rows:
                others = {"teachers": self.teachers, "beside": self.beside}
                return GivenSoftmax(*given, first=first, **others)
            return WalkSoftmax(
                *given,
                first=first,
                live=self.packing.live,
                unscored=self.packing.order.unscored,
                inplace=self.work.inplace,
            )

        return open_source, [logits]


def linear_call(
    hidden: Tensor,
    head: Head,
    batch: Batch,
    objective: Term | Objective,
    options: Options,
    on_meta: bool = False,  # a plan may be asked for on the meta device
) -> Call:
    """The call that `head_loss` makes of its arguments."""

    def joined() -> Joined:
        (prepared, found), place = join(
            head.vocab_group,
            lambda: (head.vocabulary, hidden.shape[:-1].numel()),
            lambda: prepare_linear(hidden, head, batch, objective, options, on_meta),
            lambda ready: linear_facts(
                hidden, head, batch, ready[1], options, ready[0].problem.memory
            ),
            head.vocab_size,
            options,
        )
        if options.sequence_parallel:
            place.check_tokens(batch)
        return _joined(prepared, found, place, batch, options)

    transform = Transform(
        scale=head.logit_scale, softcap=head.softcap, temperature=head.temperature
    )
    return _call(over_segments(batch, options, joined), batch, transform, options)


def given_call(
    logits: Tensor,
    batch: Batch,
    objective: Term | Objective,
    transform: Transform,
    vocab_group: ProcessGroup | None,
    inplace: bool,
    options: Options,
) -> Call:
    """The call that `logits_loss` makes of its arguments."""

    def joined() -> Joined:
        (prepared, found), place = join(
            vocab_group,
            lambda: (logits.shape[-1], 0),
            lambda: prepare_given(logits, batch, objective, transform, inplace, options),
            lambda ready: given_facts(
                logits, transform, batch, ready[1], options, inplace, ready[0].problem.memory
            ),
            None,
            options,
        )
        return _joined(prepared, found, place, batch, options)

    return _call(over_segments(batch, options, joined), batch, transform, options)


def _joined(
    prepared: Prepared, objective: Objective, place: Place, batch: Batch, options: Options
) -> Joined:
    """Packed and planned, without a collective over the segments' group."""
    unit = objective.segments_per_unit
    packing = packing_of(batch, place.vocabulary, options.static, unit)
    support = packing.support
    plan = prepared.plan(
        options,
        tokens=len(packing),
        vocabulary=place.widest,
        lengths=packing.lengths,
        support=0 if support is None else len(support.ids),
        restricted=0 if support is None else support.restricted,
        sharded=place.group is not None,
        memory=prepared.problem.memory if place.memory is None else place.memory,
        weight_gradient=prepared.problem.weight_gradient or bool(place.weight_gradient),
    )
    return Joined(prepared, objective, place, packing, plan)


def _call(joined: Joined, batch: Batch, transform: Transform, options: Options) -> Call:
    prepared, objective, place, packing, plan, per_segment = joined
    group = batch.segments.group
    if group is not None and options.static:
        view = voted(packing, batch, prepared.wide, group)
    else:
        view = packing.view(batch, prepared.wide, per_segment)
    spread = packing if options.sequence_parallel else None
    slices = place.slices(spread, batch.targets.device)
    transform = _of_tokens(transform, batch, packing, prepared.wide)
    bind = binder(prepared, objective, batch, packing, view, place.vocabulary, options)
    elsewhere = objective.scope == "elsewhere"
    if group is not None and not elsewhere:  # its collectives may not wait for a rank's own tokens
        bind()
    final = options.upstream is not None or elsewhere  # coefficients hold the upstream gradient
    direct = final and not prepared.problem.rescaled
    work = Work(
        plan=plan,
        batch=view,
        bind=bind,
        slices=slices,
        vocabulary=place.vocabulary,
        needs=prepared.needs,
        sums=Into(
            prepared.wants, options.accumulate_dtype, options.main_grad, direct, plan.once
        ),
        at_once=plan.rows and plan.schedule == "one_pass" and prepared.slopes and not (
            place.group or group
        ),
        tolerance=_tolerance(plan, transform, place.vocabulary, options),
        unscored=packing.order.unscored,
        inplace=prepared.problem.inplace,
    )
    teachers, index = teachers_of(objective), packing.index
    dense = tuple(
        open_teacher(teacher, view, index, transform, place.vocabulary, prepared, slices)
        for teacher in teachers
        if teacher.source(view) != "topk"
    )
    return Call(
        objective=objective,
        prepared=prepared,
        packing=packing,
        tokens=Tokens(packing.targets, transform, prepared.needs),
        teachers=dense,
        beside=open_beside(teachers, view, index, transform, prepared, slices),
        work=work,
    )


def _tolerance(
    plan: Plan, transform: Transform, vocabulary: int, options: Options
) -> Tolerance | None:
    """None where leaving rows out would save no product: the products of a frozen head are made
    before any coefficient is known."""
    if not options.gradient_tolerance:
        return None
    saves = plan.skip_rows and plan.pull not in ("unit", "never")
    return Tolerance(options.gradient_tolerance if saves else 0.0, transform, vocabulary)


def _of_tokens(
    transform: Transform, batch: Batch, packing: Packing, wide: torch.dtype
) -> Transform:
    """The head with the temperatures of the packed tokens, where each token has one."""
    temperature = transform.temperature
    if not isinstance(temperature, Tensor):
        return transform
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
