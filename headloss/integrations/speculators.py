"""Losses and metrics of speculators' draft models from hidden states, without any logits.

    install()       EAGLE-3, P-EAGLE, DFlash and DSpark; reductions and metrics stay speculators'
    uninstall()     speculators is as it was

During a training forward the heads of draft and verifier return their inputs, and `compute_metrics`
is called twice: with the hidden states, to differentiate its reduction with respect to each row's
loss, and with the values of these losses, for the metrics. In between, one call of headloss has the
reduction's slopes for the rows' weights.

T positions, n rows of a loss, H hidden width, r rank of a Markov head, V draft vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..batch.batch import Batch
from ..batch.reduction import Totals, token_mean
from ..head.head import Head
from ..head_loss import Output, head_loss
from ..head_topk import head_topk
from ..losses.teacher import teacher
from ..losses.term import Term
from ..options import Options
from ..statistics.metrics import Observed
from .seams import Seams, misfit, part, require_arguments

PACKAGE = "speculators"
CLASSES = {
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
}
FUSED, EAGER = "_FUSED_LOSS_FN_MAP", "_EAGER_LOSS_FN_MAP"
LOSSES = "speculators.losses.utils"


def _lk_hybrid(stats: Any) -> Tensor:
    share = (-3.0 * stats.acceptance.detach()).exp()  # the eta of speculators' own functions
    forward, distance = stats.divergence("forward_kl"), stats.divergence("total_variation")
    return share * forward + (1 - share) * distance


# [T] losses of rows by speculators' names; "nla" without the clamp at an acceptance of 1e-5.
VALUES: dict[str, Callable[[Any], Tensor]] = {
    "kl_div": lambda stats: stats.divergence("forward_kl"),
    "rkl": lambda stats: stats.divergence("reverse_kl"),
    "jsd": lambda stats: stats.divergence("js"),
    "tv": lambda stats: stats.divergence("total_variation"),
    "ce": lambda stats: -stats.logp,
    "nla": lambda stats: -stats.log_acceptance,
    "lk_hybrid": _lk_hybrid,
}


def install() -> None:
    """Put headloss in place of speculators' losses, in this process, until `uninstall()`.

    Raises:
        RuntimeError: speculators has no such class or function, or one with other arguments.
    """
    check()
    SEAMS.install()


def uninstall() -> None:
    """Undo `install()`."""
    SEAMS.uninstall()


def check() -> str:
    """What holds. RuntimeError where a class or function is missing or has other arguments."""
    if not SEAMS.theirs:
        for kind, name in CLASSES.items():
            core = part(PACKAGE, _core(kind))
            wanted = ["logits", "targets", "loss_mask", "loss_config"]
            if not hasattr(core, "compute_metrics"):
                raise misfit(PACKAGE, f"{_core(kind)}: has no compute_metrics")
            require_arguments(core.compute_metrics, wanted, f"{kind}: compute_metrics", PACKAGE)
            seam = f"{name}.forward"
            model = part(PACKAGE, _core(kind), name)
            require_arguments(model.forward, ["verifier_last_hidden_states"], seam, PACKAGE)
    return SEAMS.check()


# ---------------------------------------------------------------------- a model's forward


class Forward:
    """One training forward of a draft model: its heads, read while their parameters are whole."""

    def __init__(self, model: Any) -> None:
        markov = getattr(model, "markov_head", None)
        self.draft: nn.Linear = model.lm_head
        self.verifier: nn.Linear = model.verifier_lm_head
        self.markov: nn.Linear | None = None if markov is None else markov.markov_w2
        self._heads = Head.of(self.draft), Head.of(self.verifier)
        self._likeliest: tuple[Tensor, Tensor] | None = None  # of the verifier's states
        self.steps: list[Tensor] = []  # [1, T, H] draft states of EAGLE-3

    def heads(self, dtype: torch.dtype) -> tuple[Head, Head]:
        """Of draft and verifier, in the dtype of the states: autocast's, unlike the weights'."""
        draft, verifier = (replace(h, weight=h.weight.to(dtype)) for h in self._heads)
        return draft, verifier

    def beside(self, states: Tensor) -> tuple[Tensor, Head]:
        """[1, n, H] states and the draft's head: a Markov head's features are columns beside it."""
        draft, _ = self.heads(states.dtype)
        if self.markov is None:
            return states, draft
        width = self.draft.in_features
        features = (states[..., width:], self.markov.weight.to(states.dtype))
        return states[..., :width], replace(draft, beside=(features,))

    def likeliest(self, states: Tensor) -> Tensor:
        """[1, T] the verifier's likeliest ids, once for all steps of a forward."""
        if self._likeliest is None or self._likeliest[0] is not states:
            _, head = self.heads(states.dtype)
            with torch.no_grad():
                self._likeliest = states, head_topk(states, head, 1).ids.squeeze(-1)
        return self._likeliest[1]


