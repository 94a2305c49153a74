"""Construction of a `Call`: arguments are checked, compared between ranks, planned and packed into
the dataclass `Call`, which `engine.loop` reads.

N positions, T scored positions, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from .. import kernels
from ..batch.batch import Batch
from ..batch.packing import PackedBatch, Packing
from ..batch.reduction import Number, Totals
from ..batch.segments import Linear
from ..head.products import FixedProducts
from ..kernels.transform import Transform
from ..logits.accumulators import BlockAccumulator, GradientBuffers
from ..logits.given import GivenAccumulator, GivenLogits, InPlaceLogits
from ..logits.linear import ExpLogits, LinearLogits, LogitSource, NarrowLogits, RowContext
from ..logits.rows import ALL, Accumulator, Rows, Tensors
from ..logits.support import SupportLogits
from ..logits.teacher import measuring
from ..objective.external import ExternalLoss
from ..objective.tolerance import Tolerance
from ..objective.weighted import WeightedObjective, bind
from ..options import Options
from ..parallel.agreement import Facts, agree
from ..parallel.vocabulary import VocabShard, WholeVocabulary
from .checks import Arguments
from .facts import of_segments, of_vocabulary, per_segment
from .plan import Plan, make_plan
from .requirements import Requirements, inputs_of, requirements_of

READ_AGAIN = ("teacher_logits", "teacher_hidden", "teacher_topk_ids", "candidate_ids")


@dataclass(kw_only=True, eq=False)
class Call:
    """Requirements, plan and packed batch of a call."""

    requirements: Requirements
    shard: WholeVocabulary  # This rank's vocabulary shard.
    plan: Plan
    packed: PackedBatch  # The scored tokens sorted by segment, and their fields.
    # Settings of the scored tokens (targets, transform, kernels) that every `LogitSource` reads.
    context: RowContext
    # Function that skips rows with almost no gradient; None without `gradient_tolerance`.
    tolerance: Tolerance | None

    @property
    def open(self) -> Callable[[Tensors], LogitSource]:
        """Function that makes the `LogitSource` of the scored tokens from the call's tensors."""
        required = self.requirements
        support = self.scored.support
        if required.given:
            return partial(
                InPlaceLogits if self.plan.in_place else GivenLogits,
                context=self.context,
                order=self.scored,
                overwrites=required.overwrites,
            )
        exp = ExpLogits if self.plan.exp_tiles else LinearLogits
        linear = partial(
            NarrowLogits if self.plan.on_chip else exp,
            context=self.context,
            compute_dtype=required.compute_dtype,
            logits_dtype=self.options.logits_dtype,
        )
        return (
            linear if support is None else lambda tensors: SupportLogits(linear(tensors), support)
        )

    @property
    def accumulator(self) -> Callable[[Any], Accumulator]:
        """Function that makes the gradient accumulator of a `LogitSource`. If the caller passes
        logits, the gradient accumulator receives the logits' gradient tile by tile. If a head
        computes the logits, the gradient accumulator receives the logits' gradient for one block of
        tokens at a time."""
        if self.requirements.given:
            return GivenAccumulator
        return partial(
            BlockAccumulator,
            buffers=self.buffers,
            blocks=self.plan.chunks,
            single_block=self.plan.single_block,
        )

    @property
    def buffers(self) -> GradientBuffers:
        """Dtypes and destinations of the sums for the gradients of hidden states and head
        weights."""
        required = self.requirements
        options = self.options
        # The gradient coefficients (`c_target`, `c_prob` ..) already include the upstream gradient
        # if `Options.upstream` is given, or if the loss is a function outside of headloss.
        final = options.upstream is not None or required.objective.scope == "external"
        return GradientBuffers(
            required.needs_grad,
            options.accumulate_dtype,
            options.main_grad,
            direct=final and not required.rescaled,
        )

    @property
    def options(self) -> Options:
        return self.requirements.options

    @property
    def scored(self) -> Packing:
        """The packing: scored tokens and their positions in the batch."""
        return self.requirements.scored

    @property
    def in_one_launch(self) -> bool:
        """True if the caller passes logits, the loss has a closed-form gradient, and one kernel
        launch therefore computes both the statistics and the gradient of the logits."""
        plan = self.plan
        alone = self.groups == (None, None)
        return plan.in_place and plan.schedule == "one_pass" and alone and self.requirements.slopes

    @property
    def groups(self) -> tuple[distributed.ProcessGroup | None, ...]:
        """The vocabulary's process group, and the group of segments that run across ranks."""
        return self.shard.group, self.packed.segments.group

    def weighted(self) -> WeightedObjective | ExternalLoss:
        """Return the loss terms with a weight for each token. For segments that run across ranks,
        totals are summed in a collective."""
        required = self.requirements
        vocabulary = self.shard.vocabulary
        batch = required.batch
        scored = required.scored
        options = required.options
        upstream = 1.0 if options.upstream is None else options.upstream
        if required.loss_fn is not None:
            return ExternalLoss(required.loss_fn, scored, vocabulary, upstream)
        totals = batch.totals
        kinds = required.kinds
        if totals is None:
            more = batch.segments.group is not None or scored.live is not None
            more |= "prompts" in kinds or torch.bool in (dtype for dtype, _ in kinds.values())
            totals = Totals.of(batch) if more else Totals(len(scored), scored.count)
        weighted = bind(
            required.objective,
            self.packed,
            totals,
            vocabulary,
            required.wide,
            upstream=upstream,
            closed=required.slopes,
            logp_only=self.plan.schedule == "frozen",
        )
        if not required.rescaled:
            return weighted
        return weighted.scaled(self.packed.targets.device, partial(slope_of, required.transform))

    def unit(self, logp: Tensor, rows: Rows = ALL) -> Tensor:
        """Return the [n] coefficients by which the `frozen` schedule multiplies dlogp/dhidden. If
        the hidden states are not in float16, each coefficient is 1. With float16 hidden states, a
        token's coefficient is a power of two near 1 / ((1 - p) dz/draw), where p is the target's
        probability and dz/draw the derivative of a transformed logit z with respect to the raw
        logit, so that the small gradient of a likely target keeps its digits."""
        one = torch.ones_like(logp)
        if not self.requirements.rescaled:
            return one
        slope = one / slope_of(self.context.transform.rows(rows))
        return floor_of(slope.abs().clamp(max=1e30)) / floor_of((-logp.expm1()).clamp_min(2**-24))

    @property
    def constants(self) -> list[Tensor]:
        """Tensors that the backward pass reads in addition to the logits and that must not change
        before the backward pass."""
        support = self.scored.support
        values = [self.packed.targets, self.context.transform.temperature, support and support.ids]
        return [value for value in values if isinstance(value, Tensor)]

    @property
    def read_again(self) -> list[tuple[str, Tensor, int]]:
        """Fields that the backward pass reads again, each with its version counter. Batch fields
        that the backward pass reads again are not saved with autograd, because autograd's
        saved-tensor hooks might copy the batch fields."""
        if not self.context.beside:
            return []
        fields = ((name, self.packed.as_given(name)) for name in READ_AGAIN)
        return [(n, t, t._version) for n, t in fields if t is not None and not t.is_inference()]


