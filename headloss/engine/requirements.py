"""The requirements of a call on one rank, from checked and packed arguments.

N positions, T scored positions, H hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import kernels
from ..arguments import is_dtensor
from ..batch.batch import Batch
from ..batch.packing import Packing, packing_of
from ..head.head import Head, check_one_per_token
from ..head.products import sum_dtype
from ..kernels.transform import Transform
from ..logits.linear import NeedsGrad
from ..losses.teacher import Teacher, check_teachers
from ..losses.term import Objective
from ..losses.trial import measures_of
from ..objective.external import LossFunction
from ..objective.reads import Kinds, has_slopes, reads
from ..objective.weighted import check_weights
from ..options import Options
from ..parallel.vocabulary import WholeVocabulary
from ..statistics.divergence import Measure
from ..statistics.softmax import BESIDE, CANDIDATES, COLLISION, PEAK, STATISTICS
from . import checks
from .checks import Arguments
from .plan_inputs import PlanInputs


# Not frozen: frozen dataclasses take twice the time to construct.
@dataclass(kw_only=True, eq=False)
class Requirements:
    """The requirements of a call on one rank, before the ranks of a group compare their
    requirements."""

    batch: Batch  # The batch as passed in, with unscored positions.
    options: Options
    loss_fn: LossFunction | None  # An external loss function in place of an objective.
    objective: Objective
    needs: frozenset[str]  # Statistics to compute.
    gradients: frozenset[str]  # Statistics with a gradient.
    kinds: Kinds  # Dtype and shape per token of each batch field.
    fields: frozenset[str]  # Fields of the batch that terms read.
    slopes: bool  # True if the gradient has a closed form that needs no statistics.
    # Teachers, each with the divergences that terms read.
    teachers: tuple[tuple[Teacher, tuple[Measure, ...]], ...]
    given: bool  # Logits are given.
    overwrites: bool  # True if the gradient may overwrite the caller's logits.
    # True if gradients are scaled against float16 underflow, and the weight gradient is summed in
    # float32.
    rescaled: bool
    vocabulary: int  # Vocabulary columns of this rank, without padding.
    backend: str
    compute_dtype: torch.dtype | None  # Matmul dtype under torch.autocast; None without autocast.
    dtype: torch.dtype  # Dtype of hidden states in matmuls, or of logits passed by the caller.
    wide: torch.dtype  # Dtype of statistics.
    needs_grad: NeedsGrad
    scored: Packing  # Scored tokens and their positions in the batch.
    transform: Transform  # Transform of raw logits; the temperature is a number or [T].


def requirements_of(a: Arguments) -> Requirements:
    """Return the requirements of a call; ValueError or TypeError for a wrong argument. In a
    vocabulary group, the ranks compare their calls after `requirements_of`, so that an error on one
    rank is raised on all ranks."""
    batch = a.batch
    options = a.options
    head = a.head
    objective = Objective.of(a.terms)
    compute_dtype = _checked(a, objective)
    dtype = compute_dtype or a.tensor.dtype
    device = a.tensor.device
    backend = kernels.choose(options.backend, device, dtype)
    if options.batch_invariant and head is not None and backend != "triton":
        raise ValueError(
            f"batch_invariant: got True for {dtype} on {device}, want a GPU with the triton "
            "backend and at most 32 bits: no other product keeps its order for another batch"
        )
    wide = sum_dtype(dtype)
    kinds = batch.kinds(wide)
    check_weights(objective, kinds, batch.totals)
    sample = kinds, wide, batch.targets.device
    traced = reads(objective, *sample, options.metrics or bool(options.per_token), cuts=True)
    checks.check_per_token(options.per_token, traced)
    if options.static:
        checks.check_dead_rows(objective, *sample)
    fields = {name for term in traced.values() for name in term.fields}
    fields |= {term.kept_field for _, term in objective.parts if term.kept_field is not None}
    checks.warn_of_misspelt_fields(batch, fields)
    needs = {"logp", "entropy"} if options.metrics else {"logp"}
    needs |= {s for r in traced.values() for s in r.statistics & {*STATISTICS, *BESIDE}}
    if PEAK in needs or "top1" in options.per_token:
        needs.add("top1")  # The maximum logit, which `top1` needs, is also the statistic `peak`.
    gradients = {g for r in traced.values() for g in r.gradients}
    needs_grad = _needs_grad(a.tensor, head)
    if not gradients and (any(needs_grad.features) or needs_grad.any_weight):
        raise ValueError(
            f"objective: {objective!r} has no gradient with respect to any statistic, but hidden "
            "states or weights require one (is everything detached?); call it under torch.no_grad()"
        )
    vocabulary = a.tensor.shape[-1] if head is None else head.vocabulary
    highest = vocabulary if a.group is None else torch.inf
    scored = packing_of(batch, highest, objective.segments_per_unit if options.static else None)
    # Raise an error for a mask in the batch that no term reads, unless the loss is a function of
    # the user, which may read any field.
    if not (options.static or a.loss_fn or objective.scope == "external"):
        checks.check_masks(batch, fields, scored, wide)
    return Requirements(
        batch=batch,
        options=options,
        loss_fn=a.loss_fn,
        objective=objective,
        needs=frozenset(needs),
        gradients=frozenset(gradients),
        kinds=kinds,
        fields=frozenset(fields),
        slopes=has_slopes(objective, kinds) and not needs & BESIDE.keys(),
        teachers=measures_of(objective, traced),
        given=head is None,
        # In float16 the gradient is written in the backward pass, where the upstream gradient
        # (often a loss scale) is known.
        overwrites=a.inplace and dtype != torch.float16,
        rescaled=head is not None and dtype == torch.float16,
        vocabulary=vocabulary,
        backend=backend,
        compute_dtype=compute_dtype,
        dtype=dtype,
        wide=wide,
        needs_grad=needs_grad,
        scored=scored,
        transform=_by_token(a.transform, scored, wide),
    )


def _checked(a: Arguments, objective: Objective) -> torch.dtype | None:
    """Check the arguments; return autocast's dtype."""
    batch = a.batch
    head = a.head
    if a.verb == "plan":  # Hidden states and head may be on the meta device.
        checks.check_eager(a.verb, getattr(batch, "targets", None))
    else:
        checks.check_eager(a.verb, a.tensor, head and head.weight)
    checks.check_objective(objective, batch, a.options)
    compute_dtype = checks.check_given(a) if head is None else checks.check_linear(a, objective)
    name = "hidden" if head else "logits"
    if is_dtensor(a.tensor):
        raise TypeError(f"{name}: got a DTensor, want this rank's own tensor: {name}.to_local()")
    shape = tuple(batch.targets.shape)
    fits = a.options.sequence_parallel or a.tensor.shape[:-1] == shape
    if a.tensor.dim() < 2 or not fits:
        want = f"the targets' {shape} and one more dimension"
        raise ValueError(f"{name}: got shape {tuple(a.tensor.shape)}, want {want}")
    if a.tensor.device != batch.targets.device and not a.tensor.is_meta:
        got = f"targets on {batch.targets.device}"
        raise ValueError(f"batch: got {got}, want {name}'s device {a.tensor.device}")
    check_teachers(objective.teachers, batch, a.options.static)
    return compute_dtype


