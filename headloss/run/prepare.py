"""A call's arguments checked, and what follows from them before the batch is packed (law 4b).

N positions, T of them scored, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .. import kernels
from ..arguments import check_device, check_own_places
from ..batch.batch import Batch
from ..batch.packing import Packing
from ..head.head import Head, check_transform
from ..kernels.interface import Kernels
from ..losses.teacher import Teacher
from ..losses.term import Objective
from ..losses.trial import Reads
from ..objective.bound import check_weights
from ..objective.reads import has_slopes, reads
from ..objective.sample import Kinds
from ..objective.statistics import BESIDE, CANDIDATES, COLLISION, PEAK, STATISTICS
from ..options import Options
from ..ranks.place import Place
from ..softmax.linear import Wants
from ..softmax.products import sum_dtype
from .checks import (
    Given,
    GivenLogits,
    check_dead_rows,
    check_eager,
    check_gradient,
    check_linear,
    check_objective,
    check_shape,
    check_topk,
    fields_read,
    masks_of,
    warn_of_misspelt_fields,
)
from .plan import Plan, make_plan
from .problem import Problem

DIFFERENCES = ("forward_kl", "reverse_kl")  # that a teacher's product measures


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a call needs, known before its batch is packed.

    Attributes:
        needs: statistics.
        problem: what the planner knows of it, without what differs from call to call.
        wide: of statistics.
        readable: hidden states lie as the product that writes terms reads them.
        beside: something is measured beside the statistics: teachers, candidates.
        slopes: the objective's gradient can be known before the statistics.
        counted: the batch's totals are numbers of tokens and segments, on this rank alone.
        masks: fields of `MASKS`, and whether a term reads them.
    """

    needs: frozenset[str]
    problem: Problem
    backend: str
    wide: torch.dtype
    wants: Wants
    compute_dtype: torch.dtype | None = None
    readable: bool = True
    beside: bool = True
    slopes: bool = False
    counted: bool = False
    per_segment: frozenset[str] = frozenset()
    masks: Mapping[str, bool] = field(default_factory=dict)

    @property
    def acts(self) -> Kernels:
        return kernels.load(self.backend)

    def plan(self, options: Options, packing: Packing, place: Place) -> Plan:
        """What runs for the tokens of the call."""
        support = packing.support
        problem = replace(
            self.problem,
            lengths=packing.lengths,
            tokens=len(packing),
            vocabulary=place.widest,
            support=0 if support is None else len(support.ids),
            restricted=0 if support is None else support.restricted,
            sharded=place.group is not None,
            memory=self.problem.memory if place.memory is None else place.memory,
            weight_gradient=self.problem.weight_gradient or bool(place.weight_gradient),
        )
        return make_plan(problem, options, self.backend)


def prepare_linear(given: Given) -> tuple[Prepared, Objective]:
    """What a call of `head_loss` needs, after all that it asks of its arguments is seen to hold.

    Raises:
        ValueError, TypeError: for bad input, naming the argument, what it got and what it wanted.
    """
    hidden, head, batch, terms, options, _ = given
    objective = Objective.of(terms)
    compute_dtype = check_linear(given, objective)
    dtype = compute_dtype or hidden.dtype
    backend = kernels.choose(options.backend, hidden.device, dtype)
    if options.batch_invariant and backend != "triton":
        raise ValueError(
            f"batch_invariant: got True for {dtype} on {hidden.device}, want a GPU with the triton "
            "backend and at most 32 bits: no other product keeps its order for another batch"
        )
    wants = _wants(hidden, head)
    fuses = not head.lora and options.logits_dtype is None
    fuses = fuses and kernels.can_hold_terms(backend, dtype, head.weight)
    problem = Problem(
        width=hidden.shape[-1],
        hidden_gradient=any(wants.features),
        weight_gradient=wants.any_weight,
        element_size=dtype.itemsize,
        weight_size=head.weight.dtype.itemsize,
        rescaled=dtype == torch.float16,
        on_gpu=hidden.is_cuda,
        multiprocessors=kernels.multiprocessors(hidden.device),
        memory=kernels.memory(hidden.device),
        main_grad=options.main_grad is not None,
        terms=fuses,
        differences=fuses and head.vocab_group is None and head.softcap is None,
    )
    softcap = head.softcap is not None
    prepared = _prepared(objective, batch, options, problem, softcap, backend, dtype, wants)
    readable = hidden.is_meta or kernels.suits_product(hidden)
    return replace(prepared, compute_dtype=compute_dtype, readable=readable), objective