def floor_of(sizes: Tensor) -> Tensor:
    """Return, for each element of `sizes`, the largest power of two that does not exceed the
    element."""
    return sizes.log2().floor().exp2()


def slope_of(transform: Transform, teacher: object = None) -> Number:
    """Return dz/draw, the derivative of the logits z that a term with the given teacher reads, with
    respect to the raw logits (hidden state times weight)."""
    return transform.scale / getattr(teacher, "temperature", transform.temperature)


def call_and_tensors(arguments: Arguments) -> tuple[Call, list[Tensor | None]]:
    """Return the `Call` and its input tensors: the logits alone, or features and weights
    pairwise, then the bias."""
    call = call_of(arguments)
    head = arguments.head
    if head is None:
        return call, [arguments.tensor]
    scored = call.scored
    compute_dtype = call.requirements.compute_dtype
    aligned = call.plan.exp_tiles or call.plan.on_chip
    states = list[Tensor]()
    for x in (arguments.tensor, *(features for features, _ in head.beside)):
        if x.dim() != 2:  # A matrix needs no flatten, which would add an autograd node.
            x = x.flatten(0, -2)
        if compute_dtype is not None:
            x = x.to(compute_dtype)
        if call.options.sequence_parallel:
            x = call.shard.gathered(x)
        if scored.index is not None:
            x = Linear.apply(scored.gather, scored.scatter, x.view(*scored.shape, x.shape[1]))
        elif aligned and not kernels.suits_product(arguments.tensor):
            x = x.clone(memory_format=torch.contiguous_format)
        states.append(x)
    hidden, *features = states
    if not (head.lora or features):
        return call, [hidden, head.weight, head.bias]
    weights = (weight for _, weight in head.beside)
    head = replace(head, beside=tuple(zip(features, weights, strict=True)))
    factors = head.factors(hidden, call.shard.dropout, call.context.products)
    return call, [*(tensor for pair in factors for tensor in pair), head.bias]


