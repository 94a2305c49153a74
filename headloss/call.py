"""From arguments to a validated, packed, planned call; nothing is computed on bad input.

N positions, T of them scored, H hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import kernels
from .batch import Batch, Packed, PackedBatch, pack
from .divergence import DenseDivergence, Divergence, TopkDivergence
from .head import Head, check_transform
from .kernels.transform import Transform
from .logits import GivenLogits, LinearLogits
from .losses.distillation import Teacher
from .losses.term import Objective, Reads, Term
from .objective import Bound, bind, reads
from .options import Options
from .parallel import Alone
from .plan import Problem, make_plan
from .products import sum_dtype
from .reduction import Totals
from .schedules import Call
from .shards import (
    Place,
    given_facts,
    is_dtensor,
    join,
    linear_facts,
    local_head,
    over_segments,
)
from .stats import STATISTICS

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

    def prepare() -> tuple[Call, Objective]:
        checked, place = join(
            head.vocab_group,
            lambda: head.vocabulary,
            lambda: _check_linear(hidden, head, batch, objective, options, on_meta),
            lambda checked: linear_facts(hidden, head, batch, checked[0], options),
            head.vocab_size,
            options,
        )
        found, compute_dtype = checked
        if options.sequence_parallel:
            place.check_tokens(batch)
        problem = _linear_problem(hidden, head, compute_dtype, place)
        t = Transform(scale=head.logit_scale, softcap=head.softcap, temperature=head.temperature)
        dtype, device = compute_dtype or hidden.dtype, hidden.device
        call = _prepared(found, batch, options, problem, t, dtype, device, place)
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

    def check() -> Objective:
        found = _checked(objective, batch, options)
        _check_shape("logits", logits, batch)
        check_transform(transform.temperature, transform.softcap, transform.scale)
        if options.sequence_parallel:
            raise ValueError("sequence_parallel: got logits, want hidden states before a head")
        if options.schedule == "frozen":
            raise ValueError('schedule: got "frozen", but the logits are given')
        return found

    def prepare() -> tuple[Call, Objective]:
        found, place = join(
            vocab_group,
            lambda: logits.shape[-1],
            check,
            lambda found: given_facts(logits, transform, batch, found, options, inplace),
            None,
            options,
        )
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
        )
        dtype, device = logits.dtype, logits.device
        return _prepared(found, batch, options, problem, transform, dtype, device, place), found

    return _bound(*over_segments(batch, options, prepare), batch, logits.dtype, scaled=False)


def _linear_problem(
    hidden: Tensor, head: Head, compute_dtype: torch.dtype | None, place: Place
) -> Problem:
    weights = [head.weight, *(lora.b for lora in head.lora)]
    if head.bias is not None:
        weights.append(head.bias)
    enabled = torch.is_grad_enabled()
    own = enabled and any(w.requires_grad for w in weights)
    return Problem(
        tokens=0,
        width=hidden.shape[-1],
        vocabulary=place.widest,
        scope="token",
        lengths=None,
        hidden_gradient=enabled
        and (hidden.requires_grad or any(lora.a.requires_grad for lora in head.lora)),
        weight_gradient=own if place.weight_gradient is None else place.weight_gradient,
        element_size=(compute_dtype or hidden.dtype).itemsize,
        weight_size=head.weight.dtype.itemsize,
        on_gpu=hidden.is_cuda,
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
) -> Call:
    """Pack, trace and plan; without a collective over the segments' group."""
    vocabulary, wide = place.vocabulary, sum_dtype(dtype)
    backend = kernels.choose(options.backend, device)
    temperature = transform.temperature
    if isinstance(temperature, Tensor) and temperature.dim():
        batch = _with_temperature(batch, temperature)
    teachers = _teachers(objective)
    packed = pack(
        batch,
        vocabulary,
        wide,
        options.static,
        objective.segments_per_unit,
        id_fields=("teacher_topk_ids",) if teachers and "teacher_topk_ids" in batch.fields else (),
    )
    asked = reads(objective, packed.batch, wide, observe=options.metrics)
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
        logp_only=all(r.gradients <= {"logp"} for r in asked.values()),
        row_bytes=wide.itemsize * (1 + len(teachers)),
    )
    like = torch.zeros((), dtype=wide, device=packed.batch.targets.device)
    acts = kernels.load(backend)
    slices = place.slices(packed if options.sequence_parallel else None, device)
    return Call(
        packed=packed,
        bound=Bound((), vocabulary),
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
    )


def _bound(
    call: Call, objective: Objective, batch: Batch, dtype: torch.dtype, scaled: bool
) -> Call:
    """Bind the objective to its totals."""
    totals = batch.totals if batch.totals is not None else Totals.of(batch)
    bound = bind(objective, call.packed.batch, totals, call.vocabulary, sum_dtype(dtype))
    return replace(call, bound=bound.scaled() if scaled else bound)


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


