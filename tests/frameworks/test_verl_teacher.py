"""Top-k distillation in verl's FSDP engine agrees between headloss's fused head and verl's loss on
logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="`make test-frameworks` compares with verl")
from test_verl_adapter import same
from verl.utils import tensordict_utils as tu
from verl_case import (
    PROMPTS,
    RESPONSES,
    alone,  # noqa: F401
    distillation_of,
    engine_of,
    installed,  # noqa: F401
    jagged,
    loss_of,
    saved,
    taught,
    trained,
)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that builds the engine for (backend, tied, packed) on first use and then
    reuses it."""
    paths = {tied: saved(tmp_path_factory.mktemp("llama"), tied=tied) for tied in (False, True)}
    built: dict[Any, Any] = {}

    def get(backend: str | None, tied: bool = False, packed: bool = True) -> Any:
        key = tied, packed, backend
        if key not in built:
            built[key] = engine_of(paths[tied], backend, packed=packed)
        return built[key]

    return get


def old_log_probs(engine: Any) -> torch.Tensor:
    """Return [B, R] old log-probs near the policy's, so that clipped losses have a gradient."""
    data, packed = taught(use_fused_kernels=False), engine.model_config.use_remove_padding
    tu.assign_non_tensor(data, distillation_use_topk=False, use_remove_padding=packed)
    logps = engine.infer_batch(data)["model_output"]["log_probs"].unbind()
    generator = torch.Generator()
    return jagged([
        x[prompt - 1 : -1] + 0.1 * torch.randn(len(x) - prompt, generator=generator.manual_seed(1))
        for x, prompt in zip(logps, PROMPTS, strict=True)
    ])  # fmt: skip


def both(engines: Any, loss: Any, flags: Any = None, **engine: Any) -> list[Any]:
    """Return the outputs of verl's engine with logits and with headloss, without verl's metric of
    the student's own top k."""
    results, old = [], old_log_probs(engines(None, **engine))
    for backend in (None, "headloss"):
        data = taught(use_fused_kernels=bool(backend), **(flags or {}))
        tu.assign_non_tensor(data, use_remove_padding=engine.get("packed", True))
        data["old_log_probs"] = old
        results.append(trained(engines(backend, **engine), data, loss))
    metrics = results[0][0]["metrics"]
    for name in ("distillation/overlap_ratio", "distillation/overlap_token_advantage"):
        assert metrics.pop(name) and name not in results[1][0]["metrics"]
    assert {name for name in metrics if "mass" in name} and "distillation/loss" in metrics
    return results


