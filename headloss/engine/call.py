"""One call: from arguments to what the loop runs. It is checked, agreed on between ranks, packed
and planned; and complete when it is made.

N positions, T of them scored, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..batch.batch import Batch
from ..batch.packing import PackedBatch, Packing, packing_of
from ..batch.reduction import Number, Totals
from ..head.head import Head
from ..kernels.transform import Transform
from ..logits.accumulators import (
    BlockAccumulator,
    GradientBuffers,
    HiddenGradient,
    SharedHiddenGradient,
)
from ..logits.given import GivenAccumulator, GivenLogits, InPlaceLogits, LogitsBuffer
from ..logits.linear import ExpLogits, LinearLogits, LogitSource, RowContext
from ..logits.measured_beside import measuring
from ..logits.support import SupportLogits
from ..losses.term import Objective
from ..objective.external import ExternalLoss
from ..objective.tolerance import Tolerance
from ..objective.weighted import WeightedObjective, bind
from ..options import Options
from ..parallel.agreement import agree, attempt
from ..parallel.facts import of_segments, of_vocabulary, per_segment
from ..parallel.layout import VocabLayout
from .checks import HeadLossArguments, LogitsLossArguments, check_masks, check_temperatures
from .gather_rows import GatherRows
from .plan import Plan
from .requirements import Requirements, of_given_logits, of_hidden_states

READ_AGAIN = ("teacher_logits", "teacher_hidden", "teacher_topk_ids", "candidate_ids")
Tensors = Sequence[Tensor | None]  # of a source of logits, in the order of its gradients


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """What the loop needs of a call; a subclass says where its logits come from.

    Attributes:
        requirements: what follows from the arguments, before the batch is packed.
        batch: as given, by position.
        layout: this rank's rows of the whole vocabulary, and the other ranks'.
        scored: the scored tokens, and where in the batch they are.
        per_segment: fields of the batch with one value per segment.
        transform: of raw logits; its temperature is a number or [T].
        loss_fn: somebody else's loss of log-probs and entropies, in place of the objective's.
    """

    requirements: Requirements
    objective: Objective
    batch: Batch
    options: Options
    layout: VocabLayout
    scored: Packing
    plan: Plan
    per_segment: frozenset[str]
    transform: Transform
    loss_fn: Callable[..., Any] | None = None

    def open(self, tensors: Tensors) -> LogitSource:
        """The logits of the scored tokens."""
        raise NotImplementedError

    def accumulator(self, source: Any) -> Any:
        """Takes the logit gradient in blocks of tokens, or of given logits in tiles."""
        raise NotImplementedError

    @property
    def vocabulary(self) -> int:
        """Of the whole model."""
        return self.layout.vocabulary

    @cached_property
    def shard(self) -> Any:
        """This rank's slice of the vocabulary."""
        return self.layout.shard()

    @property
    def groups(self) -> tuple[Any, ...]:
        """Of the vocabulary's slices, and of segments that run across ranks."""
        return self.layout.group, self.scored.segments.group

    @cached_property
    def packed(self) -> PackedBatch:
        """The batch as terms see it."""
        return self.scored.view(self.batch, self.requirements.wide, self.per_segment)

    @cached_property
    def weighted(self) -> WeightedObjective | ExternalLoss:
        """The objective with a weight for each token. (It is made while the first product runs, and
        holds no call, which holds it.)"""
        options, scored, batch, vocabulary = self.options, self.scored, self.batch, self.vocabulary
        if self.loss_fn is not None:
            return ExternalLoss(self.loss_fn, scored, vocabulary, options.upstream)
        requirements, totals = self.requirements, batch.totals
        if totals is None:  # packing may have read them
            known = requirements.counted and scored.live is None
            totals = Totals(len(scored), scored.count) if known else Totals.of(batch)
        weighted = bind(
            self.objective, self.packed, totals, vocabulary, requirements.wide,
            upstream=options.upstream, closed=requirements.slopes,
            logp_only=self.plan.schedule == "frozen",
        )  # fmt: skip
        if not requirements.inputs.rescaled:
            return weighted
        return weighted.scaled(self.packed.targets.device, partial(slope_of, self.transform))

    @cached_property
    def context(self) -> RowContext:
        """What a source of logits has to know of the tokens."""
        requirements, scored = self.requirements, self.scored
        whole = self.layout.group is None and scored.live is None
        context = RowContext(
            requirements.kernels, scored.targets, self.transform, requirements.needs, self.shard,
            self.vocabulary, whole,
        )  # fmt: skip
        if not requirements.beside:
            return context
        return measuring(context, self.packed, self.objective.teachers, requirements.wide)

    @cached_property
    def tolerance(self) -> Tolerance | None:
        """Leaves further rows out; of no mass at all where that would save no product: those of a
        frozen head are made before any coefficient is known."""
        options, plan = self.options, self.plan
        if not options.gradient_tolerance:
            return None
        saves = plan.skip_rows and plan.schedule not in ("frozen", "statistics")
        share = options.gradient_tolerance if saves else 0.0
        zero = self.scored.targets.new_zeros((), dtype=torch.float64)
        return Tolerance(share, self.transform, self.vocabulary, zero)

    @cached_property
    def unit(self) -> Tensor:
        """[T] coefficients of a frozen head's dlogp: about 1 / slope; `sweep` divides by 1 - p."""
        one = torch.ones_like(self.scored.targets, dtype=self.requirements.wide)
        if not self.requirements.inputs.rescaled:
            return one
        return (one / slope_of(self.transform)).abs().clamp(max=1e30).log2().floor().exp2()

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
        if not self.requirements.beside:
            return []
        fields = ((name, self.packed.as_given(name)) for name in READ_AGAIN)
        return [(n, t, t._version) for n, t in fields if t is not None and not t.is_inference()]


