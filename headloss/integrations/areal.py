"""AReaL's log-probs and entropies, computed from hidden states without logits.

N packed positions, H hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..head.head import Head
from ..head_stats import head_stats
from .seams import part, require_arguments
from .shared import refuse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def gather_logprobs_entropy(
    hidden: Tensor,  # The hidden states [N, H].
    weight: Tensor,  # The weight [V, H], as seen inside the head's forward.
    labels: Tensor,  # The labels [N], already shifted.
    temperature: float = 1.0,
    tp_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies, [N] float32, as AReaL's `gather_logprobs_entropy` does."""
    refuse("AReaL's own", tensor_parallel=tp_group is not None and tp_group.size() > 1)
    head = Head(weight, temperature=temperature)
    stats = head_stats(hidden, head, labels, gradients=("logp", "entropy"))
    return stats.logp, stats.entropy


def check() -> str:
    """Return "the signature of gather_logprobs_entropy", AReaL's function; RuntimeError if AReaL's
    function lacks an argument that headloss's replacement reads."""
    name = "gather_logprobs_entropy"
    theirs = part("areal", "areal.utils.functional.vocab_parallel", name)
    require_arguments(theirs, ("labels", "temperature", "tp_group"), name, "areal")
    return f"the signature of {name}"
