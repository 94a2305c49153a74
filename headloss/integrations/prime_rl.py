"""prime-rl's chunked output layer with headloss: log-probs and entropies, both with a gradient, or
the one-pass loss of SFT.

`install()` replaces the layers used where `model.fused_lm_head_token_chunk_size` is set; prime-rl
still computes the losses. `uninstall()` restores prime-rl's layers.

B rows of L positions, H hidden width. Only the forward of prime-rl's layer is replaced, so FSDP2's
hooks stay on prime-rl's module.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_integers
from ..batch.batch import Batch
from ..head.head import Head
from ..head_loss import head_loss
from ..head_stats import head_stats
from ..losses import cross_entropy
from .seams import Seams
from .shared import per

LAYERS = "prime_rl.trainer.models.layers"


def install() -> None:
    """Replace the forwards of prime-rl's output layers in this process, until `uninstall()`.

    Raises:
        RuntimeError: prime-rl lacks a replaced forward, or the forward has unexpected arguments.
    """
    SEAMS.install()


def forward(
    self: Any,  # prime-rl's head layer, with a weight [V, H] and, for Gemma, a soft cap.
    hidden_states: Tensor,  # The hidden states [B, L, H].
    labels: Tensor | None,  # The labels [B, L], already shifted.
    temperature: Tensor | None = None,  # Temperatures of the tokens, [B, L].
    # Ids that the sampler kept for each token, [B, L, K]; -1 marks an unused entry.
    sampling_mask: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return `logprobs` and `entropy`, [B, L] float32.

    Without a temperature, return only `loss`, a summed cross-entropy, [] float32. Labels of -100
    are not scored.

    If the K ids that the sampler kept for a token include the token's label, the token's log-prob
    and entropy are normalised over the K ids. In prime-rl the entropy is over the whole vocabulary.
    As in prime-rl, the softmax is over the whole vocabulary for a token without ids, or with ids
    that miss the label. If the layer's `return_mask_logprobs` is set, `mask_logprobs` [B, L, K] has
    the K ids' log-probs, with a gradient. `mask_logprobs` is 0 where an id is -1, and for tokens
    whose softmax is over the whole vocabulary.

    Raises:
        ValueError: the labels are None; the sampling mask's shape is not [B, L, K]; or a sampling
            mask contains ids, but `temperature` is None.
        TypeError: the sampling mask is not a tensor of integers.
    """
    if labels is None:
        raise ValueError("labels: got None, want [B, L]")
    if sampling_mask is not None:
        shape = check_integers("sampling_mask", sampling_mask).shape
        if shape[:-1] != labels.shape:
            want = (*labels.shape, "K")
            raise ValueError(f"sampling_mask: got shape {tuple(shape)}, want {want}")
    head = Head(self.weight, softcap=getattr(self, "softcap", None))
    if temperature is None:
        if sampling_mask is not None and bool((sampling_mask >= 0).any()):
            raise ValueError("sampling_mask: has ids, want a temperature beside them")
        total = cross_entropy().over(per(1))
        return {"loss": head_loss(hidden_states, head, Batch(labels), total).loss}
    head = replace(head, temperature=temperature.expand_as(labels))
    if sampling_mask is None:
        stats = head_stats(hidden_states, head, labels, gradients=("logp", "entropy"))
        return {"logprobs": stats.logp, "entropy": stats.entropy}
    hit = (sampling_mask == labels.unsqueeze(-1)).any(-1, keepdim=True)
    ids = sampling_mask.masked_fill(~hit, -1)
    fields = {"support_ids": ids} if ids.shape[-1] else {}
    output, gradients = {}, ("logp", "entropy")
    if getattr(self, "return_mask_logprobs", False):
        output["mask_logprobs"] = torch.zeros_like(ids, dtype=torch.float32)
        if fields:
            fields["candidate_ids"], gradients = ids, (*gradients, "candidate_logps")
    batch = Batch(labels, **fields)  # type: ignore[arg-type]
    stats = head_stats(hidden_states, head, batch, gradients=gradients)
    if stats.candidate_logps is not None:
        output["mask_logprobs"] = stats.candidate_logps.masked_fill(ids < 0, 0)
    return {"logprobs": stats.logp, "entropy": stats.entropy, **output}


GEMMA = (f"{LAYERS}.lm_head_gemma:GemmaFusedOutputLinear", "forward")
SEAMS = Seams(
    {
        (f"{LAYERS}.lm_head:FusedOutputLinear", "forward"): forward,
        GEMMA: forward,
    },
    "prime-rl",
    optional=(GEMMA,),
)
uninstall, check = SEAMS.uninstall, SEAMS.check
