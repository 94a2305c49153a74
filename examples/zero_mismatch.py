"""Show that, for equal hidden states, a token's policy ratio between training and scoring is
exactly 1.

This example computes old log-probs of answers one by one, and trains on chunks that mix several
answers. On a GPU a token's log-prob has equal bits in scoring and training (bfloat16 heads without
bias or adapter). If a sampler's and a trainer's log-probs still differ on a GPU, the cause is not
the head. On a CPU, log-probs in scoring and training may differ in the last bits.
"""

from __future__ import annotations

import torch

import headloss as hl

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
LENGTHS = (3, 129, 40, 1, 77, 250)


def main() -> None:
    torch.manual_seed(0)
    width, vocabulary, tokens = (1024, 32000, sum(LENGTHS)) if ON_GPU else (32, 200, sum(LENGTHS))
    hidden = torch.randn(tokens, width, device=DEVICE, dtype=DTYPE)
    weight = torch.randn(vocabulary, width, device=DEVICE, dtype=DTYPE) * width**-0.5
    targets = torch.randint(vocabulary, (tokens,), device=DEVICE)
    head = hl.Head(weight.requires_grad_())
    with torch.no_grad():  # Score each answer in a separate call.
        answers = zip(hidden.split(LENGTHS), targets.split(LENGTHS), strict=True)
        old = torch.cat([hl.head_stats(x, head, y).logp for x, y in answers])
    segments = hl.Segments.from_lengths(torch.tensor(LENGTHS, device=DEVICE))
    advantages = torch.randn(len(LENGTHS), device=DEVICE)
    batch = hl.Batch(targets, segments, advantages, old_logps=old)
    options = hl.Options(schedule="one_pass", chunk_tokens=100)
    out = hl.head_loss(hidden.requires_grad_(), head, batch, hl.grpo(), options)
    out.loss.backward()
    least, most = (float(out.metrics[f"grpo/ratio_{end}"]) for end in ("min", "max"))
    print(f"ratio from {least!r} to {most!r}, same bits: {torch.equal(out.logps, old)}")


if __name__ == "__main__":
    main()
