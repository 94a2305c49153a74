"""From arguments to a validated, packed, planned call; nothing is computed on bad input.

N positions, T of them scored, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import kernels, taped
from .across import over_segments
from .agreement import Facts
from .batch import Batch
from .checks import (
    check_dead_rows,
    check_gradient,
    check_linear,
    check_shape,
    check_topk_ids,
    checked_objective,
    teachers_of,
    warn_of_misspelt_fields,
)
from .head import Head, check_transform
from .kernels.transform import Transform
from .logits import Wants
from .losses.term import Objective, Reads, Term
from .objective import Bound, bind, check_weights, is_known, reads
from .options import Options
from .packing import Packed, Packing, survey
from .plan import Problem, make_plan
from .products import sum_dtype
from .reduction import Totals
from .schedules import Call
from .shards import Place, given_facts, has_unit_stride, join, linear_facts
from .stats import STATISTICS
from .taped import Taped
from .teachers import divergence_of, teacher_tiles

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A checked call: all of it that waits for no value of the device and for no other rank.

    Attributes:
        needs: statistics.
        problem: as far as it is known.
        dtype: that products run in.
    """

    objective: Objective
    packing: Packing
    needs: frozenset[str]
    options: Options
    problem: Problem
    transform: Transform
    backend: str
    dtype: torch.dtype
    device: torch.device
    wants: Wants
    compute_dtype: torch.dtype | None = None


def linear_call(
    hidden: Tensor,
    head: Head,
    batch: Batch,
    objective: Term | Objective,
    options: Options,
    on_meta: bool = False,  # hidden states may have no values
) -> Call:
    """The call that `head_loss` makes of its arguments."""

    def check() -> Ready:
        found, compute_dtype = check_linear(hidden, head, batch, objective, options, on_meta)
        dtype = compute_dtype or hidden.dtype
        backend = kernels.choose(options.backend, hidden.device, dtype)
        wants = _wants(hidden, head)
        t = Transform(scale=head.logit_scale, softcap=head.softcap, temperature=head.temperature)
        problem = _linear_problem(hidden, head, dtype, backend, wants, options)
        ready = _ready(found, batch, options, problem, t, backend, dtype, wants)
        return replace(ready, compute_dtype=compute_dtype)

    def describe(ready: Ready) -> Facts:
        facts = linear_facts(hidden, head, batch, ready.objective, options)
        return facts._replace(read=ready.packing.known.facts)

    def prepare() -> tuple[Call, Objective]:
        ready, place, read = join(
            head.vocab_group,
            lambda: (head.vocabulary, hidden.shape[:-1].numel()),
            check,
            describe,
            head.vocab_size,
            options,
        )
        ready.packing.known.read = read
        if options.sequence_parallel:
            place.check_tokens(batch)
        return _prepared(ready, place), ready.objective

    return over_segments(batch, options, prepare)


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

    def check() -> Ready:
        found = checked_objective(objective, batch, options)
        check_shape("logits", logits, batch)
        check_transform(transform.temperature, transform.softcap, transform.scale)
        if options.main_grad is not None:
            raise ValueError("main_grad: got a tensor, but given logits have no weight")
        if options.sequence_parallel:
            raise ValueError("sequence_parallel: got logits, want hidden states before a head")
        if options.schedule == "frozen":
            raise ValueError('schedule: got "frozen", but the logits are given')
        backend = kernels.choose(options.backend, logits.device, logits.dtype)
        wants = Wants(logits=logits.requires_grad and torch.is_grad_enabled())
        problem = Problem(
            hidden_gradient=wants.logits,
            weight_gradient=False,
            element_size=logits.element_size(),
            on_gpu=logits.is_cuda,
            given=True,
            # In float16 it is written in the backward pass, where the upstream gradient is known.
            inplace=inplace and logits.dtype != torch.float16,
            # A kernel serves the logits where they lie: with unit stride along the vocabulary.
            rows=backend == "triton" and has_unit_stride(logits) and not teachers_of(found),
        )
        return _ready(found, batch, options, problem, transform, backend, logits.dtype, wants)

    def describe(ready: Ready) -> Facts:
        facts = given_facts(logits, transform, batch, ready.objective, options, inplace)
        return facts._replace(read=ready.packing.known.facts)

    def prepare() -> tuple[Call, Objective]:
        ready, place, read = join(
            vocab_group, lambda: (logits.shape[-1], 0), check, describe, None, options
        )
        ready.packing.known.read = read
        return _prepared(ready, place), ready.objective

    return over_segments(batch, options, prepare)


