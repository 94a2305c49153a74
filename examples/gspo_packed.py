"""GSPO on packed completions of any length, with a KL penalty and an entropy bonus.

The example makes four updates on one set of samples. In the first update the policy is the
sampler's policy: every ratio is 1, and the GSPO term is minus the mean advantage, which is 0. In
later updates the ratio of the shortest completion differs most from 1, because its mean log-ratio
is over the fewest tokens. If a sequence's ratio moves out of [1 - 3e-4, 1 + 4e-4], the sequence is
clipped and gets no further gradient from GSPO, so that the GSPO term improves less with each
update. The loss is the GSPO term, plus 0.05 times the KL, minus 0.01 times the entropy.

Chunks of logits end where sequences end, so that one pass is enough. The printed plan gives the
memory of headloss (`total`) and the memory with plain logits (`plain`).
"""

from __future__ import annotations

import torch

import headloss as hl

VOCAB, WIDTH = 8000, 64
LENGTHS = [70, 310, 120, 10, 200, 90]  # Six completions, three for each of two prompts.


def main() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(sum(LENGTHS), WIDTH, requires_grad=True)  # a model's states
    lm_head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
    head = hl.Head.of(lm_head, temperature=0.8)
    segments = hl.Segments.from_lengths(LENGTHS)
    sampled = torch.randint(VOCAB, (sum(LENGTHS),))
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0]).view(2, 3)
    advantages = (reward - reward.mean(1, keepdim=True)).flatten()  # [S]

    # Placeholders for the log-probs of the sampler and of the reference policy.
    with torch.no_grad():
        old = hl.head_stats(hidden, head, sampled).logp
    reference = old + 0.1 * torch.randn_like(old)

    objective = hl.gspo() + 0.05 * hl.kl(estimator="k3") - 0.01 * hl.entropy()
    batch = hl.Batch(sampled, segments, advantages=advantages, old_logps=old, ref_logps=reference)
    options = hl.Options(memory_budget=16 << 20)  # 16 MiB for the logits of a chunk
    optimizer = torch.optim.SGD([hidden, *lm_head.parameters()], lr=1e-3)
    for step in range(4):
        out = hl.head_loss(hidden, head, batch, objective, options)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen = out.metrics.compute()
        clipped = seen["gspo/clip_region"] * len(LENGTHS)
        print(
            f"step {step}: loss {out.loss.item():.6f}, gspo {out.terms['gspo'].item():9.6f}, "
            f"ratios from {seen['gspo/ratio_min']:.5f} to {seen['gspo/ratio_max']:.5f}, "
            f"{clipped:.0f} of {len(LENGTHS)} clipped"
        )
    print(out.plan)


if __name__ == "__main__":
    main()
