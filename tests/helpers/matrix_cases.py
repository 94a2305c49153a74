"""Objectives for `tests/test_matrix.py`, `test_properties.py` and `test_distillation.py`, by
name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import headloss as hl

WIDTH = 8
LENGTHS = (5, 1, 7, 4, 0, 6, 3, 2)  # four pairs, with an empty and a one-token segment
TOKENS = sum(LENGTHS)

# ---------------------------------------------------------------------- objectives


@dataclass(frozen=True, kw_only=True)
class Case:
    """An objective, and what its batch must hold.

    Attributes:
        make: function that makes the objective; its argument is the teacher's head or None.
        logp_only: True if the loss depends on log-probs alone, as the `frozen` schedule requires.
        teacher: form of the teacher: "logits", "hidden" (states), "topk" (stored top-k log-probs)
            or "candidates" (log-probs of candidates); None without a teacher.
        temperature: temperature of the stored top-k log-probs.
        current: True if the batch passes `old_logps=hl.CURRENT`, the current log-probs.
        bounded: True if a policy ratio of exp(20) gives a loss that is finite in 16 bits.
        tightest: largest allowed error of float64 results.
    """

    make: Callable[[hl.Head | None], hl.Term | hl.Objective]
    logp_only: bool = False
    teacher: str | None = None
    temperature: float = 1.0
    current: bool = False
    bounded: bool = True
    tightest: float = 1e-10

    def objective(self, teacher: hl.Head | None = None) -> hl.Objective:
        return hl.Objective.of(self.make(teacher))


def _policy(make: Callable[[], hl.Term | hl.Objective], **options: Any) -> Case:
    return Case(make=lambda _: make(), logp_only=True, **options)


def _other(make: Callable[[], hl.Term | hl.Objective], **options: Any) -> Case:
    return Case(make=lambda _: make(), **options)


@hl.term(scope="batch")
def standardised(stats, batch):
    """A user-defined batch-scoped term: log-probs relative to their mean and spread."""
    # With static shapes unscored tokens are not removed, but marked in `batch.live`.
    live = torch.ones_like(stats.logp) if batch.live is None else batch.live.to(stats.logp.dtype)
    centred = stats.logp - (live * stats.logp).sum() / live.sum().clamp_min(1)
    spread = (live * centred.square()).sum().detach().sqrt()
    return centred / (spread + 1) * (1 + batch.advantages)


@hl.term(scope="segment", per="segment")
def segment_sigmoid(stats, batch):
    """A user-defined segment-scoped term of two statistics."""
    mean = batch.segments.mean
    return -torch.sigmoid(mean(stats.logp) + 0.1 * mean(stats.entropy)) * mean(batch.advantages)


def _read_only(stats, batch):
    observed = {"collision": stats.sum_p_squared, "least_logp": stats.candidate_logps.amin(1)}
    peak = hl.Observed(stats.peak, hl.Max)
    return {"peak": peak} | {n: hl.Observed(v) for n, v in observed.items()}


@hl.term(observe=_read_only)
def margin(stats, batch):
    """Test term that reads only candidates: the sum of student times teacher probabilities of all
    candidates but the first, minus 0.3 times the first candidate's log-prob."""
    first, others = stats.candidate_logps[:, 0], stats.candidate_logps[:, 1:]
    return (others.exp() * batch.teacher_logps[:, 1:].exp()).sum(1) - 0.3 * first


@hl.term(scope="segment", per="segment")
def reverse_kl_and_rest(stats, batch):
    """KL(p || q) over the candidates and all other columns, whose teacher probability is 1/20."""
    given = batch.candidate_ids >= 0
    log_p, tail = stats.candidate_logps, stats.candidate_tail
    inside = torch.where(given, log_p.exp() * (log_p - batch.teacher_logps), 0).sum(1)
    return batch.segments.mean(inside + tail.exp() * (tail - math.log(0.05)))


