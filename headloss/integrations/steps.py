"""Mixin for `transformers.Trainer` that divides losses by the totals of the optimizer step."""

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
    """Mixin for `transformers.Trainer`, which counts the tokens and segments of all micro-batches
    of an optimizer step before the step's first forward.

    The counts of tokens and segments are summed over all ranks, unless the training argument
    `average_tokens_across_devices` is off. Attributes not defined in `CountsSteps` belong to the
    `Trainer`.

    Attributes:
        step_totals: totals of the current step; None before the first step, or without labels.
        shards: shards of the current micro-batch, under context parallelism.
    """

    args: Any
    accelerator: Any
    model: Any
    step_totals: Totals | None = None
    shards: Shards | None = None

    def batch_of(self, inputs: dict[str, Any], device: torch.device) -> Batch | None:
        """Return the `Batch` for the loss of the micro-batch `inputs`; None if `inputs` has no
        labels."""
        raise NotImplementedError

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        samples, count = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self.step_totals = self.totals_of(samples)
        return samples, count

    def _prepare_context_parallel_inputs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Add labels and batch fields to the buffers that `Trainer` shards in place."""
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
        """Return batch and totals of a call of `compute_loss`.

        Under context parallelism the batch has this rank's tokens; otherwise the batch is None. In
        training the totals count the tokens of the optimizer step; in an evaluation, the tokens of
        this one call.
        """
        shards, self.shards = self.shards, None
        batch = None if shards is None else shards.batch(self.accelerator.device)
        if self.model.training:
            return batch, self.step_totals
        counted = self.totals_of([inputs]) if shards is None else self._over_ranks(shards.totals)
        return batch, counted

    def totals_of(self, samples: list[dict[str, Any]]) -> Totals | None:
        """Return the totals of the micro-batches `samples`, summed over the ranks whose gradients
        are averaged."""
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
            # Number of ranks that count the same rows.
            same = trainer.get_tp_size() * trainer.get_cp_size()
            totals = changed(totals.all_reduce(gradients="sum"), lambda n: n / same)
        return totals

    def over_the_step(
        self, objective: Objective, batch: Batch, totals: Totals | None
    ) -> Objective | None:
        """Return `objective` for a batch with its step's `totals`; None without totals, as in an
        evaluation."""
        if totals is None:
            return None
        batch.totals = totals
        return objective if self.ranks == 1 else self.ranks * objective

    @property
    def ranks(self) -> int:
        """Number of ranks over which a step's totals are summed and gradients are averaged."""
        if not self.args.average_tokens_across_devices:
            return self.get_cp_size()  # type: ignore[attr-defined]
        return self.accelerator.num_processes // self.get_tp_size()  # type: ignore[attr-defined]

    @property
    def parts(self) -> int:
        """Number of micro-batches in a step."""
        training = self.model.training
        return self.current_gradient_accumulation_steps if training else 1  # type: ignore[attr-defined]

    def divides(self, count: int | Tensor | None) -> bool:
        """Return whether `Trainer` will divide a loss by the number of micro-batches in a step.

        `Trainer` divides a loss by the number of micro-batches unless the loss is already divided
        by the step's count of tokens.
        """
        trainer: Any = self
        # `loss_is_scaled_for_ga` is False in Transformers releases that ignore the attribute.
        heeded = hasattr(super(), "loss_is_scaled_for_ga")
        scaled = trainer.loss_is_scaled_for_ga if heeded else None
        if scaled is None:
            counted = trainer.model_accepts_loss_kwargs and count is not None
            scaled = counted or trainer.compute_loss_func is not None
        return not scaled


def changed(totals: Totals, change: Callable[[Any], Any]) -> Totals:
    """Return `totals` with the function `change` applied to each number."""
    return totals._with([change(number) for number in totals._numbers])
