"""Test support: the plain float64 oracle, error measures against it, and the correctness gate."""

from .oracle import *  # noqa: F403
