"""Policy losses of headloss in verl: `loss_mode=headloss_gspo`, or a user's registered loss."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from verl.trainer.ppo import core_algos

from ... import losses
from ...batch.reduction import Reduction, fixed_length, sequence_mean, sequence_sum, token_mean
from ...losses import Objective, Term
from ..shared import per

Factory = Callable[[Any], Term | Objective]


def _clips(config: Any, low: str = "epsilon_low", high: str = "epsilon_high") -> dict[str, Any]:
    found = {low: config.clip_ratio_low, high: config.clip_ratio_high}
    return {name: config.clip_ratio if x is None else x for name, x in found.items()}


def _dppo(config: Any, divergence: Any) -> Term:
    deltas = _clips(config, "delta_low", "delta_high")
    return losses.dppo(divergence=divergence, ratio_max=config.clip_ratio_c, **deltas)


# Maps verl's name of a loss to a function from verl's configuration to headloss's term.
OF_VERL: dict[str, Callable[[Any], Term]] = {
    "vanilla": lambda c: losses.ppo(dual_clip=c.clip_ratio_c, **_clips(c)),
    "dppo_tv": lambda c: _dppo(c, "tv"),
    "dppo_kl": lambda c: _dppo(c, "kl"),
    "gspo": lambda c: losses.gspo_token(**_clips(c)),
    "sapo": lambda c: losses.sapo(temperature_pos=c.tau_pos, temperature_neg=c.tau_neg),
    "gpg": lambda c: losses.reinforce(),
    "dro": lambda c: losses.dro(beta=c.policy_loss.dro_beta),
    "cispo": lambda c: losses.cispo(**_clips(c)),
    "kl_cov": lambda c: losses.kl_cov(
        share=c.policy_loss.kl_cov_ratio, coefficient=c.policy_loss.ppo_kl_coef
    ),
}
KL: dict[str, dict[str, Any]] = {
    "k1": {},
    "abs": {"estimator": "abs"},
    "k2": {"estimator": "k2"},
    "k3": {"estimator": "k3", "clamp_difference": 20, "clamp": 10},
}
ALSO = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
_factories: dict[str, tuple[Factory, str | None]] = {}
# Stack of the `Request`s whose loss functions are running; the last `Request` has the log-probs for
# verl's metrics.
measured: list[Any] = []


def add() -> None:
    """Register verl's policy losses as `headloss_NAME`."""
    for name, factory in OF_VERL.items():
        register(f"headloss_{name}", factory, name)


def remove() -> None:
    for name in _factories:
        core_algos.POLICY_LOSS_REGISTRY.pop(name, None)
    _factories.clear()


def register(name: str, factory: Factory, of_verl: str | None = None) -> None:
    """Register `factory` with verl as the policy loss `name`.

    Args:
        of_verl: name of verl's own policy loss with the values of `factory`, whose metrics are also
            reported; None: no metrics.
    """
    _factories[name] = factory, of_verl

    @core_algos.register_policy_loss(name)
    def policy_loss(*args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the policy loss computed with the log-probs, and the metrics of verl's own
        function."""
        if not measured:
            raise RuntimeError(
                f"loss_mode: {name} is computed with the log-probs, by the FSDP engine under "
                "use_fused_kernels=True and fused_kernel_options.impl_backend=headloss"
            )
        metrics = {}
        if of_verl is not None:
            metrics = core_algos.get_policy_loss_fn(of_verl)(*args, **kwargs)[1]
        return measured[-1].policy.clone(), metrics


def reduction(config: Any, responses: int, ranks: float) -> Reduction:
    """Return headloss's reduction for verl's setting `loss_agg_mode`.

    Args:
        responses: greatest number of tokens in a response.
        ranks: number of data-parallel ranks.
    """
    scale = config.loss_scale_factor
    return {
        "token-mean": token_mean,
        "token-sum": per(1 / ranks),
        "seq-mean-token-sum": sequence_sum,
        "seq-mean-token-mean": sequence_mean,
        "seq-mean-token-sum-norm": fixed_length(responses if scale is None else scale),
    }[config.loss_agg_mode]


def objective(config: Any, over: Reduction, fields: Any, entropy: bool) -> tuple[Objective, int]:
    """Return the objective of verl's `ppo_loss`, and how many of the objective's terms are the
    policy loss."""
    factory, of_verl = _factories[config.policy_loss.loss_mode]
    policy = factory(config)
    if of_verl is not None and isinstance(policy, Term):
        policy = policy.over(sequence_mean if of_verl == "sapo" else over)
        if "rollout_is_weights" in fields:
            policy = policy.weighted("rollout_is_weights")
    found = Objective.of(policy)
    count = len(found.parts)
    if entropy and config.entropy_coeff:
        found = found - config.entropy_coeff * losses.entropy().over(over)
    if config.use_kl_loss:
        found = found + config.kl_loss_coef * _kl(config.kl_loss_type).over(over)
    return found, count


def _kl(kind: str) -> Term:
    name = ALSO.get(kind.removesuffix("+"), kind.removesuffix("+"))
    if name not in KL:
        raise ValueError(f"kl_loss_type: got {kind!r}, want one of {[*KL, *ALSO]}, or with +")
    return losses.kl(straight_through=kind.endswith("+") and name != "k2", **KL[name])


def known(name: str) -> bool:
    """Return whether `name` is a policy loss of headloss."""
    return name in _factories
