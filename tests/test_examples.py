"""What users read runs: the examples."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from worlds import script_on

ROOT = Path(__file__).parents[1]


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) < 60
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_sft_learns(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_example("sft", capsys)
    perplexities = [float(re.search(r"perplexity +([\d.]+)", line)[1]) for line in lines]  # type: ignore[index]
    assert perplexities[0] > 500 and perplexities[-1] < 3
    assert "of 160 tokens" in lines[-1]  # 8 rows of 24, less prompts of 4


def test_gspo_packed_lowers_its_loss(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_example("gspo_packed", capsys)
    losses = [float(line.split("loss")[1].split(",")[0]) for line in lines if "loss" in line]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert any(line.startswith("schedule   one_pass") for line in lines)


def test_own_term_is_what_it_is_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    last = run_example("own_term", capsys)[-1]
    ours, by_hand, apart = map(float, re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", last))
    assert ours == pytest.approx(by_hand, abs=2e-5)
    assert apart < 1e-5


def test_support_has_a_ratio_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    whole, support = run_example("support", capsys)
    assert "ratio 1.000000" in support and float(whole.split()[5].strip(",")) < 0.97


def test_zero_mismatch(capsys: pytest.CaptureFixture[str]) -> None:
    """Exactly 1 on a GPU; a CPU's own product may take another order for another size."""
    (line,) = run_example("zero_mismatch", capsys)
    least, most = (float(line.split()[i].strip(",")) for i in (2, 4))
    near = 0 if torch.cuda.is_available() else 4e-6
    assert 1 - near <= least <= most <= 1 + near


def test_a_trainers_own_loss(capsys: pytest.CaptureFixture[str]) -> None:
    *ways, by_hand = run_example("foreign_loss", capsys)
    assert len({way.split(": ")[1] for way in ways}) == 1 and len(ways) == 3
    assert by_hand.split()[-1] == ways[0].split()[2].strip(",")


def test_candidates_distill(capsys: pytest.CaptureFixture[str]) -> None:
    """With the rest as an outcome either KL brings the student to the teacher; the forward KL of
    the student's own top-k alone says nothing of the others."""
    forward, alone, reverse, _ = (float(x.split()[-1]) for x in run_example("candidates", capsys))
    assert forward < 1.5 and reverse < 2 < alone


def test_recommender_learns_by_either_loss(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a few steps; full cross-entropy is ahead of one negative a click."""
    monkeypatch.setattr("sys.argv", ["recommender", "--steps", "30"])
    runpy.run_path(str(ROOT / "examples" / "recommender.py"), run_name="__main__")
    full, sampled = capsys.readouterr().out.splitlines()
    values = [[float(x) for x in re.findall(r":(\d\.\d+)", line)] for line in (full, sampled)]
    assert values[0][0] == values[1][0] < 0.01
    assert values[0][-1] > 0.1 and values[0][-1] > values[1][-1]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parallel_learns(ranks: int) -> None:
    printed = script_on(ranks, str(ROOT / "examples" / "parallel.py"))
    found = re.findall(r"step \d: (\d+) tokens, perplexity ([\d.]+)", printed)
    assert [tokens for tokens, _ in found] == ["16" if ranks == 2 else "34"] * 4
    perplexities = [float(perplexity) for _, perplexity in found]
    assert all(after < before for before, after in pairwise(perplexities)), printed


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_cpu_memory_contestants(capsys: pytest.CaptureFixture[str]) -> None:
    """On sizes of no interest: every contestant runs, and those of the same work agree."""
    benchmark = load(ROOT / "benchmarks" / "cpu_memory.py")
    losses: dict[str, list[float]] = {}
    for name in benchmark.CONTESTANTS:
        sizes = ["--tokens=64", "--hidden=16", "--vocab=200"]
        assert benchmark.main([*sizes, "--contestant", name]) == 0
        row = json.loads(capsys.readouterr().out)
        assert row["returned_gradient_bytes"] == 4 * 16 * (64 + 200)
        losses.setdefault(row["work"], []).append(row["loss"])
    for found in losses.values():
        assert found == pytest.approx([found[0]] * len(found), rel=1e-5)
