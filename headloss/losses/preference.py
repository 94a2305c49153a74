"""Preference terms on pairs: segment 2k is the chosen answer, 2k + 1 the rejected answer.

S segments; h is the score of the chosen answer minus the score of the rejected answer. Every term
of this module has segment scope and returns one loss per segment, [S]. The module
`preference_pairs` says how empty answers and several rejected answers per chosen answer are
treated.
"""

from __future__ import annotations

import functools

from .arguments import flags, number, one_of, positive
from .factory import factory
from .preference_pairs import (
    AVERAGED,
    DIVERGENCES,
    Pairwise,
    f_log_ratio,
    log_odds,
    log_ratio,
    logp,
    preference,
)
from .term import Term


def _averaged(asked: bool | None, loss_type: str) -> bool:
    if asked is not None and not isinstance(asked, bool):
        raise TypeError(f"average_log_prob: got {asked!r}, want True, False or None")
    return loss_type in AVERAGED if asked is None else asked


@factory
def dpo(
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    average_log_prob: bool | None = None,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    ld_alpha: float | None = None,
    use_weighting: bool = False,
    discopop_tau: float = 0.05,
    rejected: int = 1,
) -> Term:
    """Direct preference optimization, on sums of log-probs.

        -log sigmoid(beta h), h = sum_chosen(logp - ref) - sum_rejected(logp - ref)

    Rafailov et al. 2023, arXiv:2305.18290. The option loss_type selects the loss:

    - symbols: s is the log sigmoid; c and r are the scores of the chosen and the rejected answer
      times beta; x = c - r = beta h; e = label_smoothing;
    - sigmoid: -s(x); hinge: max(0, 1 - x) (Zhao et al. 2023, arXiv:2305.10425); sigmoid_norm and
      ipo: -s(x) and (h - 1 / (2 beta))^2 on log-prob means;
    - robust: (-(1 - e) s(x) + e s(-x)) / (1 - 2e) (Chowdhury et al. 2024, arXiv:2403.00409);
    - exo_pair: KL of (sigmoid x, sigmoid -x) from (1 - e, e) (Ji et al. 2024, arXiv:2402.00856);
    - nca_pair: -s(c) - (s(-c) + s(-r)) / 2 (Chen et al. 2024, arXiv:2402.05369);
    - bco_pair: -s(c) - s(-r), without a running reward shift (Jung et al. 2024, arXiv:2404.04656);
    - sppo_hard: (c / beta - 1 / (2 beta))^2 + (r / beta + 1 / (2 beta))^2 (Wu et al. 2024,
      arXiv:2405.00675);
    - apo_zero: sigmoid(-c) + sigmoid(r); apo_down: sigmoid(c) + sigmoid(r - c) (D'Oosterlinck et
      al. 2024, arXiv:2408.06266);
    - discopop: -s(x) (1 - m) + exp(-x) m, m = sigmoid(x / discopop_tau) (Lu et al. 2024,
      arXiv:2406.08414);
    - softmax: -log of the chosen answer's share of exp(c) + sum_j exp(r_j) (Chen et al. 2024,
      arXiv:2406.09215).

    Args:
        beta: strength of the pull to the reference, > 0.
        label_smoothing: assumed share of pairs with exchanged labels, in [0, 0.5]. The loss is (1 -
            label_smoothing) f(h) + label_smoothing f(-h), where h is the score of the chosen answer
            minus the score of the rejected answer, and f(h) the loss without smoothing; the loss
            types robust and exo_pair smooth in another way.
        loss_type: name of the loss, such as "sigmoid" or "ipo".
        average_log_prob: average an answer's log-ratios instead of summing them; None: average for
            sigmoid_norm and ipo alone.
        f_divergence_type: name of the f-divergence from the reference; an answer has the score
            f'(t) for the ratio t of policy to reference: "reverse_kl" log t, "forward_kl" 1 - 1/t,
            "js_divergence" log(2t / (1 + t)), "alpha_divergence" (t^(a - 1) - 1) / (a - 1) (Wang et
            al. 2023, arXiv:2309.16240). Every f_divergence_type but "reverse_kl" needs a loss type
            that depends only on the difference between the scores of the chosen and the rejected
            answer.
        f_alpha_divergence_coef: the number a of f_divergence_type="alpha_divergence".
        ld_alpha: weight of the tokens by which an answer is longer than the answer with which it is
            compared, in [0, 1] (Liu et al. 2024, arXiv:2409.06411); None: 1.
        use_weighting: multiply by the weights of both answers, each exp of the answer's mean of
            log p_y - log sum_j p_j^2, without gradient (WPO: Zhou et al. 2024, arXiv:2406.11827).
            use_weighting=True costs one more sum over the vocabulary, sum_j p_j^2.
        discopop_tau: temperature of the loss type discopop, > 0.
        rejected: number of rejected answers that follow each chosen answer in the batch; the loss
            is the mean over the rejected answers.

    Also called: TRL sigmoid.

    Inputs: ref_logps; segments in pairs. Default reduction: sequence_mean, the mean over pairs.
    Metrics: chosen_rewards, rejected_rewards, margin, accuracy.
    """
    one_of(DIVERGENCES, f_divergence_type=f_divergence_type)
    positive(discopop_tau=discopop_tau)
    flags(use_weighting=use_weighting)
    number("a finite number", lambda x: True, f_alpha_divergence_coef=f_alpha_divergence_coef)
    if ld_alpha is not None:
        number("0 <= ld_alpha <= 1", lambda x: 0 <= x <= 1, ld_alpha=ld_alpha)
        if rejected != 1:
            raise ValueError(f"ld_alpha: got {ld_alpha} with rejected={rejected}, want one partner")
    how = Pairwise(
        loss_type=loss_type,
        beta=beta,
        label_smoothing=label_smoothing,
        tau=discopop_tau,
        rejected=rejected,
        weighted=use_weighting,
    )
    average = _averaged(average_log_prob, loss_type)
    reward = functools.partial(log_ratio, average=average, ld_alpha=ld_alpha)
    if f_divergence_type == "reverse_kl":
        return preference(reward, how)
    if how.of_both:
        raise ValueError(
            f"f_divergence_type: got {f_divergence_type!r} with loss_type={loss_type!r}, want a "
            "loss of h alone: in any other a constant of the prompt would not cancel"
        )
    power = {"forward_kl": -1.0, "alpha_divergence": f_alpha_divergence_coef - 1}
    score = functools.partial(
        f_log_ratio, average=average, ld_alpha=ld_alpha, power=power.get(f_divergence_type)
    )
    return preference(score, how, reward)