class DraftTokens(Sequence[Tensor]):
    """[1, T] likeliest ids of each unrolled step, computed when a step is read."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def __len__(self) -> int:
        return len(self.forward.steps)

    def __getitem__(self, step: Any) -> Any:
        if isinstance(step, slice):
            return [self[i] for i in range(len(self))[step]]
        states = self.forward.steps[step]
        with torch.no_grad():
            return head_topk(states, self.forward.heads(states.dtype)[0], 1).ids.squeeze(-1)


CURRENT: ContextVar[Forward | None] = ContextVar("headloss_speculators", default=None)


@functools.cache
def _padded(before: int, after: int) -> Callable[[Tensor], Tensor]:
    """A head's forward that returns its input between zeros, in the dtype of its product: one
    function for each pair of widths, so that a compiled model is not compiled again."""

    def forward(states: Tensor) -> Tensor:
        device = states.device.type
        if torch.is_autocast_enabled(device):
            states = states.to(torch.get_autocast_dtype(device))
        return F.pad(states, (before, after)) if before + after else states

    return forward


@contextmanager
def _states_for_logits(forward: Forward) -> Iterator[None]:
    """Draft [.., H + r] = [h | 0] from its head, [0 | u] from a Markov head, so that their sum is
    [h | u]; the verifier's head returns [.., H]."""
    draft, markov = forward.draft, forward.markov
    rank = 0 if markov is None else markov.in_features
    replaced: dict[Any, Any] = {draft: _padded(0, rank), forward.verifier: _padded(0, 0)}
    if markov is not None:
        replaced[markov] = _padded(draft.in_features, 0)
    before = CURRENT.set(forward)
    try:
        for module, function in replaced.items():
            module.forward = function
        yield
    finally:
        for module in replaced:
            vars(module).pop("forward", None)
        CURRENT.reset(before)


def _forward_of(kind: str) -> Callable[..., Any]:
    at = (f"{_core(kind)}:{CLASSES[kind]}", "forward")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        theirs = SEAMS.theirs[at]
        arguments = _bound(theirs, (self, *args), kwargs)
        if arguments["verifier_last_hidden_states"] is None:  # no loss is asked for
            return theirs(self, *args, **kwargs)
        call = Forward(self)
        with _states_for_logits(call):
            tokens, loss, metrics = theirs(self, *args, **kwargs)
        return (DraftTokens(call) if call.steps else tokens), loss, metrics

    return forward


# ---------------------------------------------------------------------- losses and metrics


def _metrics_of(kind: str) -> Callable[..., Any]:
    at = (_core(kind), "compute_metrics")

    def compute_metrics(*args: Any, **kwargs: Any) -> Any:
        theirs, forward = SEAMS.theirs[at], CURRENT.get()
        if forward is None:  # outside of a draft model's forward
            return theirs(*args, **kwargs)
        arguments = _bound(theirs, args, kwargs)
        if kind == "eagle3":
            forward.steps.append(arguments["logits"].detach())
        return _fused(theirs, arguments, forward, ROWS[kind](arguments, forward))

    return compute_metrics


@dataclass(frozen=True)
class Rows:
    """The rows of a loss: states of both models, and which rows losses or metrics read."""

    hidden: Tensor  # [1, n, H + r]
    verifier: Tensor  # [1, n, H]
    targets: Tensor  # [1, n] the verifier's likeliest ids
    read: Tensor  # [1, n] bool


def _unrolled(arguments: dict[str, Any], forward: Forward) -> Rows:
    """EAGLE-3 shifts one against the other by a step, and goes on from what was right so far."""
    step, states = arguments["ttt_step"], arguments["targets"]
    hidden = arguments["logits"][:, : states.shape[1] - step]
    mask = arguments["loss_mask"]
    read = torch.ones_like(hidden[..., 0], dtype=torch.bool)
    if mask is not None:
        read = mask[:, step:] > 0
        if arguments["prev_correct"] is not None:
            read = read | arguments["prev_correct"][:, : read.shape[1]]
    return Rows(hidden, states[:, step:], forward.likeliest(states)[:, step:], read)


def _sampled(arguments: dict[str, Any], forward: Forward) -> Rows:
    states = arguments["targets"]
    read = arguments["loss_mask"][:, arguments["anchor_pos"] + arguments["depth"]] > 0
    return Rows(arguments["logits"], states, forward.likeliest(states), read)


def _blocks(arguments: dict[str, Any], forward: Forward) -> Rows:
    states = arguments["targets"]
    read = arguments["loss_mask"] > 0
    return Rows(arguments["logits"], states, forward.likeliest(states), read)


ROWS = {"eagle3": _unrolled, "peagle": _sampled, "dflash": _blocks, "dspark": _blocks}


