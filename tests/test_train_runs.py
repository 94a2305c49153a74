"""`headloss train` runs a very small model: whole, stopped and resumed, and on two ranks."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL trains")
pytest.importorskip("omegaconf", reason="recipes are read by it")
pytest.importorskip("reasoning_gym", reason="the tasks of the shipped recipes")
import torch
from blank_plots import Drawn, blank_plots  # noqa: F401
from safetensors.torch import load_file
from test_train import ALGORITHMS

from headloss import train
from headloss.__main__ import main

SMALL = [
    "model=tiny",
    "tiny.hidden_size=16",
    "tiny.intermediate_size=32",
    "tiny.num_hidden_layers=1",
    "tiny.num_attention_heads=2",
    "train_problems=24",
    "held_out=6",
    "trainer.per_device_train_batch_size=8",
    "trainer.max_steps=2",
    "trainer.save_steps=2",
]
RL = [
    "trainer.num_generations=4",
    "trainer.max_completion_length=4",
    f"reward={__name__}:varied",  # a reward by length, since a random model solves no problem
]
TIMES = ("step_time", "peak_memory_mib", "train_runtime")


def varied(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    pairs = zip(prompts, completions, strict=True)
    return [sum((prompt + text).encode()) % 11 / 10 for prompt, text in pairs]


def run(name: str, output: Path, *overrides: str) -> int:
    small = SMALL if name == "sft" else [*SMALL, *RL]
    return main(["train", name, *small, f"output={output}", *overrides])


def metrics(output: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_shipped_recipe(name: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    if name in ("sft", "gspo"):  # runs with every plot
        monkeypatch.setattr("headloss.train.plots.Figure", Drawn)
    assert run(name, tmp_path) == 0
    printed = capsys.readouterr().out
    assert "held-out before: 0.0% of 6 problems" in printed and f"{name} 2/2  loss" in printed
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    shared = {"loss", "entropy", "grad_norm", "learning_rate", "step_time", "peak_memory_mib"}
    further = set() if name == "sft" else {"reward", "completions/mean_length"}
    assert shared | further <= lines[0].keys()
    assert lines[0]["entropy"] == pytest.approx(5.55, abs=0.05)  # about log(258)
    assert 0 < lines[0]["step_time"] < 60 and 100 < lines[0]["peak_memory_mib"] < 1e5
    plots = {path.stem for path in (tmp_path / "plots").iterdir()}
    assert {"loss", "entropy", "step_time", "peak_memory"} <= plots
    if name != "sft":
        assert {"reward", "kl_old"} <= plots or name == "reinforce"
    if name in ("grpo", "gspo", "ppo"):
        assert "clip_fraction" in plots
    report = (tmp_path / "report.md").read_text()
    assert report.startswith(f"# {name}: reasoning_gym:spell_backward\n")
    assert "| after | " in report and "![loss](plots/loss.png)" in report
    checkpoint = {path.name for path in (tmp_path / "checkpoints" / "checkpoint-2").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "trainer_state.json"} <= checkpoint
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".partial")]
    assert weights(tmp_path)


def test_terms_join_the_objective(tmp_path: Path) -> None:
    """With a z-loss added, the loss is the sum of cross-entropy and z-loss, and the head is still
    computed once."""
    losses = {}
    for weight in (0.0, 0.5):
        run("sft", tmp_path / str(weight), "trainer.max_steps=1", f"terms.z_loss={weight}")
        losses[weight] = metrics(tmp_path / str(weight))[0]
    both = losses[0.5]
    perplexity = both["headloss/cross_entropy/perplexity"]
    assert math.log(perplexity) == pytest.approx(losses[0.0]["loss"], rel=1e-5)
    z_loss = (losses[0.5]["loss"] - losses[0.0]["loss"]) / 0.5
    assert z_loss == pytest.approx(5.55**2, rel=0.02)


CALLS: list[int] = []


def pressing(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Reward function that simulates Ctrl-C (SIGINT) in its fourth call, after two calls for
    held-out prompts and one call for a generation."""
    CALLS.append(len(completions))
    if len(CALLS) == 4:
        os.kill(os.getpid(), signal.SIGINT)
    return varied(prompts, completions)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("sft", ["trainer.gradient_accumulation_steps=2", "terms.entropy=-0.01"]),
        (
            "gspo",
            [
                "trainer.num_iterations=2",
                "trainer.beta=0.1",
                "terms.z_loss=0.001",
                "train_problems=6",
            ],
        ),
        (
            "ppo",
            [
                "trainer.gradient_accumulation_steps=2",
                "trainer.steps_per_generation=4",
                "train_problems=8",
            ],
        ),
    ],
)
def test_resumes_to_the_same_numbers(name: str, overrides: list[str], tmp_path: Path) -> None:
    """A resumed run logs the same numbers as an uninterrupted run, also across epochs, and repeats
    all steps after the checkpoint."""
    steps = [
        "trainer.lr_scheduler_type=constant",
        "trainer.learning_rate=0.01",
        "trainer.save_steps=4",
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(name, whole, *overrides, *steps, "trainer.max_steps=8")
    run(name, parts, *overrides, *steps, "trainer.max_steps=6")
    # Rename the last checkpoint, so that the run looks as if it was killed before it saved step 6.
    (parts / "checkpoints" / "checkpoint-6").rename(parts / "never")
    run(name, parts, *overrides, *steps, "trainer.max_steps=8", "resume=true")
    want, got = metrics(whole), metrics(parts)
    assert [line["step"] for line in got] == list(range(1, 9))
    assert want[-1]["epoch"] > 1.2
    for line, same in zip(got, want, strict=True):
        assert line == same
    for key, value in weights(whole).items():
        assert value.equal(weights(parts)[key]), key


def test_interrupt(tmp_path: Path, capsys: Any) -> None:
    """Ctrl-C in the first of a generation's two steps runs both steps, writes a checkpoint, and
    resumes to the same result."""
    path = tmp_path / "task.jsonl"
    lines = [json.dumps({"prompt": f"{i}", "answer": i}) for i in range(30)]
    path.write_text("\n".join(lines))
    reward = f"reward={__name__}:pressing"
    options = [f"task={path}", "trainer.num_iterations=2", "trainer.max_steps=6", reward]
    CALLS[:] = [0] * 4  # Ctrl-C already used up
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    before = signal.getsignal(signal.SIGINT)
    assert run("grpo", whole, *options) == 0
    CALLS.clear()
    assert run("grpo", parts, *options) == 130
    assert signal.getsignal(signal.SIGINT) is before
    printed = capsys.readouterr()
    assert "stopping after this step" in printed.err and "stopped after 4 steps" in printed.out
    assert {p.name for p in (parts / "checkpoints").iterdir()} == {"checkpoint-2", "checkpoint-4"}
    assert not (parts / "model").exists() and "stopped after 4" in (parts / "report.md").read_text()
    assert run("grpo", parts, *options, "resume=true") == 0
    assert metrics(parts) == metrics(whole)


def test_a_folder_holds_one_run(tmp_path: Path, capsys: Any) -> None:
    assert run("sft", tmp_path) == 0
    capsys.readouterr()
    for overrides, said in (
        ([], "holds a run; resume=true continues it, output= takes another folder"),
        (["resume=true", "seed=1"], "was begun with seed=0, now it is 1"),
        (
            ["resume=true", "trainer.learning_rate=0.1"],
            "was begun with trainer.learning_rate=0.002",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            run("sft", tmp_path, *overrides)
        assert ended.value.code == 2
        printed = capsys.readouterr().err
        assert said in printed and printed.count("\n") == 1


def test_from_python_with_an_adapter_and_a_saved_model(tmp_path: Path) -> None:
    run("sft", tmp_path / "a")
    overrides = [*SMALL, *RL, f"model={tmp_path / 'a' / 'model'}", f"output={tmp_path / 'b'}"]
    recipe = train.recipe("gspo", [*overrides, "lora.r=2", "lora.target_modules=all-linear"])
    result = train.run(recipe)
    assert result.finished and result.steps == 2 and len(result.metrics) == 2
    assert result.before is not None and result.after is not None
    assert (result.model / "adapter_model.safetensors").is_file()
    assert result.report.is_file() and all(path.is_file() for path in result.plots)
