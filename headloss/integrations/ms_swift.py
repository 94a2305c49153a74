"""ms-swift's supervised trainer with headloss's loss, by a callback of ms-swift's command line.

# headloss_plugin.py
from headloss.integrations.ms_swift import register

register()

swift sft ... --external_plugins headloss_plugin.py --callbacks headloss
"""

from __future__ import annotations

from typing import Any

import torch

from ..losses import Objective, Term, cross_entropy
from ..options import Options
from ..statistics.metrics import Metrics
from .seams import announce, part, require_arguments, watch_of
from .shared import needs_segments, refuse
from .transformers import HeadLossCallback

STOCK = "ms-swift without `--callbacks headloss`"


def register(
    terms: Term | Objective | None = None, options: Options | None = None, name: str = "headloss"
) -> None:
    """Register ms-swift's callback `name`, so that `--callbacks name` applies headloss to the
    model.

    Args:
        terms: terms as for `apply`; each must be a mean of all scored tokens.
        options: options as for `apply`.

    Raises:
        ValueError: a term is a mean over sequences, or over a part of the tokens. ms-swift weights
            the loss of a micro-batch by the fraction of the step's tokens in the micro-batch.
        RuntimeError: the installed ms-swift has no registry of callbacks, or its loss function has
            arguments that headloss does not know.
    """
    objective = Objective.of(cross_entropy() if terms is None else terms)
    if needs_segments(objective) or any(term.kept_field for _, term in objective.parts):
        raise ValueError(
            "terms: got a term that is no mean of all scored tokens, by whose number ms-swift "
            "weighs a micro-batch; use headloss.integrations.transformers.Trainer"
        )
    checked = check()

    watch = watch_of("ms-swift")
    watch.start()

    @watch.counting
    def callback_of(args: Any, trainer: Any) -> Callback:
        announce("ms-swift", checked)
        return Callback(args, trainer, objective, options)

    part("ms-swift", "swift.callbacks", "callbacks_map")[name] = callback_of


def check() -> str:
    """Return a text that says which ms-swift code was checked. RuntimeError as from `register`."""
    part("ms-swift", "swift.callbacks", "callbacks_map")
    name = "compute_sft_loss"
    theirs = part("ms-swift", "swift.template:Template", name)
    require_arguments(theirs, ("model", "inputs"), f"Template.{name}", "ms-swift")
    return f"its callbacks and the signature of {name}"


class Callback(HeadLossCallback):
    """headloss's callback, which ms-swift constructs from the training arguments and the
    trainer."""

    def __init__(
        self, args: Any, trainer: Any, terms: Objective, options: Options | None = None
    ) -> None:
        super().__init__(terms, options)
        self.trainer, kind = trainer, type(trainer)
        if "rlhf" in kind.__module__:  # `swift rlhf` sets `loss_type` by itself.
            raise ValueError(
                f"callbacks: got headloss with {kind.__name__}, a trainer of `swift rlhf`, which "
                "computes a loss of its own; want `swift sft` or `swift pt`"
            )
        refuse(
            STOCK,
            enable_dft_loss=bool(args.enable_dft_loss),
            enable_channel_loss=bool(args.enable_channel_loss),
            loss_type=bool(args.loss_type),
            use_liger_kernel=bool(args.use_liger_kernel),
            sequence_parallel_size=trainer.template.sequence_parallel_size > 1,
            task_type=trainer.template.task_type != "causal_lm",
        )

    def on_init_end(self, args: Any, *others: Any, **kwargs: Any) -> None:
        super().on_init_end(args, *others, **kwargs)
        assert self.applied is not None
        applied, trainer, template = self.applied, self.trainer, self.trainer.template
        compute = template.compute_sft_loss

        def without_logits(model: Any, inputs: dict[str, Any], *more: Any, **kwargs: Any) -> Any:
            outputs = compute(model, inputs, *more, **kwargs)
            if "labels" not in inputs:
                return outputs
            outputs.logits = None  # ms-swift would read the logits only for an accuracy.
            hits = None if applied.metrics is None else of_tokens(applied.metrics)
            if args.acc_strategy == "token" and hits is not None:
                mode = "train" if trainer.model.training else "eval"
                trainer.custom_metrics[mode]["token_acc"].update(hits)
            return outputs

        template.compute_sft_loss = without_logits


def of_tokens(metrics: Metrics) -> torch.Tensor | None:
    """Return a tensor [T] whose mean is the top-1 accuracy; None if no accuracy was measured."""
    numbers = metrics.compute()
    top1 = [value for name, value in numbers.items() if name.endswith("/top1")]
    tokens = int(numbers.get("tokens", 0))
    return torch.full((tokens,), top1[0], device="cpu") if top1 and tokens else None