WAYS = {
    "supervised alone": {"use_task_rewards": False, "use_policy_gradient": False},
    "supervised beside rewards": {"use_policy_gradient": False, "distillation_loss_coef": 0.3},
    "as a reward": {"use_task_rewards": False},
    "as a reward beside rewards": {"distillation_loss_coef": 0.3},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_ways(engines: Any, way: str, packed: bool, tied: bool) -> None:
    """In all of verl's distillation modes, headloss and verl's engine agree on two micro-batches,
    with an entropy bonus and a KL penalty in the policy loss."""
    loss = distillation_of("vanilla", WAYS[way], entropy_coeff=0.1, use_kl_loss=True)
    only = way == "supervised alone"
    flags = {"distillation_only": only, "calculate_entropy": not only}
    want, got = both(engines, loss, flags, packed=packed, tied=tied)
    same(got, want)


CLAMPS = [(None, None), (-10.0, 10.0), (-4.0, 0.5), (-2.0, None)]


@pytest.mark.parametrize(("floor", "ceiling"), CLAMPS)
@pytest.mark.parametrize("over", ["token-mean", "seq-mean-token-mean"])
def test_clamps(engines: Any, floor: float | None, ceiling: float | None, over: str) -> None:
    """verl's two clamps agree: the lower bound of log-probs inside the divergence, and the upper
    bound of a token's loss."""
    settings = {**WAYS["supervised beside rewards"], "log_prob_min_clamp": floor,
        "loss_max_clamp": ceiling}  # fmt: skip
    want, got = both(engines, distillation_of("gspo", settings, loss_agg_mode=over))
    same(got, want)


@pytest.mark.parametrize("packed", [True, False])
def test_a_temperature_per_sample(engines: Any, packed: bool) -> None:
    """Top-k distillation with one temperature per sample agrees with verl's."""
    temperature = torch.tensor([0.7, 1.3, 0.9, 1.0])
    loss = distillation_of("vanilla", WAYS["supervised beside rewards"])
    want, got = both(engines, loss, {"temperature": temperature}, packed=packed)
    same(got, want)


def test_outputs(engines: Any) -> None:
    """Distillation outputs are nested tensors shaped like the tokens, with 0 at unscored response
    tokens; without a teacher they are absent."""
    loss = distillation_of("vanilla", WAYS["supervised alone"])
    results = both(engines, loss, {"distillation_only": True, "calculate_entropy": False})
    theirs, ours = (out["model_output"] for out, _ in results)
    assert "log_probs" not in ours
    data = taught()
    for name in ("distillation_losses", "student_mass", "teacher_mass"):
        rows = zip(ours[name].unbind(), theirs[name].unbind(), strict=True)
        for b, (got, want) in enumerate(rows):
            scored = torch.zeros(len(want), dtype=torch.bool)
            at = slice(PROMPTS[b] - 1, PROMPTS[b] + RESPONSES[b] - 1)
            scored[at] = data["response_mask"].unbind()[b].bool()
            torch.testing.assert_close(got[scored], want[scored], rtol=2e-5, atol=1e-6)
            assert not got[~scored].any()
    plain = engines("headloss").infer_batch(taught(distillation_use_topk=False))["model_output"]
    assert "distillation_losses" not in plain and plain["log_probs"].values().all()


def test_bfloat16(tmp_path: Path) -> None:
    """Results agree within bfloat16 precision, since verl (not headloss) rounds the student's
    log-probs to bfloat16."""
    path, losses = saved(tmp_path), []
    loss = distillation_of("vanilla", WAYS["supervised alone"])
    for backend, dtype in ((None, "fp32"), ("headloss", "bf16"), (None, "bf16")):
        data = taught(use_fused_kernels=bool(backend), distillation_only=True)
        out, _ = trained(engine_of(path, backend, dtype=dtype), data, loss)
        losses.append(torch.tensor(out["loss"]))
    ours, theirs = ((x - losses[0]).norm() / losses[0].norm() for x in losses[1:])
    assert ours < 0.02 and theirs < 0.02


# ---------------------------------------------------------------------- invalid input


def test_refused(engines: Any) -> None:
    """Distillation with an unsupported loss mode or with `support_ids` raises ValueError."""
    engine, settings = engines("headloss"), WAYS["supervised beside rewards"]
    with pytest.raises(ValueError, match="top-k distillation with another loss function, want"):
        trained(engine, taught(), loss_of("vanilla"))
    with pytest.raises(ValueError, match="loss_mode: got 'headloss_gspo' beside distillation"):
        trained(engine, taught(), distillation_of("headloss_gspo", settings))
    data = taught()
    tu.assign_non_tensor_stack(data, "support_ids", [None] * len(PROMPTS))
    with pytest.raises(ValueError, match="top-k distillation with support_ids, want .* vocabulary"):
        trained(engine, data, distillation_of("vanilla", settings))


def test_a_policy_loss_that_is_not_read(engines: Any) -> None:
    """In purely supervised distillation the policy loss is not read, so it has no effect."""
    engine, results = engines("headloss"), []
    for mode in ("vanilla", "headloss_gspo"):
        data = taught(distillation_only=True, calculate_entropy=False)
        results.append(trained(engine, data, distillation_of(mode, WAYS["supervised alone"])))
    same(*results)


def test_an_engine_that_drops_fused_outputs(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verl engine that does not return the fused head's distillation outputs raises
    RuntimeError."""
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead

    original = FSDPEngineWithLMHead.prepare_model_outputs

    def older(self: Any, output: Any, *rest: Any) -> Any:
        aux, output.fused_linear_aux = output.fused_linear_aux, None
        found = original(self, output, *rest)
        output.fused_linear_aux = aux
        return found

    monkeypatch.setattr(FSDPEngineWithLMHead, "prepare_model_outputs", older)
    with pytest.raises(RuntimeError, match="prepare_model_outputs: does not read fused_linear_aux"):
        trained(engines("headloss"), taught(), distillation_of("vanilla", WAYS["as a reward"]))
