"""A call's arguments checked, and what follows from them before the batch is packed (law 4b).

N positions, T of them scored, H hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..arguments import check_device, check_own_places
from ..batch.batch import Batch
from ..head.head import check_transform
from ..head.products import sum_dtype
from ..kernels.transform import Transform
from ..logits.linear import NeedsGrad
from ..losses.term import Objective
from ..losses.trial import Reads
from ..objective.reads import has_slopes, reads
from ..objective.weighted import check_weights
from ..options import Options
from ..statistics.softmax import BESIDE, CANDIDATES, COLLISION, PEAK, STATISTICS
from .checks import (
    Arguments,
    check_dead_rows,
    check_eager,
    check_linear,
    check_objective,
    check_shape,
    check_topk,
    warn_of_misspelt_fields,
)
from .plan_inputs import PlanInputs


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a call needs, known before its batch is packed.

    Attributes:
        objective: its terms.
        needs: statistics.
        inputs: what the planner knows of the call, without what differs from batch to batch.
        wide: dtype of statistics.
        needs_grad: which tensors want a gradient.
        compute_dtype: of products, under autocast; None: the tensors' own.
        slopes: the objective's gradient can be known before the statistics.
        fields: of the batch, that a term reads.
    """

    objective: Objective
    needs: frozenset[str]
    inputs: PlanInputs
    backend: str
    wide: torch.dtype
    needs_grad: NeedsGrad
    compute_dtype: torch.dtype | None
    slopes: bool
    fields: set[str]


def of_hidden_states(arguments: Arguments) -> Requirements:
    """What a call of `head_loss` needs, after all that it asks of its arguments is seen to hold.

    Raises:
        ValueError, TypeError: for bad input, naming the argument, what it got and what it wanted.
    """
    hidden, head, options = arguments.values, arguments.head, arguments.options
    objective = Objective.of(arguments.terms)
    compute_dtype = check_linear(arguments, objective)
    assert head is not None
    dtype = compute_dtype or hidden.dtype
    backend = kernels.choose(options.backend, hidden.device, dtype)
    if options.batch_invariant and backend != "triton":
        raise ValueError(
            f"batch_invariant: got True for {dtype} on {hidden.device}, want a GPU with the triton "
            "backend and at most 32 bits: no other product keeps its order for another batch"
        )
    enabled, lora, bias = torch.is_grad_enabled(), head.lora, head.bias
    into = enabled and hidden.requires_grad
    needs_grad = NeedsGrad(
        features=(into, *(into or (enabled and x.a.requires_grad) for x in lora)),
        weights=tuple(enabled and w.requires_grad for w in (head.weight, *(x.b for x in lora))),
        bias=enabled and bias is not None and bias.requires_grad,
    )
    plain = not lora and options.logits_dtype is None
    inputs = {
        "width": hidden.shape[-1],
        "vocabulary": head.vocabulary,
        "on_gpu": hidden.is_cuda,
        "memory": kernels.memory(hidden.device),
        "weight_size": head.weight.dtype.itemsize,
        "rescaled": dtype == torch.float16,
        "multiprocessors": kernels.multiprocessors(hidden.device),
        "exp_tiles": plain and kernels.can_write_exp(backend, dtype, head.weight),
    }
    of_batch = objective, arguments.batch, options, arguments.transform
    return _required(*of_batch, inputs, backend, dtype, needs_grad, compute_dtype)


def of_given_logits(arguments: Arguments) -> Requirements:
    """What a call of `logits_loss` needs; raises as `of_hidden_states`."""
    logits, batch, options = arguments.values, arguments.batch, arguments.options
    transform, inplace = arguments.transform, arguments.inplace
    check_eager("logits_loss", logits)
    objective = Objective.of(arguments.terms)
    check_objective(objective, batch, options)
    if batch.support is not None:
        raise ValueError(
            "support_ids: got them beside given logits, want head_loss, or the logits masked"
        )
    check_shape("logits", logits, batch)
    check_transform(transform.temperature, transform.softcap, transform.scale)
    if isinstance(transform.temperature, Tensor):
        check_device("temperature", transform.temperature, logits, "that of logits,")
    if options.main_grad is not None:
        raise ValueError("main_grad: got a tensor, but given logits have no weight")
    if options.sequence_parallel:
        raise ValueError("sequence_parallel: got logits, want hidden states before a head")
    if options.gradient_tolerance:
        raise ValueError(
            f"gradient_tolerance: got {options.gradient_tolerance}, want 0: given logits have no "
            "products that leaving rows out would save"
        )
    if not isinstance(inplace, bool):
        raise TypeError(f"inplace: got {inplace!r}, want True or False")
    if inplace:
        check_own_places("inplace", logits, "logits")
    backend = kernels.choose(options.backend, logits.device, logits.dtype)
    needs_grad = NeedsGrad((logits.requires_grad and torch.is_grad_enabled(),))
    inputs = {
        "vocabulary": logits.shape[-1],
        "on_gpu": logits.is_cuda,
        "memory": kernels.memory(logits.device),
        "given": True,
        # In float16 it is written in the backward pass, where the upstream gradient is known.
        "overwrites": inplace and logits.dtype != torch.float16,
        # A kernel serves the logits where they lie: with unit stride along the vocabulary.
        "in_place": backend == "triton" and (logits.stride(-1) == 1 or logits.shape[-1] <= 1),
    }
    of_batch = objective, batch, options, transform
    return _required(*of_batch, inputs, backend, logits.dtype, needs_grad)


