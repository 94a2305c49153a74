"""The verbs on a whole objective: `head_loss`, `logits_loss`, `plan`.

N positions, T of them scored, H hidden width, V vocabulary, K terms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .arguments import brief, plain_numbers
from .batch.batch import Batch
from .head.head import Head, check_head
from .kernels.transform import Transform
from .losses.term import Objective, Term
from .objective.elsewhere import READ, loss_elsewhere
from .objective.metrics import Mean, Metrics, Observed, Sum, fold_all
from .objective.statistics import Statistics
from .options import DEFAULT, Options
from .ranks.agreement import in_step
from .ranks.collectives import inside
from .ranks.place import local_head
from .run.calls import Call, given_call, linear_call, linear_plan
from .run.checks import eagerly, outside
from .run.loop import HeadLoss
from .run.plan import Plan
from .run.work import Work

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True, repr=False)
class Output:
    """What `head_loss` returns; `loss` alone carries a gradient.

    Attributes:
        loss: the objective, 0-dim, float32 (float64 for float64 inputs).
        terms: each term's reduced value, without its coefficient and without a gradient: to change
            what is trained, change the objective. `out.loss - 0.5 * out.terms["entropy"]` has the
            gradient of `out.loss`; `objective - 0.5 * hl.entropy()` has the other.
        metrics: measurements by name; empty with `Options(metrics=False)`.
        logps: [..] log-probs of the targets, 0 where unscored.
        entropies: [..] entropies in nats, 0 where unscored; None where nothing asked for them.
        plan: what ran.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    metrics: Metrics
    logps: Tensor
    entropies: Tensor | None
    plan: Plan

    def __repr__(self) -> str:
        """Values of the loss and the terms, which are read from the device; names of metrics."""
        terms = ", ".join(f"{name} {value.item():.6g}" for name, value in self.terms.items())
        per_token = f"logps={brief(self.logps)}, entropies={brief(self.entropies)}"
        return (
            f"Output(loss={self.loss.item():.6g}, terms: {terms}, {per_token},\n"
            f"    metrics: {', '.join(self.metrics)},\n    plan: {self.plan.schedule})"
        )


@eagerly
def head_loss(
    hidden: Tensor,  # [.., H]
    head: Head,
    batch: Batch,
    objective: Term | Objective,
    options: Options | None = None,
) -> Output:
    """An objective on the logits of a linear head, without the logits.

    loss = sum_k c_k sum_t w_kt l_kt, with l_kt a function of the softmax statistics of
    z = head(hidden) at each scored token, and gradients for everything that requires one.

    Args:
        hidden: [.., H] float64, float32, bfloat16 or float16, of the head's dtype (any, under
            autocast).
        head: the weight and what happens to its logits.
        batch: targets [..] and what the terms read.
        objective: terms, e.g. `hl.gspo() + 1e-4 * hl.z_loss()`.
        options: schedule, memory, metrics; see `Options`.

    Returns:
        An `Output`. Call `.loss.backward()` once.

    Raises:
        ValueError, TypeError: for bad input, before any work, naming the argument, what it got and
            what it wanted.
        RuntimeError: a second backward through `loss`; a rank of a process group that failed in the
            middle of a call, on the others: within the group's timeout they are told that the group
            cannot be used any more. Nor can it after an exception that one rank alone caught: such
            an exception carries a note that says so.

    >>> import torch, headloss as hl
    >>> hidden, weight = torch.zeros(3, 4, requires_grad=True), torch.zeros(10, 4)
    >>> batch = hl.Batch(torch.tensor([1, 2, -100]))
    >>> out = hl.head_loss(hidden, hl.Head(weight), batch, hl.cross_entropy())
    >>> print(f"{out.loss.item():.4f}")  # the logarithm of 10: all logits are 0
    2.3026
    """
    if torch.compiler.is_compiling():
        return outside(head_loss)(hidden, head, batch, objective, options)
    check_head(head)
    options = DEFAULT if options is None else options
    head = local_head(head)
    given = (hidden, head, batch, objective, options, "head_loss")
    return in_step(head.vocab_group, batch, lambda: _run(options, linear_call, given))


