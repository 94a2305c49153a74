# pyright: strict
"""The public surface as pyright's strict rules see it from outside: `make types` reads this file.

A parameter or a result whose type is unknown is an error there, for each name that is used here.
"""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor

import headloss as hl
from headloss.batch.packing import PackedBatch
from headloss.statistics.softmax import Statistics


@hl.term
def soft_policy_gradient(
    stats: Statistics, batch: PackedBatch, tau: float = 1.0
) -> Tensor:
    ratio = (stats.logp - batch.old_logps).exp()
    return -torch.sigmoid(tau * (ratio - 1)) * batch.advantages


def calls(hidden: Tensor, weight: Tensor, targets: Tensor, logits: Tensor) -> None:
    head = hl.Head(weight, temperature=0.8)
    segments = hl.Segments.from_lengths([3, 4])
    batch = hl.Batch(targets, segments, advantages=torch.ones(2), old_logps=hl.CURRENT)
    assert_type(batch.with_fields(keep=targets > 0), hl.Batch)
    totals = hl.Totals.of(batch) + hl.Totals.of(hl.Batch.from_labels(targets))
    assert_type(totals, hl.Totals)
    options = hl.Options(schedule="recompute", memory_budget=1 << 30)
    objective = hl.gspo() + 0.05 * hl.kl(estimator="k3") - 1e-3 * hl.entropy()
    own = soft_policy_gradient(tau=2.0).over("sequence_mean").weighted("keep")

    out = hl.head_loss(hidden, head, batch, objective + own, options)
    assert_type(out, hl.Output)
    assert_type(out.loss, Tensor)
    assert_type(out.terms, dict[str, Tensor])
    assert_type(out.logps, Tensor)
    assert_type(out.plan, hl.Plan)
    assert_type(out.metrics, hl.Metrics)
    assert_type(out.metrics.compute(), dict[str, float])
    assert_type(hl.logits_loss(logits, batch, hl.dapo(), inplace=True), hl.Output)

    stats = hl.head_stats(hidden, head, batch, options, gradients=("logp",))
    assert_type(stats.logp, Tensor)
    logp, _, entropy = stats
    assert_type((logp, entropy), tuple[Tensor, Tensor])
    assert_type(hl.head_topk(hidden, head, 5).ids, Tensor)
    assert_type(hl.plan(hidden, head, batch, objective), hl.Plan)
    assert_type(hl.check_term(own), hl.TermReport)
    assert_type(hl.head_function(hidden, head, batch, lambda lp, h: (lp - h).mean()), Tensor)
