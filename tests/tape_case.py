"""Objectives and batches for tapes, and what autograd and the metrics make of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from headloss import losses as h
from headloss.batch.batch import CURRENT, Batch
from headloss.batch.packing import packing_of
from headloss.batch.reduction import Totals, fixed_length
from headloss.batch.segments import Segments
from headloss.head_loss import _metrics
from headloss.losses.catalogue import TERMS
from headloss.losses.term import Objective, Term
from headloss.objective.bound import Bound, Gradient, bind
from headloss.objective.statistics import STATISTICS, Statistics

LEVELS = ("sequence", "sequence_token", "sequence_product")
UNRECORDED = ("aot", "clip_cov", "kl_cov", "soft_cross_entropy", "any_of")  # no tape holds them


def terms() -> dict[str, Term]:
    """Every term, at each level of its ratio and with the options that change its operations."""
    found: dict[str, Term] = {}
    for make in TERMS:
        if make.__name__ not in UNRECORDED:
            found[make.__name__] = make()
    for level in LEVELS:
        for make in (h.grpo, h.dapo, h.luspo, h.sapo, h.cispo):
            found[f"{make.__name__} {level}"] = make(importance_sampling_level=level)  # type: ignore[operator, call-arg]
        corrected = h.kl(bias_corrected=True, importance_sampling_level=level)  # type: ignore[arg-type]
        found[f"kl {level}"] = corrected
    found["grpo delta"] = h.grpo(delta=1.5)
    found["ppo dual"] = h.ppo(dual_clip=2.0)
    found["cispo low"] = h.cispo(epsilon_low=0.1)
    found["kl k2"] = h.kl(estimator="k2")
    found["dppo kl"] = h.dppo(divergence="kl", delta_low=0.01, ratio_max=None, surrogate="ratio")
    found["dppo two-sided"] = h.dppo(one_sided=False, delta_high=0.05)
    found["kl straight"] = h.kl(estimator="abs", straight_through=True, bias_corrected=True)
    clamps = {"clamp_difference": 0.3, "clamp": 0.2, "zero_above": 0.1, "ratio_max": 1.1}
    found["kl clamps"] = h.kl(estimator="k3", bias_corrected=True, **clamps)
    found["kl k3 corrected"] = h.kl(estimator="k3", bias_corrected=True)
    found["cross_entropy smoothed"] = h.cross_entropy(label_smoothing=0.1)
    found["dpo smoothed"] = h.dpo(label_smoothing=0.1)
    for loss_type in ("hinge", "ipo", "nca_pair", "sppo_hard", "apo_down", "discopop"):
        found[f"dpo {loss_type}"] = h.dpo(loss_type=loss_type)
    found["dpo forward_kl"] = h.dpo(f_divergence_type="forward_kl", loss_type="sigmoid_norm")
    found["dpo js"] = h.dpo(f_divergence_type="js_divergence")
    found["dpo exo"] = h.dpo(label_smoothing=0.1, loss_type="exo_pair")
    found["simpo alpha"] = h.simpo(alpha=0.3)
    found["kto apo"] = h.kto(loss_type="apo_zero_unpaired", undesirable_weight=2.0)
    found["dr_grpo"] = h.dr_grpo(max_completion_length=7)
    return found


def objectives() -> dict[str, Objective]:
    """The same under modifiers, reductions, weights and masks, and mixed."""
    found = {name: Objective.of(term) for name, term in terms().items()}
    base = h.grpo()
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        found[f"corrected {mode}"] = Objective.of(base.corrected(mode, min=0.5, max=1.5))
    found["off policy"] = Objective.of(base.off_policy_masked(0.05))
    found["top entropy"] = Objective.of(h.gspo().top_entropy(threshold=0.7))
    for over in ("token_mean", "sequence_mean", "sequence_sum"):
        found[f"over {over}"] = Objective.of(h.dapo().over(over))
        found[f"where {over}"] = Objective.of(h.gspo().where("keep").over(over))
        found[f"where segment {over}"] = Objective.of(h.kl().where("keep_segment").over(over))
    found["fixed"] = Objective.of(h.unlikelihood().over(fixed_length(9)))
    found["weighted"] = Objective.of(h.ppo().weighted("weight").weighted("weight_segment"))
    found["weighted by integers"] = Objective.of(h.entropy().weighted("times").where("keep"))
    found["modified twice"] = Objective.of(
        h.gspo_token().corrected("token_mask").off_policy_masked(0.1).where("keep")
    )
    found["mixed"] = 0.5 * h.gspo() + 0.1 * h.kl(estimator="k3") - 0.01 * h.entropy()
    found["mixed pairs"] = h.dpo() + 0.2 * h.cross_entropy().where("keep") + 1e-3 * h.z_loss()
    found["twice"] = 0.3 * h.kl() + 0.7 * h.kl() + h.distillation() - 0.5 * h.distillation()
    return found


class Case:
    """A packed batch with statistics, and the inputs of a tape.

    `lengths` scored tokens per segment; unscored positions, where every field holds NaN, are
    strewn among them.
    """

    def __init__(
        self,
        objective: Objective,
        lengths: tuple[int, ...] = (3, 1, 0, 5, 2, 4),
        dtype: torch.dtype = torch.float64,
        *,
        unscored: bool = True,
        static: bool = False,
        current: bool = False,
        device: str = "cpu",
        totals: Totals | None = None,
    ) -> None:
        self.objective, self.dtype, self.vocabulary = objective, dtype, 11
        generator = torch.Generator().manual_seed(sum(lengths))

        def normal(size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        count, segments = sum(lengths), len(lengths)
        positions = count + (count // 2 + 2 if unscored else 0)
        place = torch.randperm(positions, generator=generator)[:count]
        ids = torch.full((positions,), max(segments - 1, 0))
        each = torch.tensor(lengths, dtype=torch.int64)
        ids[place] = torch.arange(segments).repeat_interleave(each)
        targets = torch.full((positions,), -100)
        targets[place] = torch.arange(count) % self.vocabulary

        def field(scored: Tensor) -> Tensor:
            fill: Any = float("nan") if scored.is_floating_point() else 1
            values = torch.full((positions,), fill, dtype=scored.dtype)
            return values.index_copy_(0, place, scored).to(device)

        logp = -0.5 - normal(count).abs()
        sampling = logp + 0.4 * normal(count)
        fields: dict[str, Any] = {
            "advantages": normal(segments).to(device),
            "ref_logps": field(logp + 0.4 * normal(count)),
            "old_logps": CURRENT if current else field((logp + 0.4 * normal(count)).float()),
            "sampling_logps": field(sampling.where(normal(count) < 1, torch.nan)),
            "weight": field(normal(count).bfloat16()),
            "weight_segment": normal(segments).half().to(device),
            "times": field((normal(count) * 3).int()),
            "teacher_logps": field(logp + 0.6),
            "keep": field(normal(count) < 0.4),
            "keep_segment": (normal(segments) < 0.7).to(device),
            "desirable": (normal(segments) < 0.2).to(device),
            "reference_kl": torch.full((segments,), 0.3, dtype=torch.float64, device=device),
        }
        made = Segments.from_ids(ids.to(device), segments)
        self.batch = Batch(targets.to(device), made, totals=totals, **fields)
        unit = objective.segments_per_unit
        self.packing, _ = packing_of(self.batch, self.vocabulary, static, unit)
        self.view = self.packing.view(self.batch, dtype)
        self.stats = self._statistics(logp, place, normal)
        self.kinds = {
            name: None if value is CURRENT else value.dtype for name, value in fields.items()
        }
        self.totals = totals or Totals.of(self.batch)

    def _statistics(self, logp: Tensor, place: Tensor, normal) -> Statistics:
        """Of the packed tokens; what is not scored holds other numbers."""
        p = self.packing
        whole = torch.full((p.shape.numel(),), -0.7, dtype=torch.float64)
        whole[place] = logp
        device = p.targets.device
        logp = (whole if p.index is None else whole[p.index.cpu()]).to(device, self.dtype)

        def other() -> Tensor:
            return normal(len(logp)).abs().to(device, self.dtype)

        teachers = dict.fromkeys(t.teacher for _, t in self.objective.parts if t.teacher)
        top1 = (other() > 0.5).to(self.dtype)
        named = {"lse": other(), "entropy": other(), "mean_logit": other(), "top1": top1}
        return Statistics(logp=logp, **named, divergences={t: other() for t in teachers})

    @property
    def bound(self) -> Bound:
        b = bind(self.objective, self.view, self.totals, self.vocabulary, self.dtype)
        return b

    def eager(self, needed: bool = True) -> tuple[Gradient, dict[str, Any]]:
        """By autograd and `fold_all`."""
        bound = self.bound
        gradient = bound.gradient(self.stats, self.view, None, needed)
        foreign = SimpleNamespace(own=False)
        work: Any = SimpleNamespace(batch=self.view, bound=bound, prepared=foreign)
        return gradient, _metrics(work, self.stats)()


NEEDS = frozenset(STATISTICS)


def measured_of(gradient: Gradient) -> torch.Tensor:
    """The terms' values, the loss, and all numbers of the metrics."""
    assert gradient.loss is not None and gradient.metrics is not None
    parts = [part for metric in gradient.metrics().values() for part in vars(metric).values()]
    return torch.stack([*gradient.values, gradient.loss.double(), *parts])
