"""`check_term` reports what a term reads, and raises for a term that breaks its declarations."""

from __future__ import annotations

import pytest
import torch
from own_terms import sequence_loss, soft_policy_gradient, standardised_entropy

import headloss as hl

# ---------------------------------------------------------------------- check_term


def test_a_report():
    report = hl.check_term(soft_policy_gradient(tau=2.0))
    assert report.statistics == ("logp",)
    assert report.fields == ("advantages", "old_logps")
    assert report.gradients == ("logp",)
    assert report.cuts == ("segment borders", "single tokens", "permuted segments")
    assert hl.check_term(sequence_loss()).cuts == ("segment borders", "permuted segments")
    assert hl.check_term(standardised_entropy()).cuts == ("permuted segments",)


@pytest.mark.parametrize(
    "term",
    [
        hl.cross_entropy(label_smoothing=0.1),
        hl.z_loss(),
        hl.unlikelihood(),
        hl.grpo(),
        hl.gspo(),
        hl.gspo_token(),
        hl.gmpo(),
        hl.vespo(),
        hl.cispo(),
        hl.sapo(),
        hl.dpo(),
        hl.simpo(),
        hl.kl(estimator="k3", bias_corrected=True),
        hl.grpo().corrected("sequence_truncate"),
        hl.grpo().off_policy_masked(0.1),
        hl.grpo().top_entropy(quantile=0.5),
        hl.reinforce().weighted("w").where("keep"),
        hl.dr_grpo(),
    ],
    ids=repr,
)
def test_shipped_terms_pass(term):
    assert hl.check_term(term).gradients


def test_fields_of_ones_own():
    hl.check_term(hl.reinforce().weighted("w"), w=torch.rand(6))
    with pytest.raises(ValueError, match="w: got shape"):
        hl.check_term(hl.reinforce().weighted("w"), w=torch.rand(7))


COUNT = []


@hl.term(scope="segment")
def whole_batch(stats, batch):
    return stats.logp - stats.logp.mean()


@hl.term(scope="segment")
def position(stats, batch):
    return stats.logp * torch.arange(len(batch))


@hl.term
def neighbours(stats, batch):
    return stats.logp * stats.logp.roll(1)


@hl.term
def counts_calls(stats, batch):
    COUNT.append(1)
    return stats.logp * len(COUNT)


@hl.term
def overwrites(stats, batch):
    batch.advantages.mul_(2)
    return stats.logp * batch.advantages


@hl.term
def detached(stats, batch):
    return stats.logp.detach() * batch.advantages


@hl.term
def root(stats, batch):
    return (stats.logp - stats.logp.detach()).abs().sqrt()


@hl.term
def undefined(stats, batch):
    return stats.logp.sqrt()


@hl.term
def sums(stats, batch):
    return batch.segments.expand(batch.segments.sum(stats.logp))


@hl.term(scope="segment")
def parted_pairs(stats, batch):
    chosen, rejected = batch.segments.split_pairs(batch.segments.sum(stats.logp))
    return batch.segments.expand((rejected - chosen).repeat_interleave(2))


@pytest.mark.parametrize(
    ("factory", "match"),
    [
        (parted_pairs, "parted_pairs: .*segments_per_unit=2 of a term of pairs"),
        (whole_batch, 'whole_batch: differs by .*segment borders; its scope is "segment"'),
        (position, "position: differs by .*segment borders"),
        (neighbours, "neighbours: differs by"),
        (counts_calls, "counts_calls: gives two values for one input; it must be pure"),
        (overwrites, "overwrites: changes advantages in place"),
        (undefined, "undefined: is NaN at some of its values"),
        (detached, "detached: .*no gradient"),
        (root, "root: has a non-finite gradient with respect to logp"),
        (sums, "sums: sums over segments"),
    ],
)
def test_bad_terms_are_told_apart(factory, match):
    with pytest.raises(ValueError, match=match):
        hl.check_term(factory)


def _raise() -> hl.Term:
    raise TypeError("of the factory itself")


@pytest.mark.parametrize("wrong", [3, "grpo", hl.grpo() + hl.kl(), torch.nn.Linear])
def test_check_term_wants_a_term(wrong):
    with pytest.raises(TypeError, match="term: got .*, want a Term"):
        hl.check_term(wrong)
    with pytest.raises(TypeError, match=r"want a Term: hl\.term\(function\)\(\)"):
        hl.check_term(lambda s, b: -s.logp)
    with pytest.raises(TypeError, match="^of the factory itself$"):
        hl.check_term(_raise)


def test_fields_of_check_term_are_tensors():
    with pytest.raises(TypeError, match="old_logps: got Current, want a tensor"):
        hl.check_term(hl.grpo(), old_logps=hl.CURRENT)


SAMPLED = torch.where(torch.arange(28) % 3 == 0, torch.nan, -torch.rand(28))


def test_a_term_may_not_fill_in_nan():
    @hl.term
    def fills(stats, batch):
        return stats.logp * batch.sampling_logps.nan_to_num_(0.0)

    with pytest.raises(ValueError, match="fills: changes sampling_logps in place"):
        hl.check_term(fills, sampling_logps=SAMPLED)


def test_a_field_may_be_nan_where_the_term_says_so():
    term = hl.reinforce().corrected("token_truncate", max=2.0, live=True)
    assert "sampling_logps" in hl.check_term(term, sampling_logps=SAMPLED).fields
