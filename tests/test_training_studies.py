"""Tests of the training studies `clip_sides.py`, `stacks.py` and `spelling.py`: their losses,
their clip bounds and the spelling task."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import clip_sides
import pytest
import spelling
import stacks
import torch

import headloss as hl

B, C, V, H = 6, 5, 11, 4
CPU = torch.device("cpu")


def case(work: str) -> tuple[torch.Tensor, torch.Tensor, clip_sides.Sample]:
    """Return new and old log-probs [B, C], of which some ratios are beyond the clip bounds, and a
    right-padded batch."""
    scale = 0.4 if work == "grpo" else 1e-3
    mask = torch.arange(C) < torch.tensor([5, 1, 3, 4, 2, 5])[:, None]
    old = -torch.rand(B, C, dtype=torch.float64)
    new = (old + scale * torch.randn(B, C, dtype=torch.float64)).requires_grad_()
    none = torch.zeros(0)
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0, 0.0, 1.5])
    return new, old, clip_sides.Sample(ids=none, attended=none, mask=mask, advantages=advantages)


@pytest.mark.parametrize("work", ["grpo", "gspo"])
def test_the_loss_is_that_of_the_library(work: str) -> None:
    _, old, batch = case(work)
    hidden = torch.randn(B, C, H, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, H, dtype=torch.float64)
    targets = torch.randint(V, (B, C))
    log_p = (hidden @ weight.t()).log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    old = log_p.detach() + 0.3 * (old + 0.5) * (1.0 if work == "grpo" else 3e-3)
    loss = clip_sides.policy_loss(work, log_p, old, batch)
    (want,) = torch.autograd.grad(loss, hidden)
    low, high = clip_sides.CLIP[work]
    term = getattr(hl, work)(epsilon_low=low, epsilon_high=high)
    labels = targets.masked_fill(~batch.mask, -100)
    given = hl.Batch(labels, advantages=batch.advantages.double(), old_logps=old)
    out = hl.head_loss(hidden, hl.Head(weight), given, term)
    (got,) = torch.autograd.grad(out.loss, hidden)
    torch.testing.assert_close(out.loss.detach(), loss.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("work", ["grpo", "gspo"])
def test_the_clip_stops_where_there_is_no_gradient(work: str) -> None:
    new, old, batch = case(work)
    (slopes,) = torch.autograd.grad(clip_sides.policy_loss(work, new, old, batch), new)
    ratio = clip_sides.log_ratio(work, new.detach(), old, batch.mask)
    stopped = clip_sides.beyond(work, ratio, batch.advantages).expand(B, C)
    counted = batch.mask & (batch.advantages != 0)[:, None]
    assert torch.equal((slopes == 0)[counted], stopped[counted])
    assert 0 < int(stopped[counted].sum()) < int(counted.sum())


def test_the_task() -> None:
    problems = spelling.training_words(0, 300)
    assert len(set(problems)) == 300 and not set(problems) & set(spelling.HELD_OUT)
    assert problems == spelling.training_words(0, 300) != spelling.training_words(1, 300)
    letters = spelling.tokenizer()
    ids = letters("abc>")["input_ids"]
    assert len(ids) == 4 and letters.decode(ids) == "abc>"
    assert spelling.reward(["cba", "cbx", "", "cbaa"], ["cba"] * 4) == [1.0, 2 / 3, 0.0, 0.75]
    ids, labels = spelling.demonstrations(["abcd"], CPU)
    assert letters.decode(ids[0][labels[0] >= 0]) == "dcba<end>"


def test_a_model_with_logits_of_a_wanted_size(tmp_path: Path) -> None:
    path = spelling.saved(tmp_path, spelling.SMALL, 40.0, CPU)
    how = json.loads((path / "policy.json").read_text())
    assert 30 < how["largest"] < 50 and how["steps"] == spelling.SMALL.steps
    model = spelling.load(path, CPU)
    assert math.isclose(spelling.largest_logit(model, CPU), how["largest"], rel_tol=1e-2)
    batch = clip_sides.sample(model.eval(), prompts=2, group=2)
    rounded = clip_sides.rounded(model)
    exact = clip_sides.exact(rounded, batch)[batch.mask]
    with torch.no_grad():
        errors = {
            stack: float((head(rounded, batch)[batch.mask] - exact).abs().max())
            for stack, head in clip_sides.HEADS.items()
        }
    assert errors["headloss"] < 1e-5 and errors["cast"] < 1e-5 < 1e-3 < errors["stock"], errors


def test_tables_and_figures(tmp_path: Path) -> None:
    machine: dict[str, Any] = {"machine": "a machine", "commit": "abc"}
    rows = [
        {
            "work": work, "largest": largest, "rate": 1e-6, "steps": steps, "stack": stack,
            "wrong": 0.01, "clipped": 0.2, "error": 0.03, "moved": 0.1,
        }
        for work in clip_sides.CLIP for largest in (20.0, 40.0) for steps in clip_sides.MOVES
        for stack in clip_sides.STACKS
    ]  # fmt: skip
    assert clip_sides.table(machine | {"rows": rows}).count("1 %, 3 %") == 36
    clip_sides.plot(machine | {"rows": rows}, tmp_path / "sides.png")
    curves = {curve: [0.1, 0.2, 0.3] for curve in stacks.CURVES}
    runs = [
        {"algorithm": "grpo", "stack": stack, "seed": seed, "before": 0.5, "after": 0.5 + seed}
        | curves for stack in stacks.STUDIES["exactness"] for seed in (0, 1)
    ]  # fmt: skip
    text = stacks.table(machine | {"runs": runs})
    assert text.count("1.0000 ± 0.5000") == 3 and text.count("0.2000 ± 0.0000") >= 6
    stacks.plot(machine | {"steps": 3, "runs": runs}, tmp_path / "stacks.png")
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("sides.png", "stacks.png"))


def test_a_run_over_the_sets_has_the_ratio_one(tmp_path: Path) -> None:
    """If log-probs are over the ids that the sampler kept, the ratio between trainer and sampler
    is 1 up to rounding; over the whole vocabulary, the ratio is the probability of the kept
    ids."""
    where = ["--models", str(tmp_path / "models"), "--output", str(tmp_path)]
    command = [*where, "--study", "sampling", "--quick", "--device", "cpu", "--steps", "4"]
    ratios = {}
    for stack in stacks.STUDIES["sampling"]:
        assert stacks.main([*command, "--logits", "10", "--one", "grpo", stack, "0"]) == 0
        run = json.loads((tmp_path / "sampling" / f"grpo-{stack}-0.json").read_text())
        ratios[stack] = run["ratio"][0]
    assert abs(ratios["sets"] - 1) < 1e-2 and ratios["whole"] < 0.99, ratios


@pytest.mark.slow
@pytest.mark.parametrize("study", list(stacks.STUDIES))
def test_training_runs(study: str, tmp_path: Path) -> None:
    """Training finishes eight steps with every loss and stack of libraries, and a second start
    finds the results and trains nothing."""
    where = ["--models", str(tmp_path / "models"), "--output", str(tmp_path / "runs")]
    command = [*where, "--study", study, "--quick", "--device", "cpu", "--logits", "30"]
    for _ in range(2):
        assert stacks.main([*command, "--json", str(tmp_path / "runs.json")]) == 0
    runs = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert {(r["algorithm"], r["stack"]) for r in runs} == {
        (algorithm, stack) for algorithm in clip_sides.CLIP for stack in stacks.STUDIES[study]
    }
    for run in runs:
        assert len(run["reward"]) == 2 and len(run["grad_norm"]) == 8
        assert all(map(math.isfinite, run["grad_norm"]))
        if study == "exactness":
            assert len(run["wrong"]) == 8
            if run["stack"] == "headloss":
                assert max(run["wrong"]) == 0
        else:
            assert len(run["mismatch"]) >= 2
            ratios = run["ratio"]
            assert (abs(ratios[0] - 1) < 1e-2) == (run["stack"] == "sets"), ratios
