"""User-defined terms of every scope, as in the documentation."""

from __future__ import annotations

import torch

import headloss as hl
from headloss.statistics.metrics import Observed


@hl.term
def soft_policy_gradient(stats, batch, tau=1.0):
    ratio = (stats.logp - batch.old_logps).exp()
    return -torch.sigmoid(tau * (ratio - 1)) * batch.advantages


@hl.term(scope="segment", per="segment")
def sequence_loss(stats, batch):
    ratio = -batch.segments.mean(stats.logp - batch.old_logps).exp()
    return ratio * batch.segments.mean(batch.advantages)


@hl.term(scope="segment", reduction="sequence_sum", name="centred")
def centred_logps(stats, batch):
    return (stats.logp - batch.segments.expand(batch.segments.mean(stats.logp))).square()


@hl.term(scope="batch", observe=lambda stats, batch: {"top": Observed(stats.entropy.detach())})
def standardised_entropy(stats, batch):
    return ((stats.entropy - stats.entropy.mean()) / stats.entropy.std()).tanh()
