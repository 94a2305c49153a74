"""headloss's replacements of framework functions agree with the originals, run from source."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import seam_ranks as case
import torch
from parity import extracted, file_of
from worlds import world_of

import headloss as hl

NEAR = 2e-6


@pytest.fixture(scope="module")
def world():
    with world_of(2) as made:
        yield made


@pytest.mark.parametrize("tree", ["nemo_rl", "nemo_rl_06", "nemo_rl_07"])
def test_nemo_rl(world, tree: str) -> None:
    """Log-probs and gradients agree with NeMo-RL's vocabulary-parallel functions on two ranks."""
    case.nemo_rl(tree)  # skips without sources
    for found in world.run(case.compare_nemo_rl, tree, seconds=300):
        assert max(found.values()) < NEAR, found


def test_skyrl(world) -> None:
    """Log-probs and gradients agree with SkyRL's vocabulary-parallel functions on two ranks."""
    case.skyrl()
    for found in world.run(case.compare_skyrl, seconds=300):
        assert max(found.values()) < NEAR, found


# ---------------------------------------------------------------------- prime-rl


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_prime_rl(softcap: float | None) -> None:
    """Log-probs, entropies and gradients agree with prime-rl's, with a temperature per token."""
    from headloss.integrations.prime_rl import forward

    file = file_of("prime_rl", "src/prime_rl/trainer/models/layers/lm_head.py")
    names = ["_online_logsumexp_and_weighted_update", "_SequenceChunkedLogProbEntropyFn"]
    layer, more = "FusedOutputLinear", {}
    if softcap is not None:
        update = extracted(file, names[0])
        file, layer = file.with_name("lm_head_gemma.py"), "GemmaFusedOutputLinear"
        names, more = ["_GemmaChunkedLogProbEntropyFn"], vars(update)
    theirs = extracted(file, *names, f"{layer}.forward", PrimeLmOutput=dict, **more).forward
    hidden, weight, ids, up = case.inputs()
    heat = 0.5 + torch.rand(case.B, case.L)
    found = []
    for function in (theirs, forward):
        leaf, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        module = SimpleNamespace(weight=w, chunk_size=5)
        if softcap is not None:
            module.softcap = softcap
        out = function(module, leaf, ids, heat)
        out["logprobs"].backward(up)
        found.append([out["logprobs"].detach(), out["entropy"].detach(), leaf.grad, w.grad])
    for want, got in zip(*found, strict=True):
        assert case.off(got, want) < NEAR


def test_prime_rl_entropy_has_a_gradient() -> None:
    """The gradient of prime-rl's entropies from headloss equals that of entropies of materialised
    logits."""
    from headloss.integrations.prime_rl import forward

    hidden, weight, ids, up = case.inputs()
    leaf, layer = hidden.clone().requires_grad_(), SimpleNamespace(weight=weight)
    forward(layer, leaf, ids, torch.ones(1, case.L))["entropy"].backward(up)
    other = hidden.clone().requires_grad_()
    table = (other @ weight.T).log_softmax(-1)
    (-(table.exp() * table).sum(-1)).backward(up)
    assert case.off(leaf.grad, other.grad) < NEAR  # type: ignore[arg-type]


# ---------------------------------------------------------------------- Automodel, AReaL


def test_automodel() -> None:
    """The masked cross-entropy of NeMo Automodel on logits agrees, also with a weight per token."""
    file_of("nemo_automodel", "components/loss/linear_ce_base.py")
    pytest.importorskip("nemo_automodel.components.loss.linear_ce_base")
    from headloss.integrations.nemo_automodel import HeadLossCrossEntropy

    masked = extracted(
        file_of("nemo_automodel", "components/loss/chunked_ce.py"),
        "compute_cross_entropy",
        "_linear_cross_entropy",
    )._linear_cross_entropy
    hidden, weight, ids, up = case.inputs()
    labels = ids.masked_fill(up > 0.8, -100)
    for weights in (None, up.abs()):
        found = []
        for ours in (False, True):
            leaf, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            if ours:
                loss = HeadLossCrossEntropy()(leaf, labels, w, 7, loss_weights=weights)
            else:
                losses = masked(leaf.flatten(0, 1), w, labels.flatten(), -100, None)
                loss = (losses * (1 if weights is None else weights.flatten())).sum() / 7
            loss.backward()
            found.append([loss.detach(), leaf.grad, w.grad])
        for want, got in zip(*found, strict=True):
            assert case.off(got, want) < NEAR
    capped = HeadLossCrossEntropy(logit_softcapping=2.0, terms=hl.z_loss())(hidden, labels, weight)
    z = 2 * torch.tanh(hidden @ weight.T / 2)
    want = (z.logsumexp(-1) ** 2)[labels != -100].sum()
    assert case.off(capped, want) < NEAR


def test_areal() -> None:
    """Log-probs, entropies and gradients at a temperature agree with AReaL's chunked function."""
    from headloss.integrations.areal import gather_logprobs_entropy

    theirs = extracted(
        file_of("areal", "utils/functional/vocab_parallel.py"),
        *("_gather_logprobs_entropy", "_chunked_apply", "_chunked_gather_logprobs_entropy"),
        "gather_logprobs_entropy",
        functools=functools,
    ).gather_logprobs_entropy
    hidden, weight, ids, up = case.inputs()
    found = []
    for ours in (False, True):
        leaf, w = hidden.flatten(0, 1).requires_grad_(), weight.clone().requires_grad_()
        first = (leaf, w) if ours else (leaf @ w.T,)
        function = gather_logprobs_entropy if ours else theirs
        logp, entropy = function(*first, ids.flatten(), temperature=0.7)
        (up.flatten() * (logp + 0.3 * entropy)).sum().backward()
        found.append([logp.detach(), entropy.detach(), leaf.grad, w.grad])
    for want, got in zip(*found, strict=True):
        assert case.off(got, want) < NEAR
