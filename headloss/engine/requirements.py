"""A call's arguments checked and packed, and what follows from them on one rank (law 4b).

N positions, T of them scored, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..arguments import is_dtensor
from ..batch.batch import Batch
from ..batch.packing import Packing, packing_of
from ..head.products import sum_dtype
from ..kernels.transform import Transform
from ..logits.linear import NeedsGrad
from ..losses.term import Objective
from ..objective.reads import has_slopes, reads
from ..objective.weighted import check_weights
from ..options import Options
from ..statistics.softmax import BESIDE, CANDIDATES, COLLISION, PEAK, STATISTICS
from . import checks
from .checks import Arguments
from .plan_inputs import PlanInputs


@dataclass(frozen=True, kw_only=True, eq=False)
class Requirements:
    """What one rank knows of a call before the ranks of its groups agree on it."""

    batch: Batch  # by position
    options: Options
    loss_fn: Callable[..., Any] | None  # somebody else's, in place of the objective's
    objective: Objective
    needs: frozenset[str]  # statistics
    slopes: bool  # the objective's gradient can be known before the statistics
    inputs: PlanInputs  # without what the packed batch and the other ranks add
    backend: str
    compute_dtype: torch.dtype | None  # of products, under autocast; None: the tensors' own
    wide: torch.dtype  # of statistics
    needs_grad: NeedsGrad
    scored: Packing  # the scored tokens, and where in the batch they are
    transform: Transform  # of raw logits; its temperature is a number or [T]


def requirements_of(arguments: Arguments) -> Requirements:
    """What a call needs; ValueError or TypeError for an argument that is not what it must be."""
    a, batch, options, head = arguments, arguments.batch, arguments.options, arguments.head
    objective = Objective.of(a.terms)
    if a.verb == "plan":  # of hidden states and a head without values
        checks.check_eager(a.verb, getattr(batch, "targets", None))
    else:
        checks.check_eager(a.verb, a.values, head and head.weight)
    checks.check_objective(objective, batch, options)
    compute_dtype = checks.check_given(a) if head is None else checks.check_linear(a, objective)
    name, shape, device = "hidden" if head else "logits", a.values.shape, a.values.device
    if is_dtensor(a.values):
        raise TypeError(f"{name}: got a DTensor, want this rank's own tensor: {name}.to_local()")
    checks.check_positions(name, shape, device, batch, options.sequence_parallel)
    dtype = compute_dtype or a.values.dtype
    wide, backend = sum_dtype(dtype), kernels.choose(options.backend, device, dtype)
    if options.batch_invariant and head is not None and backend != "triton":
        raise ValueError(
            f"batch_invariant: got True for {dtype} on {device}, want a GPU with the triton "
            "backend and at most 32 bits: no other product keeps its order for another batch"
        )
    if objective.teachers:
        checks.check_topk(batch)
    kinds = batch.kinds(wide)
    check_weights(objective, kinds, batch.totals)
    sample = kinds, wide, batch.targets.device
    traced = reads(objective, *sample, options.metrics, cuts=True)
    if options.static:
        checks.check_dead_rows(objective, *sample)
    fields = {name for term in traced.values() for name in term.fields}
    fields |= {term.kept_field for _, term in objective.parts if term.kept_field is not None}
    checks.warn_of_misspelt_fields(batch, fields)
    needs = {"logp", "entropy"} if options.metrics else {"logp"}
    needs |= {s for r in traced.values() for s in r.statistics & {*STATISTICS, *BESIDE}}
    if PEAK in needs:
        needs.add("top1")  # finds it
    gradients, enabled = {g for r in traced.values() for g in r.gradients}, torch.is_grad_enabled()
    into, lora = enabled and a.values.requires_grad, head.lora if head else ()
    weights, bias = (head.weight, *(x.b for x in lora)) if head else (), head and head.bias
    needs_grad = NeedsGrad(
        features=(into, *(into or (enabled and x.a.requires_grad) for x in lora)),
        weights=tuple(enabled and w.requires_grad for w in weights),
        bias=enabled and bias is not None and bias.requires_grad,
    )
    if not gradients and (any(needs_grad.features) or needs_grad.any_weight):
        raise ValueError(
            f"objective: {objective!r} has no gradient with respect to any statistic, but hidden "
            "states or weights require one (is everything detached?); call it under torch.no_grad()"
        )
    slopes = has_slopes(objective, kinds) and not needs & BESIDE.keys()
    inputs = _inputs(a, objective, needs, gradients, fields, slopes, needs_grad, backend, dtype)
    scored, transform = _packed(a, objective, inputs, fields, wide)
    return Requirements(
        batch=batch,
        options=options,
        loss_fn=a.loss_fn,
        objective=objective,
        needs=frozenset(needs),
        slopes=slopes,
        inputs=inputs,
        backend=backend,
        compute_dtype=compute_dtype,
        wide=wide,
        needs_grad=needs_grad,
        scored=scored,
        transform=transform,
    )


def _inputs(
    a: Arguments,
    objective: Objective,
    needs: set[str],
    gradients: set[str],
    fields: set[str],
    slopes: bool,
    needs_grad: NeedsGrad,
    backend: str,
    dtype: torch.dtype,
) -> PlanInputs:
    """What the planner knows of the call already."""
    values, head, options, teachers = a.values, a.head, a.options, objective.teachers
    wide, tolerance = sum_dtype(dtype), options.gradient_tolerance > 0
    kinds = a.batch.kinds(wide)
    # These are measured of tiles of logits; candidates alone also of hidden states and weights.
    of_tiles = bool(teachers or needs & {"candidate_tail", COLLISION})
    of: dict[str, Any]
    if head is None:
        exp_tiles = False
        of = {
            "vocabulary": values.shape[-1],
            "given": True,
            # In float16 it is written in the backward pass, where the upstream gradient is known.
            "overwrites": a.inplace and dtype != torch.float16,
            # A kernel serves the logits where they lie: with unit stride along the vocabulary.
            "in_place": backend == "triton"
            and not of_tiles
            and "candidate_logps" not in needs
            and (values.stride(-1) == 1 or values.shape[-1] <= 1),
        }
    else:
        plain = not (head.lora or options.logits_dtype or of_tiles)
        plain &= head.softcap is None or "mean_logit" not in gradients
        exp_tiles = plain and kernels.can_write_exp(backend, dtype, head.weight)
        of = {
            "width": values.shape[-1],
            "vocabulary": head.vocabulary,
            "weight_size": head.weight.dtype.itemsize,
            "exp_tiles": exp_tiles,
            "rescaled": dtype == torch.float16,
            "multiprocessors": kernels.multiprocessors(values.device),
        }
    # Beside the student's tile: logits of each dense teacher, and parts of the gradient of all
    # that is measured beside the statistics but the last.
    dense = sum(teacher.source(kinds) != "topk" for teacher in teachers)
    tiles = 1 + dense + (len(teachers) + (CANDIDATES in gradients) > 1)
    # Columns that are measured one by one.
    listed = ["teacher_topk_ids"] * (len(teachers) - dense)
    listed += ["candidate_ids"] * bool(needs & {"candidate_logps", "candidate_tail"})
    # Who depends on statistics may clip, who reads a field may weigh by 0 or leave out.
    terms = [term for _, term in objective.parts]
    constant = slopes and not fields and not any(term.weight_fields for term in terms)
    return PlanInputs(
        **of,
        scope=objective.scope,
        segments_per_unit=objective.segments_per_unit,
        grouped=a.batch.segments.group is not None,
        sparse=tolerance or not constant,
        thorough=tolerance or any(term.kept_field for term in terms),
        logp_only=gradients <= ({"logp"} if "candidate_tail" in needs else {"logp", CANDIDATES}),
        hidden_gradient=any(needs_grad.features),
        weight_gradient=needs_grad.any_weight,
        element_size=dtype.itemsize,
        row_bytes=2 if exp_tiles else wide.itemsize * tiles,
        on_gpu=values.is_cuda,
        memory=kernels.memory(values.device),
        teachers=dense > 0,
        candidates=sum(kinds[field][1][-1] for field in listed),
    )


def _packed(
    a: Arguments, objective: Objective, inputs: PlanInputs, fields: set[str], wide: torch.dtype
) -> tuple[Packing, Transform]:
    """The scored tokens, and the transform with their temperatures, [T]. What is wrong with values
    is raised before the ranks of a vocabulary's group hear of each other, hence on all."""
    static, temperature = a.options.static, a.transform.temperature
    vocabulary = inputs.vocabulary if a.group is None else torch.inf
    scored = packing_of(a.batch, vocabulary, inputs.segments_per_unit if static else None)
    # A loss that lives elsewhere may read what it likes.
    if not (static or a.loss_fn or objective.scope == "external"):
        checks.check_masks(a.batch, fields, scored, wide)
    if not isinstance(temperature, Tensor):
        return scored, a.transform
    if temperature.shape not in ((), scored.shape):
        raise ValueError(
            f"temperature: got shape {tuple(temperature.shape)}, want a number or one value per "
            f"token, {tuple(scored.shape)}"
        )
    rows = scored.gather(temperature.expand(scored.shape))
    if scored.live is None:
        checks.check_temperatures(rows, scored.index)
    else:  # no division by the 0 of an unscored row
        rows = torch.where(scored.live, rows, 1)
    return scored, replace(a.transform, temperature=rows.to(wide))
