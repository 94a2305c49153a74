"""One call: from arguments to what the loop runs. It is checked, agreed on between ranks, packed
and planned; and complete when it is made.

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
from ..batch.packing import PackedBatch, Packing, packing_of
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
from ..losses.trial import Reads
from ..objective.external import ExternalLoss
from ..objective.tolerance import Tolerance
from ..objective.weighted import WeightedObjective, bind
from ..options import Options
from ..parallel.agreement import agree, attempt
from ..parallel.facts import of_segments, of_vocabulary, per_segment
from ..parallel.vocabulary import VocabShard, WholeVocabulary
from .checks import Arguments, check_masks, check_temperatures
from .plan import Plan, make_plan
from .requirements import Requirements, of_given_logits, of_hidden_states

READ_AGAIN = ("teacher_logits", "teacher_hidden", "teacher_topk_ids", "candidate_ids")
Tensors = Sequence[Tensor | None]  # of a source of logits, in the order of its gradients


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """What the loop needs of a call.

    Attributes:
        requirements: what follows from the arguments, before the batch is packed.
        batch: by position.
        shard: this rank's slice of the vocabulary.
        scored: the scored tokens, and where in the batch they are.
        per_segment: fields of the batch with one value per segment; None: by their shapes.
        transform: of raw logits; its temperature is a number or [T].
        loss_fn: somebody else's loss of log-probs and entropies, in place of the objective's.
    """

    requirements: Requirements
    batch: Batch
    options: Options
    shard: Any
    scored: Packing
    plan: Plan
    per_segment: frozenset[str] | None
    transform: Transform
    loss_fn: Callable[..., Any] | None = None

    @property
    def open(self) -> Callable[[Tensors], Any]:
        """Makes the logits of the scored tokens."""
        requirements, plan, support = self.requirements, self.plan, self.scored.support
        inputs = requirements.inputs
        if inputs.given:
            kind, overwrites = InPlaceLogits if plan.in_place else GivenLogits, inputs.overwrites
            return partial(
                kind, context=self.context, order=self.scored, overwrites=overwrites
            )
        # A product measures logits of float16, whose gradient is written in float16.
        measured = inputs.rescaled and requirements.backend == "triton"
        make = partial(
            ExpLogits if plan.exp_tiles else LinearLogits,
            context=self.context,
            compute_dtype=requirements.compute_dtype,
            logits_dtype=self.options.logits_dtype,
            fixed=self.fixed,
            measured=measured and self.shard.group is None,
        )
        return make if support is None else lambda tensors: SupportLogits(make(tensors), support)

    @property
    def accumulator(self) -> Callable[[Any], Any]:
        """Makes, of these, what takes their gradient: in blocks of tokens, of given ones in
        tiles."""
        if self.plan.in_place:  # the source has written the gradient already
            return lambda source: source
        if self.requirements.inputs.given:
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
        options, inputs = self.options, self.requirements.inputs
        # Coefficients hold the upstream gradient already.
        final = options.upstream is not None or inputs.scope == "external"
        return GradientBuffers(
            needs_grad=self.requirements.needs_grad,
            accumulate_dtype=options.accumulate_dtype,
            main_grad=options.main_grad,
            direct=final and not inputs.rescaled,
        )

    @property
    def in_one_launch(self) -> bool:
        """Whether the gradient of given logits is known before their statistics, so that one launch
        gives both."""
        written = self.plan.in_place and self.plan.schedule == "one_pass"
        return written and self.groups == (None, None) and self.requirements.slopes

    @property
    def groups(self) -> tuple[Any, ...]:
        """Of the vocabulary's slices, and of segments that run across ranks."""
        return self.shard.group, self.scored.segments.group

    @cached_property
    def packed(self) -> PackedBatch:
        """The batch as terms see it."""
        return self.scored.view(self.batch, self.requirements.wide, self.per_segment)

    @cached_property
    def weighted(self) -> WeightedObjective | ExternalLoss:
        """The objective with a weight for each token. (It is made while the first product runs, and
        holds no call, which holds it.)"""
        scored, batch, vocabulary = self.scored, self.batch, self.shard.vocabulary
        upstream = 1.0 if self.options.upstream is None else self.options.upstream
        if self.loss_fn is not None:
            return ExternalLoss(self.loss_fn, scored, vocabulary, upstream)
        requirements, totals, kinds = self.requirements, batch.totals, self.packed.kinds()
        if totals is None:
            more = batch.segments.group is not None or scored.live is not None
            more |= "prompts" in kinds or torch.bool in (dtype for dtype, _ in kinds.values())
            totals = Totals.of(batch) if more else Totals(len(scored), scored.count)
        weighted = bind(
            requirements.objective, self.packed, totals, vocabulary, requirements.wide,
            upstream=upstream, closed=requirements.slopes, logp_only=self.plan.schedule == "frozen",
        )  # fmt: skip
        if not requirements.inputs.rescaled:
            return weighted
        return weighted.scaled(self.packed.targets.device, partial(slope_of, self.transform))

    @cached_property
    def context(self) -> RowContext:
        """What a source of logits has to know of the tokens."""
        requirements, scored = self.requirements, self.scored
        every_column = self.shard.group is None and scored.live is None
        context = RowContext(
            kernels.load(requirements.backend), scored.targets, self.transform,
            requirements.needs, self.shard, every_column,
        )  # fmt: skip
        teachers, keeps_tiles = requirements.objective.teachers, self.plan.keeps_tiles
        return measuring(context, self.packed, teachers, requirements.wide, keeps_tiles)

    @cached_property
    def tolerance(self) -> Tolerance | None:
        """Leaves further rows out; of no mass at all where that would save no product."""
        if not self.options.gradient_tolerance:
            return None
        share = self.options.gradient_tolerance if self.plan.skip_rows else 0.0
        zero = self.scored.targets.new_zeros((), dtype=torch.float64)
        return Tolerance(share, self.transform, self.shard.vocabulary, zero, zero, zero)

    def unit(self, logp: Tensor, rows: Rows = ALL) -> Tensor:
        """[n] coefficients of a frozen head's dlogp. In float16, where dlogp/dz is small near
        p(y) = 1, they are powers of two of about 1 / (slope (1 - p))."""
        one = torch.ones_like(logp)
        if not self.requirements.inputs.rescaled:
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
        """Fields that the backward pass reads again, and how often each was changed in place.
        (Hooks that move what autograd saves would copy them.)"""
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


