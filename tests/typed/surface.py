"""Types of the public functions for a user's type checker; `make types` checks the file without
running."""

from __future__ import annotations

from typing import assert_type

from torch import Tensor

import headloss as hl
from headloss.losses.term import Objective, Term


def verbs(hidden: Tensor, head: hl.Head, batch: hl.Batch, objective: Objective) -> None:
    out = hl.head_loss(hidden, head, batch, objective, hl.Options(metrics=False))
    assert_type(out, hl.Output)
    assert_type(out.loss, Tensor)
    assert_type(out.terms, dict[str, Tensor])
    assert_type(out.entropies, Tensor | None)
    assert_type(out.metrics, hl.Metrics)
    assert_type(out.plan, hl.Plan)
    assert_type(hl.logits_loss(hidden, batch, objective), hl.Output)
    assert_type(hl.plan(hidden, head, batch, None), hl.Plan)
    assert_type(hl.head_function(hidden, head, batch, lambda logps, _: logps.sum()), Tensor)
    assert_type(hl.check_term(hl.grpo()), hl.TermReport)


def statistics(hidden: Tensor, head: hl.Head, targets: Tensor) -> None:
    stats = hl.head_stats(hidden, head, targets)
    assert_type(stats, hl.HeadStats)
    assert_type(stats.candidate_logps, Tensor | None)
    logp, lse, entropy = stats
    assert_type((logp, lse, entropy), tuple[Tensor, Tensor, Tensor])
    best = hl.head_topk(hidden, head, k=3)
    assert_type((best.ids, best.logps), tuple[Tensor, Tensor])


def objectives(loss: Term) -> None:
    assert_type(hl.gspo(), Term)
    assert_type(loss + 0.1 * hl.kl(), Objective)
    assert_type(hl.grpo().over(hl.token_mean).where("mask"), Term)


@hl.term
def users(stats, batch, a=0.3):
    return -a * stats.logp * batch.advantages


@hl.term(scope="segment")
def of_segments(stats, batch):
    return -batch.segments.mean(stats.logp)


def terms() -> None:
    assert_type(users(a=0.5), Term)
    assert_type(of_segments(), Term)