def _wants(hidden: Tensor, head: Head) -> Wants:
    enabled = torch.is_grad_enabled()
    into, bias = enabled and hidden.requires_grad, head.bias
    return Wants(
        features=(into, *(into or (enabled and lora.a.requires_grad) for lora in head.lora)),
        weights=tuple(
            enabled and w.requires_grad for w in (head.weight, *(x.b for x in head.lora))
        ),
        bias=enabled and bias is not None and bias.requires_grad,
    )


def _linear_problem(
    hidden: Tensor, head: Head, dtype: torch.dtype, backend: str, wants: Wants, options: Options
) -> Problem:
    return Problem(
        width=hidden.shape[-1],
        hidden_gradient=any(wants.features),
        weight_gradient=wants.any_weight,
        element_size=dtype.itemsize,
        weight_size=head.weight.dtype.itemsize,
        rescaled=dtype == torch.float16,
        on_gpu=hidden.is_cuda,
        multiprocessors=kernels.multiprocessors(hidden.device),
        terms=head.bias is None
        and not head.lora
        and options.logits_dtype is None
        and kernels.can_hold_terms(backend, dtype, head.weight),
    )


def _ready(
    objective: Objective,
    batch: Batch,
    options: Options,
    problem: Problem,
    transform: Transform,
    backend: str,
    dtype: torch.dtype,
    wants: Wants,
) -> Ready:
    """Survey the batch, trace the objective's terms, and say what follows for the plan."""
    wide, teachers = sum_dtype(dtype), teachers_of(objective)
    ids = tuple({"teacher_topk_ids"} & batch.fields.keys()) if teachers else ()
    if ids:
        check_topk_ids(batch)
    heated, temperature = _with_temperature(batch, transform), transform.temperature
    known = survey(batch, options.static, objective.segments_per_unit, ids, temperature)
    packing = Packing(heated, wide, known)
    asked = reads(objective, packing.draft, wide, observe=options.metrics)
    check_weights(objective, packing.draft, batch.totals)
    if options.static:
        check_dead_rows(objective, packing.draft, wide)
    warn_of_misspelt_fields(batch, objective, asked)
    if wants.any:
        check_gradient(objective, asked)
    mean_gradient = any("mean_logit" in r.gradients for r in asked.values())
    needs_logits = bool(teachers) or (mean_gradient and transform.softcap is not None)
    terms = problem.terms and not needs_logits
    problem = replace(
        problem,
        scope=objective.scope,
        segments_per_unit=objective.segments_per_unit,
        grouped=batch.segments.group is not None,
        spread=options.sequence_parallel and not options.static,
        gathered=options.sequence_parallel and options.static,
        logp_only=all(r.gradients <= {"logp"} for r in asked.values()),
        terms=terms,
        row_bytes=2 if terms else wide.itemsize * (1 + teacher_tiles(teachers, packing.draft)),
    )
    return Ready(
        objective=objective,
        packing=packing,
        needs=_needs(asked, options),
        options=options,
        problem=problem,
        transform=transform,
        backend=backend,
        dtype=dtype,
        device=batch.targets.device,
        wants=wants,
    )