@factory
def ipo(*, beta: float = 0.1, label_smoothing: float = 0.0) -> Term:
    """Identity preference optimization, on means of log-probs: `dpo` with loss_type="ipo".

        (h - 1 / (2 beta))^2, h = mean_chosen(logp - ref) - mean_rejected(logp - ref)

    The option `beta` is called tau by Azar et al. 2023, arXiv:2310.12036. `hl.ipo` averages the
    log-ratios of an answer's tokens instead of summing them, as the code of Azar et al. does.

    Args:
        beta: strength of the pull to the reference, > 0.
        label_smoothing: as in `dpo`.

    Also called: TRL ipo.

    Inputs: ref_logps; segments in pairs. Default reduction: sequence_mean, the mean over pairs.
    Metrics: chosen_rewards, rejected_rewards, margin, accuracy.
    """
    how = Pairwise(loss_type="ipo", beta=beta, label_smoothing=label_smoothing)
    return preference(functools.partial(log_ratio, average=True), how)


@factory
def simpo(
    *,
    beta: float = 0.1,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
    alpha: float = 0.0,
    rejected: int = 1,
) -> Term:
    """Simple preference optimization: log-prob means with a target margin, without a reference.

        -log sigmoid(beta h - gamma), h = mean_chosen(logp) - mean_rejected(logp)

    Meng et al. 2024, arXiv:2405.14734. AlphaPO: Gupta et al. 2025, arXiv:2501.03884. An SFT part is
    added by hl.simpo() + weight * hl.cross_entropy().where("chosen").

    Args:
        beta: scale of the reward, > 0.
        gamma: target margin between the rewards of chosen and rejected answer, >= 0.
        label_smoothing: assumed fraction e of pairs with exchanged labels; the loss is -(1 - e) log
            sigmoid(x) - e log sigmoid(-x), where x is beta (mean log-prob of the chosen answer -
            mean log-prob of the rejected answer) - gamma.
        alpha: shape of AlphaPO's reward (1 - exp(-alpha m)) / alpha, which replaces an answer's
            mean log-prob m.
        rejected: number of rejected answers that follow each chosen answer, as in `dpo`.

    Also called: TRL simpo.

    Inputs: segments in pairs. Default reduction: sequence_mean, the mean over pairs. Metrics:
    chosen_rewards, rejected_rewards, margin, accuracy.
    """
    number("a finite number", lambda x: True, alpha=alpha)
    how = Pairwise(beta=beta, gamma=gamma, label_smoothing=label_smoothing, rejected=rejected)
    return preference(functools.partial(logp, average=True, alpha=alpha), how)


@factory
def cpo(
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    average_log_prob: bool | None = None,
    rejected: int = 1,
) -> Term:
    """Contrastive preference optimization: DPO without a reference.

        -log sigmoid(beta h), h = sum_chosen(logp) - sum_rejected(logp)

    Xu et al. 2024, arXiv:2401.08417, whose loss is hl.cpo() + hl.cross_entropy().where("chosen").

    Args:
        beta: scale of the margin, > 0.
        label_smoothing: as in `dpo`.
        loss_type: "sigmoid", "hinge" or "ipo" (on log-prob means), as in `dpo`.
        average_log_prob: as in `dpo`.
        rejected: as in `dpo`.

    Also called: TRL CPO.

    Inputs: segments in pairs. Default reduction: sequence_mean, the mean over pairs. Metrics:
    chosen_rewards, rejected_rewards, margin, accuracy.
    """
    one_of(("sigmoid", "hinge", "ipo"), loss_type=loss_type)
    how = Pairwise(
        loss_type=loss_type, beta=beta, label_smoothing=label_smoothing, rejected=rejected
    )
    average = _averaged(average_log_prob, loss_type)
    return preference(functools.partial(logp, average=average), how)


@factory
def orpo(*, beta: float = 0.1, rejected: int = 1) -> Term:
    """Odds ratio preference optimization: odds of the chosen answer against the rejected answer.

        -beta log sigmoid(h), h = log odds_chosen - log odds_rejected, odds = p / (1 - p), log p = mean(logp)

    Hong et al. 2024, arXiv:2403.07691, whose loss is hl.cross_entropy().where("chosen") +
    hl.orpo(). If an answer's mean probability p is 1, the denominator 1 - p of the odds is replaced
    by 1e-30.

    Args:
        beta: weight of the odds ratio (the paper's lambda), > 0.
        rejected: as in `dpo`.

    Also called: TRL ORPO.

    Inputs: segments in pairs. Default reduction: sequence_mean, the mean over pairs. Metrics:
    chosen_rewards, rejected_rewards (beta log p), margin, accuracy.
    """  # noqa: E501 (an equation is one line)
    positive(beta=beta)
    how = Pairwise(beta=1.0, factor=beta, rejected=rejected)
    return preference(log_odds, how, functools.partial(logp, average=True))
