"""Public functions of a whole objective: `head_loss`, `logits_loss`, `plan`.

N positions, T scored positions, H hidden width, V vocabulary, K terms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .arguments import brief, plain_numbers
from .batch.batch import Batch
from .batch.packing import PackedBatch, scattered
from .batch.survey import versions
from .collectives import inside
from .engine.autograd import HeadLoss
from .engine.call import Call, call_and_tensors, call_of
from .engine.checks import Arguments
from .engine.plan import Plan
from .head.head import Head
from .kernels.transform import Transform
from .losses.term import Objective, Term
from .objective.external import HEAD_STATISTICS, external_loss
from .objective.tolerance import Tolerance
from .objective.weighted import WeightedTerm
from .options import DEFAULT, Options
from .private import break_graph
from .statistics.metrics import Mean, Metrics, Observed, Sum, fold_all
from .statistics.softmax import Statistics

Verb = TypeVar("Verb", bound=Callable[..., Any])
UNCOMPILED = (
    "headloss: this verb reads the device and plans, so it breaks the graph: compile with "
    "fullgraph=False, or call headloss.head_stats, which does not"
)


@dataclass(frozen=True, kw_only=True, repr=False)
class Output:
    """The result of `head_loss`; only `loss` has a gradient.

    Log-probs, entropies and metrics are computed on first access, because most training steps read
    only the loss. `Options(static=True)` computes log-probs, entropies and metrics within the call.

    Attributes:
        loss: the objective's value, 0-dim, float32 (float64 for float64 inputs).
        terms: each term's reduced value, without the term's coefficient and without a gradient. To
            train another loss, change the objective: `out.loss - 0.5 * out.terms["entropy"]` has
            the gradient of `out.loss` alone; `objective - 0.5 * hl.entropy()` also trains the
            entropy.
        plan: the `Plan` that ran.
        per_token: [..] values by the names of `Options(per_token=...)`, without a gradient; 0 at
            unscored positions and at tokens that a term's `.where(field)` excludes.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    plan: Plan
    per_token: dict[str, Tensor]
    _stats: Statistics = field(compare=False)
    _scatter: Callable[[Tensor], Tensor] = field(compare=False)
    _measure: Callable[[], Metrics] = field(compare=False)

    @cached_property
    def logps(self) -> Tensor:
        """[..] log-probs of the targets, 0 at unscored positions."""
        return self._scatter(self._stats.logp)

    @cached_property
    def entropies(self) -> Tensor | None:
        """[..] entropies in nats, 0 at unscored positions; None if neither the loss nor the metrics
        need entropies."""
        entropy = self._stats.entropy
        return None if entropy is None else self._scatter(entropy)

    @cached_property
    def metrics(self) -> Metrics:
        """Measurements by name; empty with `Options(metrics=False)`. RuntimeError if the batch was
        changed in place between the call of `head_loss` and the first access to
        `Output.metrics`."""
        metrics = self._measure()
        # Replace the function `_measure`, whose closure would keep the batch alive.
        vars(self)["_measure"] = lambda: metrics
        return metrics

    def __getstate__(self) -> dict[str, object]:
        """Return the state for copies and pickles, with the values of metrics in place of the
        function that computes metrics."""
        return {**vars(self), "metrics": self.metrics, "_measure": Metrics}

    def __repr__(self) -> str:
        """Return a text with the values of the loss and of each loss term, read from the device,
        and with the names of the metrics."""
        terms = ", ".join(f"{name} {value.item():.6g}" for name, value in self.terms.items())
        per_token = f"logps={brief(self.logps)}, entropies={brief(self.entropies)}"
        return (
            f"Output(loss={self.loss.item():.6g}, terms: {terms}, {per_token},\n"
            f"    metrics: {', '.join(self.metrics)},\n    plan: {self.plan.schedule})"
        )


# FSDP2 (torch 2.10 and 2.11) and DDP register backward hooks on the output tensors that they find
# in pytree nodes. If `Output` were no pytree node, the hooks of FSDP2 and DDP would not run, and no
# parameter would be trained.
torch.export.register_dataclass(Output)


def eagerly(verb: Verb) -> Verb:
    """Run a public function outside of a graph that is being compiled; under fullgraph=True, raise
    an error that gives the reason."""

    @wraps(verb)
    def run(*arguments: Any, **options: Any) -> Any:
        # Do not decorate with torch.compiler.disable at import, which would import the compiler.
        if torch.compiler.is_compiling():
            return torch.compiler.disable(verb)(*arguments, **options)
        return verb(*arguments, **options)

    break_graph(run, UNCOMPILED)
    return cast(Verb, run)


