"""From arguments to a validated, packed, planned call; nothing is computed on bad input.

N positions, T of them scored, H hidden width, V vocabulary.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import kernels
from .across import over_segments
from .agreement import Facts
from .batch import Batch
from .checks import (
    check_linear,
    check_shape,
    checked_objective,
    teachers_of,
    wide_field,
)
from .divergence import DenseDivergence, Divergence, TopkDivergence
from .head import Head, check_transform
from .kernels.transform import Transform
from .logits import GivenLogits, LinearLogits
from .losses.distillation import Teacher
from .losses.term import Objective, Reads, Term
from .objective import Bound, bind, check_weights, is_known, reads
from .options import Options
from .packing import Packed, pack, survey
from .parallel import Alone
from .plan import Problem, make_plan
from .products import sum_dtype
from .reduction import Totals
from .schedules import Call
from .shards import (
    Place,
    given_facts,
    has_unit_stride,
    join,
    linear_facts,
    local_head,
)
from .stats import STATISTICS
from .survey import Survey

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_call(
    hidden: Tensor,
    head: Head,
    batch: Batch,
    objective: Term | Objective,
    options: Options,
    on_meta: bool = False,  # hidden states may have no values
) -> Call:
    """The call that `head_loss` makes of its arguments."""

    def check() -> tuple[Objective, torch.dtype | None, Survey]:
        found, dtype = check_linear(hidden, head, batch, objective, options, on_meta)
        return found, dtype, _survey(found, batch, options)

    def describe(checked: tuple[Objective, torch.dtype | None, Survey]) -> Facts:
        facts = linear_facts(hidden, head, batch, checked[0], options)
        return facts._replace(read=checked[2].facts)

    def prepare() -> tuple[Call, Objective]:
        checked, place, read = join(
            head.vocab_group,
            lambda: (head.vocabulary, hidden.shape[:-1].numel()),
            check,
            describe,
            head.vocab_size,
            options,
        )
        found, compute_dtype, known = checked
        known.read = read
        if options.sequence_parallel:
            place.check_tokens(batch)
        problem = _linear_problem(hidden, head, compute_dtype, place, options)
        t = Transform(scale=head.logit_scale, softcap=head.softcap, temperature=head.temperature)
        dtype, device = compute_dtype or hidden.dtype, hidden.device
        call = _prepared(found, batch, options, problem, t, dtype, device, place, known)
        return replace(call, compute_dtype=compute_dtype), found

    call, found = over_segments(batch, options, prepare)
    dtype = call.compute_dtype or hidden.dtype
    return _bound(call, found, batch, dtype, scaled=dtype == torch.float16)


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

    def check() -> tuple[Objective, Survey]:
        found = checked_objective(objective, batch, options)
        check_shape("logits", logits, batch)
        check_transform(transform.temperature, transform.softcap, transform.scale)
        if options.sequence_parallel:
            raise ValueError("sequence_parallel: got logits, want hidden states before a head")
        if options.schedule == "frozen":
            raise ValueError('schedule: got "frozen", but the logits are given')
        return found, _survey(found, batch, options)

    def describe(checked: tuple[Objective, Survey]) -> Facts:
        facts = given_facts(logits, transform, batch, checked[0], options, inplace)
        return facts._replace(read=checked[1].facts)

    def prepare() -> tuple[Call, Objective]:
        checked, place, read = join(
            vocab_group, lambda: (logits.shape[-1], 0), check, describe, None, options
        )
        found, known = checked
        known.read = read
        # A gradient in float16 is written in the backward pass, where the upstream one is known.
        over = inplace and logits.dtype != torch.float16
        problem = Problem(
            tokens=0,
            width=0,
            vocabulary=place.widest,
            scope="token",
            lengths=None,
            hidden_gradient=logits.requires_grad and torch.is_grad_enabled(),
            weight_gradient=False,
            element_size=logits.element_size(),
            on_gpu=logits.is_cuda,
            given=True,
            inplace=over,
            rows=_in_rows(logits, found, options),
        )
        dtype, device = logits.dtype, logits.device
        call = _prepared(found, batch, options, problem, transform, dtype, device, place, known)
        return call, found

    return _bound(*over_segments(batch, options, prepare), batch, logits.dtype, scaled=False)


def _in_rows(logits: Tensor, objective: Objective, options: Options) -> bool:
    """Whether a kernel serves the logits where they lie: with unit stride along the vocabulary."""
    backend = kernels.choose(options.backend, logits.device, logits.dtype)
    return backend == "triton" and has_unit_stride(logits) and not teachers_of(objective)


def _survey(objective: Objective, batch: Batch, options: Options) -> Survey:
    ids = {"teacher_topk_ids"} & batch.fields.keys() if teachers_of(objective) else ()
    return survey(batch, options.static, objective.segments_per_unit, tuple(ids))


def _linear_problem(
    hidden: Tensor, head: Head, compute_dtype: torch.dtype | None, place: Place, options: Options
) -> Problem:
    weights = [head.weight, *(lora.b for lora in head.lora)]
    if head.bias is not None:
        weights.append(head.bias)
    enabled = torch.is_grad_enabled()
    own = enabled and any(w.requires_grad for w in weights)
    dtype = compute_dtype or hidden.dtype
    return Problem(
        tokens=0,
        width=hidden.shape[-1],
        vocabulary=place.widest,
        scope="token",
        lengths=None,
        hidden_gradient=enabled
        and (hidden.requires_grad or any(lora.a.requires_grad for lora in head.lora)),
        weight_gradient=own if place.weight_gradient is None else place.weight_gradient,
        element_size=dtype.itemsize,
        weight_size=head.weight.dtype.itemsize,
        rescaled=dtype == torch.float16,
        on_gpu=hidden.is_cuda,
        multiprocessors=kernels.multiprocessors(hidden.device),
        terms=head.bias is None
        and not head.lora
        and options.logits_dtype is None
        and kernels.can_hold_terms(
            kernels.choose(options.backend, hidden.device, dtype), dtype, head.weight
        ),
    )


def _prepared(
    objective: Objective,
    batch: Batch,
    options: Options,
    problem: Problem,
    transform: Transform,
    dtype: torch.dtype,
    device: torch.device,
    place: Place,
    known: Survey,
) -> Call:
    """Pack, trace and plan; without a collective over the segments' group."""
    vocabulary, wide = place.vocabulary, sum_dtype(dtype)
    backend = kernels.choose(options.backend, device, dtype)
    temperature = transform.temperature
    if isinstance(temperature, Tensor) and temperature.dim():
        batch = _with_temperature(batch, temperature)
    teachers = teachers_of(objective)
    packed = pack(
        batch,
        vocabulary,
        wide,
        options.static,
        objective.segments_per_unit,
        known=known,
    )
    asked = reads(objective, packed.batch, wide, observe=options.metrics)
    check_weights(objective, packed.batch, batch.totals)
    if isinstance(temperature, Tensor):
        rows: Any = packed.batch.fields.pop(_TEMPERATURE) if temperature.dim() else temperature
        if packed.batch.live is not None:  # a dead row's 0 would divide
            rows = torch.where(packed.batch.live, rows, 1)
        transform = replace(transform, temperature=rows.to(wide).expand(len(packed)))
    problem = replace(
        problem,
        tokens=len(packed),
        scope=objective.scope,
        lengths=packed.lengths,
        segments_per_unit=objective.segments_per_unit,
        grouped=batch.segments.group is not None,
        spread=options.sequence_parallel and not options.static,
        gathered=options.sequence_parallel and options.static,
        sharded=place.group is not None,
        logp_only=all(r.gradients <= {"logp"} for r in asked.values()),
        row_bytes=wide.itemsize * (1 + _teacher_tiles(teachers, packed)),
    )
    mean_gradient = any("mean_logit" in r.gradients for r in asked.values())
    if teachers or (mean_gradient and transform.softcap is not None):
        problem = replace(problem, terms=False)  # these need the logits
    if problem.terms:
        problem = replace(problem, row_bytes=2)
    like = torch.zeros((), dtype=wide, device=packed.batch.targets.device)
    acts = kernels.load(backend)
    slices = place.slices(packed if options.sequence_parallel else None, device)
    return Call(
        packed=packed,
        bind=lambda: Bound((), vocabulary),
        plan=make_plan(problem, options, backend),
        options=options,
        kernels=acts[0],
        transform=transform,
        needs=_needs(asked, options),
        vocabulary=vocabulary,
        slices=slices,
        divergences=tuple(
            _divergence(teacher, packed, transform, vocabulary, acts, like, slices)
            for teacher in teachers
        ),
        inplace=problem.inplace,
        gradient_dtype=dtype if dtype.itemsize == 2 and not problem.given else None,
    )


