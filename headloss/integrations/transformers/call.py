"""A call of a model with labels: its head hands on followed logits, and its loss function, or a
`torch.nn.functional.cross_entropy` of them, is the objective.

B rows, L positions, V vocabulary.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...arguments import is_dtensor
from ...batch.batch import IGNORE, Batch
from ...batch.packing import NOT_GIVEN
from ...head.head import Head
from ...head_loss import Output, head_loss, logits_loss
from ..followed import Followed, HeadCall
from ..sharding import bare, externals, hooked, inside, is_fsdp2, is_unit, whole
from ..shared import needs_segments
from .denominators import nan_where_nothing, over_step
from .subclass import eagerly

BREAKS = (
    "headloss.integrations.transformers.apply breaks the graph at the head and at the loss: "
    "compile the model with fullgraph=False, or call headloss.head_stats, which breaks none"
)


class Call:
    """A call with labels, as a context in which the model's forward runs.

    Args:
        applied: an `Applied`.
        model: whose forward runs.
        arguments: of the call, by name.
        fields: the arguments that go to the batch.
        own_loss: the model's loss function was set after `apply`, and counts.

    Attributes:
        losses: how often the objective was computed.
    """

    @eagerly()
    def __init__(
        self,
        applied: Any,
        model: Any,
        arguments: dict[str, Any],
        fields: dict[str, Any],
        own_loss: bool,
    ) -> None:
        self.applied, self.model, self.fields, self.own_loss = applied, model, fields, own_loss
        self.replaces = applied.is_shifted_mean and not own_loss
        self.arguments, self.labels, self.step = arguments, arguments["labels"], applied.step
        self.shift_labels = applied.shift_labels(arguments)
        self.thread, self.gradient = threading.get_ident(), torch.is_grad_enabled()
        self.losses, self.asked, self.heads = 0, False, list[HeadCall]()
        self.head = model.get_output_embeddings()
        self.sharded = externals(self.head) or is_unit(self.head)
        # Before the model's forward: packing's question to the device is answered at the loss.
        self.batch: Batch | None = self.step and self.step.batch
        if self.batch is None and self.replaces:
            self.batch = applied.batch_of({**arguments, **fields}, self.labels.device)

    @eagerly()
    def __enter__(self) -> Call:
        head, model = self.head, self.model
        self.before = vars(head).get("forward"), vars(model).get("_loss_function")
        self.own = self.before[0] or functools.partial(type(head).forward, head)
        head.forward = self.at_head
        if self.replaces:
            model._loss_function = self.at_loss
        return self

    @eagerly()
    def __exit__(self, *error: object) -> None:
        places = (self.head, "forward"), (self.model, "_loss_function")
        for (owner, name), value in zip(places, self.before, strict=True):
            vars(owner).pop(name, None)
            if value is not None:
                setattr(owner, name, value)
        for call in self.heads:
            call.cross_entropy = None

    @eagerly()
    def end(self, output: Any) -> Any:
        """Return `output`. After the call a sharded head has no weight to make logits with: an
        evaluation makes them here, and a later read in training is refused."""
        if not self.model.training and (self.sharded or is_fsdp2(self.model)):
            values = output.values() if hasattr(output, "values") else output
            for value in values:
                if isinstance(value, Followed):
                    value.make()
        if self.sharded:
            for call in self.heads:
                call.closed = "FSDP2 or ZeRO-3 has taken the head's weight away"
        return output

    @eagerly(reason=BREAKS)
    def at_head(self, hidden: Tensor, **more: Any) -> Tensor:
        """In place of the head's forward. Other arguments, such as PEFT's `adapter_names`, change
        its formula: then logits are real."""
        if more or self.thread != threading.get_ident() or not hidden.is_floating_point():
            return self.own(hidden, **more)
        with bare(self.head):
            take = None if self.own_loss else self.cross_entropy
            call = HeadCall(self.head, self.own, hidden, take)
        self.heads.append(call)
        return call.logits()

    # ------------------------------------------------------------------ losses

    @eagerly()
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
        """In place of the model's loss function."""
        self.asked = True
        return self.loss(logits, labels, shift_labels, num_items_in_batch, ignore_index)

    def loss(
        self, logits: Tensor, labels: Any, shift_labels: Any, count: Any, ignore_index: int = IGNORE
    ) -> Tensor:
        """The objective on logits [B, L, V], with labels [B, L], or with targets beside them."""
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
        """The batch of labels that the model hands its loss."""
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
        if not (isinstance(logits, Followed) and logits.is_followed):
            real = logits.make() if isinstance(logits, Followed) else logits
            out = logits_loss(real, batch, objective, options=options)
            return out, out.loss
        recipe, of_head = logits.recipe, logits.recipe.call

        def act(hidden: Tensor) -> tuple[Tensor, Output]:
            head = of_head.head
            if self.sharded:
                head = Head.of(of_head.module)
            elif is_dtensor(head.weight):
                head = whole(head, self.model, hidden.dtype)
            head = recipe.head_of(head)
            out = head_loss(hidden.to(head.weight.device), head, batch, objective, options)
            return out.loss, out

        of_head.draw()
        with (
            torch.set_grad_enabled(logits.requires_grad and torch.is_grad_enabled()),
            torch.autocast(**of_head.autocast),
        ):
            if not self.sharded:
                loss, out = act(recipe.hidden)
                return out, loss
            loss, out = inside(of_head.module, act, recipe.hidden)
        return out, hooked(out.loss, loss)

    def cross_entropy(
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
        """The objective in place of `torch.nn.functional.cross_entropy` of these logits, where that
        is the model's loss; None for its own value."""
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
        """`labels` and `shift_labels` of a loss function, if the targets are the call's labels: as
        they are, shifted [B, L] or, for terms of tokens alone, [B, L - 1]."""
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
    """Reads the device."""
    return labels.shape == others.shape and torch.equal(labels, others.to(labels.device))
