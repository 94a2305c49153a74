"""Random calls agree with a float64 computation from materialised logits, and the errors of invalid
calls name an argument."""

from __future__ import annotations

import functools
import json
import shutil
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fuzz
import fuzz_bad
import fuzz_draw
import fuzz_oracle
import fuzz_ranks
import fuzz_versions
import pytest
import torch

import headloss as hl

BLOCK = 50


def check(first: int, count: int, **drawn: Any) -> Counter[str]:
    """Check calls of consecutive seeds; return the number of calls by outcome."""
    wrong, kinds = [], Counter()
    for seed in range(first, first + count):
        call = fuzz_draw.draw(seed, **drawn)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            record = fuzz.run(call)
            found = fuzz_oracle.complaints(call, record)
        kinds["bad" if call.spoil else "refused" if "error" in record else "served"] += 1
        kinds.update(call.kinds)
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("first", range(20_000, 20_500, BLOCK))
def test_random_calls_on_a_gpu(first: int) -> None:
    """Random calls on a GPU use the GPU's backend and larger sizes, and some of the calls run in a
    replayed CUDA graph."""
    kinds = check(first, BLOCK, device="cuda")
    assert kinds["served"] > BLOCK / 2, kinds


def test_random_calls_of_triton() -> None:
    pytest.importorskip("triton")
    kinds = check(0, 5, triton=True)
    assert kinds["served"] >= 3, kinds


@pytest.mark.slow
@pytest.mark.parametrize("first", range(5, 205, BLOCK))
def test_more_random_calls_of_triton(first: int) -> None:
    pytest.importorskip("triton")
    check(first, BLOCK, triton=True)


drawn = functools.cache(fuzz_draw.draw)


@pytest.mark.parametrize("name", fuzz_bad.SPOILS)
def test_every_way_to_be_wrong_is_named(name: str) -> None:
    """Each kind of invalid argument, put into a random valid call, raises an error that names the
    argument."""
    spoil = fuzz_bad.SPOILS[name]
    for seed in range(100_000, 101_000):
        if drawn(seed).spoil is not None and spoil.fits(drawn(seed)):
            call = fuzz_draw.draw(seed)
            call.spoil = name
            break
    else:
        pytest.fail(f"no call fits {name}")
    assert fuzz_oracle.complaints(call, fuzz.run(call)) == []


def test_a_seed_gives_one_call() -> None:
    """A seed always gives one call: two runs have bitwise equal results."""
    once, again = records(0, 20), records(0, 20)
    assert fuzz_versions.compare(once, again) == []
    for a, b in zip(once, again, strict=True):
        assert fuzz_versions.difference(a, b) == ""


def test_the_comparison_sees_what_differs() -> None:
    """The comparison of two versions reports a changed loss, gradient, metric or error text, and an
    error that only one version raises."""
    seed = next(
        s for s in range(500) if fuzz_draw.draw(s).verb == "head_loss" and served(s, "gradients")
    )
    bad = next(s for s in range(500) if fuzz_draw.draw(s).spoil is not None)
    for changed in ("loss", "gradients", "metrics", "logps"):
        old, new = records(seed, 1), records(seed, 1)
        value = new[0][changed]
        if isinstance(value, dict):
            value[next(iter(value))] = next(iter(value.values())) * 1.1 + 1e-3
        else:
            new[0][changed] = value * 1.1 + 1e-3
        (found,) = fuzz_versions.compare(old, new)
        assert changed in found
    old, new = records(bad, 1), records(bad, 1)
    new[0]["error"] += "!"
    assert "error" in fuzz_versions.compare(old, new)[0]
    del new[0]["error"]
    assert "only in one" in fuzz_versions.compare(old, new)[0]


def records(first: int, count: int) -> list[dict[str, Any]]:
    return list(fuzz.records(first, count))


def served(seed: int, name: str) -> bool:
    record = fuzz.run(fuzz_draw.draw(seed))
    return bool(record.get(name)) and bool(record.get("metrics"))


