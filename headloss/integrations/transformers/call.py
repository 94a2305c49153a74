"""Model calls with labels, in which the head returns lazy logits and headloss computes the loss.

The objective replaces the model's loss function, or a `torch.nn.functional.cross_entropy` of the
lazy logits (tensors that store their formula instead of values).

B rows, L positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...batch.batch import IGNORE, Batch
from ...batch.packing import NOT_GIVEN
from ...head.head import Head
from ...head_loss import Output, head_loss, logits_loss
from ..followed import Followed, is_followed, real
from ..followed_head import FollowedHead, eager
from ..sharding import is_fsdp2
from ..shared import needs_segments
from .denominators import nan_where_nothing, over_step


class Call(FollowedHead):
    """Context in which the model's forward runs in a call with labels.

    Args:
        applied: the `Applied` that `apply` stored on the model.
        model: the model whose forward runs.
        arguments: arguments of the call, by name.
        fields: arguments to put into the batch.
        own_loss: whether the model's loss function was set after `apply`, and is used.

    Attributes:
        losses: number of times the objective was computed.
    """

    @eager
    def __init__(
        self,
        applied: Any,
        model: Any,
        arguments: dict[str, Any],
        fields: dict[str, Any],
        own_loss: bool,
    ) -> None:
        super().__init__(model)
        self.applied, self.model, self.arguments, self.fields = applied, model, arguments, fields
        self.replaces = applied.is_shifted_mean and not own_loss
        self.cross_entropy = None if own_loss else self.at_cross_entropy
        self.labels, self.step = arguments["labels"], applied.step
        self.shift_labels = applied.shift_labels(arguments)
        self.losses, self.asked, self.gradient = 0, False, torch.is_grad_enabled()
        # The batch's constructor starts an asynchronous copy of token counts from the GPU to the
        # CPU; make the batch before the model's forward, so that copy and forward overlap.
        self.batch: Batch | None = self.step and self.step.batch
        if self.batch is None and self.replaces:
            self.batch = applied.batch_of({**arguments, **fields}, self.labels.device)

    @eager
    def __enter__(self) -> Call:
        self.own_loss = vars(self.model).get("_loss_function")
        if self.replaces:
            vars(self.model)["_loss_function"] = self.at_loss
        return super().__enter__()

    @eager
    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        vars(self.model).pop("_loss_function", None)
        if self.own_loss is not None:
            self.model._loss_function = self.own_loss

    @eager
    def end(self, output: Any) -> Any:
        """Return `output`; if a sharded model is evaluated, compute the values of its logits first.

        After the call, the weight of a sharded head is freed, so that the logits' values cannot be
        computed. In training, reading the logits of a sharded model after the call raises an error.
        """
        if not self.model.training and (self.external or is_fsdp2(self.model)):
            for value in output.values() if hasattr(output, "values") else output:
                real(value)
        if self.external or self.unit:
            self.closed = "FSDP2 or ZeRO-3 has taken the head's weight away"
        return output

    # ------------------------------------------------------------------ losses

    @eager
    def at_loss(
        self,
        logits: Tensor,
        labels: Any,
        vocab_size: Any = None,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORE,
        shift_labels: Any = None,
        **more: Any,
    ) -> Tensor:
        """Return the objective's loss; replaces the model's loss function."""
        self.asked = True
        return self.loss(logits, labels, shift_labels, num_items_in_batch, ignore_index)

    def loss(
        self, logits: Tensor, labels: Any, shift_labels: Any, count: Any, ignore_index: int = IGNORE
    ) -> Tensor:
        """Return the objective on logits [B, L, V] and labels [B, L], or shifted labels [B, L]."""
        applied, step, batch = self.applied, self.step, self.batch
        lies = shift_labels if shift_labels is not None else labels
        counted = self.shift_labels if self.shift_labels is not None else self.labels
        alike = (shift_labels is None) == (self.shift_labels is None)
        if batch is None or not alike or lies is not counted or ignore_index != IGNORE:
            batch = self.batch_of(lies, shift_labels is not None, ignore_index)
            if step is not None and not (alike and _equal(lies, counted)):
                raise RuntimeError(
                    f"labels: {type(self.model).__name__} hands its loss others than those of the "
                    "call, by which the step was counted; train with transformers.Trainer"
                )
        if batch.targets.device != logits.device:
            batch = batch.to(logits.device)
        objective = over_step(applied.objective, batch, step, count)
        try:
            out, loss = self._computed(logits, batch, objective)
        except ValueError as error:
            if NOT_GIVEN not in str(error):
                raise
            how = "apply(model, terms, fields=(names,)) hands arguments of the call to the batch"
            raise ValueError(f"{error}; {how}") from None
        self.losses += 1
        applied.record(out, step, count is not None)
        if step is not None and step.parts > 1:
            loss = loss * step.parts
        return loss if self.model.training else nan_where_nothing(loss, batch, count)

    def batch_of(self, labels: Tensor, shifted: bool, ignore_index: int) -> Batch:
        """Return the `Batch` whose targets are the labels that the model passes to its loss."""
        if ignore_index != IGNORE:
            labels = labels.masked_fill(labels == ignore_index, IGNORE)
        beside = [
            n for n, x in self.fields.items() if getattr(x, "shape", None) == self.labels.shape
        ]
        if beside and labels.shape != self.labels.shape:
            raise ValueError(
                f"{', '.join(beside)}: got {tuple(self.labels.shape)} beside the call's labels, "
                f"want {tuple(labels.shape)}, the shape of the labels that the model hands its loss"
            )
        arguments = {**self.arguments, **self.fields, "labels": labels, "shift_labels": None}
        if shifted:
            arguments["shift_labels"] = labels
        return self.applied.batch_of(arguments, labels.device)

    def _computed(self, logits: Tensor, batch: Batch, objective: Any) -> tuple[Output, Tensor]:
        options = self.applied.options
        if not is_followed(logits):
            out = logits_loss(real(logits), batch, objective, options=options)
            return out, out.loss
        outputs: list[Output] = []

        def act(hidden: Tensor, head: Head) -> tuple[Tensor]:
            outputs.append(head_loss(hidden, head, batch, objective, options))
            return (outputs[0].loss,)

        (loss,) = logits.through(self.model, act)
        return outputs[0], loss

    def at_cross_entropy(
        self,
        logits: Followed,
        target: Tensor,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = IGNORE,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        """Return the objective's value as the result of the `cross_entropy` call by which the model
        computes its loss.

        Return None to let `torch.nn.functional.cross_entropy` run on the logits' values.
        """
        rows = target.shape == logits.shape[:-1]
        usual = weight is None and size_average is None and reduce is None and not label_smoothing
        metric = self.asked or torch.is_grad_enabled() != self.gradient
        if not usual or not rows or target.is_floating_point() or metric:
            return None
        if reduction not in ("mean", "sum"):
            return None
        labels: tuple[Tensor, Tensor | None] | None = target, target
        if self.step is not None or not self.applied.plain:
            labels = self._labels_of(target, ignore_index)
            if labels is None:
                return None
            if self.losses:
                raise RuntimeError(
                    f"{type(self.model).__name__}.forward: takes two cross-entropies of its labels "
                    "and asks for no loss function, want one for terms other than cross_entropy(); "
                    "call remove(model)"
                )
            logits = logits.view(*labels[0].shape, logits.shape[-1])  # type: ignore[assignment]
        return self.loss(logits, *labels, 1 if reduction == "sum" else None, ignore_index)

    def _labels_of(self, target: Tensor, fill: int) -> tuple[Tensor, Tensor | None] | None:
        """Return `labels` and `shift_labels` of a loss function, if the targets are the call's
        labels.

        Accepted targets are the unshifted labels [B, L], the labels shifted by one and padded [B,
        L], or, for terms of tokens only, the labels without the first column [B, L - 1].
        """
        labels = self.labels
        if target.numel() == labels.numel():
            target = target.view(labels.shape)
            if _equal(target, labels):
                return labels, labels
            return (
                (labels, None) if _equal(target, pad(labels[:, 1:], (0, 1), value=fill)) else None
            )
        alone = not self.fields and not needs_segments(self.applied.objective)
        shifted = alone and _equal(target.flatten(), labels[:, 1:].flatten())
        return (target, target) if shifted else None


def _equal(labels: Tensor, others: Tensor) -> bool:
    """Return whether two label tensors are equal, which reads the device."""
    return labels.shape == others.shape and torch.equal(labels, others.to(labels.device))