@eagerly
def head_loss(
    hidden: Tensor,  # [.., H]
    head: Head,
    batch: Batch,
    objective: Term | Objective,
    options: Options | None = None,
) -> Output:
    """Compute an objective on the logits of a linear head, without storing the logits.

    Shapes: hidden [.., H], head.weight [V, H] and batch.targets [..], say [T] or [B, T]; the loss
    is 0-dim, log-probs are [..].

    loss = sum_k c_k sum_t w_kt l_kt, with l_kt a function of the softmax statistics of z =
    head(hidden) at each scored token. Every input that requires a gradient receives its gradient.

    Args:
        hidden: [.., H] float64, float32, bfloat16 or float16, of the head's dtype (of any of these
            dtypes under autocast).
        head: the weight and the transform of the logits (scale, soft cap, temperature).
        batch: targets [..] and the fields that the terms read.
        objective: a sum of loss terms, such as `hl.gspo() + 1e-4 * hl.z_loss()`.
        options: schedule, memory, metrics; see `Options`.

    Returns:
        An `Output`. Call `.loss.backward()` once.

    Raises:
        ValueError, TypeError: for bad input, before any computation; the message names the
            argument, the given value and the wanted value.
        RuntimeError: a second backward through `loss`; a failure of another rank in the middle of a
            call, within the group's timeout. After an exception on a single rank, the process group
            cannot be used any more, as a note on the exception explains.

    >>> import torch, headloss as hl
    >>> hidden, weight = torch.zeros(3, 4, requires_grad=True), torch.zeros(10, 4)
    >>> batch = hl.Batch(torch.tensor([1, 2, -100]))
    >>> out = hl.head_loss(hidden, hl.Head(weight), batch, hl.cross_entropy())
    >>> print(f"{out.loss.item():.4f}")  # the logarithm of 10: all logits are 0
    2.3026
    >>> out.loss.backward()
    >>> [list(x.shape) for x in (out.logps, hidden.grad)]
    [[3], [3, 4]]
    """
    return _run(Arguments.of_head, "head_loss", hidden, head, batch, objective, options)


@eagerly
def logits_loss(
    logits: Tensor,  # [.., V]
    batch: Batch,
    objective: Term | Objective,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_group: torch.distributed.ProcessGroup | None = None,
    inplace: bool = False,
    options: Options | None = None,
) -> Output:
    """Compute an objective on given logits instead of hidden states and a head, like `head_loss`.

    Shapes: logits [.., V] and batch.targets [..]; the loss is 0-dim, log-probs are [..].

    Args:
        logits: [.., V] raw logits, any float dtype and layout.
        temperature, softcap, logit_scale: as in `Head`; raw logits are scaled, then soft-capped,
            then divided by the temperature.
        vocab_group: process group over whose ranks the vocabulary is sharded, in rank order;
            `logits` are this rank's vocabulary shard.
        inplace: True lets the gradient overwrite the logits, whose memory then no longer holds
            logits. For float16 logits the gradient is a separate tensor, scaled for the upstream
            gradient.

    Returns:
        An `Output`.

    Raises:
        ValueError, TypeError, RuntimeError: as `head_loss`.

    >>> import torch, headloss as hl
    >>> out = hl.logits_loss(torch.zeros(2, 10), hl.Batch(torch.tensor([1, 2])), hl.z_loss())
    >>> print(f"{out.loss.item():.4f}")  # the logarithm of 10, squared
    5.3019
    """
    transform = Transform(scale=logit_scale, softcap=softcap, temperature=temperature)
    plain_numbers(transform, "scale", "softcap", "temperature")
    return _run(
        Arguments,
        verb="logits_loss",
        tensor=logits,
        batch=batch,
        terms=objective,
        transform=transform,
        options=DEFAULT if options is None else options,
        group=vocab_group,
        inplace=inplace,
    )


@eagerly
def plan(
    hidden: Tensor,  # Hidden states [.., H]; a tensor on the meta device is allowed.
    head: Head,
    batch: Batch,
    objective: Term | Objective | None,
    options: Options | None = None,
) -> Plan:
    """Return the plan of `head_loss` for given arguments, without running `head_loss`.

    Shapes: hidden [.., H], head.weight [V, H] and batch.targets [..], as for `head_loss`.

    Args:
        hidden, head, batch, options: as for `head_loss`; hidden states and the head may be on the
            meta device.
        objective: an objective as for `head_loss`; if None, the function returns the plan of
            `head_stats` (with the default `gradients`).

    Returns:
        A `Plan`: schedule, chunks, tiles, bytes, and the reason for the schedule.

    Raises:
        ValueError, TypeError: as `head_loss`, for errors visible in shapes and options alone.

    >>> import torch, headloss as hl
    >>> hidden, head = torch.zeros(6, 4, requires_grad=True), hl.Head(torch.zeros(10, 4))
    >>> hl.plan(hidden, head, hl.Batch(torch.zeros(6).long()), hl.cross_entropy()).schedule
    'one_pass'
    """
    terms = external_loss(frozenset(HEAD_STATISTICS)) if objective is None else objective
    return call_of(Arguments.of_head("plan", hidden, head, batch, terms, options)).plan


