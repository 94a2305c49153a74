"""Random calls against float64 through plain logits; bad ones have errors that name an argument."""

from __future__ import annotations

import warnings
from collections import Counter

import fuzz
import fuzz_bad
import fuzz_oracle
import pytest
import torch

import headloss as hl

BLOCK = 50


def check(first: int, count: int, **drawn: bool) -> Counter[str]:
    """Calls of consecutive seeds; how many ended in which way."""
    wrong, kinds = [], Counter()
    for seed in range(first, first + count):
        call = fuzz.draw(seed, **drawn)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            record = fuzz.run(call)
            found = fuzz_oracle.complaints(call, record)
        kinds["bad" if call.spoil else "refused" if "error" in record else "served"] += 1
        wrong += [f"{call}\n    {what}" for what in found]
    assert not wrong, "\n".join(wrong)
    return kinds


@pytest.mark.parametrize("first", range(0, 500, BLOCK))
def test_random_calls(first: int) -> None:
    kinds = check(first, BLOCK)
    assert kinds["served"] > BLOCK / 2 and kinds["refused"] < BLOCK / 5, kinds


@pytest.mark.slow
@pytest.mark.parametrize("first", range(500, 10_000, 10 * BLOCK))
def test_more_random_calls(first: int) -> None:
    check(first, 10 * BLOCK)


def test_random_calls_of_triton() -> None:
    pytest.importorskip("triton")
    kinds = check(0, 5, triton=True)
    assert kinds["served"] >= 3, kinds


@pytest.mark.slow
@pytest.mark.parametrize("first", range(5, 205, BLOCK))
def test_more_random_calls_of_triton(first: int) -> None:
    pytest.importorskip("triton")
    check(first, BLOCK, triton=True)


@pytest.mark.parametrize("name", fuzz_bad.SPOILS)
def test_every_way_to_be_wrong_is_named(name: str) -> None:
    """Each spoil, on the first random call that it fits."""
    spoil = fuzz_bad.SPOILS[name]
    for seed in range(100_000, 101_000):
        call = fuzz.draw(seed)
        if call.spoil is not None and spoil.fits(call):
            call.spoil = name
            break
    else:
        pytest.fail(f"no call fits {name}")
    assert fuzz_oracle.complaints(call, fuzz.run(call)) == []


def test_a_seed_gives_one_call() -> None:
    """The records of two runs are the same, to the bit, and the comparison says so."""
    once, again = fuzz.records(0, 20), fuzz.records(0, 20)
    assert fuzz.compare(once, again) == []
    for a, b in zip(once, again, strict=True):
        assert fuzz.difference(a, b, 0.0) == ""


def test_the_comparison_sees_what_differs() -> None:
    """A loss, a gradient, a metric, an error's text, a missing error."""
    seed = next(
        s for s in range(500) if fuzz.draw(s).verb == "head_loss" and served(s, "gradients")
    )
    bad = next(s for s in range(500) if fuzz.draw(s).spoil is not None)
    for changed in ("loss", "gradients", "metrics", "logps"):
        old, new = fuzz.records(seed, 1), fuzz.records(seed, 1)
        value = new[0][changed]
        if isinstance(value, dict):
            value[next(iter(value))] = next(iter(value.values())) * 1.1 + 1e-3
        else:
            new[0][changed] = value * 1.1 + 1e-3
        (found,) = fuzz.compare(old, new)
        assert changed in found
    old, new = fuzz.records(bad, 1), fuzz.records(bad, 1)
    new[0]["error"] += "!"
    assert "error" in fuzz.compare(old, new)[0]
    del new[0]["error"]
    assert "only in one" in fuzz.compare(old, new)[0]


def served(seed: int, name: str) -> bool:
    record = fuzz.run(fuzz.draw(seed))
    return bool(record.get(name)) and bool(record.get("metrics"))


def test_the_oracle_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fuzz that passes when the library is wrong is worth nothing."""
    whole = hl.head_loss

    def scaled(hidden, head, batch, objective, options):
        return whole(hidden, head, batch, 1.01 * objective, options)

    monkeypatch.setattr(hl, "head_loss", scaled)
    with pytest.raises(AssertionError, match=r"loss: off by|gradients"):
        check(0, 10)

    def without_options(hidden, head, batch, objective, options):
        return whole(hidden, head, batch, objective)

    monkeypatch.setattr(hl, "head_loss", without_options)
    with pytest.raises(AssertionError, match="metrics|weight"):
        check(0, BLOCK)

    def warm(hidden, head, batch, objective, options):
        return whole(hidden, hl.Head(head.weight, head.bias), batch, objective, options)

    monkeypatch.setattr(hl, "head_loss", warm)
    with pytest.raises(AssertionError, match="logps: off by"):
        check(0, BLOCK)
    monkeypatch.setattr(hl, "head_loss", lambda *given: [][0])
    with pytest.raises(AssertionError, match="unnamed: IndexError"):
        check(0, 10)
    monkeypatch.undo()
    assert torch.is_grad_enabled()
