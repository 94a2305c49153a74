"""Callback that applies headloss in a `Trainer` built by other code."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from ...losses import Objective, Term
from ...options import Options
from .apply import Applied, apply


class HeadLossCallback(TrainerCallback):
    """Callback that applies headloss to the model of a `transformers.Trainer` when the trainer is
    built:

        Trainer(model, ..., callbacks=[HeadLossCallback()])

    headloss stays applied after the training, so that evaluations have an equal loss;
    `remove(model)` restores the model.

    Args:
        terms, options, fields: arguments of `apply`.

    Attributes:
        applied: the result of `apply`; None before a `Trainer` is built.

    Raises:
        ValueError, TypeError, RuntimeError: from `apply`, when the `Trainer` is built; ValueError
            for `label_smoothing_factor`. RuntimeError before the optimizer's first step if the loss
            did not come from headloss, which means that the trainer computes the loss itself or
            trains a different model.
    """

    def __init__(
        self,
        terms: Term | Objective | None = None,
        options: Options | None = None,
        fields: tuple[str, ...] = (),
    ) -> None:
        self.terms, self.options, self.fields = terms, options, fields
        self.applied: Applied | None = None

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        if args.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor: got {args.label_smoothing_factor}, want 0, as it takes "
                "the loss from logits; pass headloss.cross_entropy(label_smoothing=...) as terms"
            )
        assert model is not None  # `Trainer` requires a model, and passes it to callbacks.
        self.applied = apply(model, self.terms, self.options, self.fields)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.applied is None or self.applied.output is None:
            raise RuntimeError(
                "HeadLossCallback: the loss of the first step did not come from headloss. The "
                "trainer computes its own (as TRL's do, and compute_loss_func: see headloss's page "
                "of the framework), or trains another model than it was built with (model_init)"
            )
