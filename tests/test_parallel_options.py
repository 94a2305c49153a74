"""Ranks compare all values of tensors in a term's options, and skip the same token rows."""

from __future__ import annotations

from collections.abc import Iterator

import parallel_options
import pytest
from worlds import World, world_of


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of(2) as made:
        yield made


@pytest.mark.parametrize("form", ["plain", "nested"])
@pytest.mark.parametrize("over", ["vocabulary", "segments"])
def test_tensors_among_options(world: World, over: str, form: str) -> None:
    for spoil, fact in {
        "middle": "options: differs between the ranks",
        "shape": "objective: differs between the ranks",
        "dtype": "objective: differs between the ranks",
    }.items():
        for kind, message in world.run(parallel_options.run, over, form, spoil):
            assert kind == "ValueError"
            assert fact in message
    for kind, value in world.run(parallel_options.run, over, form, ""):
        assert kind == "loss", value


@pytest.mark.parametrize(("gradients", "share"), [("sum", 1.0), ("mean", 0.5)])
def test_totals_of_restricted_fields(world: World, gradients: str, share: float) -> None:
    """`Totals.all_reduce` sums over two ranks the numbers of tokens and segments that each boolean
    field of the batch keeps, also if the field names are not sorted."""
    kept = {"zeta": (8, 4), "alpha": (1, 1), "middle": (3 + 2 + 3 + 1, 4)}
    want = {name: (share * tokens, share * count) for name, (tokens, count) in kept.items()}
    for found in world.run(parallel_options.restricted_totals, gradients):
        assert found == (12 * share, 6 * share, want)


def test_what_is_sent_does_not_depend_on_which_rows_have_a_gradient(world: World) -> None:
    """The size of the all-reduced hidden gradient does not depend on how many tokens have a
    gradient."""
    for sparse in (False, True):
        for shapes in world.run(parallel_options.sent, "recompute", sparse):
            assert shapes == [(64, 8)]


@pytest.mark.parametrize("schedule", ["one_pass", "recompute", "held"])
def test_ranks_leave_out_the_same_rows(world: World, schedule: str) -> None:
    """With `gradient_tolerance`, ranks that share the vocabulary skip identical token rows, since
    they compute the sizes of the rows' gradients with identical bits."""
    (whole, mine), (_, theirs) = world.run(parallel_options.left_out, schedule)
    assert mine == theirs
    assert mine[0] == whole[0]
    assert mine[1] == whole[1] > 0
    assert mine[2] == pytest.approx(whole[2], rel=1e-9)