C = TypeVar("C", bound=Call)


class LinearCall(Call):
    """Of hidden states and a head."""

    def open(self, tensors: Tensors) -> LinearLogits:
        requirements, options = self.requirements, self.options
        # A product measures logits of float16, whose gradient is written in float16.
        measured = requirements.inputs.rescaled and requirements.backend == "triton"
        source = (ExpLogits if self.plan.exp_tiles else LinearLogits)(
            tensors,
            self.context,
            compute_dtype=requirements.compute_dtype,
            logits_dtype=options.logits_dtype,
            fixed=requirements.fixed_product(options),
            measured=measured and self.layout.group is None,
        )
        support = self.scored.support
        return source if support is None else SupportLogits(source, support)

    @property
    def buffers(self) -> GradientBuffers:
        """Where the gradients of features and weights are added up."""
        options, inputs, shard = self.options, self.requirements.inputs, self.shard
        # Coefficients hold the upstream gradient already.
        final = options.upstream is not None or inputs.scope == "external"
        shared = partial(SharedHiddenGradient, shard)
        return GradientBuffers(
            needs_grad=self.requirements.needs_grad,
            accumulate_dtype=options.accumulate_dtype,
            main_grad=options.main_grad,
            direct=final and not inputs.rescaled,
            hidden=HiddenGradient if self.layout.group is None else shared,
        )

    def accumulator(self, source: LinearLogits) -> BlockAccumulator:
        return BlockAccumulator(source, self.buffers, self.plan.chunks, self.plan.single_block)


class GivenCall(Call):
    """Of logits that exist already."""

    @cached_property
    def buffer(self) -> LogitsBuffer:
        return LogitsBuffer(self.scored.order, self.requirements.inputs.overwrites)

    @property
    def in_one_launch(self) -> bool:
        """Whether the gradient is known before the statistics, so that one launch gives both."""
        plan, alone = self.plan, self.groups == (None, None)
        inside = plan.in_place and plan.schedule == "one_pass"
        return alone and inside and self.requirements.slopes

    def open(self, tensors: Tensors) -> GivenLogits:
        index = self.scored.index
        if self.plan.in_place:
            return InPlaceLogits(tensors, self.context, index=index, buffer=self.buffer)
        return GivenLogits(tensors, self.context, index=index)

    def accumulator(self, source: GivenLogits) -> Any:
        if isinstance(source, InPlaceLogits):
            return source  # which has written the gradient already
        return GivenAccumulator(source, self.buffer)


def slope_of(transform: Transform, teacher: object = None) -> Number:
    """Of the logits that a term (with this teacher) sees over the raw ones."""
    return transform.scale / getattr(teacher, "temperature", transform.temperature)


# ---------------------------------------------------------------------- making a call


def linear_call(
    arguments: HeadLossArguments, loss_fn: Callable[..., Any] | None = None
) -> tuple[LinearCall, list[Tensor | None]]:
    """The call that `head_loss` makes of its arguments, and the tensors of its logits: features and
    weights pairwise, bias."""
    hidden, head, _, _, options, _ = arguments
    call = linear_plan(arguments, loss_fn)
    requirements, scored, shard = call.requirements, call.scored, call.shard
    x = hidden if hidden.dim() == 2 else hidden.flatten(0, -2)  # else autograd gets a step more
    if requirements.compute_dtype is not None:
        x = x.to(requirements.compute_dtype)
    if options.sequence_parallel:
        x = shard.gathered(x)
    if scored.index is not None:
        x = GatherRows.apply(x, scored.index, scored.live)
    elif call.plan.exp_tiles and not requirements.readable:
        x = x.clone(memory_format=torch.contiguous_format)
    if not head.lora:
        return call, [x, head.weight, head.bias]
    factors = shard.factors(head, x, requirements.fixed_product(options))
    return call, [*(tensor for pair in factors for tensor in pair), head.bias]


