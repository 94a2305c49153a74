"""Which gradients can be computed from held softmax terms."""

from __future__ import annotations

from ..objective.statistics import Coefficients
from .interface import Backward
from .transform import Transform


def is_multiple(transform: Transform, coefficients: Coefficients) -> bool:
    """Whether the gradient of a token is a multiple of its terms, the target's apart."""
    c = coefficients
    plain = c.prob is not None and c.entropy is None and c.uniform is None
    return plain and transform.softcap is None


def check_multiple(backward: Backward) -> None:
    """ValueError where the gradient is no multiple of held terms."""
    if not is_multiple(backward.transform, backward.coefficients):
        raise ValueError("a soft cap or such coefficients need held_gradient_")


def check_held(backward: Backward) -> None:
    """ValueError where held terms cannot give the gradient: that needs z, which follows from log p,
    and no longer follows from a term of 0."""
    if backward.transform.softcap is not None and backward.coefficients.uniform is not None:
        raise ValueError(
            "held softmax terms cannot give the gradient of the mean logit under a soft cap; "
            "keep the logits (logit_gradient_)"
        )
