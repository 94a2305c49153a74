"""Trainers of Transformers' kind whose losses are divided by the totals of the optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..batch.batch import Batch
from ..batch.reduction import Totals
from ..losses import Objective
from .context import Shards, group_of
from .seams import misfit


class CountsSteps:
    """Goes before a `transformers.Trainer`, and counts all micro-batches of a step before its first
    forward: over the ranks too, unless `average_tokens_across_devices` is off. Attributes that it
    reads are Trainer's.

    Attributes:
        step_totals: of the step that is under way; None before, and where there are no labels.
        shards: of the micro-batch that is under way, under context parallelism.
    """

    args: Any
    accelerator: Any
    model: Any
    step_totals: Totals | None = None
    shards: Shards | None = None

    def batch_of(self, inputs: dict[str, Any], device: torch.device) -> Batch | None:
        """A micro-batch as the loss sees it; None where it has no labels."""
        raise NotImplementedError

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        samples, count = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self.step_totals = self.totals_of(samples)
        return samples, count

    def _prepare_context_parallel_inputs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Trainer's, with what the loss reads among the buffers that are sharded in place."""
        trainer: Any = super()
        prepare, batch = trainer._prepare_context_parallel_inputs, None
        if (group := group_of(self)) is not None:
            batch = self.batch_of(inputs, inputs["input_ids"].device)
        if batch is None:
            return prepare(model, inputs)
        enter, inputs = prepare(model, inputs)
        given, self.shards = getattr(enter, "keywords", {}), Shards.of(batch, group)
        if not {"buffers", "buffer_seq_dims", "no_restore_buffers"} <= given.keys():
            raise misfit("transformers", "Trainer._prepare_context_parallel_inputs: has no buffers")
        buffers = self.shards.buffers
        given["buffers"].extend(buffers)
        given["buffer_seq_dims"].extend([1] * len(buffers))
        given["no_restore_buffers"].update(buffers)
        return enter, inputs

    def of_call(self, inputs: dict[str, Any]) -> tuple[Any, Totals | None]:
        """Batch of a call of `compute_loss`: this rank's tokens under context parallelism, else
        None; and the totals, of the step in training and of the call in an evaluation."""
        shards, self.shards = self.shards, None
        batch = None if shards is None else shards.batch(self.accelerator.device)
        if self.model.training:
            return batch, self.step_totals
        counted = self.totals_of([inputs]) if shards is None else self._over_ranks(shards.totals)
        return batch, counted

    def totals_of(self, samples: list[dict[str, Any]]) -> Totals | None:
        """Of micro-batches of this rank and, if they are counted together, of all ranks."""
        device = self.accelerator.device
        batches = [self.batch_of(inputs, device) for inputs in samples]
        counted = [Totals.of(batch) for batch in batches if batch is not None]
        if not counted or len(counted) < len(batches):
            return None
        return self._over_ranks(sum(counted[1:], counted[0]))

    def _over_ranks(self, totals: Totals) -> Totals:
        device = self.accelerator.device
        totals = changed(totals, lambda n: n.to(device) if isinstance(n, Tensor) else n)
        if self.args.average_tokens_across_devices and self.accelerator.num_processes > 1:
            trainer: Any = self
            same = trainer.get_tp_size() * trainer.get_cp_size()  # ranks with the same rows
            totals = changed(totals.all_reduce(gradients="sum"), lambda n: n / same)
        return totals

    def over_the_step(
        self, objective: Objective, batch: Batch, totals: Totals | None
    ) -> Objective | None:
        """`objective` on a batch that gets the `totals` of its step; None where there are none, as
        in an evaluation."""
        if totals is None:
            return None
        batch.totals = totals
        return objective if self.ranks == 1 else self.ranks * objective

    @property
    def ranks(self) -> int:
        """Ranks that are counted together; their gradients are averaged."""
        if not self.args.average_tokens_across_devices:
            return self.get_cp_size()  # type: ignore[attr-defined]
        return self.accelerator.num_processes // self.get_tp_size()  # type: ignore[attr-defined]

    @property
    def parts(self) -> int:
        """The micro-batches of a step."""
        training = self.model.training
        return self.current_gradient_accumulation_steps if training else 1  # type: ignore[attr-defined]

    def divides(self, count: int | Tensor | None) -> bool:
        """Tell whether `Trainer` will divide a loss by the micro-batches of a step, which happens
        without a count of tokens."""
        trainer: Any = self
        heeded = hasattr(super(), "loss_is_scaled_for_ga")  # by this release of Transformers
        scaled = trainer.loss_is_scaled_for_ga if heeded else None
        if scaled is None:
            counted = trainer.model_accepts_loss_kwargs and count is not None
            scaled = counted or trainer.compute_loss_func is not None
        return not scaled


def changed(totals: Totals, change: Callable[[Any], Any]) -> Totals:
    """Each number of them anew."""
    return totals._with([change(number) for number in totals._numbers])
