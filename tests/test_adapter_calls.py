"""The replacements for functions of prime-rl and NeMo-RL return the values of materialised logits.

Stubs with real signatures stand for the frameworks; tests of framework code are in
tests/frameworks.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from framework_stubs import (
    here,
    nemo_rl_06,
    nemo_rl_07,
    no_notice_yet,  # noqa: F401
    parameters_of,
    place,
    prime_rl,
    released,
    stub,
    stubbed,
    with_parameters,
)
from torch import Tensor

from headloss.integrations import nemo_rl_distillation as distillation

# ---------------------------------------------------------------------- prime-rl


def layer(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(weight=torch.randn(33, 8, requires_grad=True), **more)


def test_prime_rl_without_gemma(monkeypatch) -> None:
    """headloss installs into a prime-rl release that has no Gemma layer."""
    released(monkeypatch, "0.8.0", "prime-rl")
    module, standing = stubbed(monkeypatch, "prime_rl", lambda f: prime_rl)
    monkeypatch.delitem(sys.modules, module.GEMMA[0].partition(":")[0])
    module.install()
    assert list(module.SEAMS.theirs) == [at for at in standing if at != module.GEMMA]
    module.uninstall()


def test_prime_rl_without_a_temperature() -> None:
    """prime-rl's `forward` without a temperature returns the sum of the cross-entropy over labels
    other than -100, with correct gradients."""
    from headloss.integrations.prime_rl import forward

    torch.manual_seed(0)
    made, ids = layer(), torch.randint(33, (2, 5))
    ids[0, :2] = -100
    hidden = torch.randn(2, 5, 8, requires_grad=True)
    logits = hidden @ made.weight.T
    want = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids.flatten(), ignore_index=-100, reduction="sum"
    )
    output = forward(made, hidden, ids)
    assert set(output) == {"loss"}
    torch.testing.assert_close(output["loss"], want)
    leaves = (hidden, made.weight)
    theirs = torch.autograd.grad(want / 3, leaves)
    for got, right in zip(torch.autograd.grad(output["loss"] / 3, leaves), theirs, strict=True):
        torch.testing.assert_close(got, right)
    nothing = forward(made, hidden, torch.full_like(ids, -100))["loss"]
    assert float(nothing.detach()) == 0 and not torch.autograd.grad(nothing, hidden)[0].any()
    with pytest.raises(ValueError, match="labels: got None"):
        forward(made, hidden, None)


def test_prime_rl_sampling_mask() -> None:
    from headloss.integrations.prime_rl import forward

    torch.manual_seed(0)
    made, ids, heat = layer(), torch.randint(33, (2, 5)), 0.5 + torch.rand(2, 5)
    hidden = torch.randn(2, 5, 8)
    want = forward(made, hidden, ids, heat)
    for empty in (None, torch.empty(2, 5, 0, dtype=torch.int32), torch.full((2, 5, 3), -1)):
        output = forward(made, hidden, ids, heat, sampling_mask=empty)
        assert output.keys() == want.keys()
        assert all(output[name].equal(want[name]) for name in want)
    made.return_mask_logprobs = True
    output = forward(made, hidden, ids, heat, sampling_mask=torch.full((2, 5, 3), -1))
    assert output["mask_logprobs"].shape == (2, 5, 3) and not output["mask_logprobs"].any()
    with pytest.raises(ValueError, match="sampling_mask: has ids, want a temperature"):
        forward(made, hidden, ids, sampling_mask=ids[..., None])
    for wrong in (ids, ids[:1, :, None], ids[:, :4, None]):
        with pytest.raises(ValueError, match=r"sampling_mask: got shape .*, want \(2, 5, 'K'\)"):
            forward(made, hidden, ids, heat, sampling_mask=wrong)
    for wrong in (3, ids[..., None].float(), ids[..., None] > 0, [[[1]]]):
        with pytest.raises(TypeError, match="sampling_mask: got .*, want integers"):
            forward(made, hidden, ids, heat, sampling_mask=wrong)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_prime_rl_replays_a_sampling_mask(cap: float | None) -> None:
    """Values and gradients under prime-rl's sampling mask equal those of masked logits.

    A token whose mask is empty or lacks the label is scored over the whole vocabulary. The mask is
    an int32 tensor of the ids that the sampler kept, mixed with unused entries (-1).
    """
    from headloss.integrations.prime_rl import forward

    torch.manual_seed(1)
    made, ids, heat = layer(), torch.randint(33, (2, 6)), 0.5 + torch.rand(2, 6)
    made.softcap, made.return_mask_logprobs = cap, True
    hidden = torch.randn(2, 6, 8, requires_grad=True)
    mask = torch.rand(2, 6, 33).topk(7).indices.to(torch.int32)
    mask[torch.rand(2, 6, 7) < 0.3] = -1
    mask[..., 3] = ids
    mask[..., :3][mask[..., :3] == ids[..., None]] = -1
    mask[..., 4:][mask[..., 4:] == ids[..., None]] = -1
    mask[0, 0] = -1
    mask[1, 2] = torch.tensor([(int(ids[1, 2]) + 1) % 33, *[-1] * 6])
    ids[1, 5] = -100
    whole = torch.zeros(2, 6).bool()
    whole[0, 0] = whole[1, 2] = whole[1, 5] = True
    z = hidden @ made.weight.T
    z = (z if cap is None else cap * torch.tanh(z / cap)) / heat[..., None]
    inside = torch.zeros(2, 6, 34).scatter_(2, mask.long() % 34, 1.0)[..., :33].bool()
    log_p = z.masked_fill(~(inside | whole[..., None]), -1e4).log_softmax(-1)
    scored = ids >= 0
    logp = log_p.gather(2, ids.clamp_min(0)[..., None])[..., 0] * scored
    entropy = -(log_p.exp() * log_p).sum(-1) * scored
    usable = (mask >= 0) & ~whole[..., None]
    of_mask = torch.where(usable, log_p.gather(2, mask.long().clamp_min(0)), 0.0)
    want = {"logprobs": logp, "entropy": entropy, "mask_logprobs": of_mask}
    got = forward(made, hidden, ids, heat, sampling_mask=mask)
    assert got.keys() == want.keys()
    weights = {name: torch.randn(x.shape) for name, x in want.items()}
    leaves = (hidden, made.weight)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5, msg=name)
    totals = [sum((x[n] * w).sum() for n, w in weights.items()) for x in (got, want)]
    ours, theirs = (torch.autograd.grad(total, leaves) for total in totals)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    made.return_mask_logprobs = False
    assert "mask_logprobs" not in forward(made, hidden, ids, heat, sampling_mask=mask)


# ---------------------------------------------------------------------- NeMo-RL


class Alone:
    """A process group of one rank."""

    def size(self) -> int:
        return 1


@pytest.mark.parametrize("signature", [nemo_rl_06, nemo_rl_07])
def test_nemo_rl_as_each_release_calls_it(signature, monkeypatch) -> None:
    """NeMo-RL 0.6 passes a second weight by position; a tied head has only the second weight."""
    released(monkeypatch, "0.6.0" if signature is nemo_rl_06 else "0.7.0", "nemo-rl")
    module, standing = stubbed(monkeypatch, "nemo_rl", lambda f: signature)
    module.install()
    try:
        function = next(iter(here(standing).values()))
    finally:
        module.uninstall()
    torch.manual_seed(0)
    hidden, weight, ids = torch.randn(5, 2, 8), torch.randn(33, 8), torch.randint(33, (2, 5))
    want = (hidden.transpose(0, 1) @ weight.T).log_softmax(-1)[:, :-1]
    want = want.gather(2, ids[:, 1:, None])[..., 0]
    more: dict[str, Any] = {"vocab_start_index": 0, "vocab_end_index": 33, "inference_only": False}
    more |= {"tp_group": Alone(), "cp_group": None, "chunk_size": 3}
    weights: list[tuple[Tensor | None, ...]] = [(weight,)]
    if signature is nemo_rl_06:
        weights = [(weight, weight), (None, weight)]
    for passed in weights:
        torch.testing.assert_close(function(hidden, *passed, False, ids, **more), want)


@pytest.fixture
def distilling(monkeypatch) -> Any:
    """Return a function that installs a NeMo-RL stub whose full-vocabulary distillation stands at
    `at` ("module.function"), or nowhere."""
    released(monkeypatch, "0.7.0", "nemo-rl")

    def like(ours: Any) -> Any:
        return with_parameters(ours, parameters_of(ours))

    def install(at: str) -> Any:
        forward = stub("(data_iterator, model, post_processing_fn, sampling_params=None)")
        train = place(monkeypatch, distillation.TRAIN, distillation.FORWARD, forward)
        place(monkeypatch, distillation.MODELS, distillation.TOPK, like(distillation.topk_logprobs))
        if at:
            place(monkeypatch, *at.rsplit(".", 1), like(distillation.full_divergence))
        distillation.install()
        return train

    yield install
    distillation.uninstall()


@pytest.mark.parametrize("name", distillation.FULL)
@pytest.mark.parametrize("module", [distillation.INPUTS, distillation.UTILS])
def test_nemo_rl_full_vocabulary_distillation_under_each_name(distilling, module, name) -> None:
    """headloss replaces NeMo-RL's function of full-vocabulary distillation in each module and under
    each name that the function has had."""
    distilling(f"{module}.{name}")
    function = getattr(sys.modules[module], name)
    assert function.__module__ == distillation.__name__


def test_nemo_rl_full_vocabulary_distillation_that_is_not_replaced_is_refused(distilling) -> None:
    """A full-vocabulary loss raises ValueError if headloss found no function to replace, since the
    loss would read hidden states as logits."""
    train = distilling("")
    loss_fn = SimpleNamespace(input_type=SimpleNamespace(name="OPD_FULL"))
    with pytest.raises(ValueError, match="opd_full of this NeMo-RL: is not supported here"):
        train.forward_with_post_processing_fn(iter(()), None, SimpleNamespace(loss_fn=loss_fn))