def _needs_grad(tensor: Tensor, head: Head | None) -> NeedsGrad:
    """Return flags of the tensors that require a gradient; all False without grad mode."""
    enabled = torch.is_grad_enabled()

    def wants(tensor: Tensor | None) -> bool:
        return enabled and tensor is not None and tensor.requires_grad

    into = wants(tensor)
    if head is None:
        return NeedsGrad((into,))
    weights = (head.weight, *(x.b for x in head.lora), *(w for _, w in head.beside))
    of_lora = (into or wants(x.a) for x in head.lora)
    return NeedsGrad(
        features=(into, *of_lora, *(wants(x) for x, _ in head.beside)),
        weights=tuple(map(wants, weights)),
        bias=wants(head.bias),
    )


def _by_token(transform: Transform, scored: Packing, wide: torch.dtype) -> Transform:
    """Return a `Transform` whose temperature is [T], one per scored token, or a single number."""
    temperature = transform.temperature
    if not isinstance(temperature, Tensor):
        return transform
    check_one_per_token(temperature, scored.shape)
    rows = scored.gather(temperature.expand(scored.shape))
    if scored.live is None:
        checks.check_temperatures(rows, scored.index)
    else:  # Replace an unscored row's temperature, which may be 0, by 1.
        rows = torch.where(scored.live, rows, 1)
    return replace(transform, temperature=rows.to(wide))


