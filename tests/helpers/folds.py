"""One vector that a term observes, folded by itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headloss.statistics.metrics import Observed, fold_all


def fold(observed: Observed, live: Tensor | None = None, share: float = 1.0) -> Any:
    """Its measurement."""
    return fold_all({"": observed}, live, share)[""]
