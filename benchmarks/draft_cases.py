"""Case of studies/draft_models.py: a training step of an EAGLE-3-like draft model.

B sequences of L tokens, T = B L positions, S unrolled steps, H hidden width, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from oracle import EXACT, ROUNDED
from step_cases import Contestant
from torch import Tensor, nn
from torch.nn.functional import linear, pad, rms_norm, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

import headloss as hl

DECAY = 0.8  # Weight of an unrolled step relative to the step before.


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes of a draft model and its batch; by default the draft of a Llama-3-8B."""

    rows: int = 8
    length: int = 2048
    steps: int = 7
    width: int = 4096
    heads: int = 32
    groups: int = 8  # Number of attention heads for keys and values.
    inner: int = 14336
    vocabulary: int = 32000
    dtype: torch.dtype = torch.bfloat16


TINY = Setting(
    rows=2, length=12, steps=3, width=16, heads=2, groups=1, inner=32, vocabulary=97,
    dtype=torch.float32,
)  # fmt: skip


class Draft(nn.Module):
    """One Llama layer that reads token embeddings and states, as in EAGLE-3 (arXiv:2503.01840).

    In every unrolled step a position attends to the step's states up to this position. The head
    [V, H] is the verifier's, and frozen.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting = setting
        width, inner = setting.width, setting.inner
        self.size = width // setting.heads
        self.fuse = nn.Linear(3 * width, width, bias=False)
        self.qkv = nn.Linear(2 * width, width + 2 * setting.groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        head = 3 * width**-0.5 * torch.randn(setting.vocabulary, width)
        self.register_buffer("head", head)

    def step(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """Return the states of the next step from states and embeddings [B, L, H]."""
        setting = self.setting
        both = torch.cat([self.normed(embeddings), self.normed(hidden)], -1)
        sizes = setting.width, setting.groups * self.size, setting.groups * self.size
        q, k, v = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in self.qkv(both).split(sizes, -1)
        )
        seen = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        gate, up = self.up(self.normed(hidden)).chunk(2, -1)
        return hidden + self.down(silu(gate) * up)

    @staticmethod
    def normed(x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:])

    def forward(self, batch: Batch) -> list[Tensor]:
        """Return the states [B, L, H] of each step, aligned with the verifier's positions."""
        hidden, found, length = self.fuse(batch.layers), [], self.setting.length
        for step in range(self.setting.steps):
            hidden = self.step(hidden, batch.embeddings.roll(-step - 1, 1))
            found.append(pad(self.normed(hidden)[:, : length - step], (0, 0, step, 0)))
        return found


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs of a step.

    Attributes:
        layers: [B, L, 3 H], states of three of the verifier's layers.
        embeddings: [B, L, H], embeddings of the tokens.
        states: [B, L, H], the verifier's states, after its last norm.
        scored: [L, S] bool; step s has no state at the first s positions.
    """

    layers: Tensor
    embeddings: Tensor
    states: Tensor
    scored: Tensor

    @property
    def count(self) -> int:
        return len(self.states) * int(self.scored.sum())


def make_model(setting: Setting, device: torch.device) -> Draft:
    torch.manual_seed(0)
    with torch.device(device):
        return Draft(setting).to(setting.dtype)


def make_batch(setting: Setting, device: torch.device) -> Batch:
    """Make a batch of random states. The verifier's last states are also part of `layers`, the
    draft's input, so that a draft can learn to agree with the verifier."""
    generator = torch.Generator(device).manual_seed(0)
    size = setting.rows, setting.length, setting.width
    options: dict[str, Any] = {"generator": generator, "device": device, "dtype": setting.dtype}
    states, first, second = (torch.randn(size, **options) for _ in range(3))
    place = torch.arange(setting.length, device=device)
    return Batch(
        layers=torch.cat([states, first, second], -1),
        embeddings=torch.randn(size, **options),
        states=states,
        scored=place[:, None] >= torch.arange(setting.steps, device=device),
    )


# ---------------------------------------------------------------------- losses


def step_loss(hidden: Tensor, states: Tensor, head: Tensor) -> Tensor:
    """Return KL divergences [..] in float32 between two softmax distributions whose logits are
    computed in the head's dtype."""
    with torch.no_grad():
        log_q = linear(states.to(head.dtype), head).float().log_softmax(-1)
    return divergence(linear(hidden.to(head.dtype), head), log_q, log_q.exp())


def divergence(logits: Tensor, log_q: Tensor, q: Tensor) -> Tensor:
    log_p = logits.float().log_softmax(-1)
    return (q * log_q).sum(-1) - (q * log_p).sum(-1)


def exact(work: str, model: Draft, batch: Batch) -> Tensor:
    """Return the loss of a float32 head on the draft's states, a sequence and step at a time."""
    head = model.head.float()
    total = batch.states.new_zeros((), dtype=torch.float32)
    for step, hidden in enumerate(model(batch)):
        scored = batch.scored[:, step]
        for pair in zip(hidden, batch.states, strict=True):
            values = checkpoint(step_loss, *pair, head, use_reentrant=False)
            total = total + DECAY**step * values[scored].sum()
    return total / batch.count


def of_logits(work: str, model: Draft, batch: Batch) -> Tensor:
    """Return the loss from stored logits of verifier and draft, with float32 log-probs."""
    with torch.no_grad():
        log_q = linear(batch.states, model.head).float().log_softmax(-1)
        q = log_q.exp()
    total = q.new_zeros(())
    for step, hidden in enumerate(model(batch)):
        values = divergence(linear(hidden, model.head), log_q, q)
        total = total + DECAY**step * values[:, batch.scored[:, step]].sum()
    return total / batch.count


def of_speculators(work: str, model: Draft, batch: Batch) -> Tensor:
    """Return the loss by speculators' fused kernel, from stored logits of verifier and draft."""
    from speculators.losses.fused import fused_kl_div_loss

    targets = linear(batch.states, model.head)
    total = targets.new_zeros((), dtype=torch.float32)
    for step, hidden in enumerate(model(batch)):
        values = fused_kl_div_loss(linear(hidden, model.head), targets)
        total = total + DECAY**step * values[:, batch.scored[:, step]].sum()
    return total / batch.count


def of_headloss(options: hl.Options) -> Callable[[str, Draft, Batch], Tensor]:
    def loss(work: str, model: Draft, batch: Batch) -> Tensor:
        drafted = torch.stack(model(batch), 2)  # [B, L, S, H]
        shape = drafted.shape[:3]
        places = torch.arange(shape[0] * shape[1], device=drafted.device)
        step_weights = DECAY ** torch.arange(shape[2], device=drafted.device).float()
        inputs = hl.Batch(
            torch.where(batch.scored, 0, -100).expand(shape),
            teacher_hidden=batch.states.flatten(0, 1),
            teacher_index=places.view(*shape[:2], 1).expand(shape),
            step_weights=step_weights.expand(shape),
        )
        head = hl.Head(model.head)
        objective = hl.distillation(teacher_head=head).weighted("step_weights")
        return hl.head_loss(drafted, head, inputs, objective, options).loss

    return loss


CONTESTANTS = {
    "plain PyTorch": Contestant(loss=of_logits),
    "speculators": Contestant(loss=of_speculators, gpu=True, tolerance=ROUNDED),
    "headloss": Contestant(loss=of_headloss(hl.Options()), tolerance=EXACT),
    "headloss, recompute": Contestant(
        loss=of_headloss(hl.Options(schedule="recompute")), tolerance=EXACT
    ),
}
