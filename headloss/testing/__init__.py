"""Test support: a plain float64 implementation (the oracle), error measures against the oracle, and
the tests of `headloss gate`, which compare losses and gradients with the oracle."""

from .oracle import *  # noqa: F403
