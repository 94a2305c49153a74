"""Distil on the student's top-k tokens, with and without a tail of all other tokens.

The distillation is on-policy: the student's top-k tokens change in every step.

T tokens; K candidates, the top-k tokens.
"""

import torch

import headloss as hl


@hl.term
def candidate_kl(stats, batch, reverse=False, rest=True):
    """Return KL(q || p) [T], or KL(p || q) if `reverse`, of the teacher's q and the student's p.

    The KL is over the candidates and, if `rest`, over one outcome for all other tokens.
    """
    log_p, log_q = stats.candidate_logps, batch.teacher_logps[:, :-1]
    if rest:
        log_p = torch.cat([log_p, stats.candidate_tail.unsqueeze(1)], 1)
        log_q = batch.teacher_logps
    a, b = (log_p, log_q) if reverse else (log_q, log_p)
    return (a.exp() * (a - b)).sum(1)


def teachers_logps(z, ids):
    """Return [T, K + 1]: log-probs of the teacher at the candidates, and of all other tokens."""
    log_q = z.log_softmax(1)
    rest = log_q.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([log_q.gather(1, ids), rest], 1)


if __name__ == "__main__":
    for options in ({}, {"rest": False}, {"reverse": True}, {"reverse": True, "rest": False}):
        torch.manual_seed(0)
        z, x = 2 * torch.randn(32, 200), torch.randn(32, 32, requires_grad=True)
        weight = (torch.randn(200, 32) / 8).requires_grad_()
        optimizer = torch.optim.Adam([x, weight], lr=0.2)
        for _ in range(25):
            head, tokens = hl.Head(weight), z.argmax(1)
            ids = hl.head_topk(x, head, k=16).ids  # the student's likeliest tokens
            batch = hl.Batch(tokens, candidate_ids=ids, teacher_logps=teachers_logps(z, ids))
            optimizer.zero_grad()
            hl.head_loss(x, head, batch, candidate_kl(**options)).loss.backward()
            optimizer.step()
        p, q = (x @ weight.t()).detach().log_softmax(1), z.log_softmax(1)
        print(options, f"KL(q || p) over all tokens {(q.exp() * (q - p)).sum(1).mean():.3f}")
