"""A loss for NeMo Automodel that consumes hidden states and the head's weight.

    loss_fn:
      _target_: headloss.integrations.nemo_automodel.HeadLossCrossEntropy

B rows of L positions, H hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..batch.batch import Batch
from ..head.head import Head
from ..head_loss import Output, head_loss
from ..losses import Objective, Term, cross_entropy
from ..statistics.metrics import Metrics
from .seams import announce, check_signature, part, require_arguments, watch_of
from .shared import over_count

PACKAGE, HOME = "nemo-automodel", "nemo_automodel.components.loss"
LinearCrossEntropy: Any = part(PACKAGE, f"{HOME}.linear_ce_base", "LinearCrossEntropy")


class HeadLossCrossEntropy(LinearCrossEntropy):
    """Cross-entropy, or other terms, in one pass; an alternative to Automodel's
    `FusedLinearCrossEntropy`.

    Args:
        ignore_index: label of tokens that are not scored.
        logit_softcapping: soft cap of the logits; 0 means none.
        terms: the objective; default: cross-entropy.

    Attributes:
        metrics: headloss's metrics of the last call; None before the first call.

    Raises:
        RuntimeError: Automodel's own losses have arguments that headloss does not know.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        logit_softcapping: float = 0,
        terms: Term | Objective | None = None,
    ) -> None:
        announce(PACKAGE, check())
        super().__init__()
        # Automodel silently uses its own loss instead of headloss's if a model's forward cannot
        # return hidden states without logits.
        watch_of(PACKAGE).start()
        self.ignore_index, self.softcap = ignore_index, logit_softcapping or None
        self.objective = Objective.of(cross_entropy() if terms is None else terms)
        self.output: Output | None = None

    @property
    def metrics(self) -> Metrics | None:
        return None if self.output is None else self.output.metrics

    def forward(
        self,
        hidden_states: Tensor,  # The hidden states [B, L, H].
        labels: Tensor,  # The labels [B, L], already shifted.
        lm_weight: Tensor,  # The weight [V, H], either whole or sharded by FSDP2.
        num_label_tokens: int | None = None,
        grad_reduce_group: Any = None,
        loss_weights: Tensor | None = None,  # [B, L]
    ) -> Tensor:
        """Return the loss, a sum over tokens divided by `num_label_tokens` if that count is given.

        Raises:
            ValueError: a term's reduction is not the mean over tokens, and the optimizer step has
                more tokens than this call.
        """
        watch_of(PACKAGE).called = True
        weight = self.materialize_lm_weight(lm_weight, grad_reduce_group=grad_reduce_group)
        objective = self.objective
        fields: dict[str, Any] = {}
        if loss_weights is not None:
            fields = {"loss_weights": loss_weights.to(hidden_states.device)}
            weighted = ((c, term.weighted("loss_weights")) for c, term in objective.parts)
            objective = Objective(tuple(weighted))
        batch = Batch(labels, ignore_index=self.ignore_index, **fields)
        objective = over_count(
            objective,
            num_label_tokens,
            batch,
            name="num_label_tokens",
            instead="want a mean of tokens, or a headloss.Reduction with a denominator of its own",
        )
        head = Head(weight.to(hidden_states.dtype), softcap=self.softcap)
        out = head_loss(hidden_states, head, batch, objective)
        self.output = replace(out, loss=out.loss.detach())  # Metrics are computed on demand.
        return out.loss


def check() -> str:
    """Return a text that says which NeMo Automodel code was checked.

    RuntimeError if Automodel's own losses have unexpected arguments.
    """
    theirs = part(PACKAGE, f"{HOME}.linear_ce", "FusedLinearCrossEntropy").forward
    seam = "FusedLinearCrossEntropy.forward"
    check_signature(theirs, HeadLossCrossEntropy.forward, seam, PACKAGE, by_name=True)
    gather = part(PACKAGE, f"{HOME}.linear_ce_base:LinearCrossEntropy", "materialize_lm_weight")
    require_arguments(gather, ("grad_reduce_group",), gather.__qualname__, PACKAGE)
    return f"the signature of {seam}"