SUPERVISED = {
    "cross_entropy": _policy(hl.cross_entropy),
    "cross_entropy_smoothed": _other(lambda: hl.cross_entropy(label_smoothing=0.1)),
    "z_loss": _other(hl.z_loss),
    "entropy": _other(hl.entropy),
    # If 1 - p is about 1e-13, even the float64 reference has few correct digits.
    "unlikelihood": _policy(hl.unlikelihood, tightest=1e-4),
    "dft": _policy(hl.dft),
    "chord_phi": _policy(hl.chord_phi),
    "eaft": _other(hl.eaft),
    "focal": _policy(hl.focal),
}
POLICY = {
    "grpo": _policy(hl.grpo),
    "grpo_delta": _policy(lambda: hl.grpo(delta=1.5)),
    "grpo_sequence": _policy(lambda: hl.grpo(importance_sampling_level="sequence")),
    "grpo_sequence_token": _policy(
        lambda: hl.grpo(importance_sampling_level="sequence_token"), bounded=False
    ),
    "gspo": _policy(hl.gspo),
    "gspo_token": _policy(hl.gspo_token, bounded=False),
    "dapo": _policy(hl.dapo),
    "bnpo": _policy(hl.bnpo),
    "dr_grpo": _policy(lambda: hl.dr_grpo(max_completion_length=16)),
    "luspo": _policy(hl.luspo),
    "ppo": _policy(hl.ppo),
    "ppo_dual_clip": _policy(lambda: hl.ppo(dual_clip=1.5)),
    "cispo": _policy(hl.cispo),
    "cispo_sequence": _policy(
        lambda: hl.cispo(epsilon_low=0.1, importance_sampling_level="sequence")
    ),
    "reinforce": _policy(hl.reinforce),
    "sapo": _policy(hl.sapo),
    "sapo_sequence": _policy(lambda: hl.sapo(importance_sampling_level="sequence")),
    "gmpo": _policy(hl.gmpo),
    "vespo": _policy(hl.vespo),
    "kl_k1": _policy(hl.kl),
    "kl_k2": _policy(lambda: hl.kl(estimator="k2")),
    "kl_k3": _policy(lambda: hl.kl(estimator="k3")),
    "kl_corrected": _policy(lambda: hl.kl(estimator="k3", bias_corrected=True), bounded=False),
    "kl_corrected_sequence": _policy(
        lambda: hl.kl(estimator="k2", bias_corrected=True, importance_sampling_level="sequence"),
        bounded=False,
    ),
    "current": _policy(hl.grpo, current=True),
    "regions": _policy(
        lambda: (
            hl.dppo(delta_low=0.05)
            + hl.icepop()
            + hl.vaco(delta=0.1)
            + hl.ce_gppo()
            + hl.aspo()
            + hl.clip_cov(share=0.1, low=-1.0)
        )
    ),
    "topr": _policy(lambda: hl.topr() + hl.topr(importance_sampling_level="token")),
    "fipo": _policy(lambda: hl.fipo(delta=1.3, half_life=2.0, safety=1.1, high_only=False)),
    "real": _policy(lambda: hl.real(tau=0.3) + hl.real().over("prompt_mean").where("kept")),
    "penalties": _policy(
        lambda: hl.dro() + hl.kl_cov(share=0.2) + 0.1 * hl.kl(straight_through=True), current=True
    ),
}
PREFERENCE = {
    "dpo": _policy(hl.dpo),
    "dpo_smoothed": _policy(lambda: hl.dpo(beta=0.3, label_smoothing=0.1)),
    "ipo": _policy(hl.ipo),
    "simpo": _policy(lambda: hl.simpo(beta=2.0, gamma=0.5)),
    "cpo": _policy(hl.cpo),
    "orpo": _policy(lambda: hl.orpo(rejected=3)),
    "aot": _policy(hl.aot),
    "dpo_weighted": _policy(lambda: hl.dpo(use_weighting=True, rejected=3)),
    "kto": _policy(hl.kto),
    "a2po": _policy(lambda: hl.a2po(beta=0.5)),
}
MODIFIED = {
    **{
        mode: _policy(lambda mode=mode: hl.grpo().corrected(mode, min=0.9, max=1.1))
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "rejected": _policy(
        lambda: (
            hl.grpo().rejected("k3", "sequence_mean", max=0.02)
            + hl.gspo().rejected("tv", max=0.05, live=True).rejected("kl", "sequence_max", max=0.1)
            + hl.dapo().corrected("sequence_mask", min=0.5, live=True, normalized=True)
        )
    ),
    "rejected_by_each_ratio": _policy(
        lambda: (
            hl.grpo().rejected("ratio", "sequence_max", min=0.75, max=1.3)
            + hl.gspo().rejected("ratio", "sequence_max", max=1.5, live=True)
        )
    ),
    "off_policy_masked": _policy(lambda: hl.grpo().off_policy_masked(0.02)),
    "second_moment_masked": _policy(
        lambda: (
            hl.grpo().second_moment_masked(0.02)
            + hl.cispo(epsilon_high=50.0).second_moment_masked(live=True)
        )
    ),
    "top_entropy_quantile": _policy(lambda: hl.dapo().top_entropy(quantile=0.4)),
    "top_entropy_threshold": _policy(lambda: hl.dapo().top_entropy(threshold=0.5)),
    "weighted": _policy(lambda: hl.cross_entropy().weighted("weight")),
    "weighted_per_segment": _policy(lambda: hl.gspo().weighted("segment_weight")),
    "where": _policy(lambda: hl.grpo().where("kept")),
    "where_per_segment": _policy(lambda: hl.grpo().where("segment_kept")),
    "where_segment_scope": _policy(lambda: hl.gspo().where("kept")),
    "over_sequence_sum": _other(lambda: hl.entropy().over("sequence_sum")),
    "over_fixed_length": _policy(lambda: hl.gspo().over(hl.fixed_length(16))),
    "rlsd_shaped": _policy(lambda: hl.rlsd_shaped(hl.grpo()) + hl.rlsd_shaped(hl.gspo(), mix=1.0)),
    "over_prompt_mean": _policy(
        lambda: (
            hl.gspo().over("prompt_mean")
            + hl.dapo().over("prompt_mean").where("kept")
            + hl.reinforce().over("prompt_mean").where("segment_kept")
        )
    ),
    "standardised": _policy(standardised),
    "segment_sigmoid": _other(segment_sigmoid),
}
DISTILLATION = {
    f"distillation_{teacher}_{kind}": Case(
        make=lambda head, kind=kind, t=t, teacher=teacher: hl.distillation(
            divergence=kind,
            beta=0.3,
            temperature=t,
            teacher_head=head if teacher == "hidden" else None,
        ),
        teacher=teacher,
        temperature=t,
    )
    for teacher, t in (("logits", 1.0), ("hidden", 2.0), ("topk", 0.8))
    for kind in ("forward_kl", "reverse_kl", "js", *(("skew_reverse_kl",) if t == 1 else ()))
}
DISTILLATION["distillation_sampled"] = Case(
    make=lambda _: hl.distillation(divergence="reverse_kl", temperature=0.8, tail="sampled"),
    teacher="topk",
    temperature=0.8,
)
DRAFT = {
    "draft_logits": Case(
        make=lambda _: hl.nla() + 0.3 * hl.lk_hybrid() + hl.cross_entropy(), teacher="logits"
    ),
    "draft_hidden": Case(
        make=lambda head: (
            hl.lk_alpha(teacher_head=head)
            + hl.dspark(teacher_head=head, gamma=None)
            + hl.distillation(divergence="js", beta=0.3, teacher_head=head)
        ),
        teacher="hidden",
    ),
    "draft_steps": Case(
        make=lambda _: hl.lk_hybrid(per="step", temperature=0.8), teacher="topk", temperature=0.8
    ),
    "draft_blocks": Case(
        make=lambda _: hl.cross_entropy().modified(hl.draft_weights("d_pace"))
    ),
}
CANDIDATES = {
    "several_targets": Case(
        make=lambda _: hl.soft_cross_entropy() + 0.5 * hl.any_of(), teacher="candidates"
    ),
    "margin": _policy(margin, teacher="candidates"),
    "score_centering": _policy(
        lambda: (
            hl.reinforce().corrected("token_truncate", min=0.7, max=1.4, live=True)
            + hl.score_centering(mode="token_truncate", min=0.7, max=1.4)
            + 0.3 * hl.score_centering()
        ),
        teacher="candidates",
    ),
    "reverse_kl_and_rest": Case(make=lambda _: reverse_kl_and_rest(), teacher="candidates"),
}
MIXES = {
    "mix_candidates": Case(
        make=lambda _: hl.grpo() + margin() + 0.2 * reverse_kl_and_rest() - 0.1 * hl.entropy(),
        teacher="candidates",
    ),
    "mix": _other(
        lambda: hl.gspo() + 1e-4 * hl.z_loss() - 1e-3 * hl.entropy() + 0.1 * hl.kl(),
    ),
    "mix_preference": _other(
        lambda: hl.dpo() + 0.2 * hl.cross_entropy(label_smoothing=0.05) - 0.01 * hl.entropy()
    ),
    "mix_restricted": _other(
        lambda: hl.dapo().where("kept") + hl.dapo().where("segment_kept") - 0.1 * hl.entropy()
    ),
    "on_policy_distillation": _policy(hl.on_policy_distillation),
    "sdar": _policy(lambda: hl.reinforce() + 0.1 * hl.sdar()),
    "mix_distillation": Case(
        make=lambda _: hl.gspo() + 0.5 * hl.distillation(temperature=1.5) - 0.01 * hl.entropy(),
        teacher="logits",
    ),
    "mix_teachers": Case(
        make=lambda _: hl.distillation() + 0.3 * hl.distillation(divergence="js", temperature=2.0),
        teacher="logits",
    ),
}
CASES: dict[str, Case] = {
    **SUPERVISED,
    **POLICY,
    **PREFERENCE,
    **MODIFIED,
    **DISTILLATION,
    **DRAFT,
    **CANDIDATES,
    **MIXES,
}


def others(tokens: int, segments: int) -> dict[str, Tensor]:
    """Return the batch fields that only a few terms read: answer labels, reference KL, teacher
    log-probs, random draws and prompts."""
    generator = torch.Generator().manual_seed(4)
    return {
        "desirable": torch.arange(segments) % 3 != 1,
        "reference_kl": torch.full((segments,), 0.2),
        "teacher_logps": -torch.rand(tokens, generator=generator),
        "draws": torch.rand(tokens, generator=generator),
        # Groups of four segments alternate between two prompts.
        "prompts": 5 - 3 * (torch.arange(segments) // 4 * 2 + torch.arange(segments) % 2),
    }
