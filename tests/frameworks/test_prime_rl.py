"""Terms agree with prime-rl's loss functions, which are extracted from its sources because prime-rl
is not on PyPI."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from parity import EDGES, Step, compare, extracted, file_of, step
from torch import Tensor

import headloss as hl

FUNCTIONS = ("default_loss_fn", "ipo_loss_fn", "ref_kl_loss_fn", "ce_loss_fn")
# The edge case "overflow" (a huge ratio) is left out, since prime-rl does not clamp ratios.
FAR = ("random", "clipped", "one token")


@pytest.fixture(scope="module")
def peer() -> SimpleNamespace:
    return extracted(
        file_of("prime_rl", "src/prime_rl/trainer/rl/loss.py"),
        *("LossInputs", "LossOutputs", "_safe_mean", "compute_importance_ratio_and_mismatch_kl"),
        *FUNCTIONS,
        Tensor=Tensor,
        dataclass=dataclass,
        field=field,
        __name__=__name__,
    )


def of(peer: SimpleNamespace, name: str, made: Step, **config: float):
    """Return prime-rl's loss, summed over rows and divided by the step's tokens like its
    `compute_loss`."""

    def loss(logp: Tensor) -> Tensor:
        total = logp.sum() * 0
        for b in range(len(logp)):
            inputs = peer.LossInputs(
                trainer_logprobs=logp[b],
                inference_logprobs=made["old_logps"][b],
                ref_logprobs=made["ref_logps"][b],
                advantages=made["advantages"][b],
                loss_mask=made["mask"][b],
            )
            more = (SimpleNamespace(**config),) if config else ()
            total = total + getattr(peer, name)(inputs, *more).loss
        return total / made["mask"].sum()

    return loss


def drift(tau: float) -> hl.Objective:
    """Return the objective tau (log r)^2 with the policy ratio r."""
    return 2 * tau * hl.kl(estimator="k2", against="old_logps")


@pytest.mark.parametrize("edge", FAR)
def test_default(peer: SimpleNamespace, edge: str) -> None:
    """DPPO plus a drift penalty agrees with prime-rl's default loss."""
    config = {"dppo_mask_low": 0.08, "dppo_mask_high": 0.05, "adv_tau": 0.7, "kl_tau": 1e-2}
    term = hl.dppo(delta_low=0.08, delta_high=0.05, ratio_max=None, surrogate="ratio")
    for seed in range(3):
        made = step(edge, seed)
        want = of(peer, "default_loss_fn", made, **config)
        compare(0.7 * term + drift(1e-2), made, want)


@pytest.mark.parametrize("edge", FAR)
def test_ipo(peer: SimpleNamespace, edge: str) -> None:
    """DPPO with a two-sided threshold plus a drift penalty agrees with prime-rl's IPO loss."""
    config = {"ipo_threshold": 0.06, "adv_tau": 1.0, "kl_tau": 1e-2}
    bounds = {"delta_low": 0.06, "delta_high": 0.06, "one_sided": False}
    term = hl.dppo(**bounds, ratio_max=None, surrogate="ratio")  # type: ignore[arg-type]
    for seed in range(3):
        made = step(edge, seed)
        compare(term + drift(1e-2), made, of(peer, "ipo_loss_fn", made, **config))


@pytest.mark.parametrize("edge", FAR)
def test_ref_kl(peer: SimpleNamespace, edge: str) -> None:
    """prime-rl's reference-KL loss agrees: the reverse KL is the advantage, and tokens whose
    probability dropped by more than 0.2 are masked."""
    bounds = {"delta_low": 0.2, "delta_high": 1.0, "one_sided": False}
    term = hl.dppo(**bounds, ratio_max=None, surrogate="ratio")  # type: ignore[arg-type]
    for seed in range(3):
        made = step(edge, seed)
        made["advantages"] = torch.zeros_like(made["advantages"])
        term_ = hl.kl_shaped(term, beta=1.0)
        compare(term_ + drift(1e-3), made, of(peer, "ref_kl_loss_fn", made))


@pytest.mark.parametrize("edge", EDGES)
def test_ce(peer: SimpleNamespace, edge: str) -> None:
    """Cross-entropy agrees with prime-rl's."""
    made = step(edge)
    compare(hl.cross_entropy(), made, of(peer, "ce_loss_fn", made))
