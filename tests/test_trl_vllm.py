"""Replaying kept ids works with colocated vLLM: TRL's own code runs around a replacement of vLLM's
engine."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is the trainer that headloss is put into")
import vllm_engine
from test_trl_replay import generated, make, masked_logps, scored_of
from test_trl_support import support_of
from trl_case import llama, load

from headloss import rl

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def colocated(monkeypatch: pytest.MonkeyPatch, engine: Any = None, **options: Any) -> Any:
    """Return a GRPO trainer with a colocated replacement of vLLM, and the list of vLLM engines that
    it has built."""
    built = vllm_engine.install(monkeypatch, load(llama()), **(engine or {}))
    return make(rl.GRPO, use_vllm=True, **options), built


def test_sets_come_from_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, (engine,) = colocated(monkeypatch, beta=0.1)
    assert engine.options["return_sampling_mask"] is True and os.environ[RUNNER] == "1"
    inputs = generated(trainer)
    scored, support = scored_of(inputs), support_of(inputs)
    kept = (support >= 0).sum(2)[scored]
    assert (kept > 0).all() and (kept <= 20).all() and len(kept.unique()) > 1
    want = masked_logps(trainer, inputs)[scored]
    for name in ("sampling_per_token_logps", "old_per_token_logps", "ref_per_token_logps"):
        torch.testing.assert_close(inputs[name][scored], want, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_iterations": 2, "gradient_accumulation_steps": 2},
        {"top_p": 1.0, "min_p": 0.05},
        {"vllm_importance_sampling_correction": False},
        {"generation_kwargs": {"top_k": 6}, "top_k": 0},
        {"sampling_support": True},
    ],
    ids=str,
)
def test_ratios_are_one_on_the_first_step(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """On the first step, the ratio between policy and vLLM's log-probs is 1, in TRL's metric and in
    headloss's."""
    trainer, _ = colocated(monkeypatch, **options)
    trainer.train()
    log = next(row for row in trainer.state.log_history if "loss" in row)
    names = [f"headloss/sampling/ratio_{name}" for name in ("min", "mean", "max")]
    if options.get("vllm_importance_sampling_correction", True):
        names.append("sampling/importance_sampling_ratio/mean")
    for name in names:
        assert log[name] == pytest.approx(1, abs=1e-4 if name.startswith("s") else 1e-5), name
    assert log["headloss/sampling/kept_max"] <= 20


def test_off_is_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `sampling_support=False` vLLM is built as in stock TRL, and the logged ratio to the
    sampler is not 1."""
    trainer, (engine,) = colocated(
        monkeypatch, sampling_support=False, vllm_importance_sampling_mode="token_truncate"
    )
    assert "return_sampling_mask" not in engine.options and RUNNER not in os.environ
    assert "support_ids" not in generated(trainer)
    trainer.train()
    log = next(row for row in trainer.state.log_history if "loss" in row)
    assert log["sampling/importance_sampling_ratio/mean"] < 0.8
    assert log["headloss/sampling/ratio_mean"] < 0.8 and log["headloss/sampling/kl"] > 0.05
    assert "headloss/sampling/kept" not in log


def test_a_runner_set_by_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    built = vllm_engine.install(monkeypatch, load(llama()), masks=False)
    monkeypatch.setenv(RUNNER, "0")
    with pytest.warns(UserWarning, match="return_sampling_mask"):
        make(rl.GRPO, use_vllm=True)
    assert os.environ[RUNNER] == "0" and len(built) == 1


def test_vllms_functions_are_restored_after_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_engine.install(monkeypatch, load(llama()))
    before = vllm_engine.vllm_generation.LLM  # type: ignore[attr-defined]
    own = vllm_engine.vllm_generation.extract_logprobs
    trainer = make(rl.GRPO, use_vllm=True)
    generated(trainer)
    assert vllm_engine.vllm_generation.LLM is before  # type: ignore[attr-defined]
    assert vllm_engine.vllm_generation.extract_logprobs is own


OBSTACLES: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 0},
    "vllm_mode": {"vllm_mode": "server"},
    "temperature": {"generation_kwargs": {"temperature": 0.5}},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence_penalty": {"generation_kwargs": {"presence_penalty": 0.4}},
}
ON = ("repetition_penalty", "presence_penalty")


@pytest.mark.parametrize("option", [*OBSTACLES, "use_vllm"])
def test_true_refuses_by_name(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.setattr("headloss.integrations.trl.replay._version", lambda: "0.27.1")
    if option == "vllm_mode":  # replace TRL's client, which would look for a vLLM server
        monkeypatch.setattr(vllm_engine.grpo_trainer, "VLLMGeneration", lambda **options: None)
        more = {"vllm_importance_sampling_correction": False}
    else:
        more = {}
    engine = {"masks": option != "use_vllm"}
    with pytest.raises(ValueError, match=f"^{option}: .*sampling_support=True") as caught:
        colocated(monkeypatch, engine, sampling_support=True, **OBSTACLES.get(option, {}), **more)
    if option == "use_vllm":
        assert "vLLM 0.27.1" in str(caught.value)


@pytest.mark.parametrize("option", [*OBSTACLES, "use_vllm"])
def test_none_warns_once_by_name(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.setattr("headloss.integrations.trl.replay._version", lambda: "0.27.1")
    options: dict[str, Any] = dict(OBSTACLES.get(option, {}))
    if option == "vllm_mode":
        monkeypatch.setattr(vllm_engine.grpo_trainer, "VLLMGeneration", lambda **options: None)
        options["vllm_importance_sampling_correction"] = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, built = colocated(monkeypatch, {"masks": option != "use_vllm"}, **options)
        if option != "vllm_mode":
            assert ("support_ids" in generated(trainer)) is (option in ON)
            assert ("return_sampling_mask" in built[-1].options) is (option in ON)
    ours = [str(w.message) for w in caught if str(w.message).startswith("sampling_support")]
    assert len(ours) == 1 and ours[0].startswith(f"sampling_support: {option}: "), ours
    assert option != "use_vllm" or "0.27.1" in ours[0]
    assert RUNNER not in os.environ or option in ON


def test_without_a_filter_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, (engine,) = colocated(monkeypatch, top_k=0, top_p=1.0)
        assert "support_ids" not in generated(trainer)
    assert "return_sampling_mask" not in engine.options
    assert not [w for w in caught if "sampling_support" in str(w.message)]


def test_a_type_error_of_the_engine_passes_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, model: str, **options: Any) -> None:
        raise TypeError("an engine of another kind")

    with pytest.raises(TypeError, match="another kind"):
        colocated(monkeypatch, {"__init__": broken})


def test_a_set_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = colocated(monkeypatch, {"loses": (3, 0)})
    with pytest.raises(ValueError, match="support_ids: sequence 3 has no set at its token 0"):
        generated(trainer)
