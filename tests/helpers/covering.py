"""The choice of parameter combinations that `make test` runs."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

MARK = (
    "covering(strength=2): of all combinations of the parameters of this test, those are slow that "
    "are not needed for each pair of values (for each value: 1) to occur"
)


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Mark parametrised tests as slow, except the combinations that the test's `covering` marker
    selects."""
    of_test: dict[Any, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering"):
            of_test[item.parent, item.originalname].append(item)  # type: ignore[attr-defined]
    for same in of_test.values():
        points = [
            [(name, id(value)) for name, value in item.callspec.params.items()]  # type: ignore[attr-defined]
            for item in same
        ]
        needed = chosen(points, *same[0].get_closest_marker("covering").args)  # type: ignore[union-attr]
        for number, item in enumerate(same):
            if number not in needed:
                item.add_marker(pytest.mark.slow)


def chosen(points: Sequence[Sequence[Any]], strength: int = 2) -> set[int]:
    """Return the indices of a few points that together contain every combination of `strength`
    values that occurs in any of `points`.

    The choice is greedy: each step adds the point with the most combinations of values that no
    chosen point contains yet; of several such points, the first.
    """
    sets = [set(itertools.combinations(point, min(strength, len(point)))) for point in points]
    missing, found = set().union(*sets), set()
    while missing:
        best = max(range(len(sets)), key=lambda number: len(sets[number] & missing))
        missing -= sets[best]
        found.add(best)
    return found
