"""Losses and metrics of speculators' draft models, computed from hidden states without logits.

`install()` replaces the losses of EAGLE-3, P-EAGLE, DFlash and DSpark, while speculators still
reduces the losses and computes metrics. `uninstall()` restores speculators' losses.

During a training forward the heads of draft and verifier return their inputs. speculators'
`compute_metrics`, which reduces row losses to one loss, is called twice. The first
`compute_metrics` call gives the derivative of the reduced loss with respect to each row's loss. One
headloss call computes the row losses, each weighted by the derivative of the reduced loss with
respect to the row's loss. In its second call, `compute_metrics` gets the row losses that headloss
computed, and returns speculators' metrics. All steps of EAGLE-3 share one headloss call, after the
last step.

T positions, n rows of a loss, S unrolled steps, H hidden width, r rank of a Markov head, V draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..head_loss import Output
from ..head_topk import head_topk
from .drafts import VALUES, DraftHeads, bound_arguments
from .seams import Seams, part

PACKAGE = "speculators"
CLASSES = {
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
}
FUSED, EAGER = "_FUSED_LOSS_FN_MAP", "_EAGER_LOSS_FN_MAP"
LOSSES = "speculators.losses.utils"


def install() -> None:
    """Replace speculators' losses by headloss's in this process, until `uninstall()`.

    Raises:
        RuntimeError: a replaced class or function is missing, or has unexpected arguments.
    """
    SEAMS.install()


# ---------------------------------------------------------------------- a model's forward


class Forward(DraftHeads):
    """State of one training forward of a draft model."""

    def __init__(self, model: Any) -> None:
        markov = getattr(model, "markov_head", None)
        of_markov = None if markov is None else markov.markov_w2
        super().__init__(model.lm_head, model.verifier_lm_head, of_markov)
        # The verifier's hidden states, and the likeliest ids at the verifier's hidden states.
        self._targets: tuple[Tensor, Tensor] | None = None
        # For each EAGLE-3 step, the arguments of `compute_metrics`; the argument `logits` holds
        # hidden states.
        self.steps: list[dict[str, Any]] = []

    def targets(self, states: Tensor) -> Tensor:
        """Return the verifier's likeliest ids [1, T], computed once for all steps of a forward."""
        if self._targets is None or self._targets[0] is not states:
            self._targets = states, self.likeliest(states).ids.squeeze(-1)
        return self._targets[1]