def _required(
    objective: Objective, batch: Batch, options: Options, transform: Transform,
    inputs: dict[str, Any], backend: str, dtype: torch.dtype, needs_grad: NeedsGrad,
    compute_dtype: torch.dtype | None = None
) -> Requirements:
    """Trace the objective's terms, and say what follows for the plan beside its `inputs`."""
    wide, teachers, device = sum_dtype(dtype), objective.teachers, batch.targets.device
    if teachers:
        check_topk(batch)
    kinds = batch.kinds(wide)
    check_weights(objective, kinds, batch.totals)
    traced = reads(objective, kinds, wide, device, options.metrics, cuts=True)
    if options.static:
        check_dead_rows(objective, kinds, wide, device)
    fields = {name for term in traced.values() for name in term.fields}
    fields |= {term.kept_field for _, term in objective.parts if term.kept_field is not None}
    warn_of_misspelt_fields(batch, fields)
    needs, gradients = _needs(traced, options), {g for r in traced.values() for g in r.gradients}
    into_hidden, into_weight = any(needs_grad.features), needs_grad.any_weight
    if (into_hidden or into_weight) and not gradients:
        raise ValueError(
            f"objective: {objective!r} has no gradient with respect to any statistic, but hidden "
            "states or weights require one (is everything detached?); call it under torch.no_grad()"
        )
    # These are measured of tiles of logits; candidates alone also of hidden states and weights.
    of_tiles = bool(teachers or needs & {"candidate_tail", COLLISION})
    exp_tiles = inputs.pop("exp_tiles", False) and not of_tiles
    exp_tiles &= not (transform.softcap is not None and "mean_logit" in gradients)
    in_place = inputs.pop("in_place", False) and not of_tiles and "candidate_logps" not in needs
    # Beside the student's tile: logits of each dense teacher, and parts of the gradient of all
    # that is measured beside the statistics but the last.
    dense = sum(teacher.source(kinds) != "topk" for teacher in teachers)
    tiles = 1 + dense + (len(teachers) + (CANDIDATES in gradients) > 1)
    # Columns that are measured one by one.
    listed = ["teacher_topk_ids"] * (len(teachers) - dense)
    listed += ["candidate_ids"] * bool(needs & {"candidate_logps", "candidate_tail"})
    slopes = has_slopes(objective, kinds) and not needs & BESIDE.keys()
    # Who depends on statistics may clip, who reads a field may weigh by 0 or leave out.
    restricted = any(term.kept_field for _, term in objective.parts)
    constant = slopes and not (restricted or any(term.fields for term in traced.values()))
    constant &= not any(term.weight_fields for _, term in objective.parts)
    inputs |= {
        "hidden_gradient": into_hidden,
        "weight_gradient": into_weight,
        "element_size": dtype.itemsize,
        "scope": objective.scope,
        "sparse": not constant or options.gradient_tolerance > 0,
        "thorough": restricted or options.gradient_tolerance > 0,
        "segments_per_unit": objective.segments_per_unit,
        "grouped": batch.segments.group is not None,
        "logp_only": gradients <= ({"logp"} if "candidate_tail" in needs else {"logp", CANDIDATES}),
        "in_place": in_place,
        "exp_tiles": exp_tiles,
        "teachers": dense > 0,
        "row_bytes": 2 if exp_tiles else wide.itemsize * tiles,
        "candidates": sum(kinds[field][1][-1] for field in listed),
    }
    return Requirements(
        objective=objective,
        needs=needs,
        inputs=PlanInputs(**inputs),
        backend=backend,
        wide=wide,
        needs_grad=needs_grad,
        compute_dtype=compute_dtype,
        slopes=slopes,
        fields=fields,
    )


def _needs(traced: dict[str, Reads], options: Options) -> frozenset[str]:
    needs = {"logp"} | ({"entropy"} if options.metrics else set())
    for term in traced.values():
        needs |= term.statistics & {*STATISTICS, *BESIDE}
    if PEAK in needs:
        needs.add("top1")  # finds it
    return frozenset(needs)