def prepare_given(given: GivenLogits) -> tuple[Prepared, Objective]:
    """What a call of `logits_loss` needs; raises as `prepare_linear`."""
    logits, batch, terms, transform, _, inplace, options = given
    check_eager("logits_loss", logits)
    objective = Objective.of(terms)
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
    wants = Wants(logits=logits.requires_grad and torch.is_grad_enabled())
    problem = Problem(
        hidden_gradient=wants.logits,
        weight_gradient=False,
        element_size=logits.element_size(),
        on_gpu=logits.is_cuda,
        memory=kernels.memory(logits.device),
        given=True,
        # In float16 it is written in the backward pass, where the upstream gradient is known.
        inplace=inplace and logits.dtype != torch.float16,
        # A kernel serves the logits where they lie: with unit stride along the vocabulary.
        rows=backend == "triton" and (logits.stride(-1) == 1 or logits.shape[-1] <= 1),
    )
    kind = transform.softcap is not None, backend, logits.dtype
    return _prepared(objective, batch, options, problem, *kind, wants), objective


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


def _prepared(
    objective: Objective, batch: Batch, options: Options, problem: Problem, softcap: bool,
    backend: str, dtype: torch.dtype, wants: Wants
) -> Prepared:
    """Trace the objective's terms, and say what follows for the plan."""
    wide, teachers = sum_dtype(dtype), objective.teachers
    if teachers:
        check_topk(batch)
    kinds = batch.kinds(wide)
    check_weights(objective, kinds, batch.totals)
    asked = reads(objective, kinds, wide, batch.targets.device, options.metrics, cuts=True)
    if options.static:
        check_dead_rows(objective, kinds, wide, batch.targets.device)
    warn_of_misspelt_fields(batch, read := fields_read(objective, asked))
    if wants.any:
        check_gradient(objective, asked)
    needs, gradients = _needs(asked, options), {g for r in asked.values() for g in r.gradients}
    beside = needs & BESIDE.keys()
    # These are measured of tiles of logits; candidates alone also of hidden states and weights.
    of_tiles = bool(teachers or needs & {"candidate_tail", COLLISION})
    terms = problem.terms and not of_tiles and not (softcap and "mean_logit" in gradients)
    # Beside the student's tile: logits of each dense teacher, and parts of the gradient of all
    # that is measured beside the statistics but the last.
    dense = sum(teacher.source(kinds) != "topk" for teacher in teachers)
    tiles = 1 + dense + (len(teachers) + (CANDIDATES in gradients) > 1)
    # Columns that are measured one by one.
    listed = ["teacher_topk_ids"] * (len(teachers) - dense)
    listed += ["candidate_ids"] * bool(needs & {"candidate_logps", "candidate_tail"})
    differences = problem.differences and wide.itemsize == 4 and len(teachers) == 1 and not beside
    differences = differences and _differences(teachers[0], kinds, backend)
    slopes = has_slopes(objective, kinds) and not beside
    # Who depends on statistics may clip, who reads a field may weigh by 0 or leave out.
    restricted = any(term.kept_field for _, term in objective.parts)
    constant = slopes and not (restricted or any(term.fields for term in asked.values()))
    constant &= not any(term.weight_fields for _, term in objective.parts)
    problem = replace(
        problem,
        scope=objective.scope,
        sparse=not constant or options.gradient_tolerance > 0,
        thorough=restricted or options.gradient_tolerance > 0,
        segments_per_unit=objective.segments_per_unit,
        grouped=batch.segments.group is not None,
        gathered=options.sequence_parallel,
        logp_only=gradients <= ({"logp"} if "candidate_tail" in needs else {"logp", CANDIDATES}),
        rows=problem.rows and not of_tiles and "candidate_logps" not in needs,
        terms=terms,
        teachers=dense > 0,
        differences=differences,
        row_bytes=2 if terms else 4 if differences else wide.itemsize * tiles,
        candidates=sum(kinds[field][1][-1] for field in listed),
    )
    masked = torch.bool in (kind for kind, _ in kinds.values())
    return Prepared(
        needs=needs,
        problem=problem,
        backend=backend,
        wide=wide,
        wants=wants,
        beside=bool(teachers or beside),
        slopes=slopes,
        counted=not (batch.segments.group is not None or "prompts" in kinds or masked),
        masks=masks_of(kinds, objective, read),
        per_segment=frozenset([name for name in kinds if not batch.per_token(name)]),
    )


def _needs(asked: dict[str, Reads], options: Options) -> frozenset[str]:
    needs = {"logp"} | ({"entropy"} if options.metrics else set())
    for term in asked.values():
        needs |= term.statistics & {*STATISTICS, *BESIDE}
    if PEAK in needs:
        needs.add("top1")  # finds it
    return frozenset(needs)


def _differences(teacher: Teacher, kinds: Kinds, backend: str) -> bool:
    """Whether the teacher's product measures its divergence from the student's logits."""
    head = teacher.head
    if teacher.source(kinds) != "hidden" or teacher.kind not in DIFFERENCES:
        return False
    assert head is not None
    weight = head.weight
    plain = head.bias is None and not head.lora and head.vocab_group is None
    return (
        plain
        and kinds["teacher_hidden"][0] == weight.dtype
        and kernels.can_hold_terms(backend, weight.dtype, weight)
    )