def linear_plan(
    arguments: HeadLossArguments, loss_fn: Callable[..., Any] | None = None
) -> LinearCall:
    """The same before a hidden state is looked at: they may be on the meta device."""
    hidden, head, batch, _, options, _ = arguments
    transform = Transform(
        scale=head.logit_scale, softcap=head.softcap, temperature=head.temperature
    )
    ready, error = attempt(None, of_hidden_states, arguments)
    given = hidden, head, batch, options, transform, head.vocab_group
    return _agreed(LinearCall, ready, error, *given, loss_fn)


def given_call(arguments: LogitsLossArguments) -> tuple[GivenCall, list[Tensor | None]]:
    """The call that `logits_loss` makes of its arguments, and its tensor."""
    logits, batch, _, transform, group, _, options = arguments
    ready, error = attempt(None, of_given_logits, arguments)
    given = logits, None, batch, options, transform, group
    return _agreed(GivenCall, ready, error, *given), [logits]


def _agreed(
    kind: type[C], ready: tuple[Requirements, Objective], error: Exception | None, value: Tensor,
    head: Head | None, batch: Batch, options: Options, transform: Transform, group: Any,
    loss_fn: Callable[..., Any] | None = None
) -> C:
    """A call that the ranks of its groups agree on, packed and planned. An error waits until all of
    them have heard of it.

    Args:
        value: hidden states, or (without a head) logits.
    """
    static = isinstance(options, Options) and options.static
    if group is None:
        layout, error = attempt(
            error, lambda: VocabLayout(head.vocabulary if head else value.shape[-1])
        )
    else:
        facts, error = attempt(
            error, lambda: of_vocabulary(value, head, transform, batch, options, *ready)
        )
        said, error = agree("vocab_group", group, facts, error, static)
        scored_rows = head and head.vocab_size
        layout, error = attempt(error, lambda: VocabLayout.of(group, said, scored_rows))
    made, error = attempt(error, lambda: _planned(batch, options, transform, layout, *ready))
    over = batch.segments.group if isinstance(batch, Batch) else None
    fields = None
    if over is not None:
        facts, error = attempt(error, lambda: of_segments(batch, options, made[1], *ready))
        said, error = agree("segments.group", over, facts, error, static)
        fields, error = attempt(error, lambda: per_segment(said))
    if error is not None:
        raise error
    requirements, objective = ready
    scored, plan, transform = made
    call = kind(
        requirements=requirements,
        objective=objective,
        batch=batch,
        options=options,
        layout=layout,
        scored=scored,
        plan=plan,
        per_segment=requirements.per_segment if fields is None else fields,
        transform=transform,
        loss_fn=loss_fn,
    )
    _ = call.context  # fields of teachers and candidates are checked
    return call


def _planned(
    batch: Batch, options: Options, transform: Transform, layout: VocabLayout,
    requirements: Requirements, objective: Objective
) -> tuple[Packing, Plan, Transform]:
    """The scored tokens, the plan, and the transform with their temperatures."""
    unit = requirements.inputs.segments_per_unit
    scored = packing_of(batch, layout.vocabulary, options.static, unit)
    layout.check_batch(batch, options.sequence_parallel)
    if requirements.masks and not options.static:
        check_masks(batch, requirements.masks, scored.view(batch, requirements.wide))
    plan = requirements.plan(options, scored, layout)
    if isinstance(transform.temperature, Tensor):
        transform = _of_tokens(transform, batch, scored, requirements.wide)
    return scored, plan, transform


def _of_tokens(
    transform: Transform, batch: Batch, scored: Packing, wide: torch.dtype
) -> Transform:
    """With the temperatures of the scored tokens."""
    temperature = transform.temperature
    assert isinstance(temperature, Tensor)
    if temperature.dim() == 0:
        rows = temperature.expand(len(scored))
    elif temperature.shape != batch.targets.shape:
        raise ValueError(
            f"temperature: got shape {tuple(temperature.shape)}, want a number or one value per "
            f"token, {tuple(batch.targets.shape)}"
        )
    else:
        rows = temperature.reshape(-1)
        rows = rows if scored.index is None else rows[scored.index]
    if scored.live is not None:  # else a division by the 0 of an unscored row
        rows = torch.where(scored.live, rows, 1)
    else:
        check_temperatures(rows, scored.index)
    return replace(transform, temperature=rows.to(wide))
