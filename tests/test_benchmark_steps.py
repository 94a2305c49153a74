"""Benchmarks of training steps run on tiny models and check their accuracy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import draft_models
import pytest
import step_cases
import steps
import torch
from torch import Tensor

CPU = torch.device("cpu")


# ---------------------------------------------------------------------- training steps


def test_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Implementations of a training step agree with a float32 head, and appear in the tables with
    time and memory."""
    pytest.importorskip("transformers", reason="the models are its own")
    output = tmp_path / "steps.json"
    arguments = ["--quick", "--device", "cpu", "--json", str(output), "--only", "Llama-3-8B*"]
    assert steps.main(arguments) == 0
    assert "| Llama-3-8B, 4 layers | GRPO | 96 | " in capsys.readouterr().out
    results = json.loads(output.read_text())
    assert results["runs"][0]["versions"].keys() >= {"torch", "transformers"}
    rows = [row for row in results["rows"] if row["status"] == "ok"]
    names = {"Transformers", "headloss", "headloss, 5 GiB", "headloss, recompute"}
    for work in step_cases.WORKS:
        assert {row["contestant"] for row in rows if row["work"] == work} >= names
    # DPO needs pairs of rows, so it is not run on the batch that has a single row.
    assert {row["tokens"] for row in rows if row["work"] == "DPO"} == {96}
    for row in rows:
        assert row["loss_error"] < 1e-6 and row["gradient_error"] < 1e-5
        assert row["runs"] == steps.ROUNDS and row["low"] <= row["ms"] <= row["high"]
        assert 0.3 < row["probability"] < 0.7
    peaks = {row["contestant"]: row["peak_bytes"] for row in rows if row["tokens"] == 96}
    assert min(peaks.values()) > 95 * 2048 * 4 and peaks["Transformers"] > 2 * 95 * 2048 * 4
    (liger, *_) = (row for row in results["rows"] if row["contestant"] == "Liger")
    assert (liger["status"], liger["reason"]) == ("skipped", "needs a GPU")
    short, full = (steps.table(results, largest=large) for large in (True, False))
    assert short.count("| 96 |") == full.count("| 96 |") == 3 and full.count("| 16 |") == 2
    assert "| 16 |" not in short and "| - |" in short and "longest" not in full


def test_dpo_of_steps() -> None:
    """DPO steps use the given reference log-probs, and have the loss of DPO's formula in
    float64."""
    pytest.importorskip("transformers", reason="the models are its own")
    model = step_cases.make_model(step_cases.QUICK["Llama-3-8B, 4 layers"], CPU)
    batch = step_cases.make_batch(model, 4, 24, CPU)
    logits = model(input_ids=batch.ids).logits[:, :-1].double()
    logps = logits.log_softmax(-1).gather(-1, batch.labels[:, 1:, None]).squeeze(-1)
    ratios = (logps - batch.ref_logps[:, :-1]).sum(1)
    torch.testing.assert_close(ratios, batch.log_ratios.double(), atol=1e-4, rtol=0)
    margins = 0.1 * (ratios[::2] - ratios[1::2])
    assert margins.abs().min() > 0.1 and margins.abs().max() < 3
    want = -torch.nn.functional.logsigmoid(margins).mean()
    for name in ("Transformers", "headloss", "headloss, recompute"):
        loss = step_cases.CONTESTANTS[name].loss("DPO", model, batch)
        torch.testing.assert_close(loss.double(), want, atol=1e-5, rtol=0)
    reason = step_cases.CONTESTANTS["Liger"].unserved("DPO", torch.device("cuda"))
    assert "not log-probs" in reason


def test_draft_models(tmp_path: Path) -> None:
    """A quick run of the draft-model study writes gradient errors, timings, and training steps
    whose losses agree with a float32 head."""
    pytest.importorskip("transformers", reason="the other steps are of its models")
    output = tmp_path / "drafts.json"
    assert draft_models.main(["--quick", "--output", str(output)]) == 0
    results = json.loads(output.read_text())
    assert results["gradient error"].keys() == {"kl_div", "tv"}
    assert {row["loss"] for row in results["races"]} == {"EAGLE-3", "DSpark"}
    rows = {row["contestant"]: row for row in results["step"]}
    assert rows.pop("speculators")["reason"] == "needs a GPU" and len(rows) == 3
    for row in rows.values():
        assert row["loss_error"] < 1e-5 and row["gradient_error"] < 1e-5 and row["ms"] > 0


