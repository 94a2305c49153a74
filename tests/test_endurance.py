"""Calls in two threads agree, many calls leak no memory, and an error on one of three ranks is
raised on all three ranks."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fuzz
import fuzz_draw
import pytest
import torch
from fuzz_versions import difference
from parallel_errors import INVALID_CALLS, assert_refused
from worlds import World, world_of

import headloss as hl

# ---------------------------------------------------------------------- threads


def records(seeds: list[int]) -> dict[int, dict[str, Any]]:
    """Return the results of random calls, each on one rank."""
    return {seed: fuzz.run(replace(fuzz_draw.draw(seed), place=None)) for seed in seeds}


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_calls_in_two_threads_are_equal_to_calls_in_a_row(count: int) -> None:
    """Random valid and invalid calls made one after another give the same bits as in two concurrent
    threads, which make the calls in different orders."""
    seeds = list(range(200_000, 200_000 + count // 2))
    found: dict[int, Any] = {}

    def work(number: int, order: list[int]) -> None:
        found[number] = records(order)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = records(seeds)
        threads = [
            threading.Thread(target=work, args=(0, seeds)),
            threading.Thread(target=work, args=(1, seeds[::-1])),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number in (0, 1):
        for seed in seeds:
            assert not difference(want[seed], found[number][seed]), want[seed]["call"]


# ---------------------------------------------------------------------- memory


def a_step(step: int) -> None:
    """Run a training step whose lengths, coefficients, options and user-defined functions differ
    from those of all steps before."""
    generator = torch.Generator().manual_seed(step)
    tokens, width, vocabulary = 3 + step % 17, 8, 23

    @hl.term
    def own(stats, batch, scale=1.0):
        return -scale * stats.logp * batch.advantages

    hidden = torch.randn(tokens, width, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=generator, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    lengths = [1, tokens - 1]
    batch = hl.Batch(
        targets,
        hl.Segments.from_lengths(lengths),
        advantages=torch.randn(2, generator=generator),
        old_logps=torch.full((tokens,), -3.0),
        ref_logps=torch.full((tokens,), -3.0),
    )
    objective = hl.grpo(epsilon_low=0.1 + 1e-5 * step) + step * hl.kl() + own(scale=float(step))
    if step % 3 == 0:
        objective = objective + 0.1 * hl.gspo().over(hl.fixed_length(1 + step))
    options = hl.Options(schedule=["auto", "one_pass", "recompute"][step % 3])
    out = hl.head_loss(hidden, hl.Head(weight), batch, objective, options)
    if step % 5:  # no backward pass at every fifth step
        out.loss.backward()
    if step % 7 == 0:
        with pytest.raises(ValueError, match="targets: got"):
            hl.head_loss(hidden, hl.Head(weight), hl.Batch(targets + 100), hl.cross_entropy())


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("calls", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_memory_grows_with_calls(calls: int) -> None:
    for step in range(300):  # fills all bounded caches
        a_step(step)
    objects, tensors, before = tracked_objects(), live_tensors(), resident()
    for step in range(300, 300 + calls):
        a_step(step)
    objects = tracked_objects() - objects
    assert live_tensors() <= tensors + 5
    assert objects < 0.5 * calls
    assert resident() - before < 8 * 2**20


def tracked_objects() -> int:
    """Return the number of objects that Python's garbage collector tracks. The function runs the
    garbage collector eight times, since one collection untracks only one level of nested tuples."""
    for _ in range(8):
        gc.collect()
    return len(gc.get_objects())


def live_tensors() -> int:
    return sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects())


# ---------------------------------------------------------------------- three ranks


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[World]:
    with world_of(3) as made:
        yield made


@pytest.mark.parametrize("name", INVALID_CALLS)
def test_all_of_three_ranks_refuse(three_ranks: World, name: str) -> None:
    """A call that is invalid on one of three ranks raises on all within a minute."""
    assert_refused(three_ranks, name)
