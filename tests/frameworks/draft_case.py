"""Set-up shared by the tests of adapters for draft models.

T positions, H hidden width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Trained(NamedTuple):
    """Result of a training step without an optimizer."""

    loss: Tensor
    out: Any  # The value that the model's `forward` returns.
    gradients: dict[str, Tensor]  # By parameter name.


def train(model: nn.Module, loss_of: Callable[[Any], Tensor], **batch: Any) -> Trained:
    model.zero_grad()
    torch.manual_seed(5)  # Anchors are random.
    out = model(**batch)
    loss = loss_of(out)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Trained(loss.detach(), out, gradients)


def installing(adapter: Any) -> Iterator[Callable[..., Trained]]:
    """Yield `train` with headloss's losses; the framework's losses are restored after each call and
    at the end."""

    def call(*args: Any, **named: Any) -> Trained:
        adapter.install()
        try:
            return train(*args, **named)
        finally:
            adapter.uninstall()

    yield call
    adapter.uninstall()


def agree(theirs: Trained, ours: Trained, slack: float = 1.0) -> None:
    """Assert equal losses and gradients of all parameters, to float32 rounding times `slack`."""
    assert abs(ours.loss - theirs.loss) <= slack * 1e-6 * abs(theirs.loss)
    assert ours.gradients.keys() == theirs.gradients.keys() and len(ours.gradients) > 5
    for name, gradient in theirs.gradients.items():
        error = (ours.gradients[name] - gradient).norm()
        assert error <= slack * 3e-6 * gradient.norm() + 1e-9, name


def agree_in_metrics(theirs: Trained, ours: Trained) -> None:
    """Assert as `agree` does, and equal tensors in the model's output, to 1e-6."""
    agree(theirs, ours)
    for got, want in zip(flat(ours.out), flat(theirs.out), strict=True):
        assert torch.allclose(got, want, rtol=1e-6, atol=1e-6)


def flat(value: Any) -> list[Tensor]:
    """Return the tensors of a nested output (dataclasses, dicts and sequences), in order."""
    if isinstance(value, Tensor):
        return [value.detach().double().reshape(-1)]
    if dataclasses.is_dataclass(value):
        value = vars(value)
    values = value.values() if isinstance(value, dict) else value
    return [tensor for item in values for tensor in flat(item)]


def frozen(vocabulary: int, width: int) -> tuple[nn.Linear, nn.Embedding]:
    """Return a head and an embedding of a verifier, without gradients."""
    head, embed = nn.Linear(width, vocabulary, bias=False), nn.Embedding(vocabulary, width)
    head.weight.data.copy_(0.3 * torch.randn(vocabulary, width))
    return head.requires_grad_(False), embed.requires_grad_(False)


def block_inputs(vocabulary: int, width: int, states: str, taught: bool) -> dict[str, Tensor]:
    """Return a training batch of two texts for a draft model that drafts blocks of tokens.

    The field named by the argument `states` holds the verifier's hidden states of three layers. If
    `taught` is True, the batch also has the verifier's final hidden states.
    """
    generator = torch.Generator().manual_seed(1)
    shape = 2, 24
    batch = {
        "input_ids": torch.randint(vocabulary, shape, generator=generator),
        states: torch.randn(*shape, 3 * width, generator=generator),
        "loss_mask": (torch.rand(shape, generator=generator) < 0.8).float(),
    }
    if taught:
        batch["target_last_hidden_states"] = torch.randn(*shape, width, generator=generator)
    return batch
