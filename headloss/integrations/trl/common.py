"""Checks of unsupported options, and logging of metrics, for all of headloss's TRL trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...head_loss import Output
from ...losses import term
from ...statistics.metrics import Metrics
from ..logged import PROBE, Logged, in_log
from ..seams import TESTED, check_signature, release

CHECKED = "each function of it that headloss takes the place of"


def require(owner: Any, *names: str, ours: Any = None) -> None:
    """Raise RuntimeError if `owner` (a TRL class or module) lacks one of the attributes `names`, or
    if a method of `owner` and its override in the class `ours` differ in arguments.

    With a missing or different TRL method, headloss's override would not run, or would get wrong
    arguments.
    """
    for name in names:
        if not hasattr(owner, name):
            raise RuntimeError(
                f"{owner.__name__}.{name}: is not in the installed TRL, {release('trl')}, and "
                f"headloss's own would never be called; install trl {', '.join(TESTED['trl'])}"
            )
        if ours is not None and getattr(ours, name) is not getattr(owner, name):
            check_signature(
                getattr(owner, name), getattr(ours, name), f"{owner.__name__}.{name} of trl"
            )


def refuse(trainer: object, **unsupported: tuple[bool, str]) -> None:
    """Raise ValueError for the first unsupported option that is on; the error names an
    alternative."""
    for name, (on, instead) in unsupported.items():
        if on:
            raise ValueError(
                f"{name}: is not supported by headloss's {type(trainer).__name__}; {instead}"
            )


def refuse_common(trainer: Any, stock: str, context: bool = False) -> None:
    """Refuse options that no headloss trainer supports, and context parallelism unless `context` is
    set."""
    args, accelerator = trainer.args, trainer.accelerator
    peft = getattr(accelerator.unwrap_model(trainer.model), "active_peft_config", None)
    parallel = getattr(accelerator, "parallelism_config", None)
    instead = f"use {stock}"
    refuse(
        trainer,
        use_liger_kernel=(bool(args.use_liger_kernel), "headloss takes the place of its loss"),
        prompt_learning=(bool(getattr(peft, "is_prompt_learning", False)), instead),
        context_parallel=(bool(getattr(parallel, "cp_enabled", False)) and not context, instead),
        sequence_parallel=(bool(getattr(parallel, "sp_enabled", False)), instead),
    )


def mode(trainer: Any) -> str:
    return "train" if trainer.model.training else "eval"


def record(
    trainer: Any,
    request: Any,
    parts: int,
    ranks: int = 1,
    further: Callable[[], Metrics] | None = None,
) -> None:
    """Add the terms of a `Request` to the trainer's next log entry, and the metrics of the
    `Request` if the current step is logged.

    Args:
        parts: number of micro-batches in a step.
        ranks: number of ranks whose values of a term add up to the term's value.
        further: returns metrics in addition to the metrics of the `Request`.
    """
    assert request.result is not None, "there has been no forward"
    if getattr(trainer, "log_terms", True):
        training, metrics = mode(trainer) == "train", Metrics()
        if not training or in_log(trainer.args, trainer.state):
            metrics = request.result.metrics | ({} if further is None else further())
        logged = vars(trainer).setdefault("logged", {}).setdefault(mode(trainer), Logged())
        logged.add(request.result.terms, metrics, parts, ranks)


def append_logged(trainer: Any) -> None:
    """Append the recorded values to TRL's own metrics, as "headloss/..."."""
    logged = vars(trainer).get("logged", {}).pop(mode(trainer), None)
    if logged is not None:
        into = trainer._metrics[mode(trainer)]
        for name, value in logged.take(trainer.accelerator.num_processes).items():
            into[f"headloss/{name}"].append(value)


class Logs:
    """Mixin for a TRL trainer that adds headloss's terms and metrics to the log as "headloss/...".

    Attributes:
        log_terms: whether headloss's terms and metrics are logged.
    """

    log_terms: bool = True

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        append_logged(self)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


@term(name=PROBE)
def probe(stats: Any, batch: Any, names: tuple[str, ...] = ()) -> Tensor:
    """A term of value 0 without a gradient, which requests the statistics `names` for TRL's
    metrics.

    After the forward, `of_probe` reads the requested statistics from the forward's `Output`.
    """
    for name in names:
        getattr(stats, name)
    return torch.zeros_like(stats.logp)


def of_probe(result: Output | None, name: str) -> Tensor:
    """Return the statistic `name` [..], 0 at unscored positions; the objective must have included
    the term `probe` with this name."""
    assert result is not None, "there has been no forward"
    return result._scatter(getattr(result._stats, name))
