"""One call: from arguments to what the loop runs, agreed on between ranks, planned and complete.

N positions, T of them scored, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..batch.batch import Batch
from ..batch.packing import PackedBatch
from ..batch.reduction import Number, Totals
from ..batch.segments import Linear
from ..head.products import Fixed
from ..kernels.interface import Kernels
from ..kernels.transform import Transform
from ..logits.accumulators import BlockAccumulator, GradientBuffers
from ..logits.given import GivenAccumulator, GivenLogits, InPlaceLogits
from ..logits.linear import ExpLogits, LinearLogits, RowContext
from ..logits.rows import ALL, Rows
from ..logits.support import SupportLogits
from ..logits.teacher import measuring
from ..objective.external import ExternalLoss
from ..objective.tolerance import Tolerance
from ..objective.weighted import WeightedObjective, bind
from ..options import Options
from ..parallel.agreement import agree, attempt
from ..parallel.facts import of_segments, of_vocabulary, per_segment
from ..parallel.vocabulary import VocabShard, WholeVocabulary
from .checks import Arguments
from .plan import Plan, make_plan
from .requirements import Requirements, requirements_of

READ_AGAIN = ("teacher_logits", "teacher_hidden", "teacher_topk_ids", "candidate_ids")
Tensors = Sequence[Tensor | None]  # of a source of logits, in the order of its gradients


@dataclass(frozen=True, kw_only=True, eq=False)
class Call(Requirements):
    """What the loop needs of a call."""

    shard: Any  # this rank's slice of the vocabulary
    plan: Plan
    per_segment: frozenset[str] | None  # fields of one value per segment; None: by their shapes

    @property
    def open(self) -> Callable[[Tensors], Any]:
        """Makes the logits of the scored tokens."""
        inputs, plan, support = self.inputs, self.plan, self.scored.support
        if inputs.given:
            kind, overwrites = InPlaceLogits if plan.in_place else GivenLogits, inputs.overwrites
            return partial(kind, context=self.context, order=self.scored, overwrites=overwrites)
        # A product measures logits of float16, whose gradient is written in float16.
        measured = inputs.rescaled and self.backend == "triton" and self.shard.group is None
        linear = ExpLogits if plan.exp_tiles else LinearLogits
        dtypes = {"compute_dtype": self.compute_dtype, "logits_dtype": self.options.logits_dtype}
        make = partial(linear, context=self.context, fixed=self.fixed, measured=measured, **dtypes)
        return make if support is None else lambda tensors: SupportLogits(make(tensors), support)

    @property
    def accumulator(self) -> Callable[[Any], Any]:
        """Makes, of these, what takes their gradient, in blocks of tokens or (given ones) tiles."""
        if self.plan.in_place:  # the source has written the gradient already
            return lambda source: source
        if self.inputs.given:
            return GivenAccumulator
        more = {"blocks": self.plan.chunks, "single_block": self.plan.single_block}
        return partial(BlockAccumulator, buffers=self.buffers, **more)

    @property
    def fixed(self) -> Fixed | None:
        """The product of which a row's bits depend on no other row, where it is traced for."""
        acts: Kernels = self.context.acts
        return acts.fixed_product if self.options.batch_invariant else None

    @property
    def buffers(self) -> GradientBuffers:
        """Where the gradients of features and weights are added up."""
        options, inputs = self.options, self.inputs
        # Coefficients hold the upstream gradient already.
        final = options.upstream is not None or inputs.scope == "external"
        direct = final and not inputs.rescaled
        dtype, main_grad = options.accumulate_dtype, options.main_grad
        return GradientBuffers(self.needs_grad, dtype, main_grad, direct)

    @property
    def in_one_launch(self) -> bool:
        """Whether one launch gives statistics and gradient of given logits: it has closed form."""
        written = self.plan.in_place and self.plan.schedule == "one_pass"
        return written and self.groups == (None, None) and self.slopes

    @property
    def groups(self) -> tuple[Any, ...]:
        """Of the vocabulary's slices, and of segments that run across ranks."""
        return self.shard.group, self.scored.segments.group

    @cached_property
    def packed(self) -> PackedBatch:
        """The batch as terms see it."""
        return self.scored.view(self.batch, self.wide, self.per_segment)

    @cached_property
    def weighted(self) -> WeightedObjective | ExternalLoss:
        """The objective with a weight for each token, made while the first product runs."""
        scored, batch, vocabulary = self.scored, self.batch, self.shard.vocabulary
        upstream = 1.0 if self.options.upstream is None else self.options.upstream
        if self.loss_fn is not None:
            return ExternalLoss(self.loss_fn, scored, vocabulary, upstream)
        totals, kinds = batch.totals, self.packed.kinds()
        if totals is None:
            more = batch.segments.group is not None or scored.live is not None
            more |= "prompts" in kinds or torch.bool in (dtype for dtype, _ in kinds.values())
            totals = Totals.of(batch) if more else Totals(len(scored), scored.count)
        weighted = bind(
            self.objective,
            self.packed,
            totals,
            vocabulary,
            self.wide,
            upstream=upstream,
            closed=self.slopes,
            logp_only=self.plan.schedule == "frozen",
        )
        if not self.inputs.rescaled:
            return weighted
        return weighted.scaled(self.packed.targets.device, partial(slope_of, self.transform))

    @cached_property
    def context(self) -> RowContext:
        """What a source of logits has to know of the tokens."""
        scored, shard, needs = self.scored, self.shard, self.needs
        every_column = shard.group is None and scored.live is None
        acts, targets = kernels.load(self.backend), scored.targets
        context = RowContext(acts, targets, self.transform, needs, shard, every_column)
        teachers, keeps_tiles = self.objective.teachers, self.plan.keeps_tiles
        return measuring(context, self.packed, teachers, self.wide, keeps_tiles)

    @cached_property
    def tolerance(self) -> Tolerance:
        """Leaves further rows out; of no mass at all where that would save no product."""
        share = self.options.gradient_tolerance if self.plan.skip_rows else 0.0
        zero = self.scored.targets.new_zeros((), dtype=torch.float64)
        return Tolerance(share, self.transform, self.shard.vocabulary, zero, zero, zero)

    def unit(self, logp: Tensor, rows: Rows = ALL) -> Tensor:
        """[n] coefficients of a frozen head's dlogp: in float16, where dlogp/dz is small as p nears
        1, powers of two of about 1 / (slope (1 - p))."""
        one = torch.ones_like(logp)
        if not self.inputs.rescaled:
            return one
        size = (one / slope_of(self.transform.rows(rows))).abs().clamp(max=1e30)
        return floor_of(size) / floor_of((-logp.expm1()).clamp_min(2**-24))

    @property
    def constants(self) -> list[Tensor]:
        """What the backward pass reads again beside the logits: none of it may change."""
        support = self.scored.support
        values = [self.scored.targets, self.transform.temperature, support and support.ids]
        return [value for value in values if isinstance(value, Tensor)]

    @property
    def read_again(self) -> list[tuple[str, Tensor, int]]:
        """Fields that the backward pass reads again (saved, hooks might copy them), and how often
        each was changed in place."""
        if not self.context.beside:
            return []
        fields = ((name, self.packed.as_given(name)) for name in READ_AGAIN)
        return [(n, t, t._version) for n, t in fields if t is not None and not t.is_inference()]


