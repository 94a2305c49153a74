"""Check by example that a Transformers loss function is the shifted mean cross-entropy."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...batch.batch import IGNORE
from ..seams import check_signature, part

COUNT = 11


def loss_function(
    logits: Tensor,  # The logits [B, L, V].
    labels: Tensor,  # The labels, of shape [B, L].
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORE,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Return the summed cross-entropy of tokens divided by `num_items_in_batch`, or by their
    number."""
    if shift_labels is None:
        logits, shift_labels = logits[:, :-1], labels[:, 1:]
    each = F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="none")
    count = (shift_labels != ignore_index).sum() if num_items_in_batch is None else COUNT
    return each.sum() / count


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
    count = torch.tensor(COUNT, device="cpu")
    for more in ({}, {"num_items_in_batch": count}, {"shift_labels": shifted}):
        call: dict[str, Any] = {"labels": labels, "vocab_size": 7, **more}
        given = "".join(f" with {name}" for name in more)
        with torch.no_grad():
            want = float(loss_function(logits, **call))
            try:
                got = float(stock(logits=logits.clone(), **call))
            except Exception as error:
                raise RuntimeError(
                    f"a call{given} ends in {type(error).__name__}: {error}"
                ) from error
        if not abs(got - want) <= 1e-4 * abs(want):
            raise RuntimeError(
                f"it gives {got:.6g}{given} for logits whose shifted mean is {want:.6g}"
            )