def test_what_is_drawn() -> None:
    """Random calls include every dtype, static shapes, partitions over ranks, and captured graphs
    on a GPU."""
    for device, most in (("cpu", 0), ("cuda", 500)):
        drawn = [fuzz_draw.draw(seed, device=device) for seed in range(500)]
        kinds = Counter(kind for call in drawn for kind in (*call.kinds, call.dtype))
        places = (f"ranks, {place}" for place in fuzz_ranks.PLACES)
        for name in (*fuzz_draw.DTYPES, "static", *places):
            assert kinds[name] >= 3, (name, kinds)
        assert 0 <= kinds["captured"] <= most and (kinds["captured"] > 20) == (device == "cuda")
        assert all(call.device == "cpu" for call in drawn if call.place)


def test_two_versions(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two versions in separate processes, with calls on two ranks, are compared.

    `fuzz.py` compares headloss with a copy whose error texts are changed, and with itself. If the
    imported package is not in the folder passed to `fuzz.py`, an error is raised.
    """
    root, other, first = Path(hl.__file__).parents[1], tmp_path / "other", 9
    shutil.copytree(root / "headloss", other / "headloss")
    for path in other.rglob("*.py"):
        path.write_text(path.read_text().replace("got ", "got  "))
    bad = next(seed for seed in range(first, 5000) if fuzz_draw.draw(seed).spoil is not None)
    count = str(bad + 1 - first)
    asked = ["--first", str(first), "--count", count, "--json", str(tmp_path / "found.json")]
    assert fuzz.main([*asked, "--against", str(other)]) == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert (str(found["calls"]), found["differ"], found["broken"]) == (count, 1, [])
    assert any(kind.startswith("ranks") for kind in found["kinds"])
    said = capfd.readouterr().out
    assert f"seed {bad}: " in said and "got  " in said and f"1 of {count} calls differ" in said

    def in_this_process(arguments: Any, folder: Path, part: int, place: str, version: str) -> Any:
        fuzz_versions.save(iter(records(bad, 1)), Path(place) / f"{version}{part}", hl.__file__)
        return SimpleNamespace(wait=lambda seconds: 0)

    monkeypatch.setattr(fuzz_versions, "_start", in_this_process)
    assert fuzz.main([*asked, "--against", str(root)]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["differ"] == 0
    fuzz_versions.save(iter([]), tmp_path / "records", hl.__file__)
    with pytest.raises(ValueError, match="against: got the package"):
        fuzz_versions.load(tmp_path / "records", other)


def test_a_tolerance() -> None:
    """A tolerance is relative and applies to numbers only; 16-bit gradients may differ by one
    rounding."""
    about = {"call": "a", "seed": 1, "dtype": "bfloat16", "kinds": []}
    gradients = {"hidden": torch.ones(4, dtype=torch.bfloat16)}
    old = about | {"loss": torch.tensor(2.0), "gradients": gradients, "error": "A: b"}
    rounded = {"hidden": torch.tensor([1 + 2**-7, 1, 1, 1], dtype=torch.bfloat16)}
    for change, close, says in (
        ({}, 0.0, None),
        ({"loss": torch.tensor(2.000001)}, 1e-6, None),
        ({"loss": torch.tensor(2.000001)}, 0.0, "loss: off by 4.8e-07"),
        ({"loss": torch.tensor(2.00001)}, 1e-6, "loss: off by"),
        ({"loss": torch.tensor(torch.nan)}, 1e-6, "loss: off by inf"),
        ({"gradients": rounded}, 1e-6, None),
        ({"gradients": rounded}, 0.0, "gradients: hidden: off by"),
        ({"error": "A: c"}, 1e-6, "error: 'A: b' is 'A: c'"),
    ):
        found = fuzz_versions.compare([old], [old | change], close)
        assert len(found) == (says is not None) and all(says in what for what in found), change
    hung = about | {"error": "hang: rank 0 of 2"}
    assert fuzz_versions.compare([hung], [hung]) == ["a\n    hang: rank 0 of 2"]


def test_ranks_that_hang_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that hangs is ended and reported, and the next call gets new ranks."""
    call = next(c for c in map(fuzz_draw.draw, range(100)) if c.place)
    ranks = fuzz_ranks.Ranks()
    with monkeypatch.context() as patch:
        patch.setattr(fuzz_ranks, "SECONDS", 0.0)
        record = ranks.run(call)
    assert record["error"].startswith("hang: rank 0 of 2") and ranks.world is None
    assert fuzz_oracle.complaints(call, {"spoil": None, **record})
    assert not ranks.run(call).get("error", "").startswith("hang")
    ranks.close()


def test_the_oracle_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The float64 reference detects errors that are put into the library."""
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
