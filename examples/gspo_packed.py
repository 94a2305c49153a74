"""GSPO on packed completions of any length, with a KL penalty and an entropy bonus."""

from __future__ import annotations

import torch

import headloss as hl

VOCAB, WIDTH = 500, 16
LENGTHS = [7, 31, 12, 1, 20, 9]  # six completions, two groups of three


def main() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(sum(LENGTHS), WIDTH, requires_grad=True)  # what a model would return
    lm_head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
    head = hl.Head.of(lm_head, temperature=0.8)
    segments = hl.Segments.from_lengths(LENGTHS)
    sampled = torch.randint(VOCAB, (sum(LENGTHS),))
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0]).view(2, 3)
    advantages = (reward - reward.mean(1, keepdim=True)).flatten()  # [S]

    # The log-probs that the sampler and the reference would have given.
    with torch.no_grad():
        old = hl.head_stats(hidden, head, sampled).logp
    reference = old + 0.1 * torch.randn_like(old)

    objective = hl.gspo() + 0.05 * hl.kl(estimator="k3") - 0.01 * hl.entropy()
    batch = hl.Batch(sampled, segments, advantages=advantages, old_logps=old, ref_logps=reference)
    optimizer = torch.optim.SGD([hidden, *lm_head.parameters()], lr=0.02)
    for step in range(4):
        out = hl.head_loss(hidden, head, batch, objective)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen = out.metrics.compute()
        clipped = seen["gspo/clip_region"] * len(LENGTHS)
        print(
            f"step {step}: loss {out.loss.item():8.4f}, k3 to the reference "
            f"{out.terms['kl'].item():.4f}, entropy {seen['entropy']:.3f}, "
            f"sequences at the clip {clipped:.0f} of {len(LENGTHS)}"
        )
    print(out.plan)


if __name__ == "__main__":
    main()