def floor_of(sizes: Tensor) -> Tensor:
    """The power of two at or below each."""
    return sizes.log2().floor().exp2()


def slope_of(transform: Transform, teacher: object = None) -> Number:
    """Of the logits that a term (with this teacher) sees over the raw ones."""
    return transform.scale / getattr(teacher, "temperature", transform.temperature)


def call_and_tensors(arguments: Arguments) -> tuple[Call, list[Tensor | None]]:
    """The call, and the tensors of its logits: these, or features and weights pairwise, bias."""
    call, hidden, head = call_of(arguments), arguments.values, arguments.head
    if head is None:
        return call, [hidden]
    scored, shard = call.scored, call.shard
    x = hidden if hidden.dim() == 2 else hidden.flatten(0, -2)  # else autograd gets a step more
    if call.compute_dtype is not None:
        x = x.to(call.compute_dtype)
    if call.options.sequence_parallel:
        x = shard.gathered(x)
    if scored.index is not None:
        x = Linear.apply(scored.gather, scored.scatter, x.view(*scored.shape, x.shape[1]))
    elif call.plan.exp_tiles and not kernels.suits_product(hidden):
        x = x.clone(memory_format=torch.contiguous_format)
    factors = [(x, head.weight)]
    if head.lora:
        factors = head.factors(x, shard.dropout, call.fixed)
    return call, [*(tensor for pair in factors for tensor in pair), head.bias]


def call_of(arguments: Arguments) -> Call:
    """A call that the ranks of its groups agree on; an error waits until all have heard of it.
    Hidden states may be on the meta device."""
    a, batch, group = arguments, arguments.batch, arguments.group
    static = isinstance(a.options, Options) and a.options.static
    required, error = attempt(None, lambda: requirements_of(a))
    shard: Any
    if group is None:
        shard, error = attempt(error, lambda: WholeVocabulary(required.inputs.vocabulary))
    else:
        vocab_size = a.head and a.head.vocab_size
        say = partial(of_vocabulary, a, required)
        numbers = partial(agree, "vocab_group", group, say, error, static)
        shard, error = attempt(None, lambda: VocabShard(group, numbers(), vocab_size, batch))
    plan, error = attempt(error, lambda: plan_of(required, shard))
    fields, across = None, batch.segments.group if isinstance(batch, Batch) else None
    if across is not None:
        say = partial(of_segments, a, plan, required)
        forms = partial(agree, "segments.group", across, say, error, static)
        fields, error = attempt(None, lambda: per_segment(forms()))
    if error is not None:
        raise error
    call = Call(**vars(required), shard=shard, plan=plan, per_segment=fields)
    _ = call.context  # fields of teachers and candidates are checked
    return call


def plan_of(requirements: Requirements, shard: WholeVocabulary) -> Plan:
    """What runs for the tokens of the call."""
    inputs, scored, support = requirements.inputs, requirements.scored, requirements.scored.support
    inputs = replace(
        inputs,
        lengths=scored.lengths,
        tokens=len(scored),
        vocabulary=shard.widest,
        support=0 if support is None else len(support.ids),
        restricted=0 if support is None else support.restricted,
        sharded=shard.group is not None,
        memory=shard.memory or inputs.memory,
        weight_gradient=inputs.weight_gradient or shard.weight_gradient,
    )
    return make_plan(inputs, requirements.options, requirements.backend)
