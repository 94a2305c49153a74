"""Megatron-Core models whose output layer hands on hidden states: one door for code that reads
logits. No `output_processor` is needed, so that `HybridModel` and forks before 0.18 have it too.

    door = hand_on(model)                # once; None on stages without an output layer
    losses = model(ids, positions, mask, labels=labels)              # [b, s], as without
    hidden = model(ids, positions, mask)                             # where logits were
    stats = door.stats(hidden, labels, temperature=0.8)              # log-probs and entropies

b sequences of s positions (this rank's, under context parallelism), H hidden width, K candidates.
Hidden states are [b, s, H], or [b, s / tp, H] under sequence parallelism, in the model's dtype or
in float32, as `Float16Module` returns them.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..batch.batch import Batch
from ..head_stats import HeadStats, head_stats
from ..options import Options
from . import megatron_mtp
from .megatron_heads import HANDS_ON, check_layer, head_of, linear_of
from .seams import announce, misfit, part, require_arguments
from .shared import refuse

PACKAGE = "megatron-core"
LAYER = "megatron.core.tensor_parallel:ColumnParallelLinear"
MODULE = "megatron.core.models.common.language_module.language_module:LanguageModule"


def check() -> str:
    """Name the checks that hold. RuntimeError where layer or loss take other arguments."""
    layer, model = part(PACKAGE, LAYER), part(PACKAGE, MODULE)
    names = ("input_", "weight", "runtime_gather_output")
    require_arguments(layer.forward, names, "ColumnParallelLinear.forward", PACKAGE)
    loss = model.compute_language_model_loss
    require_arguments(
        loss, ("labels", "logits"), "LanguageModule.compute_language_model_loss", PACKAGE
    )
    return "the signatures of ColumnParallelLinear.forward and compute_language_model_loss"


def hand_on(model: Any, options: Options | None = None) -> Door | None:
    """Let the output layer of a model hand on its hidden states, until `Door.close()`.

    Args:
        model: Megatron's, also inside wrappers (`module`) and vision models (`language_model`).
        options: memory and schedule; `sequence_parallel` and `main_grad` are set here.

    Returns:
        the door; None where the model has no output layer, as on all stages but the last.

    Raises:
        RuntimeError: a Megatron-Core whose layer or loss takes other arguments.
        ValueError: a model whose output layer hands on hidden states already.
    """
    announce(PACKAGE, check())
    while hasattr(model, "module"):
        model = model.module
    model = getattr(model, "language_model", model)
    if not getattr(model, "post_process", True) or not hasattr(model, "output_layer"):
        return None
    return Door(model, options or Options())


LATEST: ContextVar[Door | None] = ContextVar("latest", default=None)


def latest() -> Door:
    """The door whose layer was called last. RuntimeError where none was."""
    if (door := LATEST.get()) is None:
        raise misfit(PACKAGE, "output_layer: was not called, so that it handed on no hidden states")
    return door


class Door:
    """A model's output layer that hands on hidden states, and the head that it computes.

    Calls of the layer that gather logits (inference), that carry labels, or whose weight is a
    detached one (the depths of forks) go to the layer's own forward.

    Attributes:
        options: of `head_stats`.
    """

    def __init__(self, model: Any, options: Options) -> None:
        self.layer, self.config, self.options = model.output_layer, model.config, options
        self.model = model
        if "forward" in vars(self.layer):
            raise ValueError(
                f"model: got a forward on the instance of its {type(self.layer).__name__}, want "
                "an output layer of its class's"
            )
        self._forward, self._loss = self.layer.forward, model.compute_language_model_loss
        self._tied: Tensor | None = None
        self._shape: torch.Size | None = None  # of what was handed on, in the dtype
        self._dtype = torch.float32

        def forward(
            input_: Tensor,
            weight: Any = None,
            runtime_gather_output: Any = None,
            **more: Any,
        ) -> Any:
            return self._hand_on(input_, weight, runtime_gather_output, more)

        setattr(forward, HANDS_ON, self._forward)
        self.layer.forward = forward
        model.compute_language_model_loss = self._losses

    def close(self) -> None:
        """Give the layer its own forward back, and the model its own loss."""
        for owner, name in ((self.layer, "forward"), (self.model, "compute_language_model_loss")):
            vars(owner).pop(name, None)

    @property
    def ranks(self) -> int:
        """Number of ranks that share the rows of a sequence, under sequence parallelism."""
        linear = linear_of(self.layer)
        return linear.tp_group.size() if linear.sequence_parallel else 1

    def stats(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float | Tensor = 1.0,
        gradients: tuple[str, ...] = ("logp", "entropy"),
        vocab_size: int | None = None,
        gathered: bool = False,
        teacher: Any = None,
        divergences: tuple[str, ...] = (),
        **fields: Any,
    ) -> HeadStats:
        """Statistics of what the model returned in place of logits.

        Args:
            hidden: [b, s, H] or [b, s / tp, H].
            targets: [b, s], shifted; -100: not scored.
            temperature: a number, or [b, s].
            gradients, vocab_size: as of `head_stats` and `Head`.
            gathered: whether `hidden` has whole rows under sequence parallelism too, or a part of
                what was handed on.
            teacher, divergences: as of `head_stats`.
            fields: of the batch, [b, s, ..]; `support_ids` as pairs go over [s, b].

        Returns:
            [b, s] each, divergences too; candidates [b, s, K].

        Raises:
            ValueError: `hidden` is not what the layer handed on.
        """
        want = None if self._shape is None else (self._shape[1], self._shape[0], self._shape[2])
        if tuple(hidden.shape) != want and not (gathered and want and hidden.shape[2] == want[2]):
            raise ValueError(
                f"hidden: got shape {tuple(hidden.shape)}, want {want}, the hidden states that the "
                "output layer handed on last"
            )
        if isinstance(temperature, Tensor):
            temperature = temperature.t()
        beside = {n: x.transpose(0, 1) if _lies(x, targets) else x for n, x in fields.items()}
        batch = Batch(targets.t().contiguous(), **beside)
        measured = {"teacher": teacher, "divergences": divergences}
        stats = self._stats(
            hidden.transpose(0, 1), batch, gradients, temperature, vocab_size, gathered, **measured
        )
        logp, lse, entropy = (statistic.t().contiguous() for statistic in stats)
        candidates = stats.candidate_logps
        if candidates is not None:
            candidates = candidates.transpose(0, 1).contiguous()
        by_name = {name: value.t().contiguous() for name, value in stats.divergences.items()}
        return HeadStats(logp, lse, entropy, candidates, plan=stats.plan, divergences=by_name)

    def _stats(
        self,
        hidden: Tensor,  # [s, b, H]
        batch: Batch,
        gradients: tuple[str, ...],
        temperature: float | Tensor = 1.0,
        vocab_size: int | None = None,
        gathered: bool = False,
        **measured: Any,
    ) -> HeadStats:
        hidden = hidden.to(self._dtype)  # what Float16Module made float32 loses nothing
        check_layer(self.layer, None, self.config, hidden, self._tied, handed_on=True)
        head, options = head_of(
            self.layer, self._tied, self.config, self.options, temperature, vocab_size
        )
        head = replace(head, logit_scale=1.0)  # MuP's comes after the layer: hidden states have it
        if gathered:
            options = replace(options, sequence_parallel=False)
        return head_stats(hidden, head, batch, options, gradients, **measured)

    def _hand_on(self, hidden: Tensor, weight: Any, gather: Any, more: dict[str, Any]) -> Any:
        detached = isinstance(weight, Tensor) and not isinstance(weight, nn.Parameter)
        if more or gather or detached:
            self._shape = None
            return self._forward(hidden, weight, gather, **more)
        refuse(
            "megatron_mtp.install(), called before",
            mtp_num_layers=bool(self.config.mtp_num_layers) and not megatron_mtp.INSTALLED,
        )
        self._tied, self._shape, self._dtype = weight, hidden.shape, hidden.dtype
        LATEST.set(self)
        return hidden, None

    def _losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        """In place of the model's `compute_language_model_loss`: [b, s], of [s, b, H]."""
        if self._shape is None:
            return self._loss(labels, logits)
        stats = self._stats(logits, Batch(labels.t().contiguous()), ("logp",))
        return -stats.logp.t().contiguous()


def _lies(value: Any, targets: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape[:2] == targets.shape