class DraftTokens(Sequence[Tensor]):
    """The draft's likeliest ids [1, T] of each unrolled step, computed when a step is read."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def __len__(self) -> int:
        return len(self.forward.steps)

    def __getitem__(self, step: Any) -> Any:
        if isinstance(step, slice):
            return [self[i] for i in range(len(self))[step]]
        states = self.forward.steps[step]["logits"].detach()
        return head_topk(states, self.forward.heads(states.dtype)[0], 1).ids.squeeze(-1)


CURRENT: ContextVar[Forward | None] = ContextVar("headloss_speculators", default=None)


def _forward_of(kind: str) -> Callable[..., Any]:
    at = (f"{_core(kind)}:{CLASSES[kind]}", "forward")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        theirs = SEAMS.theirs[at]
        arguments = bound_arguments(theirs, (self, *args), kwargs)
        # Without the verifier's states, no loss is computed.
        if arguments["verifier_last_hidden_states"] is None:
            return theirs(self, *args, **kwargs)
        call = Forward(self)
        before = CURRENT.set(call)
        try:
            with call.returning_states():
                tokens, loss, metrics = theirs(self, *args, **kwargs)
        finally:
            CURRENT.reset(before)
        if not call.steps:
            return tokens, loss, metrics
        loss, own = _fused(kind, call.steps, call)
        return DraftTokens(call), loss, own | metrics | {"loss_sum": loss.detach().clone()}

    return forward


# ---------------------------------------------------------------------- losses and metrics


def _metrics_of(kind: str) -> Callable[..., Any]:
    at = (_core(kind), "compute_metrics")

    def compute_metrics(*args: Any, **kwargs: Any) -> Any:
        theirs, forward = SEAMS.theirs[at], CURRENT.get()
        if forward is None:  # `compute_metrics` was called outside a draft model's forward.
            return theirs(*args, **kwargs)
        arguments = bound_arguments(theirs, args, kwargs)
        if kind == "eagle3":  # After the last EAGLE-3 step, one call computes all steps' losses.
            forward.steps.append(arguments)
            return arguments["logits"].new_zeros((), dtype=torch.float32), {}
        return _fused(kind, [arguments], forward)

    return compute_metrics


@dataclass(frozen=True)
class Rows:
    """Hidden states of draft and verifier for a loss, and a mask of the rows that the loss
    reads."""

    # The draft's n hidden states (width H), each followed by the Markov head's r inputs: [1, n, H +
    # r]. For S unrolled steps of EAGLE-3 on T positions, the draft's hidden states [1, T, S, H].
    hidden: Tensor
    # The verifier's hidden states: [1, n, H] for n rows of the draft, or [T, H] for EAGLE-3 on T
    # positions.
    verifier: Tensor
    targets: Tensor  # The verifier's likeliest ids, [1, n] or [1, T, S].
    read: Tensor  # Bool mask in the shape of `targets`.
    # Index of the verifier's row for each draft row, in the shape of `targets`; None if draft row i
    # belongs to verifier row i.
    index: Tensor | None = None
    # For each `compute_metrics` call, an index that selects the call's rows.
    parts: tuple[Any, ...] = (...,)


def _unrolled(steps: list[dict[str, Any]], forward: Forward) -> Rows:
    """Return the draft rows of all EAGLE-3 steps, and for each draft row the index of the
    verifier's row that predicts the same token.

    Draft row j of EAGLE-3's step i belongs to the verifier's row i + j.
    """
    states = steps[0]["targets"]
    length, count = states.shape[1], len(steps)
    hidden, read = [], []
    for step, arguments in enumerate(steps):
        kept = length - step
        hidden.append(F.pad(arguments["logits"][:, :kept], (0, 0, step, 0)))
        mask, before = arguments["loss_mask"], arguments["prev_correct"]
        alive = torch.ones(1, kept, dtype=torch.bool, device=states.device)
        # `prev_correct` is 0 where the draft model's token of an earlier step was wrong.
        if mask is not None:
            alive = (mask[:, step:] > 0) | (False if before is None else before[:, :kept] > 0)
        read.append(F.pad(alive, (step, 0)))
    targets = forward.targets(states)[..., None].expand(-1, -1, count)
    index = torch.arange(length, device=states.device)[None, :, None].expand_as(targets)
    parts = tuple((slice(None), slice(step, None), step) for step in range(count))
    return Rows(torch.stack(hidden, 2), states[0], targets, torch.stack(read, 2), index, parts)


def _sampled(calls: list[dict[str, Any]], forward: Forward) -> Rows:
    (arguments,) = calls
    states = arguments["targets"]
    read = arguments["loss_mask"][:, arguments["anchor_pos"] + arguments["depth"]] > 0
    return Rows(arguments["logits"], states, forward.targets(states), read)


def _blocks(calls: list[dict[str, Any]], forward: Forward) -> Rows:
    (arguments,) = calls
    states = arguments["targets"]
    read = arguments["loss_mask"] > 0
    return Rows(arguments["logits"], states, forward.targets(states), read)


ROWS = {"eagle3": _unrolled, "peagle": _sampled, "dflash": _blocks, "dspark": _blocks}


def _outside_graphs(
    kind: str, calls: list[dict[str, Any]], forward: Forward
) -> tuple[Tensor, dict[str, Any]]:
    """Return loss and metrics of several `compute_metrics` calls, from one headloss call."""
    theirs = SEAMS.theirs[_core(kind), "compute_metrics"]
    rows: Rows = ROWS[kind](calls, forward)
    config = _config(calls[0]["loss_config"])
    values = dict.fromkeys((f"{name}/value" for name in config), rows.read.float() * 0)
    # D-PACE computes its weights from the losses.
    if calls[0].get("per_position_loss_weight") == "dpace":
        ones = dict.fromkeys(config, torch.ones_like(rows.read))
        with torch.no_grad():
            values = _loss(rows, forward, ones, acceptance=False).per_token
    slopes = {name: rows.read.float() * 0 for name in config}
    for arguments, some in zip(calls, rows.parts, strict=True):
        leaves = {name: values[f"{name}/value"][some] for name in config}
        for name, slope in _slopes(theirs, arguments, config, leaves).items():
            slopes[name][some] = slope
    out = _loss(rows, forward, slopes, acceptance="tv_loss_fn" in calls[0])
    loss: Tensor = out.loss - out.loss.detach()
    metrics: dict[str, Any] = {}
    for arguments, some in zip(calls, rows.parts, strict=True):
        of_call_rows = {name: value[some] for name, value in out.per_token.items()}
        of_call, own = _called(theirs, arguments, config, of_call_rows)
        loss = loss + of_call
        metrics |= own
    return loss, metrics


_fused: Any = torch.compiler.disable(_outside_graphs)


def _config(loss_config: dict[str, Any] | None) -> dict[str, Any]:
    """Return the configured losses by name, each with speculators' loss function and weight."""
    theirs = [part(PACKAGE, LOSSES, maps) for maps in (FUSED, EAGER)]
    config = {"kl_div": (theirs[0]["kl_div"], 1.0)} if loss_config is None else loss_config
    for name, (function, _) in config.items():
        if name not in VALUES or function not in [functions.get(name) for functions in theirs]:
            raise ValueError(
                f"loss_config[{name!r}]: got {function}, want speculators' own function of one of "
                f"{', '.join(VALUES)}; headloss.integrations.speculators.uninstall() runs others"
            )
    return config


