"""What the trainers share: refusals by name, metrics."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...losses import Term, term
from ...statistics.metrics import Metrics, Observed
from ..logged import PROBE, Logged
from ..seams import TESTED, check_signature, release

CHECKED = "each function of it that headloss takes the place of"


def require(owner: Any, *names: str, ours: Any = None) -> None:
    """RuntimeError where TRL has no such name, or a method of it that takes other arguments than
    `ours`: what stands in its place here would never run, or not as it is called."""
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
    """ValueError for the first option that is on, by its name; each has what to do instead."""
    for name, (on, instead) in unsupported.items():
        if on:
            raise ValueError(
                f"{name}: is not supported by headloss's {type(trainer).__name__}; {instead}"
            )


def refuse_common(trainer: Any, stock: str, context: bool = False) -> None:
    """What no trainer here supports; `context` parallelism one does."""
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
    trainer: Any, request: Any, parts: int, ranks: int = 1, further: Metrics | None = None
) -> None:
    """Add the terms and metrics of a `Request` to those of the next entry of the log.

    Args:
        parts: the micro-batches of a step.
        ranks: those whose shares of a term add up to its value.
        further: metrics beside those of the request.
    """
    assert request.metrics is not None, "there has been no forward"
    if getattr(trainer, "log_terms", True):
        logged = vars(trainer).setdefault("logged", {}).setdefault(mode(trainer), Logged())
        logged.add(request.terms, request.metrics | (further or {}), parts, ranks)


def append_logged(trainer: Any) -> None:
    """Append what was recorded to TRL's own metrics, as "headloss/..."."""
    logged = vars(trainer).get("logged", {}).pop(mode(trainer), None)
    if logged is not None:
        into = trainer._metrics[mode(trainer)]
        for name, value in logged.take(trainer.accelerator.num_processes).items():
            into[f"headloss/{name}"].append(value)


class Logs:
    """Goes before a trainer of TRL: its log has each term and metric of headloss as "headloss/...".

    Attributes:
        log_terms: False leaves them out.
    """

    log_terms: bool = True

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        append_logged(self)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class Probe:
    """Keeps statistics of each token that TRL's metrics need and the loss does not.

    `term` is worth nothing and has no gradient: add it to an objective, and after the call
    `scatter(name, shape)` gives the statistic in the targets' shape.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self._kept: dict[str, Tensor] = {}
        self._index: Tensor | None = None

    @property
    def term(self) -> Term:
        def nothing(stats, batch):
            return torch.zeros_like(stats.logp)

        return term(nothing, name=PROBE, observe=self._keep)()

    def _keep(self, stats, batch) -> dict[str, Observed]:
        self._kept = {name: getattr(stats, name) for name in self.names}
        self._index = batch.index
        return {}

    def scatter(self, name: str, shape: torch.Size) -> Tensor:
        """[..], 0 where unscored."""
        values = self._kept[name]
        if self._index is None:
            return values.reshape(shape)
        whole = values.new_zeros(math.prod(shape))
        return whole.index_copy_(0, self._index, values).view(shape)
