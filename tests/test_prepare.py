"""Law 4b: a signature is prepared once, whatever the number of tokens and the coefficients."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import FunctionType, ModuleType

import pytest
import torch
from torch import Tensor

import headloss as hl
from headloss.run import prepare

H, V = 8, 19


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each signature that is prepared."""
    hl.clear_cache()
    found: list[object] = []
    plain = prepare._prepared
    monkeypatch.setattr(prepare, "_prepared", lambda *a: found.append(a[0]) or plain(*a))
    return found


def call(
    tokens: int = 6,
    objective: Callable[[], hl.Term | hl.Objective] = hl.cross_entropy,
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    hidden, weight = (
        torch.randn(n, H, generator=generator).to(dtype).requires_grad_() for n in (tokens, V)
    )
    batch = hl.Batch(torch.arange(tokens) % V, advantages=torch.ones(tokens))
    given = hl.Options(**options)  # type: ignore[arg-type]
    loss = hl.head_loss(hidden, hl.Head(weight), batch, objective(), given).loss
    loss.backward()
    return loss.detach()


def test_new_numbers_are_no_new_signature(made: list[object]) -> None:
    """Tokens, lengths, totals, coefficients and addresses differ in every step of a training."""
    for tokens in (1, 6, 7, 40):
        call(tokens, lambda tokens=tokens: hl.cross_entropy() + tokens * hl.z_loss())
    assert len(made) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float64},
        {"objective": lambda: hl.cross_entropy(label_smoothing=0.1)},
        {"chunk_tokens": 2},
        {"metrics": False},
    ],
    ids=["dtype", "objective", "chunk", "metrics"],
)
def test_what_a_signature_holds(made: list[object], other: dict) -> None:
    call(), call(**other), call(), call(**other)
    assert len(made) == 2


def test_grad_mode_and_autocast_belong_to_it(made: list[object]) -> None:
    hidden, weight = torch.randn(4, H), torch.randn(V, H)
    batch = hl.Batch(torch.arange(4))

    def run() -> Tensor:
        return hl.head_loss(hidden, hl.Head(weight), batch, hl.cross_entropy()).loss

    want = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.equal(run(), want)
    assert torch.equal(run(), want) and len(made) == 2


def test_clear_cache_forgets(made: list[object]) -> None:
    call()
    hl.clear_cache()
    call()
    assert len(made) == 2


def test_it_is_bounded(made: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "MOST", 3)
    for chunk in (1, 2, 3, 4, 4, 3, 2, 1):
        call(chunk_tokens=chunk)
    assert len(made) == 5 and len(prepare._KEPT) == 3


def test_what_is_wrong_is_not_kept(made: list[object]) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="old_logps"):
            call(objective=hl.grpo)
    assert not prepare._KEPT


def test_nothing_prepared_holds_a_tensor_of_the_call(made: list[object]) -> None:
    call(objective=lambda: hl.cross_entropy() + hl.entropy())
    stack, seen = list(prepare._KEPT.values()), set()
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(one))
        assert not isinstance(one, Tensor)
        stack += gc.get_referents(one)
    assert len(seen) > 20


def test_threads_share_it(made: list[object]) -> None:
    want, found = call(tokens=6), []
    threads = [threading.Thread(target=lambda: found.append(call(tokens=6))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(torch.equal(one, want) for one in found) and len(made) == 1