@pytest.mark.parametrize("most", [0, 15, 16, 100, 1023, 1024, 5000, 16_383, 16_384, 10**6])
def test_the_longest_that_fits(most: int) -> None:
    tried = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= most

    tokens = steps.longest(fits, 16, 16_384)
    assert tokens % 16 == 0 and tokens <= min(most, 16_384)
    assert min(most, 16_384) - tokens <= max(16, tokens // 16) and len(tried) <= 14
    assert len(set(tried)) == len(tried) and max(tried) <= 16_384


def test_longest_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for the longest sequence treats out-of-memory as too long, and reports other
    failures.

    The longest sequences are kept in the same file as the step times.
    """
    pytest.importorskip("transformers", reason="the models are its own")

    def up_to(most: int, error: Exception) -> step_cases.Contestant:
        def loss(work: str, model: torch.nn.Module, batch: step_cases.Batch) -> Tensor:
            if batch.ids.numel() > most:
                raise error
            return step_cases.of_model(work, model, batch)

        return step_cases.Contestant(loss=loss)

    contestants = {
        "Transformers": up_to(200, torch.OutOfMemoryError("CUDA out of memory. Tried to")),
        "Liger": step_cases.CONTESTANTS["Liger"],
        "TRL": up_to(200, RuntimeError("Triton Error [CUDA]: out of memory")),
        "headloss": step_cases.CONTESTANTS["headloss"],
        "headloss, 5 GiB": up_to(200, ValueError("too odd")),
    }
    monkeypatch.setattr(steps, "CONTESTANTS", contestants)
    output = tmp_path / "steps.json"
    arguments = ["--quick", "--device", "cpu", "--json", str(output), "--only", "Llama-3-8B*"]
    assert steps.main([*arguments, "--contestants", "headloss"]) == 0
    assert steps.main([*arguments, "--longest"]) == 1
    printed = capsys.readouterr().out
    for work in ("SFT", "GRPO"):
        cells = "192 | - | 192 | 256 | ValueError: too odd |"
        assert f"| Llama-3-8B, 4 layers | {work} | {cells}" in printed
    results = json.loads(output.read_text())
    with_lengths = steps.table(results)
    assert with_lengths in printed and with_lengths.count(" | DPO | ") == 1
    monkeypatch.undo()
    timed = [row for row in results["rows"] if "longest" not in row]
    alone = {"runs": results["runs"], "rows": timed}
    assert steps.table(results).startswith(steps.table(alone) + "\n\n| longest sequence | step | ")
    assert steps.errors(results) == steps.errors(alone)


def test_steps_that_disagree_are_not_timed() -> None:
    pytest.importorskip("transformers", reason="the models are its own")
    model = step_cases.make_model(step_cases.QUICK["Qwen2.5-0.5B"], CPU)
    batch = step_cases.make_batch(model, 2, 16, CPU)

    def off(work: str, model: torch.nn.Module, batch: step_cases.Batch) -> Tensor:
        return 1.2 * step_cases.of_model(work, model, batch)

    rows = steps.race("SFT", model, batch, {"off": step_cases.Contestant(loss=off)}, CPU)
    assert rows["off"]["status"] == "failed" and "gradient_error" in rows["off"]["reason"]
    assert "ms" not in rows["off"]


def test_labels_look_trained() -> None:
    """`make_model` scales the last norm so that labels get a mean probability of 0.5, also in a
    model with tied embeddings."""
    pytest.importorskip("transformers", reason="the models are its own")
    setting = replace(step_cases.QUICK["Qwen2.5-0.5B"], dtype=torch.bfloat16)
    batch = step_cases.make_batch(step_cases.make_model(setting, CPU), 4, 512, CPU)
    assert abs(batch.probability - 0.5) < 0.05
    assert (batch.labels[:, 0] == -100).all() and (batch.labels[:, 1:] >= 0).all()