def _prepared(ready: Ready, place: Place) -> Call:
    """Pack and plan; without a collective over the segments' group."""
    objective, options, vocabulary = ready.objective, ready.options, place.vocabulary
    packed = ready.packing.packed(vocabulary)
    transform = _packed_transform(ready.transform, packed, ready.packing.dtype)
    problem = replace(
        ready.problem,
        tokens=len(packed),
        vocabulary=place.widest,
        lengths=packed.lengths,
        sharded=place.group is not None,
        weight_gradient=ready.problem.weight_gradient or bool(place.weight_gradient),
    )
    acts = kernels.load(ready.backend)
    slices = place.slices(packed if options.sequence_parallel else None, ready.device)
    return Call(
        packed=packed,
        bind=_binder(ready, vocabulary),
        plan=make_plan(problem, options, ready.backend),
        options=options,
        kernels=acts,
        transform=transform,
        needs=ready.needs,
        vocabulary=vocabulary,
        wants=ready.wants,
        slices=slices,
        divergences=tuple(
            divergence_of(teacher, packed, transform, vocabulary, acts, ready.packing.dtype, slices)
            for teacher in teachers_of(objective)
        ),
        inplace=problem.inplace,
        compute_dtype=ready.compute_dtype,
        gradient_dtype=ready.dtype if ready.dtype.itemsize == 2 and not problem.given else None,
        known_slopes=lambda: (
            not problem.grouped
            and not problem.sharded
            and is_known(objective, packed.batch, ready.packing.dtype)
        ),
    )


def _packed_transform(transform: Transform, packed: Packed, wide: torch.dtype) -> Transform:
    """With the temperatures of packed tokens, where they have their own."""
    rows: Any = packed.batch.get(_TEMPERATURE, transform.temperature)
    packed.batch.fields.pop(_TEMPERATURE, None)
    if not isinstance(rows, Tensor):
        return transform
    if packed.batch.live is not None:  # a dead row's 0 would divide
        rows = torch.where(packed.batch.live, rows, 1)
    return replace(transform, temperature=rows.to(wide).expand(len(packed)))


def _binder(ready: Ready, vocabulary: int) -> Callable[[Packed], Bound | Taped]:
    """Binds the objective to its totals: once, while the first product runs."""
    made: list[Bound | Taped] = []
    objective, dtype, rescaled = ready.objective, ready.packing.dtype, ready.problem.rescaled

    def bind_once(packed: Packed) -> Bound | Taped:
        if made:
            return made[0]
        batch = ready.packing.batch
        totals = batch.totals or _counted(batch, packed) or Totals.of(batch)

        def by_autograd() -> Bound:
            found = bind(objective, packed.batch, totals, vocabulary, dtype)
            return found.scaled() if rescaled else found

        found = None
        if taped.serves(ready.backend, dtype, ready.device):
            found = taped.taped(
                objective,
                batch,
                packed,
                totals,
                vocabulary,
                ready.needs,
                observe=ready.options.metrics,
                by_autograd=by_autograd,
                rescaled=rescaled,
            )
        made.append(found or by_autograd())
        return made[0]

    return bind_once


def _counted(batch: Batch, packed: Packed) -> Totals | None:
    """The totals of the batch where packing has read them, else None."""
    masks = any(isinstance(f, Tensor) and f.dtype == torch.bool for f in batch.fields.values())
    if packed.lengths is None or masks or batch.segments.group is not None:
        return None
    return Totals(sum(packed.lengths), packed.segments)


_TEMPERATURE = "_temperature"


def _with_temperature(batch: Batch, transform: Transform) -> Batch:
    """Temperatures of tokens travel through packing as one more field."""
    temperature = transform.temperature
    if not isinstance(temperature, Tensor) or not temperature.dim():
        return batch
    if temperature.shape != batch.targets.shape:
        raise ValueError(
            f"temperature: got shape {tuple(temperature.shape)}, want a number or one value per "
            f"token, {tuple(batch.targets.shape)}"
        )
    found = copy(batch)
    found.fields = {**batch.fields, _TEMPERATURE: temperature}  # a name that no user can give
    return found


def _needs(asked: dict[str, Reads], options: Options) -> frozenset[str]:
    needs = {"logp"} | ({"entropy"} if options.metrics else set())
    for term in asked.values():
        needs |= term.statistics & set(STATISTICS)
    return frozenset(needs)
