"""Megatron-Core's `GPTModel` with headloss in place of its output layer and cross-entropy.

The model returns the losses of the tokens [b, s], as without headloss, for Megatron's usual loss
function:

    model(ids, positions, mask, labels=labels, loss_mask=loss_mask, output_processor=TokenLosses())

With the output processor `HeadLoss`, the model returns headloss's `Output`, with `.loss`:

    policy = HeadLoss(hl.gspo())
    model(..., output_processor=policy, output_processor_context={"advantages": ..., ...})

b sequences of s positions (this rank's, under context parallelism), H hidden width, V vocabulary.
Megatron's hidden states are [s, b, H], or [s / tp, b, H] under sequence parallelism; its labels and
masks are [b, s]. The vocabulary is sharded over the output layer's tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..batch.batch import IGNORE, Batch
from ..batch.segments import Segments
from ..head.head import Head
from ..head_loss import Output, head_loss
from ..head_stats import HeadStats, head_stats
from ..losses import Objective, Term
from ..options import Options
from .megatron_heads import check_layer, head_of
from .megatron_mtp import handed_on, with_depths
from .seams import announce, part, require_arguments
from .shared import needs_segments


def check() -> str:
    """Return a text that says which Megatron code was checked.

    RuntimeError if Megatron-Core's `GPTModel.forward` accepts no output processor.
    """
    model = part("megatron-core", "megatron.core.models.gpt.gpt_model", "GPTModel")
    names = ("output_processor", "output_processor_context")
    require_arguments(model.forward, names, "GPTModel.forward", "megatron-core")
    return "the signature of GPTModel.forward"


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The callable for `GPTModel.forward(output_processor=...)` on the last stage.

    A position is scored if its loss mask is not 0 and its label is not -100. With
    `gradient_accumulation_fusion` the weight's gradient is added to the weight's `main_grad`.

    Attributes:
        temperature: a number, or a [b, s] tensor.
        vocab_size: number of vocabulary rows to score, over all ranks; None, like Megatron's own
            cross-entropy, also scores the padding rows.
        options: memory and schedule; headloss sets the options `sequence_parallel` and `main_grad`.

    Raises:
        RuntimeError: Megatron-Core's `GPTModel.forward` has no argument `output_processor`.
    """

    temperature: float | Tensor = 1.0
    vocab_size: int | None = None
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        announce("megatron-core", check())

    def __call__(
        self,
        *,
        hidden_states: Tensor,  # Shape [s, b, H] or [s / tp, b, H].
        output_layer: Any,
        output_weight: Tensor | None = None,  # The shared weight of tied embeddings.
        labels: Tensor | None = None,  # The labels [b, s], already shifted.
        loss_mask: Tensor | None = None,  # The loss mask [b, s].
        packed_seq_params: Any = None,
        inference_context: Any = None,
        context: Mapping[str, Any] | None = None,
        config: Any,
        **rest: Any,
    ) -> Any:
        if labels is None:
            raise ValueError("labels: got None, want [b, s]; without them there are logits alone")
        check_layer(output_layer, inference_context, config, hidden_states, output_weight)
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature.t()
        head, options = head_of(
            output_layer, output_weight, config, self.options, temperature, self.vocab_size
        )
        targets = labels.t().contiguous()  # Shape [s, b], like the hidden states.
        if loss_mask is not None:
            targets = targets.masked_fill(loss_mask.t() == 0, IGNORE)
        given = {name: _as_hidden(value, labels.shape) for name, value in (context or {}).items()}
        if "segments" not in given and self._needs_segments():
            given["segments"] = _segments(packed_seq_params, loss_mask, targets, config)
        return self._act(hidden_states, head, Batch(targets, **given), options)

    def _needs_segments(self) -> bool:
        return False

    def _act(self, hidden: Tensor, head: Head, batch: Batch, options: Options) -> Any:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TokenLosses(Processor):
    """Negative log-probs of the labels, [b, s] float32, 0 at unscored positions.

    The model returns headloss's tensor in place of Megatron's losses.
    """

    def _act(self, hidden: Tensor, head: Head, batch: Batch, options: Options) -> Tensor:
        stats = head_stats(hidden, head, batch, options, gradients=("logp",))
        return -stats.logp.t().contiguous()


@dataclass(frozen=True, kw_only=True)
class TokenStats(Processor):
    """Log-prob, log-sum-exp and entropy, each [b, s] float32, for a policy loss computed
    afterwards.

    Attributes:
        gradients: names of the statistics that get a gradient, as for `head_stats`.
    """

    gradients: tuple[str, ...] = ("logp", "entropy")

    def _act(self, hidden: Tensor, head: Head, batch: Batch, options: Options) -> HeadStats:
        stats = head_stats(hidden, head, batch, options, self.gradients)
        logp, lse, entropy = (statistic.t().contiguous() for statistic in stats)
        return HeadStats(logp, lse, entropy)


@dataclass(frozen=True)
class HeadLoss(Processor):
    """Output processor that returns headloss's `Output` of an objective, with `logps` and
    `entropies` [s, b].

    `output_processor_context` holds arguments of `Batch`: fields [b, s], [b, s, K] or [S],
    `totals`, and `segments` over [s, b]. By default the segments are the sequences of
    `packed_seq_params` that hold a token, or the b rows if nothing is packed.
    """

    objective: Term | Objective
    takes_depths: ClassVar = True

    def _needs_segments(self) -> bool:
        return needs_segments(Objective.of(self.objective))

    def _act(self, hidden: Tensor, head: Head, batch: Batch, options: Options) -> Output:
        objective = Objective.of(self.objective)
        if (depths := handed_on()) is not None:
            return with_depths(depths, hidden, head, batch, objective, options)
        return head_loss(hidden, head, batch, objective, options)


def _as_hidden(value: Any, shape: torch.Size) -> Any:
    """Return a field [b, s, ..] as [s, b, ..], the order of the hidden states; return other values
    as is."""
    beside = isinstance(value, Tensor) and value.shape[:2] == shape
    return value.transpose(0, 1) if beside else value


def _segments(packed: Any, loss_mask: Tensor | None, targets: Tensor, config: Any) -> Segments:
    s, b = targets.shape
    if config.context_parallel_size > 1:
        raise ValueError(
            "output_processor_context['segments']: is missing, want "
            "Segments.from_ids(ids, count=S, group=...) over the context-parallel group"
        )
    if packed is None:
        return Segments.from_ids(torch.arange(b, device=targets.device).expand(s, b), b)
    ends, padded = packed.cu_seqlens_q, packed.cu_seqlens_q_padded
    holds_tokens = ends.diff() > 0  # Megatron pads buffers of fixed size with empty sequences.
    if padded is not None:
        ends = padded
        if loss_mask is None:
            raise ValueError("loss_mask: got None, want [b, s], with cu_seqlens_q_padded")
    if b != 1:
        raise ValueError(f"packed_seq_params: got {b} rows of labels, want one")
    ends = ends[1:][holds_tokens]
    positions = torch.arange(s, device=targets.device)
    return Segments.from_ids(torch.bucketize(positions, ends, right=True)[:, None], len(ends))
