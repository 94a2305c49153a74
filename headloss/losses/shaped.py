"""Policy terms with reshaped advantages: `kl_shaped` and `rlsd_shaped`.

T scored tokens, A advantages, kl an estimate of the KL divergence; sg stops the gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from ..statistics.metrics import Observed
from ..statistics.softmax import Statistics
from .arguments import flags, naming, non_negative, number, one_of, with_floats
from .importance import MAX_LOG_RATIO, estimate
from .kl import ESTIMATORS
from .scope import Scope, wider
from .term import Term


class _Shaped:
    """Proxy of a batch that replaces the advantages and records whether the advantages are read."""

    def __init__(self, batch: Any, advantages: Tensor) -> None:
        self._batch, self._advantages, self.used = batch, advantages, False

    @property
    def advantages(self) -> Tensor:
        self.used = True
        return self._advantages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __len__(self) -> int:
        return len(self._batch)

    def __contains__(self, name: str) -> bool:
        return name in self._batch

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name) if name in self else default


Advantages = Callable[..., Tensor]  # function of (stats, batch, **options), returns [T]


def _called(
    stats: Statistics,
    batch: Any,
    *,
    of: Callable[..., Any],
    by: Advantages,
    name: str | None = None,
    **how: Any,
) -> Any:
    """Call the function `of` (a term's loss or metrics) on the batch with the advantages replaced
    by the result of the function `by`.

    Raise ValueError when the term reads no advantages; the message begins with `name`, if given.
    """
    shaped = _Shaped(batch, by(stats, batch, **how))
    values = of(stats, shaped)
    if name is not None and not shaped.used:
        raise ValueError(f"{name}: term: got one that reads no advantages, want one that does")
    return values


def _shaped(term: object, name: str, by: Advantages, needs: Scope, **how: Any) -> Term:
    """Return a copy of `term` whose advantages are the result of the function `by`; the copy's repr
    shows `name` with the options `how`.

    Raise TypeError if `term` is not a Term. A call of the returned term raises ValueError if `term`
    reads no advantages.
    """
    if not isinstance(term, Term):
        raise TypeError(f"{name}: term: got {type(term).__name__}, want a Term")
    return replace(
        term,
        function=functools.partial(_called, of=term.function, by=by, name=name, **how),
        observe=term.observe and functools.partial(_called, of=term.observe, by=by, **how),
        options=(*term.options, (name, tuple(how.items()))),
        scope=wider(term.scope, needs),
        own_scope=term.own_scope and wider(term.own_scope, needs),
        slopes=None,
    )


# ---------------------------------------------------------------------- minus a KL divergence


def _less_kl(
    stats: Statistics, batch: Any, *, beta: float, estimator: str, centred: bool, through: bool
) -> Tensor:
    value = estimate(batch.ref_logps - stats.logp, estimator)
    value = value if through else value.detach()
    if centred:
        value = value - batch.segments.expand(batch.segments.mean(value))
    return batch.advantages - beta * value


@with_floats
def kl_shaped(
    term: Term,
    *,
    beta: float,
    estimator: Literal["k1", "k2", "k3", "abs"] = "k1",
    centred: bool = False,
    through: bool = False,
) -> Term:
    """Policy term with the KL divergence from the reference subtracted from the advantages.

        A_t - beta kl_t in place of the advantage A_t, or A_t - beta (kl_t - mean_t kl_t) with centred=True; kl_t the KL divergence from the reference policy, estimated at token t

    Ziegler et al. 2019, arXiv:1909.08593, subtract the KL divergence from the reward. For example,
    hl.kl_shaped(hl.reinforce(), beta=1.0) with advantages of 0 is on-policy distillation from the
    reference policy.

    Args:
        term: a term that reads advantages.
        beta: weight of the divergence, a finite number.
        estimator: as in `kl`.
        centred: subtract from each token's divergence the mean divergence of its sequence, so that
            the sequence's mean advantage does not change.
        through: let the gradient flow through the advantages too, as AgileRL does; the gradient is
            then no longer a policy gradient.

    Returns:
        Term: with the name, reduction and modifiers of `term`.
    """  # noqa: E501 (an equation is one line)
    with naming("kl_shaped"):
        number("a finite number", lambda x: True, beta=beta)
        one_of(ESTIMATORS, estimator=estimator)
        flags(centred=centred, through=through)
    how: dict[str, Any] = {"beta": beta, "estimator": estimator}
    how |= {"centred": centred, "through": through}
    return _shaped(term, "kl_shaped", _less_kl, "segment" if centred else "token", **how)


# ---------------------------------------------------------------------- times a teacher's ratio


def _weight(batch: Any, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the weight exp(sign(A) (teacher - old)) clipped to [1 - epsilon, 1 + epsilon], and the
    mask of clipped tokens, [T] each."""
    apart = (batch.teacher_logps - batch.old_logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight = (batch.advantages.sign() * apart).exp()
    clipped = weight.clamp(1 - epsilon, 1 + epsilon)
    return clipped, clipped != weight


def _factor(batch: Any, *, mix: float, epsilon: float, negative_only: bool) -> Tensor:
    factor = 1 - mix + mix * _weight(batch, epsilon)[0]
    return factor.where(batch.advantages < 0, 1) if negative_only else factor


def _times_teacher(stats: Statistics, batch: Any, **how: Any) -> Tensor:
    return batch.advantages * _factor(batch, **how)


def _observe_factor(
    stats: Statistics, batch: Any, *, of: Callable[..., Any] | None, **how: Any
) -> dict[str, Observed]:
    outside = _weight(batch, how["epsilon"])[1]
    if how["negative_only"]:
        outside = outside & (batch.advantages < 0)
    factor = _factor(batch, **how)
    figures = {"factor": factor, "factor_clipped": outside.to(factor.dtype)}
    of_term = {} if of is None else of(stats, batch)
    return of_term | {name: Observed(values) for name, values in figures.items()}


@with_floats
def rlsd_shaped(
    term: Term, *, mix: float = 0.5, epsilon: float = 0.2, negative_only: bool = False
) -> Term:
    """Policy term whose advantages grow where the teacher agrees with their sign, else shrink.

        A_t ((1 - mix) + mix clip(w_t, 1 - epsilon, 1 + epsilon)), w_t = sg(exp(sign(A_t) (teacher_t - old_t)))

    Yang et al. 2026 (RLSD), arXiv:2604.03128; their teacher is the policy with the answer in the
    prompt. `rlsd_shaped` multiplies each advantage by a positive factor, so that no advantage
    changes its sign. The log of the weight w (the ratio of the teacher's to the old policy's
    probability, or the inverse of this ratio) is clamped to [-20, 20].

    Args:
        term: a term that reads advantages.
        mix: each advantage is multiplied by 1 - mix + mix * (clipped ratio w of teacher to policy),
            with mix in [0, 1]; a warm-up or decay is up to the caller.
        epsilon: largest distance of the clipped ratio w_t from 1, >= 0.
        negative_only: leave advantages >= 0 as they are.

    Inputs: the inputs of `term`; teacher_logps, old_logps [..]. Metrics: the metrics of `term`;
    factor (by which a token's advantage is multiplied); factor_clipped (the fraction of tokens at
    which the clip to [1 - epsilon, 1 + epsilon] changed the factor).

    Returns:
        Term: with the name, reduction and modifiers of `term`.
    """  # noqa: E501 (an equation is one line)
    with naming("rlsd_shaped"):
        number("in [0, 1]", lambda x: 0 <= x <= 1, mix=mix)
        non_negative(epsilon=epsilon)
        flags(negative_only=negative_only)
    how = {"mix": mix, "epsilon": epsilon, "negative_only": negative_only}
    shaped = _shaped(term, "rlsd_shaped", _times_teacher, "token", **how)
    return replace(shaped, observe=functools.partial(_observe_factor, of=shaped.observe, **how))