def _bound(
    call: Call, objective: Objective, batch: Batch, dtype: torch.dtype, scaled: bool
) -> Call:
    """Bind the objective to its totals: once, while the first product runs. Over segments that run
    across ranks it is done here, since collectives may not wait for a rank's own tokens."""

    @functools.cache
    def bound() -> Bound:
        totals = batch.totals or _counted(batch, call.packed) or Totals.of(batch)
        found = bind(objective, call.packed.batch, totals, call.vocabulary, sum_dtype(dtype))
        return found.scaled() if scaled else found

    if batch.segments.group is not None:
        bound()

    def known() -> bool:
        alone = batch.segments.group is None and type(call.slices) is Alone
        return alone and is_known(objective, call.packed.batch, sum_dtype(dtype))

    return replace(call, bind=bound, known_slopes=known)


def _counted(batch: Batch, packed: Packed) -> Totals | None:
    """The totals of the batch where packing has read them, else None."""
    masks = any(isinstance(f, Tensor) and f.dtype == torch.bool for f in batch.fields.values())
    if packed.lengths is None or masks or batch.segments.group is not None:
        return None
    return Totals(sum(packed.lengths), packed.segments)


_TEMPERATURE = "_temperature"


def _with_temperature(batch: Batch, temperature: Tensor) -> Batch:
    """A per-token temperature travels through packing as one more field."""
    if temperature.shape != batch.targets.shape:
        raise ValueError(
            f"temperature: got shape {tuple(temperature.shape)}, want a number or one value per "
            f"token, {tuple(batch.targets.shape)}"
        )
    fields = {**batch.fields, _TEMPERATURE: temperature}
    return Batch(batch.targets, batch.segments, totals=batch.totals, **fields)  # type: ignore[arg-type]