@eagerly
def logits_loss(
    logits: Tensor,  # [.., V]
    batch: Batch,
    objective: Term | Objective,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_group: ProcessGroup | None = None,
    inplace: bool = False,
    options: Options | None = None,
) -> Output:
    """An objective on logits that exist already; otherwise as `head_loss`.

    Args:
        logits: [.., V] raw logits, any float dtype and layout.
        temperature, softcap, logit_scale: as in `Head`: raw -> scale -> soft cap -> / temperature.
        vocab_group: the logits are this rank's slice of the vocabulary, in rank order.
        inplace: the gradient may overwrite the logits, which hold nothing useful afterwards. For
            float16 logits it is a tensor of its own all the same: it is written in the backward
            pass, where the upstream gradient that it is scaled for is known.

    Returns:
        An `Output`.

    Raises:
        ValueError, TypeError, RuntimeError: as `head_loss`.

    >>> import torch, headloss as hl
    >>> out = hl.logits_loss(torch.zeros(2, 10), hl.Batch(torch.tensor([1, 2])), hl.z_loss())
    >>> print(f"{out.loss.item():.4f}")  # the logarithm of 10, squared
    5.3019
    """
    if torch.compiler.is_compiling():
        given = (temperature, softcap, logit_scale, vocab_group, inplace, options)
        return outside(logits_loss)(logits, batch, objective, *given)
    options = DEFAULT if options is None else options
    transform = Transform(scale=logit_scale, softcap=softcap, temperature=temperature)
    plain_numbers(transform, "scale", "softcap", "temperature")
    given = (logits, batch, objective, transform, vocab_group, inplace, options)
    return in_step(vocab_group, batch, lambda: _run(options, given_call, given))


@eagerly
def plan(
    hidden: Tensor,  # [.., H], may be on the meta device
    head: Head,
    batch: Batch,
    objective: Term | Objective | None,
    options: Options | None = None,
) -> Plan:
    """What `head_loss` would run for these arguments, without running it.

    Args:
        hidden, head, batch, options: as of `head_loss`; tensors may be on the meta device.
        objective: None asks for the plan of `head_stats` with its default gradients.

    Returns:
        A `Plan`: schedule, pieces, bytes, and why.

    Raises:
        ValueError, TypeError: as `head_loss`, for what can be known of shapes and options.

    >>> import torch, headloss as hl
    >>> hidden, head = torch.zeros(6, 4, requires_grad=True), hl.Head(torch.zeros(10, 4))
    >>> hl.plan(hidden, head, hl.Batch(torch.zeros(6).long()), hl.cross_entropy()).schedule
    'one_pass'
    """
    if torch.compiler.is_compiling():
        return outside(plan)(hidden, head, batch, objective, options)
    check_head(head)
    head, options = local_head(head), DEFAULT if options is None else options
    if objective is None:
        objective = loss_elsewhere(frozenset(READ))
    return linear_plan((hidden, head, batch, objective, options, "plan"))


# ---------------------------------------------------------------------- running a call


def without_gradient(*_: Any, **__: Any) -> None:
    """In place of the backward of a term's value."""
    raise RuntimeError(
        "out.terms: carry no gradient, out.loss alone does; a term to be trained belongs into the "
        "objective, with its coefficient: objective + 0.5 * hl.entropy()"
    )


def _run(options: Options, make: Callable[..., Call], *given: Any) -> Output:
    work, tensors = make(*given)
    metrics = Metrics()
    with inside(work.packing.targets.device.type, *work.groups):
        loss, (stats, values, _) = HeadLoss.apply(work, *tensors)
        if options.metrics:
            metrics |= _metrics(work, stats)
            if work.tolerance is not None:
                metrics |= work.tolerance.metrics()
    pairs = zip(work.bound.named, values.to(loss.dtype).unbind(), strict=False)
    terms = {name: value for (name, _), value in pairs}
    for value in terms.values():
        vars(value)["backward"] = without_gradient
    entropies = stats.entropy
    return Output(
        loss=loss,
        terms=terms,
        metrics=metrics,
        logps=work.packing.scatter(stats.logp),
        entropies=None if entropies is None else work.packing.scatter(entropies),
        plan=work.plan,
    )


@torch.no_grad()
def _metrics(work: Work, stats: Statistics) -> Metrics:
    """What every term observes, folded."""
    batch, group = work.batch.on(stats), work.batch.segments.group
    share = 1.0 if group is None else 1 / torch.distributed.get_world_size(group)
    one = torch.ones((), dtype=torch.float64, device=batch.targets.device)
    tokens = one * len(batch) if batch.live is None else batch.live.sum().double()
    metrics = Metrics(tokens=Sum(tokens), segments=Sum(one * batch._count * share))
    # What counts the same tokens, or segments, is folded together: an operation takes its time.
    entropy: Any = {"entropy": Observed(stats.entropy, Mean)}
    shares, together = {"token": 1.0, "segment": share}, {(id(batch.live), "token"): entropy}
    rows = {id(batch.live): batch.live}
    for part in work.bound.parts:
        for per, (values, live) in zip(shares, part.observed(stats, batch), strict=True):
            rows[id(live)] = live
            together.setdefault((id(live), per), {}).update(values)
    for (of, per), values in together.items():
        metrics |= fold_all(values, rows[of], shares[per])
    return metrics
