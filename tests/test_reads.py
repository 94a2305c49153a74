"""The inputs that a term reads are found once for equal terms, and remembered in a table of bounded
size."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import headloss as hl
from headloss.objective import reads

H, V = 8, 19


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the name of each term that is tried on made-up tokens."""
    hl.clear_cache()
    names: list[str] = []
    plain = reads.trace
    monkeypatch.setattr(reads, "trace", lambda *a: names.append(a[0].name) or plain(*a))
    return names


def call(
    tokens: int = 6,
    objective: Callable[[], hl.Term | hl.Objective] = hl.cross_entropy,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    hidden, weight = (
        torch.randn(n, H, generator=generator).to(dtype).requires_grad_() for n in (tokens, V)
    )
    batch = hl.Batch(torch.arange(tokens) % V, advantages=torch.ones(tokens))
    loss = hl.head_loss(hidden, hl.Head(weight), batch, objective(), hl.Options(**options)).loss
    loss.backward()
    return loss.detach()


def test_a_term_that_is_made_anew_in_each_step_is_traced_once(traced: list[str]) -> None:
    """A term that is recreated in each step is traced once, whatever the tokens, totals,
    coefficients and chunks."""
    for tokens in (1, 6, 7, 40):
        objective = hl.cross_entropy() + 0.1 * tokens * hl.z_loss()
        call(tokens, lambda objective=objective: objective, chunk_tokens=tokens)
    assert traced == ["cross_entropy", "z_loss"]


def test_a_users_term_is_traced_once(traced: list[str]) -> None:
    @hl.term
    def mine(stats, batch, tau=1.0):
        return -tau * stats.logp

    for tau in (1.0, 2.0, 1.0, 2.0):
        call(objective=lambda tau=tau: mine(tau=tau))
    assert len(traced) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float64},
        {"objective": lambda: hl.cross_entropy(label_smoothing=0.1)},
        {"objective": lambda: hl.cross_entropy().weighted("advantages")},
        {"metrics": False},
    ],
    ids=["dtype", "options", "weighted", "metrics"],
)
def test_a_changed_input_kind_is_traced_anew(traced: list[str], other: dict) -> None:
    call(), call(**other), call(), call(**other)
    assert len(traced) == 2


def test_grad_mode_and_autocast_are_asked_in_each_call() -> None:
    hidden, weight = torch.randn(4, H), torch.randn(V, H)
    batch = hl.Batch(torch.arange(4))

    def run() -> Tensor:
        return hl.head_loss(hidden, hl.Head(weight), batch, hl.cross_entropy()).loss

    want = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.equal(run(), want)
    assert torch.equal(run(), want)


def test_clear_cache_forgets(traced: list[str]) -> None:
    call()
    hl.clear_cache()
    call()
    assert len(traced) == 2


def test_the_table_is_bounded(traced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "TABLE_ENTRIES", 3)
    for number in (1, 2, 3, 4, 4, 3, 2, 1):
        call(objective=lambda number=number: hl.cross_entropy(label_smoothing=0.1 * number))
    assert len(traced) == 5 and len(reads._TABLE) == 3


def test_a_failed_trace_is_not_cached() -> None:
    hl.clear_cache()
    for _ in range(2):
        with pytest.raises(ValueError, match="old_logps"):
            call(objective=hl.grpo)
    assert not reads._TABLE


def test_the_table_keeps_no_tensor_and_no_function_alive() -> None:
    hl.clear_cache()

    def run() -> list[weakref.ref]:
        closed, option = torch.full((), 0.5), torch.full((), 2.0)

        @hl.term
        def mine(stats, batch, scale):
            return -scale * closed * stats.logp

        call(objective=lambda: mine(scale=option))
        return [weakref.ref(x) for x in (closed, option)]

    alive = run()
    assert len(reads._TABLE) == 1
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_an_option_without_a_hash_is_served() -> None:
    @hl.term
    def mine(stats, batch, names):
        return -stats.logp * len(names)

    assert call(objective=lambda: mine(names={"a", "b"})) == 2 * call()


def test_threads_share_one_trace(traced: list[str]) -> None:
    want, found = call(tokens=6), []
    threads = [threading.Thread(target=lambda: found.append(call(tokens=6))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(torch.equal(one, want) for one in found) and len(traced) == 1
