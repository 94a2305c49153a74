"""prime-rl's chunked output layer with headloss: log-probs and entropies, both with a gradient.

    install()       with `model.fused_lm_head_token_chunk_size` set; the losses stay prime-rl's
    uninstall()     prime-rl is as it was

B rows of L positions, H hidden width. Nothing else of prime-rl changes: FSDP2's hooks are those of
its own module, whose forward this is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..head.head import Head
from ..head_stats import head_stats
from .seams import Seams
from .shared import require_version

LAYERS = "prime_rl.trainer.models.layers"


def install() -> None:
    """Put headloss in place of the forwards of two layers, in this process, until `uninstall()`.

    Raises:
        RuntimeError: a release of prime-rl that is not known here.
    """
    require_version("prime-rl", "0.8")
    SEAMS.install()


def uninstall() -> None:
    """Undo `install()`."""
    SEAMS.uninstall()


def forward(
    self: Any,  # prime-rl's layer: a weight [V, H], and a soft cap in Gemma's
    hidden_states: Tensor,  # [B, L, H]
    labels: Tensor | None = None,  # [B, L], shifted
    temperature: Tensor | None = None,  # [B, L]
) -> dict[str, Tensor]:
    """`logprobs` and `entropy`, [B, L] float32."""
    for name, given in (("labels", labels), ("temperature", temperature)):
        if given is None:
            raise ValueError(f"{name}: got None, want [B, L]")
    heat = temperature.expand_as(labels)  # type: ignore[union-attr, arg-type]
    head = Head(self.weight, temperature=heat, softcap=getattr(self, "softcap", None))
    stats = head_stats(hidden_states, head, labels, gradients=("logp", "entropy"))  # type: ignore[arg-type]
    return {"logprobs": stats.logp, "entropy": stats.entropy}


SEAMS = Seams(
    {
        (f"{LAYERS}.lm_head:FusedOutputLinear", "forward"): forward,
        (f"{LAYERS}.lm_head_gemma:GemmaFusedOutputLinear", "forward"): forward,
    }
)
