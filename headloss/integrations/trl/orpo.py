"""TRL's experimental preference trainers without a reference model, with log-probs from headloss.

B pairs, L tokens of the longest row, H hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from trl.experimental.cpo import cpo_trainer
from trl.experimental.orpo import orpo_trainer

from ...batch.batch import IGNORE, Batch
from ...batch.labels import next_in_row
from ...head.head import Head
from ...head_stats import head_stats
from ...options import Options
from ..seams import announce
from .common import CHECKED, refuse, refuse_common, require
from .forward import HeadOutput, Request, add_head


class LogProbs(Request):
    """Log-probs [B, C] with a gradient, and mean logits [B] without a gradient.

    Args:
        positions: positions of each row to average the logits over.
    """

    def __init__(self, positions: slice = slice(None), **request: Any) -> None:
        super().__init__(**request)
        self.positions = positions

    def at_head(self, hidden: Tensor, head: Head, batch: Batch, options: Options) -> HeadOutput:
        logps = head_stats(hidden, head, batch, options, gradients=("logp",)).logp
        means = mean_logits(hidden[:, self.positions], head)
        return HeadOutput(log_probs=logps, mean_logits=means)


@torch.no_grad()
def mean_logits(hidden: Tensor, head: Head) -> Tensor:
    """Return the mean logit of each row, [B] from hidden states [B, L, H].

    The mean logit over positions and vocabulary is the dot product of the mean hidden state and the
    mean row of the head's weight. The mean logit ignores the soft cap and the adapters' dropout.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)

    def mean(rows: Tensor) -> Tensor:
        return rows[: head.vocabulary].mean(0, keepdim=True, dtype=dtype)

    bias = None if head.bias is None else mean(head.bias)
    lora = tuple(replace(x, a=x.a.to(dtype), b=mean(x.b), dropout=0.0) for x in head.lora)
    row = replace(head, weight=mean(head.weight), bias=bias, lora=lora, softcap=None, vocab_size=1)
    return row.logits(hidden.mean(1, dtype=dtype)).squeeze(-1)


class WithoutLogits:
    """Common base of the ORPO and CPO trainers: scores and likelihoods by one call of
    `head_stats`."""

    options: Options = Options()
    theirs: type

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs = self.theirs
        require(theirs, "concatenated_inputs", "get_batch_loss_metrics")
        require(theirs, "concatenated_forward", ours=type(self))
        super().__init__(*args, **kwargs)  # type: ignore[misc]
        stock = f"{theirs.__module__}.{theirs.__name__}"
        refuse_common(self, stock)
        refuse(self, is_encoder_decoder=(self.is_encoder_decoder, f"use {stock}"))
        model = self.model
        add_head(model.get_base_model() if hasattr(model, "get_base_model") else model)
        announce("trl", CHECKED)

    def _forward(
        self: Any,
        model: Any,
        batch: dict[str, Any],
        *,
        padding: int,
        average: bool,
        prompts: bool,
        likelihood: bool,
        positions: slice,
    ) -> tuple[Tensor, ...]:
        """Return the values of TRL's `concatenated_forward`.

        The result is the tuple (log-probs of chosen answers [B], log-probs of rejected answers [B],
        mean logits of chosen answers [B], mean logits of rejected answers [B], negative
        log-likelihood of chosen answers []). If the model's routers have an auxiliary loss [], the
        returned tuple has that loss as its sixth element.
        """
        device = self.accelerator.device
        rows = self.concatenated_inputs(batch, padding_value=padding, device=device)
        names = "input_ids", "attention_mask", "labels"
        ids, attention, labels = (rows[f"concatenated_{name}"] for name in names)
        targets = labels.clone()
        chosen, rejected = slice(len(labels) // 2), slice(len(labels) // 2, None)
        if prompts:
            targets[chosen] = ids[chosen].masked_fill(attention[chosen] != 1, IGNORE)
        router = {"output_router_logits": True} if self.aux_loss_enabled else {}
        request = LogProbs(positions, batch=Batch(_shifted(targets)), options=self.options)
        out: Any = request.of(model, input_ids=ids, attention_mask=attention, **router)
        answers = _shifted(labels) != IGNORE
        scores = (out.log_probs * answers).sum(1)
        if average:
            scores = scores / answers.sum(1)
        nll = scores.new_zeros(())
        if likelihood:
            nll = -out.log_probs[chosen].sum() / (_shifted(targets[chosen]) != IGNORE).sum()
        means = out.mean_logits
        parts = scores[chosen], scores[rejected], means[chosen], means[rejected], nll
        return (*parts, out.aux_loss) if self.aux_loss_enabled else parts


def _shifted(labels: Tensor) -> Tensor:
    """Return the label after each token, [.., L]; the last position has no label."""
    return next_in_row(labels, dim=1, fill=IGNORE)


class ORPOTrainer(WithoutLogits, orpo_trainer.ORPOTrainer):
    """`trl.experimental.orpo.ORPOTrainer` without the logits.

    Arguments, configuration, loss, gradients and metrics are TRL's, from float32 log-probs; set
    `options` for memory and schedule. `logits/chosen` and `logits/rejected` are means that include
    padding, as in TRL; for a model with a soft cap, the means are of logits before the cap. Labels
    must be the tokens themselves or -100, as from TRL's collator.

    Raises:
        ValueError: an unsupported configuration; the message names the option.
    """

    theirs = orpo_trainer.ORPOTrainer

    def concatenated_forward(self: Any, model: Any, batch: dict[str, Any]) -> Any:
        return self._forward(
            model,
            batch,
            padding=self.padding_value,
            average=True,
            prompts=True,
            likelihood=True,
            positions=slice(-1),
        )


class CPOTrainer(WithoutLogits, cpo_trainer.CPOTrainer):
    """`trl.experimental.cpo.CPOTrainer` computed without logits, for every loss type.

    Options, metrics and errors are as in `ORPOTrainer`.
    """

    theirs = cpo_trainer.CPOTrainer

    def concatenated_forward(self: Any, model: Any, batch: dict[str, Any]) -> Any:
        average = self.loss_type in ("ipo", "simpo")
        return self._forward(
            model,
            batch,
            padding=self.pad_token_id,
            average=average,
            prompts=False,
            likelihood=self.cpo_alpha != 0,
            positions=slice(None),
        )
