"""Test helper that returns the metrics of one vector that a term observes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headloss.statistics.metrics import Observed, fold_all


def fold(observed: Observed, live: Tensor | None = None, share: float = 1.0) -> Any:
    """Return the metrics that headloss computes from one vector observed by a term."""
    return fold_all({"": observed}, live, share)[""]