def inputs_of(a: Arguments, required: Requirements, shard: WholeVocabulary) -> PlanInputs:
    """Return the planner's inputs for a call on this rank's vocabulary shard."""
    tensor = a.tensor
    head = a.head
    scored = required.scored
    objective = required.objective
    needs = required.needs
    kinds = required.kinds
    tolerance = required.options.gradient_tolerance > 0
    support = scored.support
    # Number of tiles in memory: the student's logits, the logits of each dense teacher, and partial
    # gradients if several teachers or candidates add to the logits' gradient.
    teachers = objective.teachers
    dense = sum(teacher.source(kinds) != "topk" for teacher in teachers)
    tiles = 1 + dense + (len(teachers) + (CANDIDATES in required.gradients) > 1)
    # Names of batch fields that list vocabulary ids whose log-probs a term reads.
    listed = ["teacher_topk_ids"] * (len(teachers) - dense)
    listed += ["candidate_ids"] * bool(needs & {"candidate_logps", "candidate_tail"})
    # Divergences, the sum of p squared, and the log-prob of all columns but the candidates need
    # tiles of logits; candidates' log-probs can be computed from hidden states and weight rows.
    of_tiles = bool(teachers or needs & {"candidate_tail", COLLISION})
    exp_tiles = on_chip = by_sweeps = False
    if head is not None and not (
        of_tiles or head.lora or head.beside or required.options.logits_dtype
    ):
        capped = head.softcap and "mean_logit" in required.gradients
        weight = required.backend, required.dtype, head.weight
        exp_tiles = kernels.can_write_exp(*weight) and not capped
        on_chip, by_sweeps = kernels.can_sweep(*weight, shard.widest)
    # A kernel works on logits with unit stride along the vocabulary, without a copy.
    in_place = head is None and not of_tiles and "candidate_logps" not in needs
    in_place &= tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
    in_place &= required.backend == "triton"
    # Tokens may have no gradient if a term clips (reads statistics) or has weights (reads fields).
    terms = [term for _, term in objective.parts]
    constant = required.slopes and not required.fields
    constant &= not any(term.weight_fields for term in terms)
    logp_only = {"logp"} if "candidate_tail" in needs else {"logp", CANDIDATES}
    return PlanInputs(
        tokens=len(scored),
        width=0 if head is None else tensor.shape[-1],
        vocabulary=shard.widest,
        scope=objective.scope,
        lengths=scored.lengths,
        segments_per_unit=objective.segments_per_unit,
        grouped=required.batch.segments.group is not None,
        sharded=shard.group is not None,
        sparse=tolerance or not constant,
        thorough=tolerance or any(term.kept_field for term in terms),
        logp_only=required.gradients <= logp_only,
        input_gradient=any(required.needs_grad.features),
        weight_gradient=required.needs_grad.any_weight or shard.weight_gradient,
        element_size=required.dtype.itemsize,
        weight_size=4 if head is None else head.weight.dtype.itemsize,
        on_chip=on_chip,
        by_sweeps=by_sweeps,
        multiples=required.gradients <= {"logp", "lse"},
        exp_tiles=exp_tiles,
        rescaled=required.rescaled,
        row_bytes=2 if exp_tiles else required.wide.itemsize * tiles,
        on_gpu=tensor.is_cuda,
        multiprocessors=0 if head is None else kernels.multiprocessors(tensor.device),
        memory=shard.memory or kernels.memory(tensor.device),
        given=required.given,
        overwrites=required.overwrites,
        in_place=in_place,
        teachers=dense > 0,
        candidates=sum(kinds[field][1][-1] for field in listed),
        support=0 if support is None else len(support.ids),
        restricted=0 if support is None else support.restricted,
    )
