"""The plain float64 oracle, what measures against it, and the gate that compares with it."""

from .oracle import (
    LiveTensors,
    Mode,
    Plain,
    error,
    parameters,
    plain,
    plain_divergence,
    random_batch,
    trained_looking,
    within_budget,
)

__all__ = [
    "LiveTensors",
    "Mode",
    "Plain",
    "error",
    "parameters",
    "plain",
    "plain_divergence",
    "random_batch",
    "trained_looking",
    "within_budget",
]
