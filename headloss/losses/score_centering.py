"""Score centering: the sampler's mean score, removed from a policy gradient.

T scored tokens, K candidates, A advantages, p the trainer's probabilities, q the sampler's
probabilities; sg stops the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from ..batch.reduction import token_mean
from ..statistics.metrics import Observed
from ..statistics.softmax import FLOOR, Statistics
from .arguments import bounds, one_of
from .factory import factory
from .importance import bounded, bounded_exp
from .term import Term

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch

Mode = Literal["token_truncate", "token_mask"]
MODES = ("token_truncate", "token_mask")
LEAST_TAIL = 1e-6  # smallest mass of p and of q outside the candidates


class _Centre(NamedTuple):
    """Coefficients of score centering per token, without a gradient.

    Attributes:
        c: [T, K] the coefficient of each candidate's log-prob in the loss.
        sampler_mass: [T] the sampler's total probability of the candidates.
        trainer_mass: [T] the trainer's total probability of the candidates.
        rho: [T] (1 - sampler_mass) / (1 - trainer_mass).
    """

    c: Tensor
    sampler_mass: Tensor
    trainer_mass: Tensor
    rho: Tensor


@dataclass(frozen=True, kw_only=True)
class _Centering:
    mode: str | None
    minimum: float
    maximum: float

    def __call__(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        log_p = _log_p(stats, batch)
        return batch.advantages * (self.centre(log_p, batch).c * log_p).sum(1)

    @torch.no_grad()
    def centre(self, log_p: Tensor, batch: PackedBatch) -> _Centre:
        """Return the coefficients c_k of the loss A sum_k c_k log p_k, computed from `log_p` [T,
        K], the trainer's log-probs of the candidates."""
        got, want = batch.candidate_sampling_logps.shape[1:], log_p.shape[1:]
        if got != want:
            raise ValueError(
                f"candidate_sampling_logps: got {tuple(got)} at each token, want {tuple(want)}"
            )
        log_q = _held(batch.candidate_sampling_logps.to(log_p.dtype), batch)
        p, q = log_p.exp(), log_q.exp()
        # Sum in float64: a float32 sum close to 1 would leave no correct digits of 1 - sum.
        masses = [x.sum(1, dtype=torch.float64) for x in (q, p)]
        of_q, of_p = ((1 - mass).clamp_min(LEAST_TAIL) for mass in masses)
        rho = of_q / of_p
        alpha = (rho * self._weight(-rho.log())).to(p.dtype)
        c = q * self._weight(log_p - log_q) - alpha.unsqueeze(1) * p
        return _Centre(c, *(x.to(p.dtype) for x in (*masses, rho)))

    def _weight(self, log_ratio: Tensor) -> Tensor:
        """Return the weight exp(log_ratio), clamped or masked as the option `mode` says."""
        if self.mode is None:
            return torch.ones_like(log_ratio)
        return bounded(
            bounded_exp(log_ratio), self.minimum, self.maximum, self.mode == "token_mask"
        )

    def observe(self, stats: Statistics, batch: PackedBatch) -> dict[str, Observed]:
        centre = self.centre(_log_p(stats, batch), batch)
        return {
            "sampler_mass": Observed(centre.sampler_mass),
            "trainer_mass": Observed(centre.trainer_mass),
            "rho": Observed(centre.rho),
            "abs_c": Observed(centre.c.abs().sum(1)),
        }


def _held(logps: Tensor, batch: PackedBatch) -> Tensor:
    """Return [T, K] log-probs of the candidate tokens; -10000 for probability 0 and for a missing
    candidate."""
    return logps.masked_fill(batch.candidate_ids < 0, FLOOR).clamp_min(FLOOR)


def _log_p(stats: Statistics, batch: PackedBatch) -> Tensor:
    return _held(stats.candidate_logps, batch)


@factory
def score_centering(
    *, mode: Mode | None = None, min: float | None = None, max: float | None = None
) -> Term:
    """Subtract the mean score (gradient of log p) under the sampler from a policy gradient.

        A sum_k sg(c_k) log p_k over candidates k; c_k = q_k f(p_k / q_k) - alpha p_k, with the weight function f that the option mode selects; alpha = rho f(1 / rho); rho = (1 - sum_k q_k) / (1 - sum_k p_k)

    Marek and Ryabinin 2026, arXiv:2609.20807, equations 9, 12 and 14. In rho = (1 - sum_k q_k) / (1
    - sum_k p_k), for the sampler's and the trainer's probability q_k and p_k of candidate k,
    numerator and denominator are raised to at least 1e-6 (appendix A.3 of Marek and Ryabinin;
    NeMo-RL bounds the denominator alone). Add score centering to a policy term, with that policy
    term's reduction and correction bounds, e.g. hl.reinforce() + hl.score_centering(), or
    hl.reinforce().corrected("token_truncate", min=a, max=b, live=True) +
    hl.score_centering(mode="token_truncate", min=a, max=b). The sampler's probability of a
    vocabulary entry that is not among `candidate_ids` is modelled as rho times the trainer's
    probability of that entry. The loss is exact if the candidates cover the whole vocabulary or all
    of `support_ids`, because no token is outside the candidates. The loss of prime-rl is the exact
    sum over the ids that the sampler kept, and drops tokens whose trainer and sampler probabilities
    differ too much. `hl.score_centering` also applies to tokens that the policy term clips or
    masks.

    Args:
        mode: the weight f(w) of the ratio w is 1 (None), w clamped to [min, max]
            ("token_truncate"), or w within [min, max] and 0 outside ("token_mask"). The log of the
            ratio w = p / q is clamped to [-20, 20] before the weight function f(w) is applied.
        min, max: bounds of the ratio p / q, each > 0 or None; both None if mode is None.

    Inputs: advantages; candidate_ids [.., K], the sampler's likeliest tokens, where unused entries
    count 0; candidate_sampling_logps [.., K], log q of the candidates under the sampler's full
    sampling distribution. Default reduction: token_mean. Metrics: sampler_mass and trainer_mass
    (total probability of the candidates under sampler and trainer), rho = (1 - sampler_mass) / (1 -
    trainer_mass), and abs_c (the sum over the candidates of the absolute coefficients of their
    log-probs).
    """  # noqa: E501 (an equation is one line)
    if mode is not None:
        one_of(MODES, mode=mode)
    elif min is not None or max is not None:
        raise ValueError(f"got min={min!r} and max={max!r} without a mode, want none")
    low, high = bounds("> 0", lambda x: x > 0, min, max)
    centering = _Centering(mode=mode, minimum=low, maximum=high)
    return Term(name="", function=centering, reduction=token_mean, observe=centering.observe)
