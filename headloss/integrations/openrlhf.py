"""OpenRLHF's log-probs and entropies by headloss, for SFT, DPO and PPO.

After `install()` OpenRLHF's `Actor.forward` makes no logits, while OpenRLHF still computes the
losses. `uninstall()` restores `Actor.forward`.

B rows, L positions, A actions at the end of a row, H hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..batch.batch import IGNORE
from ..head.head import Head
from ..head.reading import causal_of
from ..head_stats import head_stats
from .followed import is_followed
from .followed_head import FollowedHead
from .seams import Seams, part
from .sharding import hooked, in_place_of
from .shared import refuse

HOME = "openrlhf.models.actor"
SEAM = f"{HOME}:Actor", "forward"


def install() -> None:
    """Replace `Actor.forward` in this process, until `uninstall()`.

    Raises:
        RuntimeError: OpenRLHF lacks the method, or the method has unexpected arguments.
    """
    SEAMS.install()


def forward(
    self: Any,
    sequences: Tensor,  # The token ids [B, L].
    action_mask: Tensor | None = None,  # The mask of actions [B, A].
    attention_mask: Tensor | None = None,  # The padding mask [B, L].
    return_output: bool = False,
    allgather_logits: bool = False,
    return_logprobs: bool = False,
    ring_attn_group: Any = None,
    packed_seq_lens: list[int] | None = None,
    return_entropy: bool = False,
    **mm_inputs: Any,
) -> Any:
    """Return log-probs [B, L - 1], or the actions' log-probs [B, A]; replaces `Actor.forward`.

    The returned output has no logits. A call that asks only for the model's output runs OpenRLHF's
    method unchanged.

    Raises:
        ValueError: the call has images, or the head cannot be read.
    """
    if action_mask is None and not return_logprobs:
        return SEAMS.theirs[SEAM](
            self,
            sequences,
            attention_mask=attention_mask,
            return_output=return_output,
            allgather_logits=allgather_logits,
            ring_attn_group=ring_attn_group,
            packed_seq_lens=packed_seq_lens,
            return_entropy=return_entropy,
            **mm_inputs,
        )
    refuse("OpenRLHF's own method: call uninstall()", **dict.fromkeys(mm_inputs, True))
    if attention_mask is None:
        raise ValueError("attention_mask: is missing, want [B, L]")
    actor, shape = part("openrlhf", HOME), sequences.shape
    packed: tuple[Any, ...] = ()
    if self.packing_samples:
        tokens, positions, targets, *packed = actor.unpad_and_slice_tensor(  # type: ignore[assignment]
            sequences, attention_mask, ring_attn_group
        )
        attention_mask = None
    else:
        tokens, padding = sequences, attention_mask.roll(-1, 1) == 0
        targets = sequences.roll(-1, 1).masked_fill(padding, IGNORE)
        if action_mask is not None:  # OpenRLHF uses only the actions' log-probs.
            actions = action_mask.shape[1]
            targets[:, : -actions - 1] = IGNORE
        positions = attention_mask.long().cumsum(-1) - 1
        vision = getattr(self, "is_vlm", False)  # Vision models make position ids in `forward`.
        positions = None if vision else positions.masked_fill(attention_mask == 0, 1)
    output, stats = measured(
        self, targets, return_entropy, tokens, attention_mask=attention_mask, position_ids=positions
    )

    def of_rows(values: Tensor) -> Tensor:
        """Return per-token statistics unpacked into rows, [B, L - 1]."""
        if packed:
            added, places = packed
            values = actor.gather_and_pad_tensor(values, ring_attn_group, added, places, *shape)
        return values[:, :-1]

    logps, *entropies = map(of_rows, stats)
    if entropies:
        output.entropy = entropies[0]
    if action_mask is not None:
        logps = logps[:, -action_mask.shape[1] :] * action_mask.float()
    return (logps, output) if return_output else logps


def measured(
    actor: Any, targets: Tensor, with_entropy: bool, *args: Any, **kwargs: Any
) -> tuple[Any, list[Tensor]]:
    """Return the model's output, and its log-probs and, if wanted, entropies, [B, L] float32."""
    model: Any = causal_of(actor.model)
    own, gradients = model.forward, ("logp", "entropy")[: 1 + with_entropy]
    statistics: list[Tensor] = []

    def act(hidden: Tensor, head: Head) -> tuple[Tensor, ...]:
        head = replace(head, temperature=actor.temperature)
        stats = head_stats(hidden, head, targets, gradients=gradients)
        return tuple(getattr(stats, name) for name in gradients)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with FollowedHead(model):
            output = own(*args, **kwargs)
        logits = output["logits"]
        if not is_followed(logits):
            raise ValueError(
                f"model: got {type(model).__name__}, which does more to its logits than rows, a "
                "factor, one soft cap and a constant bias; call uninstall()"
            )
        statistics.extend(logits.through(model, act))
        output["logits"] = torch.stack(statistics)  # Wrappers put hooks on the output's tensors.
        return output

    with in_place_of(model, forward):
        output = actor.model(*args, **kwargs)
    statistics = [hooked(x, output["logits"]) for x in statistics]
    output["logits"] = None
    return output, statistics


SEAMS = Seams({SEAM: forward}, "openrlhf")
uninstall, check = SEAMS.uninstall, SEAMS.check
