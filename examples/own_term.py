"""Write custom losses: a few lines of PyTorch on log-probs, as fused as the built-in losses."""

from __future__ import annotations

import torch

import headloss as hl


@hl.term
def soft_policy_gradient(stats, batch, tau=1.0):
    ratio = (stats.logp - batch.old_logps).exp()
    return -torch.sigmoid(tau * (ratio - 1)) * batch.advantages  # [T]


@hl.term(scope="segment", per="segment")
def worst_token(stats, batch):
    """Return for each sequence [S] the mean square of max(m - logp, 0), where m is the sequence's
    mean log-prob."""
    mean = batch.segments.expand(batch.segments.mean(stats.logp))  # [T]
    return batch.segments.mean((mean - stats.logp).relu().square())  # [S]


def main() -> None:
    report = hl.check_term(soft_policy_gradient(tau=2.0))
    print("reads", report.statistics, "and", report.fields)
    print("agrees when cut at", report.cuts)

    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 16), torch.randn(300, 16)
    hidden.requires_grad_()
    weight.requires_grad_()
    batch = hl.Batch(
        torch.randint(300, (40,)),
        hl.Segments.from_lengths([10, 25, 5]),
        advantages=torch.tensor([1.0, -0.5, 0.2]),
        old_logps=hl.CURRENT,  # on policy: the ratio is 1, but has a gradient
    )
    objective = soft_policy_gradient(tau=2.0) + 0.01 * worst_token()
    out = hl.head_loss(hidden, hl.Head(weight), batch, objective)
    ours = torch.autograd.grad(out.loss, weight)[0]
    print({name: round(value.item(), 4) for name, value in out.terms.items()})

    # For comparison, compute the loss in plain PyTorch from materialised logits.
    logps = (hidden @ weight.T).log_softmax(-1)[torch.arange(40), batch.targets]
    ratio = (logps - logps.detach()).exp()
    advantages = batch.segments.expand(batch.advantages)
    mean = batch.segments.expand(batch.segments.mean(logps))
    worst = batch.segments.mean((mean - logps).relu().square()).mean()
    by_hand = -(torch.sigmoid(2 * (ratio - 1)) * advantages).mean() + 0.01 * worst
    gradient = torch.autograd.grad(by_hand, weight)[0]
    apart = (ours - gradient).norm() / gradient.norm()
    print(f"loss {out.loss.item():.5f}, by hand {by_hand.item():.5f}, gradients {apart:.0e} apart")


if __name__ == "__main__":
    main()
