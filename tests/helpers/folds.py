"""The fold of a single observed vector of a term."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headloss.statistics.metrics import Observed, fold_all


def fold(observed: Observed, live: Tensor | None = None, share: float = 1.0) -> Any:
    """Return the measurement of an observed vector."""
    return fold_all({"": observed}, live, share)[""]
