"""Megatron-Core models whose output layer returns hidden states in place of logits.

The model needs no `output_processor` argument, so `HybridModel` and forks older than 0.18 are
supported.

    door = hand_on(model)                # once; None on stages without an output layer
    losses = model(ids, positions, mask, labels=labels)              # [b, s], as before
    hidden = model(ids, positions, mask)                             # in place of logits
    stats = door.stats(hidden, labels, temperature=0.8)              # log-probs and entropies

b sequences of s positions (this rank's, under context parallelism), H hidden width, K candidates.
Hidden states are [b, s, H], or [b, s / tp, H] under sequence parallelism, in the model's dtype, or
in float32 if returned through `Float16Module`.
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
    """Return a text that names the functions of Megatron whose arguments were checked.

    RuntimeError if Megatron's output layer or loss has unexpected arguments.
    """
    layer, model = part(PACKAGE, LAYER), part(PACKAGE, MODULE)
    names = ("input_", "weight", "runtime_gather_output")
    require_arguments(layer.forward, names, "ColumnParallelLinear.forward", PACKAGE)
    loss = model.compute_language_model_loss
    require_arguments(
        loss, ("labels", "logits"), "LanguageModule.compute_language_model_loss", PACKAGE
    )
    return "the signatures of ColumnParallelLinear.forward and compute_language_model_loss"


def hand_on(model: Any, options: Options | None = None) -> Door | None:
    """Let the output layer of a model return its hidden states, until `Door.close()`.

    Args:
        model: Megatron's model, also inside wrappers (`module`) and vision models
            (`language_model`).
        options: memory and schedule; `hand_on` sets `sequence_parallel` and `main_grad` itself.

    Returns:
        the `Door` object that takes the place of the model's output layer; None if the model has no
        output layer, as on every pipeline stage but the last.

    Raises:
        RuntimeError: Megatron-Core's output layer or loss has unexpected arguments.
        ValueError: the model's output layer already returns hidden states.
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
    """Return the `Door` (replacement of an output layer) that was called last; RuntimeError if no
    `Door` has been called."""
    if (door := LATEST.get()) is None:
        raise misfit(PACKAGE, "output_layer: was not called, so that it handed on no hidden states")
    return door


class Door:
    """An output layer that returns hidden states, with the head (weight, bias, scale) to apply to
    them.

    In three cases a call computes logits by Megatron's code: if it gathers logits (inference), if
    it has labels, and if it has a detached weight (multi-token prediction in forks).

    Attributes:
        options: options of `head_stats`.
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
        self._shape: torch.Size | None = None  # Shape of the last returned hidden states.
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
        """Restore the layer's forward and the model's loss."""
        for owner, name in ((self.layer, "forward"), (self.model, "compute_language_model_loss")):
            vars(owner).pop(name, None)

    @property
    def ranks(self) -> int:
        """Number of ranks over which sequence parallelism shards a sequence."""
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
        """Return statistics of the hidden states that the model returned in place of logits.

        Args:
            hidden: [b, s, H] or [b, s / tp, H].
            targets: [b, s], shifted; -100: not scored.
            temperature: a number, or [b, s].
            gradients, vocab_size: as in `head_stats` and `Head`.
            gathered: True if `hidden` was gathered over the ranks of sequence parallelism, or is a
                subset of the hidden states that the model returned.
            teacher, divergences: as in `head_stats`.
            fields: fields of the batch, [b, s, ..]. For `support_ids` given as two tensors (all
                ids, and the number of ids per token), the tokens are in the order of [s, b].

        Returns:
            statistics and divergences [b, s]; log-probs of candidates [b, s, K].

        Raises:
            ValueError: `hidden` differs in shape from the output layer's last hidden states.
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
        # Megatron's `Float16Module` has cast the hidden states from 16 bits to float32, so casting
        # back loses nothing.
        hidden = hidden.to(self._dtype)
        check_layer(self.layer, None, self.config, hidden, self._tied, handed_on=True)
        head, options = head_of(
            self.layer, self._tied, self.config, self.options, temperature, vocab_size
        )
        # MuP scales the layer's outputs, so the returned hidden states are already scaled.
        head = replace(head, logit_scale=1.0)
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
        """Return losses [b, s] from hidden states [s, b, H], in place of
        `compute_language_model_loss`."""
        if self._shape is None:
            return self._loss(labels, logits)
        stats = self._stats(logits, Batch(labels.t().contiguous()), ("logp",))
        return -stats.logp.t().contiguous()


def _lies(value: Any, targets: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape[:2] == targets.shape
