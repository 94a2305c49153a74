"""Terms agree with verl's `core_algos`, called like its workers do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import (
    EDGES,
    B,
    C,
    Step,
    batch_of,
    compare,
    filled_rows,
    measured,
    ours,
    step,
    theirs,
)
from torch import Tensor

import headloss as hl

pytest.importorskip("verl", reason="`make test-frameworks` compares with verl")
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils import losses as worker_losses

CLIP = {"clip_ratio": 0.2, "clip_ratio_low": 0.15, "clip_ratio_high": 0.25}


def config(made: Step, **options: Any) -> ActorConfig:
    """Return the configuration of a verl worker, with the token totals of the step."""
    loss = options.pop("policy_loss", {})
    found = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(**loss),
        **{**CLIP, **options},
    )
    info = {"batch_num_tokens": made["mask"].sum(), "global_batch_size": B, "dp_size": 1}
    found.global_batch_info.update(info)
    return found


def verl(
    name: str, made: Step, mode: str = "token-mean", weights: Tensor | None = None, **options: Any
) -> Callable[[Tensor], Tensor]:
    function = core_algos.get_policy_loss_fn(name)

    def loss(logp: Tensor) -> Tensor:
        return function(
            made["old_logps"],
            logp,
            made["advantages"],
            made["mask"].double(),
            mode,
            config(made, **options),
            weights,
        )[0]

    return loss


TERMS: dict[str, tuple[hl.Term, dict[str, Any]]] = {
    "vanilla": (hl.ppo(epsilon_low=0.15, epsilon_high=0.25, dual_clip=3.0), {}),
    "dppo_tv": (hl.dppo(delta_low=0.15, delta_high=0.25, ratio_max=3.0), {}),
    "dppo_kl": (hl.dppo(divergence="kl", delta_low=0.15, delta_high=0.25, ratio_max=3.0), {}),
    "gspo": (hl.gspo_token(epsilon_low=0.15, epsilon_high=0.25).over("token_mean"), {}),
    "sapo": (hl.sapo(temperature_neg=1.5), {"tau_pos": 1.0, "tau_neg": 1.5}),
    "gpg": (hl.reinforce(), {}),
    "geo_mean": (hl.gmpo(epsilon_low=0.15, epsilon_high=0.25), {}),
    "dro": (hl.dro(beta=0.3), {"policy_loss": {"dro_beta": 0.3}}),
    "cispo": (hl.cispo(epsilon_low=0.15, epsilon_high=0.25), {}),
    "kl_cov": (
        hl.kl_cov(share=0.2, coefficient=0.1),
        {"policy_loss": {"kl_cov_ratio": 0.2}},
    ),
}
# Looser tolerance: for the `geo_mean` and `sapo` losses verl divides by (tokens + 1e-8).
TOLERANCE = {"geo_mean": 1e-7, "sapo": 1e-7}
UNCLAMPED = ("kl_cov", "gspo", "geo_mean")


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", TERMS)
def test_policy_loss(name: str, edge: str) -> None:
    """Policy losses agree with verl's, except at log-ratios of 90, which verl clamps differently
    (`test_overflow`)."""
    if edge == "overflow" and name in UNCLAMPED:
        return
    term, options = TERMS[name]
    for seed in range(3):
        made = step(edge, seed, per_token=name != "geo_mean")
        # verl's `geo_mean` also counts rows without tokens; their advantage is 0
        if name == "geo_mean":
            made["advantages"][-1] = 0
        compare(term, made, verl(name, made, **options), TOLERANCE.get(name, 1e-12))


@pytest.mark.parametrize("name", UNCLAMPED)
def test_overflow(name: str) -> None:
    """At a log-ratio of 90, verl's and headloss's losses are finite; verl clamps the ratio to e^90
    or e^10, headloss to e^20."""
    term, options = TERMS[name]
    made = step("overflow", per_token=name != "geo_mean")
    assert theirs(made, verl(name, made, **options))[0].isfinite()
    assert all(x.isfinite().all() for x in ours(term, made))


@pytest.mark.parametrize(
    ("mode", "over"),
    [
        ("token-mean", "token_mean"),
        ("seq-mean-token-sum", "sequence_sum"),
        ("seq-mean-token-mean", "sequence_mean"),
        ("seq-mean-token-sum-norm", hl.fixed_length(C)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_reductions(mode: str, over: Any) -> None:
    """Policy loss and a user's term agree with verl in each aggregation over tokens and
    sequences."""
    term = hl.ppo(epsilon_low=0.15, epsilon_high=0.25, dual_clip=3.0).over(over)
    tolerance = 1e-7 if mode == "seq-mean-token-mean" else 1e-12
    for edge in EDGES:
        made = step(edge)
        compare(term, made, verl("vanilla", made, mode), tolerance)

        def alone(logp: Tensor, made: Step = made) -> Tensor:
            """Compute verl's loss without the batch's token totals, so that rows without tokens do
            not count."""
            return core_algos.agg_loss(logp.exp(), made["mask"].double(), mode)

        likelihood = hl.term(lambda stats, batch: stats.logp.exp(), name="p")().over(over)
        compare(likelihood, made, alone, tolerance, totals=filled_rows(made))


def test_token_sum() -> None:
    """A sum over tokens agrees with verl's "token-sum" aggregation."""
    made = step()
    term = hl.ppo(epsilon_low=0.15, epsilon_high=0.25, dual_clip=3.0)
    compare(term, made, verl("vanilla", made, "token-sum"), totals=hl.Totals(1, 1))


