"""The plain float64 oracle, what measures against it, and the gate that compares with it."""

from .oracle import *  # noqa: F403
