"""From arguments to a validated, packed, planned call; nothing is computed on bad input.

N positions, T of them scored, H hidden width, V vocabulary.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .batch import Batch, Packed, PackedBatch, pack
from .divergence import DenseDivergence, Divergence, TopkDivergence
from .head import Head, check_head, check_transform
from .kernels.transform import Transform
from .logits import GivenLogits, LinearLogits
from .losses.distillation import Teacher
from .losses.term import Objective, Reads, Term
from .objective import Bound, bind, check_weights, reads
from .options import Options
from .plan import Problem, make_plan
from .products import sum_dtype
from .reduction import Totals
from .schedules import WHOLE, Call
from .stats import STATISTICS


def linear_call(
    hidden: Tensor,
    head: Head,
    batch: Batch,
    objective: Term | Objective,
    options: Options,
    on_meta: bool = False,  # hidden states may have no values
) -> Call:
    """The call that `head_loss` makes of its arguments."""
    check_head(head)
    if head.vocab_group is not None or head.vocab_mesh_dim is not None:
        raise ValueError("vocab_group: is not supported yet, want None")
    objective = _checked(objective, batch, options)
    _check_shape("hidden", hidden, batch, on_meta)
    compute_dtype = _autocast_dtype(hidden)
    head.validate(hidden, compute_dtype=compute_dtype)
    dtype = compute_dtype or hidden.dtype
    weights = [head.weight, *(lora.b for lora in head.lora)]
    if head.bias is not None:
        weights.append(head.bias)
    enabled = torch.is_grad_enabled()
    problem = Problem(
        tokens=0,
        width=hidden.shape[-1],
        vocabulary=head.vocabulary,
        scope="token",
        lengths=None,
        hidden_gradient=enabled
        and (hidden.requires_grad or any(lora.a.requires_grad for lora in head.lora)),
        weight_gradient=enabled and any(w.requires_grad for w in weights),
        element_size=dtype.itemsize,
        weight_size=head.weight.dtype.itemsize,
        on_gpu=hidden.is_cuda,
        terms=head.bias is None
        and not head.lora
        and options.logits_dtype is None
        and kernels.can_hold_terms(
            kernels.choose(options.backend, hidden.device, dtype), dtype, head.weight
        ),
    )
    _check_main_grad(head.weight, options)
    transform = Transform(
        scale=head.logit_scale, softcap=head.softcap, temperature=head.temperature
    )
    call = _call(objective, batch, options, problem, transform, dtype, hidden.device)
    return replace(call, compute_dtype=compute_dtype)


def given_call(
    logits: Tensor,
    batch: Batch,
    objective: Term | Objective,
    transform: Transform,
    vocab_group,
    inplace: bool,
    options: Options,
) -> Call:
    """The call that `logits_loss` makes of its arguments."""
    objective = _checked(objective, batch, options)
    _check_shape("logits", logits, batch)
    check_transform(transform.temperature, transform.softcap, transform.scale)
    if vocab_group is not None:
        raise ValueError("vocab_group: is not supported yet, want None")
    if options.schedule == "frozen":
        raise ValueError('schedule: got "frozen", but the logits are given')
    if inplace and logits.dtype == torch.float16:
        inplace = False  # written in the backward pass, where the upstream gradient is known
    wanted = logits.requires_grad and torch.is_grad_enabled()
    problem = Problem(
        tokens=0,
        width=0,
        vocabulary=logits.shape[-1],
        scope="token",
        lengths=None,
        hidden_gradient=wanted,
        weight_gradient=False,
        element_size=logits.element_size(),
        on_gpu=logits.is_cuda,
        given=True,
        inplace=inplace,
    )
    return _call(objective, batch, options, problem, transform, logits.dtype, logits.device)


def _call(
    objective: Objective,
    batch: Batch,
    options: Options,
    problem: Problem,
    transform: Transform,
    dtype: torch.dtype,
    device: torch.device,
) -> Call:
    """Pack, bind and plan."""
    vocabulary, wide = problem.vocabulary, sum_dtype(dtype)
    backend = kernels.choose(options.backend, device, dtype)
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
    check_weights(objective, packed.batch, batch.totals)

    def bound() -> Bound:
        totals = batch.totals if batch.totals is not None else Totals.of(batch)
        found = bind(objective, packed.batch, totals, vocabulary, wide)
        return found.scaled() if dtype == torch.float16 and not problem.given else found

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
    mean_gradient = any("mean_logit" in r.gradients for r in asked.values())
    if teachers or (mean_gradient and transform.softcap is not None):
        problem = replace(problem, terms=False)  # these need the logits
    if problem.terms:
        problem = replace(problem, row_bytes=2)
    like = torch.zeros((), dtype=wide, device=packed.batch.targets.device)
    acts = kernels.load(backend)
    return Call(
        packed=packed,
        bind=functools.cache(bound),
        plan=make_plan(problem, options, backend),
        options=options,
        kernels=acts[0],
        transform=transform,
        needs=_needs(asked, options),
        vocabulary=vocabulary,
        divergences=tuple(
            _divergence(teacher, packed, transform, vocabulary, acts, like) for teacher in teachers
        ),
        inplace=problem.inplace,
        gradient_dtype=dtype if dtype.itemsize == 2 and not problem.given else None,
    )


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
) -> Divergence:
    batch = packed.batch
    form = teacher.source(batch)
    student = replace(transform, temperature=teacher.temperature)
    if form == "topk":
        stored = _wide("teacher_topk_ids", batch, None, "one outcome or more")
        _wide(
            "teacher_topk_logps", batch, stored.shape[-1], "a log-prob for each of teacher_topk_ids"
        )
        return TopkDivergence(teacher, batch, student, acts, WHOLE, like)
    if form == "logits":
        given = _wide("teacher_logits", batch, vocabulary, "the student's vocabulary")
        source = GivenLogits(given, batch.index)
        other = Transform(temperature=teacher.temperature)
    else:
        assert teacher.head is not None
        head = teacher.head
        width = head.weight.shape[1]
        states = _wide("teacher_hidden", batch, width, "the teacher head's width")
        if head.vocabulary != vocabulary:
            raise ValueError(
                f"teacher_head: got a vocabulary of {head.vocabulary}, want the student's "
                f"{vocabulary} (set vocab_size on both heads to leave padded rows out)"
            )
        with torch.no_grad():
            rows = states if batch.index is None else states[batch.index]
            factors = head.factors(rows)
        source = LinearLogits(
            [f for f, _ in factors], [w for _, w in factors], head.bias, vocabulary
        )
        other = Transform(
            scale=head.logit_scale, softcap=head.softcap, temperature=teacher.temperature
        )
    return DenseDivergence(teacher, source, student, other, len(packed), acts, WHOLE, like)


# ---------------------------------------------------------------------- checks


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
    if options.sequence_parallel:
        raise ValueError("sequence_parallel: needs a head with a vocab_group")
    if options.backend == "triton" and _teachers(objective):
        raise ValueError('backend: got "triton", which does not serve distillation yet')
    return objective


def _check_shape(name: str, value: Tensor, batch: Batch, on_meta: bool = False) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = f"a {value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: got {got}, want a floating tensor")
    want = tuple(batch.targets.shape)
    if value.dim() < 2 or tuple(value.shape[:-1]) != want:
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