def _teachers(objective: Objective) -> list[Teacher]:
    found: dict[Teacher, None] = {}
    for _, term in objective.parts:
        if term.teacher is not None:
            found[term.teacher] = None
    return list(found)


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
    student = replace(transform, temperature=teacher.temperature)
    if form == "topk":
        stored = _wide("teacher_topk_ids", batch, None, "one outcome or more")
        _wide(
            "teacher_topk_logps", batch, stored.shape[-1], "a log-prob for each of teacher_topk_ids"
        )
        return TopkDivergence(teacher, batch, student, acts, slices, like)
    if form == "logits":
        given = _wide("teacher_logits", batch, size, "the student's vocabulary")
        source = GivenLogits(given, batch.index)
        other = Transform(temperature=teacher.temperature)
    else:
        assert teacher.head is not None
        head = local_head(teacher.head)
        width = head.weight.shape[1]
        states = _wide("teacher_hidden", batch, width, "the teacher head's width")
        if head.vocab_group is None and head.vocabulary != vocabulary:
            raise ValueError(
                f"teacher_head: got a vocabulary of {head.vocabulary}, want the student's "
                f"{vocabulary} (set vocab_size on both heads to leave padded rows out)"
            )
        with torch.no_grad():
            rows = states if batch.index is None else states[batch.index]
            factors = head.factors(rows)
        # A whole head beside a student's slice: its rows of that slice.
        first = slices.first if head.vocab_group is None else 0
        own = slice(first, first + size)
        bias = None if head.bias is None else head.bias[own]
        source = LinearLogits([f for f, _ in factors], [w[own] for _, w in factors], bias, size)
        other = Transform(
            scale=head.logit_scale, softcap=head.softcap, temperature=teacher.temperature
        )
    return DenseDivergence(teacher, source, student, other, len(packed), acts, slices, like)


# ---------------------------------------------------------------------- checks


def _check_linear(
    hidden: Tensor,
    head: Head,
    batch: Batch,
    objective: Term | Objective,
    options: Options,
    on_meta: bool,
) -> tuple[Objective, torch.dtype | None]:
    """The objective, and what autocast computes in."""
    found = _checked(objective, batch, options)
    grouped = head.vocab_group is not None
    if options.sequence_parallel and not grouped:
        raise ValueError("sequence_parallel: needs a head with a vocab_group")
    if options.sequence_parallel and options.static:
        raise ValueError("static: got True with sequence_parallel, whose row counts are read")
    _check_shape("hidden", hidden, batch, on_meta, spread=options.sequence_parallel)
    compute_dtype = _autocast_dtype(hidden)
    head.validate(hidden, token_shape=batch.targets.shape, compute_dtype=compute_dtype)
    _check_main_grad(head.weight, options)
    for teacher in _teachers(found) if grouped else ():
        other = teacher.head and local_head(teacher.head)
        if other and other.vocab_group is not None:
            got, want = ((h.weight.shape[0], h.vocab_size) for h in (other, head))
            if got != want or other.vocab_group is not head.vocab_group:
                raise ValueError(
                    f"teacher_head: got (rows, vocab_size) {got}, want the student's {want} and "
                    "its vocab_group, or the teacher's whole head"
                )
    if grouped and any(lora.dropout for lora in head.lora):
        raise ValueError(
            "lora.dropout: got > 0 with a vocab_group, where ranks would differ; want 0"
        )
    return found, compute_dtype


def _checked(objective: Term | Objective, batch: Batch, options: Options) -> Objective:
    objective = Objective.of(objective)
    if not objective.parts:
        raise ValueError("objective: got no terms, want at least one")
    if not isinstance(batch, Batch):
        raise TypeError(f"batch: got {type(batch).__name__}, want headloss.Batch")
    if not isinstance(options, Options):
        raise TypeError(f"options: got {type(options).__name__}, want headloss.Options")
    if batch.segments.count % objective.segments_per_unit:
        raise ValueError(
            f"segments: got {batch.segments.count}, want a multiple of "
            f"{objective.segments_per_unit} for {objective!r}"
        )
    if options.backend == "triton" and _teachers(objective):
        raise ValueError('backend: got "triton", which does not serve distillation yet')
    return objective


def _check_shape(
    name: str, value: Tensor, batch: Batch, on_meta: bool = False, spread: bool = False
) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = f"a {value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: got {got}, want a floating tensor")
    if is_dtensor(value):
        raise TypeError(f"{name}: got a DTensor, want this rank's own tensor: {name}.to_local()")
    want = tuple(batch.targets.shape)
    if value.dim() < 2 or (tuple(value.shape[:-1]) != want and not spread):
        raise ValueError(
            f"{name}: got shape {tuple(value.shape)}, want the targets' {want} and one more "
            "dimension"
        )
    if value.device != batch.targets.device and not (on_meta and value.is_meta):
        raise ValueError(
            f"batch: got targets on {batch.targets.device}, want {name}'s device {value.device}"
        )


def _wide(name: str, batch: PackedBatch, want: int | None, what: str) -> Tensor:
    """A [N, want] field of the batch."""
    value = batch.wide.get(name)
    if value is None or value.dim() != 2 or want not in (None, value.shape[-1]):
        got = None if value is None else value.shape[-1]
        raise ValueError(f"{name}: got a last dimension of {got}, want {what}, {want}")
    return value


def _check_main_grad(weight: Tensor, options: Options) -> None:
    grad = options.main_grad
    if grad is None:
        return
    if grad.shape != weight.shape or grad.dtype != torch.float32 or grad.device != weight.device:
        raise ValueError(
            f"main_grad: got {grad.dtype} {tuple(grad.shape)} on {grad.device}, want torch.float32 "
            f"{tuple(weight.shape)} on {weight.device}"
        )


def _autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    device = hidden.device.type
    if device == "meta" or hidden.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
