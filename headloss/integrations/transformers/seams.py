"""Check by example that a Transformers loss function is the shifted mean cross-entropy."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...batch.batch import IGNORE
from ..seams import check_signature, part


def loss_function(
    logits: Tensor,  # The logits [B, L, V].
    labels: Tensor,  # The labels, of shape [B, L].
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORE,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Signature of Transformers' loss function, which sums the tokens' cross-entropies and divides
    by `num_items_in_batch`, or by the number of tokens if `num_items_in_batch` is None."""


def check() -> str:
    """Check Transformers' loss function without a model, and return its description.

    Raises:
        RuntimeError: the loss function is missing, or its value at an example differs from the
            shifted mean cross-entropy.
    """
    check_loss_function(part("transformers", "transformers.loss.loss_utils", "ForCausalLMLoss"))
    return "its loss function"


def check_loss_function(stock: Any) -> None:
    """Raise RuntimeError if a loss of logits [1, 5, 7] is not the shifted mean cross-entropy."""
    check_signature(stock, loss_function, "ForCausalLMLoss", "transformers")
    generator = torch.Generator("cpu").manual_seed(0)
    logits = torch.randn(1, 5, 7, generator=generator, dtype=torch.float32, device="cpu")
    labels = torch.tensor([[3, 1, IGNORE, 6, 2]], device="cpu")
    shifted = torch.tensor([[1, IGNORE, 6, 2, 5]], device="cpu")
    cases: tuple[tuple[dict[str, Any], Tensor, int], ...] = (
        ({}, labels[0, 1:], 3),
        ({"num_items_in_batch": torch.tensor(11, device="cpu")}, labels[0, 1:], 11),
        ({"shift_labels": shifted}, shifted[0], 4),
    )
    for more, targets, count in cases:
        given = "".join(f" with {name}" for name in more)
        summed = F.cross_entropy(logits[0, : len(targets)], targets, reduction="sum")
        want = float(summed / count)
        try:
            got = float(stock(logits=logits.clone(), labels=labels, vocab_size=7, **more))
        except Exception as error:
            raise RuntimeError(f"a call{given} ends in {type(error).__name__}: {error}") from error
        if not abs(got - want) <= 1e-4 * abs(want):
            raise RuntimeError(
                f"it gives {got:.6g}{given} for logits whose shifted mean is {want:.6g}"
            )