def _fused(
    theirs: Callable[..., Any], arguments: dict[str, Any], forward: Forward, rows: Rows
) -> tuple[Tensor, dict[str, Any]]:
    config = _config(arguments["loss_config"])
    values = None
    if arguments.get("per_position_loss_weight") == "dpace":  # weights follow from the values
        ones = dict.fromkeys(config, torch.ones_like(rows.read))
        with torch.no_grad():
            values = _loss(rows, forward, ones, acceptance=False).per_token
    slopes = _slopes(theirs, arguments, config, rows, values)
    out = _loss(rows, forward, slopes, acceptance="tv_loss_fn" in arguments)
    loss, metrics = _called(theirs, arguments, config, rows, out.per_token)
    return loss + (out.loss - out.loss.detach()), metrics


def _config(loss_config: dict[str, Any] | None) -> dict[str, Any]:
    """Losses by name; speculators' own function under each."""
    theirs = [part(PACKAGE, LOSSES, maps) for maps in (FUSED, EAGER)]
    config = {"kl_div": (theirs[0]["kl_div"], 1.0)} if loss_config is None else loss_config
    for name, (function, _) in config.items():
        if name not in VALUES or function not in [functions.get(name) for functions in theirs]:
            raise ValueError(
                f"loss_config[{name!r}]: got {function}, want speculators' own function of one of "
                f"{', '.join(VALUES)}; headloss.integrations.speculators.uninstall() runs others"
            )
    return config


def _weighted(stats: Any, batch: Any, *, name: str) -> Tensor:
    return VALUES[name](stats) * getattr(batch, f"slopes_{name}")


def _observed(stats: Any, batch: Any, *, name: str, acceptance: bool) -> dict[str, Observed]:
    value = {"value": Observed(VALUES[name](stats))}
    return value | ({"acceptance": Observed(stats.acceptance)} if acceptance else {})


def _term(name: str, verifier: Head, acceptance: bool) -> Term:
    return Term(
        name=name,
        function=functools.partial(_weighted, name=name),
        reduction=token_mean,
        observe=functools.partial(_observed, name=name, acceptance=acceptance),
        teacher=teacher(verifier) if acceptance or name != "ce" else None,
    )


def _loss(rows: Rows, forward: Forward, slopes: dict[str, Tensor], acceptance: bool) -> Output:
    """sum_t sum_k slope_kt loss_kt over the rows that are read."""
    targets = rows.targets.masked_fill(~rows.read, -100)
    fields: dict[str, Any] = {f"slopes_{n}": slope.float() for n, slope in slopes.items()}
    batch = Batch(targets, totals=Totals(1, 1), teacher_hidden=rows.verifier, **fields)
    hidden, draft = forward.beside(rows.hidden)
    _, verifier = forward.heads(hidden.dtype)
    first, *_ = slopes
    objective: Any = sum(_term(name, verifier, acceptance and name == first) for name in slopes)
    observed = [f"{name}/value" for name in slopes] + [f"{first}/acceptance"] * acceptance
    options = Options(per_token=(*observed, "top1"))
    return head_loss(hidden, draft, batch, objective, options)


def _slopes(
    theirs: Callable[..., Any],
    arguments: dict[str, Any],
    config: dict[str, Any],
    rows: Rows,
    values: dict[str, Tensor] | None,
) -> dict[str, Tensor]:
    """[1, n] by loss: of speculators' reduction with respect to each row's loss."""
    zeros = torch.zeros_like(rows.read, dtype=torch.float32)
    leaves = {name: zeros if values is None else values[f"{name}/value"] for name in config}
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    alone: dict[str, Any] = dict(arguments)
    if "confidence_logits" in alone:
        alone["confidence_logits"] = None
    if alone.get("prev_correct") is not None:
        alone["prev_correct"] = alone["prev_correct"].clone()  # which is written to
    with torch.enable_grad():
        losses = {f"{name}/value": leaf for name, leaf in leaves.items()}
        loss, _ = _called(theirs, alone, config, rows, losses)
        slopes = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, slopes, strict=True))


def _called(
    theirs: Callable[..., Any],
    arguments: dict[str, Any],
    config: dict[str, Any],
    rows: Rows,
    values: dict[str, Tensor],
) -> tuple[Tensor, dict[str, Any]]:
    """Speculators' own function, of losses that are there: two columns for logits, whose likeliest
    is the first in each row of the verifier, and of the draft where both models agree."""
    agreed = values.get("top1", torch.zeros_like(rows.read, dtype=torch.float32))
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


def _bound(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


_signature = functools.cache(inspect.signature)


def _core(kind: str) -> str:
    return f"speculators.models.{kind}.core"


SEAMS = Seams(
    {(f"{_core(kind)}:{name}", "forward"): _forward_of(kind) for kind, name in CLASSES.items()}
    | {(_core(kind), "compute_metrics"): _metrics_of(kind) for kind in CLASSES},
    PACKAGE,
)
