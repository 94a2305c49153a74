"""Trainers of Transformers' kind whose losses are divided by the totals of the optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..batch.batch import Batch
from ..batch.reduction import Totals
from ..losses import Objective


class CountsSteps:
    """Goes before a `transformers.Trainer`, and counts all micro-batches of a step before its first
    forward: over the ranks too, unless `average_tokens_across_devices` is off. Attributes that it
    reads are Trainer's.

    Attributes:
        step_totals: of the step that is under way; None before, and where there are no labels.
    """

    args: Any
    accelerator: Any
    model: Any
    step_totals: Totals | None = None

    def batch_of(self, inputs: dict[str, Any], device: torch.device) -> Batch | None:
        """A micro-batch as the loss sees it; None where it has no labels."""
        raise NotImplementedError

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        samples, count = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self.step_totals = self.totals_of(samples)
        return samples, count

    def totals_of(self, samples: list[dict[str, Any]]) -> Totals | None:
        """Of micro-batches of this rank and, if they are counted together, of all ranks."""
        device = self.accelerator.device
        batches = [self.batch_of(inputs, device) for inputs in samples]
        counted = [Totals.of(batch) for batch in batches if batch is not None]
        if not counted or len(counted) < len(batches):
            return None
        totals = sum(counted[1:], counted[0])
        totals = changed(totals, lambda n: n.to(device) if isinstance(n, Tensor) else n)
        if self.args.average_tokens_across_devices and self.accelerator.num_processes > 1:
            same = self.get_tp_size()  # type: ignore[attr-defined]  ranks with the same rows
            totals = changed(totals.all_reduce(gradients="sum"), lambda n: n / same)
        return totals

    def over_the_step(self, objective: Objective, batch: Batch) -> Objective | None:
        """`objective` on a batch of the step that is under way, which gets that step's totals; None
        where there is no such step, as in an evaluation."""
        if not self.model.training or self.step_totals is None:
            return None
        batch.totals = self.step_totals
        return objective if self.ranks == 1 else self.ranks * objective

    @property
    def ranks(self) -> int:
        """That are counted together; their gradients are averaged."""
        if not self.args.average_tokens_across_devices:
            return 1
        return self.accelerator.num_processes // self.get_tp_size()  # type: ignore[attr-defined]

    @property
    def parts(self) -> int:
        """The micro-batches of a step."""
        training = self.model.training
        return self.current_gradient_accumulation_steps if training else 1  # type: ignore[attr-defined]

    def divides(self, count: int | Tensor | None) -> bool:
        """Whether `Trainer` will divide a loss by the micro-batches of a step, as it does where it
        has passed no count of tokens."""
        trainer: Any = self
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            counted = trainer.model_accepts_loss_kwargs and count is not None
            scaled = counted or trainer.compute_loss_func is not None
        return not scaled


def changed(totals: Totals, change: Callable[[Any], Any]) -> Totals:
    """Each number of them anew."""
    return totals._with([change(number) for number in totals._numbers])