def _loss(rows: Rows, forward: Forward, slopes: dict[str, Tensor], acceptance: bool) -> Output:
    """Return the weighted sum of all losses over all rows; `slopes` are the weights."""
    targets = rows.targets.masked_fill(~rows.read, -100)
    fields = {} if rows.index is None else {"teacher_index": rows.index}
    return forward.losses(rows.hidden, targets, slopes, rows.verifier, acceptance, **fields)


def _slopes(
    theirs: Callable[..., Any],
    arguments: dict[str, Any],
    config: dict[str, Any],
    values: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Return, for each loss by name, the derivative of speculators' reduced loss with respect to
    each row's loss, [1, n]."""
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    alone: dict[str, Any] = dict(arguments)
    if "confidence_logits" in alone:
        alone["confidence_logits"] = None
    if alone.get("prev_correct") is not None:
        # Clone `prev_correct`, because `compute_metrics` writes to it.
        alone["prev_correct"] = alone["prev_correct"].clone()
    with torch.enable_grad():
        losses = {f"{name}/value": leaf for name, leaf in leaves.items()}
        loss, _ = _called(theirs, alone, config, losses)
        slopes = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, slopes, strict=True))


def _called(
    theirs: Callable[..., Any],
    arguments: dict[str, Any],
    config: dict[str, Any],
    values: dict[str, Tensor],
) -> tuple[Tensor, dict[str, Any]]:
    """Return the result of speculators' `compute_metrics`, called with row losses computed before.

    In place of logits over the vocabulary, `compute_metrics` gets logits of two made-up tokens, 0
    and 1. The verifier's made-up logits prefer token 0; the draft's made-up logits prefer token 0
    in rows where draft and verifier agree on the likeliest token, and token 1 elsewhere.
    """
    first = next(iter(values.values()))
    agreed = values.get("top1", torch.zeros_like(first))
    positions = arguments["logits"].shape[1]
    agreed = F.pad(agreed, (0, positions - agreed.shape[1]))
    losses = {
        name: (_constant(values[f"{name}/value"]), weight) for name, (_, weight) in config.items()
    }
    replaced: dict[str, Any] = {
        "logits": torch.stack([agreed, 1 - agreed], -1),
        "targets": torch.tensor([1.0, 0.0], device=agreed.device).expand(1, positions, 2),
        "loss_config": losses,
    }
    if "tv_loss_fn" in arguments:
        acceptance = next((v for k, v in values.items() if k.endswith("/acceptance")), agreed)
        replaced["tv_loss_fn"] = _constant(1 - acceptance)
    return theirs(**arguments | replaced)


def _constant(values: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, targets: values


def _core(kind: str) -> str:
    return f"speculators.models.{kind}.core"


FORWARDS = {
    (f"{_core(kind)}:{name}", "forward"): _forward_of(kind) for kind, name in CLASSES.items()
}
METRICS = {(_core(kind), "compute_metrics"): _metrics_of(kind) for kind in CLASSES}
SEAMS = Seams(
    FORWARDS | METRICS,
    PACKAGE,
    arguments=dict.fromkeys(FORWARDS, ("verifier_last_hidden_states",))
    | dict.fromkeys(METRICS, ("logits", "targets", "loss_mask", "loss_config")),
)
uninstall, check = SEAMS.uninstall, SEAMS.check
