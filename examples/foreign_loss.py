"""Run a trainer's own loss function of log-probs and entropies on the head, by `hl.head_function`.

A loss that is a sum over tokens or sequences needs one pass, if `separable` declares the sum.
"""

from __future__ import annotations

import torch

import headloss as hl


def main() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(4, 10, 16, requires_grad=True)
    head = hl.Head(torch.randn(300, 16, requires_grad=True))
    targets = torch.randint(300, (4, 10))
    targets[:, :3] = -100  # prompts
    mask, advantages = targets != -100, torch.randn(4, 1)
    with torch.no_grad():
        old = hl.head_stats(hidden, head, targets).logp

    def trainers_loss(logps: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        ratio = (logps - old).exp()
        clipped = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -((clipped + 0.01 * entropies) * mask).sum() / mask.sum()

    batch = hl.Batch(targets)
    for separable in (None, "token", "sequence"):
        options = hl.Options(chunk_tokens=7) if separable else None
        loss = hl.head_function(hidden, head, batch, trainers_loss, separable, options)
        gradient = torch.autograd.grad(loss, head.weight)[0]
        print(f"separable={separable}: loss {loss:.6f}, gradient {gradient.norm():.6f}")
    stats = hl.head_stats(hidden, head, batch)  # without head_function
    assert stats.plan is not None
    print(f"{stats.plan.schedule}: loss {trainers_loss(stats.logp, stats.entropy):.6f}")


if __name__ == "__main__":
    main()
