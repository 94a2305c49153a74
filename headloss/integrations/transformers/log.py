"""Log the terms and metrics of the objective given to `apply` in every `transformers.Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from transformers import trainer as trainers

from ..logged import in_log
from .apply import Applied, applied_to


class TermLog(TrainerCallback):
    """Callback that adds "headloss/NAME" values to log entries, averaged like the entry's loss.

    `install` adds the callback `TermLog` to Transformers' default callbacks, before the reporting
    callbacks, so that every `Trainer` built later has a `TermLog`. The callback does nothing for a
    model without `apply`, or if `Applied.log_terms` is False. Terms are averaged over all steps,
    metrics only over the steps that `logging_steps` selects.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._begin(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        self.step = state.global_step
        self._begin(model)

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        if (applied := _applied(model)) is not None:
            applied.in_log = in_log(args, state)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **_: Any
    ) -> None:
        applied, names = _applied(model), [n for n in logs or () if n.endswith("loss")]
        if applied is None or applied.logged is None or not names or names == ["train_loss"]:
            return
        training = "loss" in names
        logged = applied.logged.pop(training, None)
        if logged is None:
            return
        prefix = "" if training else f"{names[0].removesuffix('_loss')}_"
        steps, ranks = None, None
        if logged.ranks is None:  # `Trainer` divides the loss by the step's token count.
            ranks = args.world_size if args.average_tokens_across_devices else 1
            steps = state.global_step - self.step if training else None
        if training:
            self.step = state.global_step
        found = logged.take(args.world_size, steps, ranks)
        values = {f"{prefix}headloss/{name}": value for name, value in found.items()}
        logs.update(values)
        state.log_history[-1].update(values)

    def _begin(self, model: Any) -> None:
        applied = _applied(model)
        if applied is not None and applied.log_terms:
            applied.logged = {}


def _applied(model: Any) -> Applied | None:
    try:
        return applied_to(model)
    except (ValueError, TypeError):
        return None


def install() -> None:
    """Put `TermLog` among Transformers' default callbacks, once."""
    callbacks: list[Any] = trainers.DEFAULT_CALLBACKS
    if TermLog not in callbacks:
        callbacks.append(TermLog)