def without_gradient(*_: object, **__: object) -> None:
    """Raise the error for `.backward()` on a value of `out.terms`, which has no gradient."""
    raise RuntimeError(
        "out.terms: carry no gradient, out.loss alone does; a term to be trained belongs into the "
        "objective, with its coefficient: objective + 0.5 * hl.entropy()"
    )


def _run(make: Callable[..., Arguments], *arguments: Any, **named: Any) -> Output:
    call, tensors = call_and_tensors(make(*arguments, **named))
    with inside(call.packed.targets.device.type, *call.groups):
        loss, (stats, shares, weighted) = HeadLoss.apply(call, *tensors)
        measure = _measure_of(call, weighted.parts, stats) if call.options.metrics else Metrics
    pairs = zip(weighted.named, shares.to(loss.dtype).unbind(), strict=False)
    terms = {name: value for (name, _), value in pairs}
    for value in terms.values():
        vars(value)["backward"] = without_gradient
    scored = call.scored
    output = Output(
        loss=loss,
        terms=terms,
        plan=call.plan,
        per_token=_per_token(call, weighted.parts, stats) if call.options.per_token else {},
        _stats=stats,
        _scatter=partial(scattered, shape=scored.shape, index=scored.index, live=scored.live),
        _measure=measure,
    )
    if call.options.static:
        _ = output.logps, output.entropies
    return output


@torch.no_grad()
def _per_token(call: Call, parts: tuple[WeightedTerm, ...], stats: Statistics) -> dict[str, Tensor]:
    """Return the [..] values that `options.per_token` names, in the order of those names."""
    values = {"top1": stats.top1}
    batch = call.packed.on(stats)
    for part in parts:
        values |= part.per_token(stats, batch)
    return {name: call.scored.scatter(values[name]) for name in call.options.per_token}


def _measure_of(
    call: Call, parts: tuple[WeightedTerm, ...], stats: Statistics
) -> Callable[[], Metrics]:
    """Return a function without arguments that returns the call's metrics.

    Metrics are computed at once if a term is a user's code, if storing their inputs would keep
    tensors larger than [T] vectors alive, or if a change of the batch could not be detected; else
    on first access.
    """
    measure = partial(_metrics, parts, call.packed.on(stats), stats, call.tolerance)
    batch = call.requirements.batch
    pure = all(part.term.is_own for part in parts)
    read = batch.targets, batch.segments.ids, *batch.fields.values()
    tensors = [value for value in read if isinstance(value, Tensor)]
    vectors = not any(more for _, more in call.requirements.kinds.values())
    later = pure and vectors and not (call.options.static or batch.segments.group)
    before = versions(tensors)
    if not later or before is None:
        return partial(Metrics, measure())

    def unless_changed() -> Metrics:
        if versions(tensors) != before:
            raise RuntimeError(
                "out.metrics: the batch was changed in place since the call; read metrics before, "
                "or give the batch a clone"
            )
        return measure()

    return unless_changed


@torch.no_grad()
def _metrics(
    parts: tuple[WeightedTerm, ...],
    batch: PackedBatch,
    stats: Statistics,
    tolerance: Tolerance | None,
) -> Metrics:
    """Return the metrics of all terms (reported values, reduced over tokens or segments), and the
    number of tokens that `Options.gradient_tolerance` left out of the backward matmuls."""
    group = batch.segments.group
    share = 1.0 if group is None else 1 / torch.distributed.get_world_size(group)
    one = torch.ones((), dtype=torch.float64, device=batch.targets.device)
    tokens = one * len(batch) if batch.live is None else batch.live.sum().double()
    metrics = Metrics(tokens=Sum(tokens), segments=Sum(one * batch._count * share))
    metrics |= fold_all({"entropy": Observed(stats.entropy, Mean)}, batch.live)
    for part in parts:
        metrics |= part.metrics(stats, batch, share)
    return metrics if tolerance is None else Metrics(metrics | tolerance.metrics())
