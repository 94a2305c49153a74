"""GRPO on answers of a top-k sampler: the ratio is 1 only over the ids that the sampler kept."""

from __future__ import annotations

import torch

import headloss as hl

TEMPERATURE, KEPT = 0.8, 8


def sample(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tokens of a top-k sampler, their log-probs, and the ids that the sampler kept."""
    z = hl.Head(weight, temperature=TEMPERATURE).logits(hidden)
    kept = z.topk(KEPT)
    log_p = kept.values.log_softmax(-1)
    slot = log_p.exp().multinomial(1)
    return kept.indices.gather(1, slot)[:, 0], log_p.gather(1, slot)[:, 0], kept.indices


def main() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 16), torch.randn(300, 16)
    tokens, logps, kept = sample(hidden, weight)
    hidden.requires_grad_()
    weight.requires_grad_()
    head = hl.Head(weight, temperature=TEMPERATURE)
    segments = hl.Segments.from_lengths([10, 25, 5])
    for name, ids in (("the whole vocabulary", None), ("the support", kept)):
        advantages = torch.tensor([1.0, -0.5, 0.2])
        batch = hl.Batch(tokens, segments, advantages, old_logps=logps, support_ids=ids)
        out = hl.head_loss(hidden, head, batch, hl.grpo())
        gradient = torch.autograd.grad(out.loss, weight)[0]
        rows = int(gradient.any(1).sum())
        ratio = out.metrics.compute()["grpo/ratio"]
        print(f"over {name}: ratio {ratio:.6f}, gradient in {rows} of 300 rows of the head")


if __name__ == "__main__":
    main()
