"""All examples run."""

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
    # 8 rows x (24 - 4) tokens: the 4 prompt tokens are not scored
    assert "of 160 tokens" in lines[-1]


def test_gspo_packed_lowers_its_loss(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_example("gspo_packed", capsys)
    losses = [float(line.split("loss")[1].split(",")[0]) for line in lines if "loss" in line]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert any(line.startswith("schedule   one_pass") for line in lines)


def test_own_term_equals_the_loss_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    last = run_example("own_term", capsys)[-1]
    ours, by_hand, apart = map(float, re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", last))
    assert ours == pytest.approx(by_hand, abs=2e-5)
    assert apart < 1e-5


def test_support_has_a_ratio_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    whole, support = run_example("support", capsys)
    assert "ratio 1.000000" in support and float(whole.split()[5].strip(",")) < 0.97


def test_zero_mismatch(capsys: pytest.CaptureFixture[str]) -> None:
    """The importance ratios between the example's sampler and trainer are exactly 1 on a GPU; on a
    CPU matmuls of different sizes may sum in different orders."""
    (line,) = run_example("zero_mismatch", capsys)
    least, most = (float(line.split()[i].strip(",")) for i in (2, 4))
    near = 0 if torch.cuda.is_available() else 4e-6
    assert 1 - near <= least <= most <= 1 + near


def test_a_trainers_own_loss(capsys: pytest.CaptureFixture[str]) -> None:
    *ways, by_hand = run_example("foreign_loss", capsys)
    assert len({way.split(": ")[1] for way in ways}) == 1 and len(ways) == 3
    assert by_hand.split()[-1] == ways[0].split()[2].strip(",")


def test_candidates_distill(capsys: pytest.CaptureFixture[str]) -> None:
    """Distillation on candidates reaches the teacher if all other tokens count as one outcome, and
    fails with forward KL over the student's top k alone."""
    forward, alone, reverse, _ = (float(x.split()[-1]) for x in run_example("candidates", capsys))
    assert forward < 1.5 and reverse < 2 < alone


def test_recommender_learns_by_either_loss(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example recommender improves in a few steps, and is better with full cross-entropy than
    with a loss of one negative item per click."""
    monkeypatch.setattr("sys.argv", ["recommender", "--steps", "30"])
    runpy.run_path(str(ROOT / "examples" / "recommender.py"), run_name="__main__")
    full, sampled = capsys.readouterr().out.splitlines()
    values = [[float(x) for x in re.findall(r":(\d\.\d+)", line)] for line in (full, sampled)]
    assert values[0][0] == values[1][0] < 0.01
    assert values[0][-1] > 0.1 and values[0][-1] > values[1][-1]


def small_verifier():
    """Return the example module and a frozen random model with a vocabulary of 24 tokens, of which
    the draft model knows 20."""
    from transformers import LlamaConfig, LlamaForCausalLM

    example = load(ROOT / "examples" / "draft_model.py")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=24, num_attention_heads=4, **sizes))
    with torch.no_grad():  # scale the weights so that next-token probabilities are far from uniform
        model.lm_head.weight.mul_(15)
        model.model.embed_tokens.weight.mul_(100)
    return example, example.Verifier(model, torch.arange(20))


def test_a_draft_trains_on_what_it_sees_when_it_drafts() -> None:
    """A draft model trains as it drafts: unrolled steps equal a loop over previous tokens, and the
    loss equals its formula on logits."""
    example, verifier = small_verifier()
    draft, steps, start = example.Draft(32), 3, 5
    ids = torch.randint(2, 20, (2, 12))
    scored = torch.rand(2, 12) < 0.7
    layers, states = verifier.states(ids)
    tokens = verifier.embed(ids)
    drafted = example.unrolled(draft, layers, tokens, steps)
    hidden, past = draft.fuse(layers[:, : start + 1]), []
    hidden = draft.step(hidden, tokens[:, 1 : start + 2], 0, past)[:, -1:]
    for step in range(steps):
        if step:
            at = start + 1 + step
            hidden = draft.step(hidden, tokens[:, at : at + 1], start + step, past)
        assert torch.allclose(hidden[:, 0], drafted[:, start + 1 + step, step], atol=1e-5)

    p = (drafted @ verifier.head.weight.T).double().log_softmax(-1)
    q = (states @ verifier.head.weight.T).double().log_softmax(-1)[:, :, None].expand_as(p)
    share = (-3 * torch.minimum(p.exp(), q.exp()).sum(-1)).exp()
    distance = (p.exp() - q.exp()).abs().sum(-1) / 2
    values = share * (q.exp() * (q - p)).sum(-1) + (1 - share) * distance
    row, step = torch.arange(12)[:, None], torch.arange(steps)
    there = scored[..., None] & (row >= step + 1) & (row - step - 1 < 12 - steps)
    want = (values * 0.8**step)[there].sum() / there.sum()
    out = example.loss(draft, verifier, ids, scored, steps)
    assert float(out.loss.detach()) == pytest.approx(float(want.detach()), rel=1e-5)


def test_drafted_tokens_have_the_verifiers_law() -> None:
    example, _ = small_verifier()
    p, q = torch.tensor([[0.7, 0.1, 0.2]]), torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])
    first, second = torch.zeros(3), torch.zeros(3)
    for _ in range(4000):
        token, *more = example.accept(p[0].multinomial(1), p, q).tolist()
        first[token] += 1
        second[more] += 1
    assert torch.allclose(first / 4000, q[0], atol=0.03)
    assert torch.allclose(second / second.sum(), q[1], atol=0.03)
    accepted = torch.minimum(p[0], q[0]).sum()
    assert float(second.sum() / 4000) == pytest.approx(float(accepted), abs=0.03)


def test_a_trained_draft_is_accepted_more_often() -> None:
    example, verifier = small_verifier()
    draft = example.Draft(32)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
    prompts = list(torch.randint(2, 20, (16, 6)))
    before, most = example.accepted_length(draft, verifier, prompts, 3)
    acceptances = []
    for _ in range(30):
        ids = torch.randint(2, 20, (32, 14))
        out = example.loss(draft, verifier, ids, torch.ones_like(ids, dtype=torch.bool), 3)
        acceptances.append(float(out.metrics["lk_hybrid/acceptance"]))
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    after, _ = example.accepted_length(draft, verifier, prompts, 3)
    assert acceptances[-1] > acceptances[0] + 0.3
    assert before + 0.5 < after < most and 3 < most <= 4


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parallel_learns(ranks: int) -> None:
    printed = script_on(ranks, str(ROOT / "examples" / "parallel.py"))
    found = re.findall(r"step \d: (\d+) tokens, perplexity ([\d.]+)", printed)
    assert [tokens for tokens, _ in found] == ["16" if ranks == 2 else "34"] * 4
    perplexities = [float(perplexity) for _, perplexity in found]
    assert all(after < before for before, after in pairwise(perplexities)), printed


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_cpu_memory_contestants(capsys: pytest.CaptureFixture[str]) -> None:
    """All implementations in the CPU memory study run, and those of the same loss return the same
    value."""
    benchmark = load(ROOT / "benchmarks" / "studies" / "cpu_memory.py")
    losses: dict[str, list[float]] = {}
    for name in benchmark.CONTESTANTS:
        sizes = ["--tokens=64", "--hidden=16", "--vocab=200"]
        assert benchmark.main([*sizes, "--contestant", name]) == 0
        row = json.loads(capsys.readouterr().out)
        assert row["returned_gradient_bytes"] == 4 * 16 * (64 + 200)
        losses.setdefault(row["work"], []).append(row["loss"])
    for found in losses.values():
        assert found == pytest.approx([found[0]] * len(found), rel=1e-5)
