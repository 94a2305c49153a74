"""Calls whose objective is evaluated by its tape, against the same calls by autograd.

Without a GPU a tape runs in PyTorch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tape_plain import run_plain

import headloss as hl
from headloss.kernels.transform import Transform
from headloss.objective import tape as taped
from headloss.run import prepare
from headloss.run.calls import given_call

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (5, 0, 7, 3)


@pytest.fixture(autouse=True)
def by_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(prepare, "serves", lambda *_: True)
        hl.clear_cache()
        monkeypatch.setattr(taped, "runner", lambda: run_plain)


def batch() -> hl.Batch:
    generator = torch.Generator().manual_seed(1)
    count = sum(LENGTHS) + 4
    normal = [torch.randn(count, generator=generator).to(DEVICE) - 3 for _ in range(3)]
    targets = torch.randint(0, 37, (count,), generator=generator)
    targets[[0, 6, 11, 18]] = -100
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor([6, 1, 8, 4]))
    return hl.Batch(
        targets.to(DEVICE),
        hl.Segments.from_ids(ids.to(DEVICE), len(LENGTHS)),
        advantages=torch.tensor([1.0, -0.5, -2.0, 0.7], device=DEVICE),
        old_logps=normal[0],
        ref_logps=normal[1],
        sampling_logps=normal[2],
        keep=normal[0] > -3,
    )


OBJECTIVES: dict[str, Any] = {
    "grpo": hl.grpo(),
    "mixed": hl.gspo() + 0.1 * hl.kl(estimator="k3").where("keep") - 0.01 * hl.entropy(),
    "pairs": 2.0 * hl.dpo() + hl.cross_entropy(label_smoothing=0.1),
}
CALLS: dict[str, dict[str, Any]] = {
    "one pass": {},
    "chunks": {"schedule": "one_pass", "chunk_tokens": 6},
    "recompute": {"schedule": "recompute"},
    "declared": {"upstream": 3.0},
    "static": {"static": True},
}


def run(objective: Any, options: dict[str, Any], dtype: torch.dtype, kind: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    count = len(batch().targets)
    hidden = torch.randn(count, 16, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(37, 16, generator=generator).to(DEVICE, dtype)
    leaves = [hidden, weight] if kind == "head" else [hidden]
    for leaf in leaves if kind != "nothing" else []:
        leaf.requires_grad_()
    chosen = hl.Options(**options)
    if kind == "logits":
        out = hl.logits_loss(hidden @ weight.T, batch(), objective, options=chosen)
    else:
        out = hl.head_loss(hidden, hl.Head(weight), batch(), objective, chosen)
    if out.loss.requires_grad:
        (out.loss * options.get("upstream", 3.0)).backward()
    return {
        "loss": out.loss.detach(),
        **{f"term {name}": value for name, value in out.terms.items()},
        **{f"metric {name}": m.value for name, m in out.metrics.items()},
        **{f"gradient {i}": leaf.grad for i, leaf in enumerate(leaves)},
    }


def assert_same(
    monkeypatch: pytest.MonkeyPatch, objective: Any, options: dict, dtype: torch.dtype, kind: str
) -> None:
    ran: list[object] = []
    plain = taped.Taped._run
    monkeypatch.setattr(
        taped.Taped, "_run", lambda self, *a: ran.append(a) or plain(self, *a)
    )
    found = run(objective, options, dtype, kind)
    assert ran
    monkeypatch.setattr(prepare, "serves", lambda *_: False)
    hl.clear_cache()
    want = run(objective, options, dtype, kind)
    assert list(found) == list(want)
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for name, value in want.items():
        if value is None:
            assert found[name] is None
            continue
        size = float(value.double().abs().nan_to_num(posinf=0).max().clamp_min(1e-3))
        torch.testing.assert_close(
            found[name],
            value,
            rtol=0,
            atol=tolerance * size if "gradient" in name else 1e-5 * size,
            equal_nan=True,
            msg=lambda m, name=name: f"{name}: {m}",
        )


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("call", CALLS)
def test_head(objective: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(monkeypatch, OBJECTIVES[objective], CALLS[call], torch.float32, "head")


@pytest.mark.parametrize("kind", ["hidden", "logits", "nothing"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_other_calls(objective: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(monkeypatch, OBJECTIVES[objective], {}, torch.float32, kind)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16 the tape's gradient is brought near 1 as autograd's is."""
    assert_same(monkeypatch, OBJECTIVES["mixed"], {}, dtype, "head")


def test_what_is_known_beforehand() -> None:
    """By the tape where it is the same whatever the statistics are; as the closed forms say."""
    smoothed = hl.cross_entropy(label_smoothing=0.1).where("keep")
    constant = smoothed - 0.2 * hl.entropy() + hl.reinforce()
    for objective, by_tape in ((constant, True), (hl.grpo(), False)):
        logits, given = torch.randn(19, 37, device=DEVICE), (Transform(), None, True, hl.Options())
        hl.logits_loss(logits, batch(), objective)  # finds out that not all positions are scored
        work, _ = given_call((logits, batch(), objective, *given))
        (found, *_), slopes = work.bound.beforehand(work.batch, work.prepared.needs)
        assert ("bound" not in vars(work.bound)) == (slopes is None) == by_tape
        (want, *_), _ = work.bound.bound.beforehand(work.batch, work.prepared.needs)
        assert found.tensors().keys() == want.tensors().keys()
        for name, value in want.tensors().items():
            torch.testing.assert_close(getattr(found, name), value, rtol=1e-6, atol=1e-9)


def test_what_autograd_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a tape ran")

    monkeypatch.setattr(taped.Taped, "_run", refuse)
    own = hl.term(lambda stats, batch: -stats.logp, name="own")()
    for objective in (own, hl.grpo() + own, hl.grpo().top_entropy(quantile=0.5)):
        assert run(objective, {}, torch.float32, "head")["loss"].isfinite()