# ---------------------------------------------------------------------- making a call


def call_and_tensors(arguments: Arguments) -> tuple[Call, list[Tensor | None]]:
    """The call of a verb, and the tensors of its logits: these, or features and weights pairwise,
    bias."""
    call, hidden, head = call_of(arguments), arguments.values, arguments.head
    if head is None:
        return call, [hidden]
    requirements, scored, shard = call.requirements, call.scored, call.shard
    x = hidden if hidden.dim() == 2 else hidden.flatten(0, -2)  # else autograd gets a step more
    if requirements.compute_dtype is not None:
        x = x.to(requirements.compute_dtype)
    if call.options.sequence_parallel:
        x = shard.gathered(x)
    if scored.index is not None:
        by_position = x.view(*scored.shape, x.shape[1])
        x = Linear.apply(scored.gather, scored.scatter, by_position)
    elif call.plan.exp_tiles and not kernels.suits_product(hidden):
        x = x.clone(memory_format=torch.contiguous_format)
    factors = [(x, head.weight)]
    if head.lora:
        factors = head.factors(x, shard.dropout, call.fixed)
    return call, [*(tensor for pair in factors for tensor in pair), head.bias]


def call_of(arguments: Arguments) -> Call:
    """A call that the ranks of its groups agree on, packed and planned; hidden states may be on the
    meta device. An error waits until all ranks have heard of it."""
    a, batch, options = arguments, arguments.batch, arguments.options
    static = isinstance(options, Options) and options.static
    require = of_given_logits if a.head is None else of_hidden_states
    requirements, error = attempt(None, lambda: require(a))
    packed, error = attempt(
        error, lambda: _packed(batch, options, a.transform, a.group, requirements)
    )
    shard: Any
    if a.group is None:
        shard, error = attempt(error, lambda: WholeVocabulary(requirements.inputs.vocabulary))
    else:
        vocab_size = a.head and a.head.vocab_size
        say = partial(of_vocabulary, a, requirements)
        numbers = partial(agree, "vocab_group", a.group, say, error, static)
        shard, error = attempt(None, lambda: VocabShard(a.group, numbers(), vocab_size, batch))
    plan, error = attempt(error, lambda: plan_of(packed[0], shard, requirements, options))
    across = batch.segments.group if isinstance(batch, Batch) else None
    fields = None
    if across is not None:
        say = partial(of_segments, a, plan, requirements)
        forms = partial(agree, "segments.group", across, say, error, static)
        fields, error = attempt(None, lambda: per_segment(forms()))
    if error is not None:
        raise error
    scored, transform = packed
    call = Call(
        requirements=requirements, batch=batch, options=options, shard=shard, scored=scored,
        plan=plan, per_segment=fields, transform=transform, loss_fn=a.loss_fn,
    )  # fmt: skip
    _ = call.context  # fields of teachers and candidates are checked
    return call


def _packed(
    batch: Batch, options: Options, transform: Transform, group: Any, requirements: Requirements
) -> tuple[Packing, Transform]:
    """The scored tokens, and the transform with their temperatures, [T]. What is wrong with values
    is raised here, before the ranks of a vocabulary's group hear of each other, hence on all."""
    unit = requirements.inputs.segments_per_unit if options.static else None
    vocabulary = requirements.inputs.vocabulary if group is None else torch.inf
    scored = packing_of(batch, vocabulary, unit)
    # A loss that lives elsewhere may read what it likes.
    elsewhere = any(isinstance(t.function, Reads) for _, t in requirements.objective.parts)
    if not (options.static or elsewhere):
        check_masks(batch, requirements.fields, scored, requirements.wide)
    if not isinstance(temperature := transform.temperature, Tensor):
        return scored, transform
    if temperature.shape not in ((), scored.shape):
        raise ValueError(
            f"temperature: got shape {tuple(temperature.shape)}, want a number or one value per "
            f"token, {tuple(scored.shape)}"
        )
    rows = temperature.expand(scored.shape).flatten()
    rows = rows if scored.index is None else rows[scored.index]
    if scored.live is None:
        check_temperatures(rows, scored.index)
    else:  # no division by the 0 of an unscored row
        rows = torch.where(scored.live, rows, 1)
    return scored, replace(transform, temperature=rows.to(requirements.wide))


def plan_of(
    scored: Packing, shard: WholeVocabulary, requirements: Requirements, options: Options
) -> Plan:
    """What runs for the tokens of the call."""
    inputs, support = requirements.inputs, scored.support
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
    return make_plan(inputs, options, requirements.backend)