def call_of(a: Arguments) -> Call:
    """Return the `Call` after the ranks agree that their calls match; ValueError for bad fields of
    teachers and candidates. Hidden states may be on the meta device (shapes without
    data). Dropout in a teacher's adapter uses the mask of the vocabulary group's first
    rank, which is broadcast."""
    fields = None
    across = a.batch.segments.group if isinstance(a.batch, Batch) else None
    if across is None:
        required, shard, plan = _planned(a)
    else:

        def prepare() -> tuple[Facts, tuple[Requirements, WholeVocabulary, Plan]]:
            required, shard, plan = _planned(a)
            return of_segments(a, required, plan), (required, shard, plan)

        (required, shard, plan), forms = agree(
            "segments.group", across, prepare, getattr(a.options, "static", False)
        )
        fields = per_segment(forms)
    packed = required.scored.view(required.batch, required.wide, fields)
    tolerance = None
    # If the backward matmuls compute all rows (`plan.skip_rows` is False), set the gradient
    # tolerance to 0, because dropping small gradients would save no time.
    if share := required.options.gradient_tolerance:
        share = share if plan.skip_rows else 0.0
        zero = packed.targets.new_zeros((), dtype=torch.float64)
        tolerance = Tolerance(share, required.transform, shard.vocabulary, zero, zero, zero)
    context = RowContext(
        kernels.load(required.backend),
        packed.targets,
        required.transform,
        required.needs,
        shard,
        all_columns=shard.group is None and packed.live is None,
    )
    if required.options.batch_invariant and not required.given:
        context = context._replace(products=FixedProducts(context.acts.fixed_product))
    return Call(
        requirements=required,
        shard=shard,
        plan=plan,
        packed=packed,
        context=measuring(context, packed, required.teachers, required.wide, plan.keeps_tiles),
        tolerance=tolerance,
    )


def _planned(a: Arguments) -> tuple[Requirements, WholeVocabulary, Plan]:
    """Return the requirements of the call, this rank's vocabulary shard, and the plan. If a group
    of ranks shards the vocabulary, the ranks first compare their calls."""
    if a.group is None:
        required = requirements_of(a)
        shard = WholeVocabulary(required.vocabulary)
    else:

        def prepare() -> tuple[Facts, Requirements]:
            required = requirements_of(a)
            return of_vocabulary(a, required), required

        required, numbers = agree(
            "vocab_group", a.group, prepare, getattr(a.options, "static", False)
        )
        shard = VocabShard(a.group, numbers, a.head and a.head.vocab_size, a.batch)
    plan = make_plan(inputs_of(a, required, shard), required.options, required.backend)
    return required, shard, plan