def _needs(asked: dict[str, Reads], options: Options) -> frozenset[str]:
    needs = {"logp"} | ({"entropy"} if options.metrics else set())
    for term in asked.values():
        needs |= term.statistics & set(STATISTICS)
    return frozenset(needs)


def _teacher_tiles(teachers: list[Teacher], packed: Packed) -> int:
    """Tiles beside the student's: logits of each dense teacher, and parts of the gradient of all
    divergences but the last."""
    dense = sum(teacher.source(packed.batch) != "topk" for teacher in teachers)
    return dense + (len(teachers) > 1)


def _divergence(
    teacher: Teacher,
    packed: Packed,
    transform: Transform,
    vocabulary: int,
    acts: tuple[ModuleType, ModuleType],
    like: Tensor,
    slices: Alone,
) -> Divergence:
    batch = packed.batch
    size = slices.size or vocabulary
    form = teacher.source(batch)
    student = transform
    if isinstance(transform.temperature, Tensor) or transform.temperature != teacher.temperature:
        student = replace(transform, temperature=teacher.temperature)
    if form == "topk":
        stored = wide_field("teacher_topk_ids", batch, None, "one outcome or more")
        wide_field(
            "teacher_topk_logps", batch, stored.shape[-1], "a log-prob for each of teacher_topk_ids"
        )
        return TopkDivergence(teacher, batch, student, acts, slices, like)
    if form == "logits":
        given = wide_field("teacher_logits", batch, size, "the student's vocabulary")
        source = GivenLogits(given, batch.index)
        other = Transform(temperature=teacher.temperature)
    else:
        assert teacher.head is not None
        head = local_head(teacher.head)
        width = head.weight.shape[1]
        states = wide_field("teacher_hidden", batch, width, "the teacher head's width")
        if head.vocab_group is None and head.vocabulary != vocabulary:
            raise ValueError(
                f"teacher_head: got a vocabulary of {head.vocabulary}, want the student's "
                f"{vocabulary} (set vocab_size on both heads to leave padded rows out)"
            )
        with torch.no_grad():
            rows = states if batch.index is None else states[batch.index]
            factors = head.factors(rows, slices.dropout)
        # A whole head beside a student's slice: its rows of that slice.
        first = slices.first if head.vocab_group is None else 0
        own = slice(first, first + size)
        bias = None if head.bias is None else head.bias[own]
        source = LinearLogits([f for f, _ in factors], [w[own] for _, w in factors], bias, size)
        other = Transform(
            scale=head.logit_scale, softcap=head.softcap, temperature=teacher.temperature
        )
    return DenseDivergence(
        teacher, source, student, other, transform, len(packed), acts, slices, like
    )