@pytest.mark.parametrize("share", [1e-4, 0.3])
def test_clip_cov(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clip-Cov agrees with verl if the batch's random draws select the same tokens as verl's random
    permutation."""
    for seed in range(3):
        made = step(seed=seed)
        chosen: list[Tensor] = []
        shuffle = torch.randperm

        def keep(n: int, shuffle=shuffle, chosen=chosen) -> Tensor:
            chosen.append(shuffle(n))
            return chosen[-1]

        monkeypatch.setattr(core_algos.torch, "randperm", keep)
        options = {"clip_cov_ratio": share, "clip_cov_lb": 0.05, "clip_cov_ub": 2.0}
        want = theirs(made, verl("clip_cov", made, policy_loss=options))
        monkeypatch.undo()
        # position of each candidate token in verl's random permutation
        order = chosen[-1].argsort()
        draws = torch.full((B, C), torch.inf, dtype=torch.float64)
        draws[candidates(made, 0.05, 2.0)] = order.double()
        clip = {"epsilon_low": 0.15, "epsilon_high": 0.25}
        term = hl.clip_cov(share=share, low=0.05, high=2.0, **clip)
        for layout in ("padded", "packed"):
            got = ours(term, made, layout, draws=draws)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def candidates(made: Step, low: float, high: float) -> Tensor:
    """Return [B, C] bool: the tokens among which verl's Clip-Cov chooses."""
    mask, a, n = made["mask"], made["advantages"], made["logp"]
    r = (n - made["old_logps"]).exp()
    c = (a - a[mask].mean()) * (n - n[mask].mean())
    clipped = r * a > r.clamp(1 - 0.15, 1 + 0.25) * a
    return mask & (c > low) & (c < high) & ~clipped


@pytest.mark.parametrize(
    ("name", "clipped", "drift"),
    [
        ("vanilla", "clip_region", "kl_old_k1"),
        ("cispo", "", "kl_old_k1"),
        ("dppo_tv", "clip_region", "kl_old_k1"),
        ("dppo_kl", "clip_region", "kl_old_k1"),
        ("kl_cov", "", "kl_old_abs"),
    ],
)
def test_metrics(name: str, clipped: str, drift: str) -> None:
    """Metrics equal verl's logged numbers, under the names of docs/losses.md."""
    term, options = TERMS[name]
    for seed in range(3):
        made = step(seed=seed)
        function = core_algos.get_policy_loss_fn(name)
        sides = made["old_logps"], made["logp"], made["advantages"], made["mask"].double()
        want = function(*sides, "token-mean", config(made, **options), None)[1]
        found = measured(term, made)
        assert found[drift] == pytest.approx(want["actor/ppo_kl"], rel=1e-6)
        if clipped:
            assert found[clipped] == pytest.approx(want["actor/pg_clipfrac"], rel=1e-6)


# ---------------------------------------------------------------------- supervised


def test_sft() -> None:
    """The SFT loss agrees with verl's, which divides by the token count of the whole step and
    shifts the loss mask by one position."""
    made = step()
    rows, mask = [made["logp"][0], made["logp"][1]], [made["mask"][0], made["mask"][1]]
    made = {n: x[:2] for n, x in made.items()}

    def loss(logp: Tensor) -> Tensor:
        lengths = [len(row) for row in rows]
        packed = torch.nested.nested_tensor_from_jagged(
            logp.flatten(), torch.tensor([0, *lengths]).cumsum(0)
        )
        # verl rolls the mask back by one position, from a token to the position that predicts it.
        shifted = torch.roll(torch.cat(mask).double(), 1)
        shifted = torch.nested.nested_tensor_from_jagged(
            shifted, torch.tensor([0, *lengths]).cumsum(0)
        )
        data = {"dp_size": 1, "batch_num_tokens": made["mask"].sum(), "loss_mask": shifted}
        found = worker_losses.sft_loss(None, {"log_probs": packed}, data)  # type: ignore[arg-type]
        return found[0]

    compare(hl.cross_entropy(), made, loss)


# ---------------------------------------------------------------------- KL

ESTIMATORS: dict[str, hl.Term] = {
    "k1": hl.kl(),
    "kl": hl.kl(),
    "abs": hl.kl(estimator="abs"),
    "mse": hl.kl(estimator="k2"),
    "k2": hl.kl(estimator="k2"),
    "low_var_kl": hl.kl(estimator="k3", clamp_difference=20, clamp=10),
    "k3": hl.kl(estimator="k3", clamp_difference=20, clamp=10),
    "k1+": hl.kl(straight_through=True),
    "abs+": hl.kl(estimator="abs", straight_through=True),
    "k3+": hl.kl(estimator="k3", clamp_difference=20, clamp=10, straight_through=True),
}


@pytest.mark.parametrize("scale", [0.4, 8.0])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl(name: str, scale: float) -> None:
    """KL estimators agree with each of verl's KL penalties."""
    for edge in ("random", "one token"):
        made = step(edge, scale=scale)

        def loss(logp: Tensor, made: Step = made) -> Tensor:
            values = core_algos.kl_penalty(logp, made["ref_logps"], name)
            return core_algos.agg_loss(values, made["mask"].double(), "token-mean")

        compare(ESTIMATORS[name], made, loss)


# ---------------------------------------------------------------------- rollout correction


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(
    ("level", "threshold", "mode"),
    [
        ("token", 1.4, {"mode": "token_truncate", "max": 1.4}),
        ("token", "0.7_1.4", {"mode": "token_mask", "min": 0.7, "max": 1.4}),
        ("sequence", 1.4, {"mode": "sequence_truncate", "max": 1.4}),
        ("sequence", "0.5_2.5", {"mode": "sequence_mask", "min": 0.5, "max": 2.5}),
    ],
    ids=str,
)
def test_rollout_weights(level: str, threshold: Any, mode: dict, normalized: bool) -> None:
    """Importance weights of the sampler agree with verl's rollout correction, by token or
    sequence."""
    for edge in ("random", "one token"):
        made = step(edge)
        weights, _ = compute_rollout_correction_weights(
            made["old_logps"] - made["sampling_logps"],
            made["mask"].double(),
            level,
            threshold,
            normalized,
        )
        term = hl.ppo(epsilon_low=0.15, epsilon_high=0.25, dual_clip=3.0)
        corrected = term.corrected(**mode, normalized=normalized)
        tolerance = 1e-7 if normalized else 1e-12  # verl divides by (count + 1e-8)
        compare(corrected, made, verl("vanilla", made, weights=weights), tolerance)


REJECTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "token_k1": ("0.6_1.5", {"measure": "ratio", "min": 1 / 1.5, "max": 1 / 0.6}),
    "token_k2": ("0.05", {"measure": "k2", "max": 0.05}),
    "token_k3": ("0.05", {"measure": "k3", "max": 0.05}),
    "seq_sum_k1": (
        "0.5_1.8",
        {"measure": "ratio", "min": 1 / 1.8, "max": 2.0, "level": "sequence_sum"},
    ),
    "seq_sum_k2": ("0.3", {"measure": "k2", "max": 0.3, "level": "sequence_sum"}),
    "seq_sum_k3": ("0.3", {"measure": "k3", "max": 0.3, "level": "sequence_sum"}),
    "seq_mean_k1": (
        "0.9_1.2",
        {"measure": "ratio", "min": 1 / 1.2, "max": 1 / 0.9, "level": "sequence_mean"},
    ),
    "seq_mean_k2": ("0.06", {"measure": "k2", "max": 0.06, "level": "sequence_mean"}),
    "seq_mean_k3": ("0.06", {"measure": "k3", "max": 0.06, "level": "sequence_mean"}),
    "seq_max_k2": ("0.2", {"measure": "k2", "max": 0.2, "level": "sequence_max"}),
    "seq_max_k3": ("0.2", {"measure": "k3", "max": 0.2, "level": "sequence_max"}),
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejection(name: str) -> None:
    """verl's rejection masks agree with `rejection_mask` and `.rejected()`; a rejected token does
    not count in the mean."""
    threshold, options = REJECTIONS[name]
    dropped = 0
    for seed in range(3):
        made = step(seed=seed)
        mask = made["mask"].double()
        log_ratio = made["old_logps"] - made["sampling_logps"]
        kept, _ = compute_rollout_rejection_mask(log_ratio, mask, name, threshold)
        dropped += int((mask - kept).sum())
        term = hl.ppo(epsilon_low=0.15, epsilon_high=0.25, dual_clip=3.0)

        def loss(logp: Tensor, made: Step = made, kept: Tensor = kept) -> Tensor:
            inner = {**made, "mask": kept.bool()}
            return verl("vanilla", inner)(logp)

        found = hl.rejection_mask(batch_of(made, "padded"), **options)
        torch.testing.assert_close(found[made["mask"]], kept.bool()[made["mask"]])
        want = theirs(made, loss)
        for layout in ("padded", "packed"):
            field = hl.rejection_mask(batch_of(made, layout), **options)
            got = ours(term.where("kept"), made, layout, kept=as_rows(field, made))
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert dropped


def as_rows(field: Tensor, made: Step) -> Tensor:
    """Return a possibly packed field as [B, C]."""
    if field.shape == (B, C):
        return field
    return torch.zeros(B, C, dtype=torch.bool).masked_scatter(made["mask"], field)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", ["2.0", "0.5_2.5"])
def test_bypass_mode(level: str, threshold: str) -> None:
    """verl's bypass mode agrees: the sampler's log-probs are the old ones, and importance weights
    come from the current policy."""
    made = step()
    correction = {"loss_type": "reinforce", "rollout_is": level, "rollout_is_threshold": threshold}
    masks = "_" in threshold
    mode = f"{level}_{'mask' if masks else 'truncate'}"
    bounds = {"min": 0.5, "max": 2.5} if masks else {"max": 2.0}
    term = hl.reinforce().corrected(mode, **bounds, live=True)
    made["sampling_logps"] = made["old_logps"]
    want = verl("bypass_mode", made, policy_loss={"rollout_correction": correction})
    compare(term, made, want)
    if level == "token" and masks:
        compare(hl.icepop(alpha=0.5, beta=2.5), made, want)


def test_bypass_mode_rejects() -> None:
    """Rejected sequences in verl's bypass mode agree with `.rejected("k3", live=True)`."""
    made = step()
    made["sampling_logps"] = made["old_logps"]
    correction = {"loss_type": "ppo_clip", "rollout_rs": "seq_mean_k3"}
    correction["rollout_rs_threshold"] = 0.06
    term = hl.ppo(epsilon_low=0.15, epsilon_high=0.25, dual_clip=3.0)
    term = term.rejected("k3", level="sequence_mean", max=0.06, live=True)
    compare(term, made, verl("bypass_mode", made, policy_loss={"rollout_correction": correction}))


# ---------------------------------------------------------------------- critic


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_value_loss(mode: str) -> None:
    """The clipped value loss agrees with verl's, in value and gradient, as a mean over tokens or
    sequences."""
    over = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}[mode]
    for edge in ("random", "one token"):
        made = step(edge)
        old, returns = made["old_logps"], made["ref_logps"]
        loss = functools.partial(
            core_algos.compute_value_loss,
            returns=returns,
            values=old,
            response_mask=made["mask"].double(),
            cliprange_value=0.2,
            loss_agg_mode=mode,
        )
        want = theirs(made, lambda v, loss=loss: loss(v)[0])
        batch = hl.Batch(
            torch.where(made["mask"], 0, -100),
            returns=returns,
            old_values=old,
            totals=filled_rows(made),
        )
        leaf = made["logp"].clone().requires_grad_()
        value = hl.value_loss(leaf, batch, clip=0.2, reduction=over)
        (gradient,) = torch.autograd.grad(value, leaf)
        tolerance = 1e-7 if mode == "seq-mean-token-mean" else 1e-12
        got = [value.detach(), gradient[made["mask"]]]
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
