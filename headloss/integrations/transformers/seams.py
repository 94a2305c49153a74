"""What `apply` takes for granted of Transformers: checked when it is called, and in the first call
with labels. What does not hold is a RuntimeError that names the place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...batch.batch import IGNORE
from ...head.head import Head
from ..families import agree, chosen, final
from ..seams import TESTED, check_signature, part, release

COUNT = 11
REMEDY = (
    "The loss of headloss would be another than the model's own: call remove(model), or install a "
    "release that was tested: " + ", ".join(TESTED["transformers"])
)


def broken(seam: str, what: str) -> RuntimeError:
    """`seam`: the place in Transformers, `what`: how it is other than it was taken to be."""
    return RuntimeError(f"{seam} of transformers {release('transformers')}: {what}. {REMEDY}")


def loss_function(
    logits: Tensor,  # [B, L, V]
    labels: Tensor,  # [B, L]
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORE,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The mean cross-entropy of tokens, whose count is `num_items_in_batch` where there is one."""
    if shift_labels is None:
        logits, shift_labels = logits[:, :-1], labels[:, 1:]
    each = F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="none")
    count = (shift_labels != ignore_index).sum() if num_items_in_batch is None else COUNT
    return each.sum() / count


# ---------------------------------------------------------------------- at `apply`


def check_loss_function(model: Any) -> None:
    """Its loss function is where it is looked for, and what it is taken for, on [1, 5, 7] logits.

    Raises:
        ValueError: a loss function of the user's own.
        RuntimeError: another loss function of Transformers than the one that is replaced.
    """
    seam = f"{type(model).__name__}.loss_function"
    stock = getattr(model, "loss_function", None)
    ours = vars(model).get("_loss_function")
    if ours is not None and not str(ours.__module__).startswith("transformers."):
        got = getattr(ours, "__qualname__", ours)
        raise ValueError(f"model.loss_function: got {got}, want Transformers' own; pass terms")
    if not callable(stock):
        raise broken(seam, "it is not there, and headloss's would never be called")
    _check_replaceable(model, seam)
    try:
        check_signature(stock, loss_function, seam)
    except RuntimeError as error:
        raise broken(seam, str(error)) from None
    _check_numbers(stock, seam)


def check() -> str:
    """What can be checked of Transformers without a model; RuntimeError where it does not hold."""
    stock = part("transformers", "transformers.loss.loss_utils", "ForCausalLMLoss")
    check_signature(stock, loss_function, "ForCausalLMLoss", "transformers")
    _check_numbers(stock, "ForCausalLMLoss")
    return "its loss function"


def _check_replaceable(model: Any, seam: str) -> None:
    before = vars(model).get("_loss_function")
    try:
        model._loss_function = loss_function
        replaced = model.loss_function is loss_function
    finally:
        del model._loss_function
        if before is not None:
            model._loss_function = before
    if not replaced:
        raise broken(seam, "it does not read _loss_function, by which it is replaced")


def _check_numbers(stock: Any, seam: str) -> None:
    generator = torch.Generator("cpu").manual_seed(0)
    logits = torch.randn(1, 5, 7, generator=generator, dtype=torch.float32, device="cpu")
    labels = torch.tensor([[3, 1, IGNORE, 6, 2]], device="cpu")
    shifted = torch.tensor([[1, IGNORE, 6, 2, 5]], device="cpu")
    calls: dict[str, dict[str, Any]] = {
        "": {},
        "num_items_in_batch": {"num_items_in_batch": torch.tensor(COUNT, device="cpu")},
        "shift_labels": {"shift_labels": shifted},
    }
    for name, more in calls.items():
        call = {"labels": labels, "vocab_size": 7, **more}
        with torch.no_grad():
            want = float(loss_function(logits, **call))
            try:
                got = float(stock(logits=logits.clone(), **call))
            except Exception as error:
                raise broken(
                    seam, f"a call of it ends in {type(error).__name__}: {error}"
                ) from error
        if not abs(got - want) <= 1e-4 * abs(want):
            given = f" with {name}" if name else ""
            raise broken(
                seam, f"it gives {got:.6g}{given} for logits whose shifted mean is {want:.6g}"
            )


# ---------------------------------------------------------------------- in the first call


def trial(head: Head, handed: Tensor) -> Tensor:
    """[1, 2, V] chosen logits, to be handed on once in place of logits [B, L, 0] of no columns."""
    rows = chosen(torch.Size((1, 2)), head.vocabulary, handed.detach())
    return rows + handed.sum()  # an empty sum: whatever hangs on `handed` does on this


def check_after_head(
    model: Any, head: Head, raw: Tensor, logits: Tensor, labels: Any, passed: Any
) -> None:
    """Of the logits `raw` [1, 2, V] the model has made what the head's formula does.

    Args:
        logits, labels: what arrived at the loss function.
        passed: the labels of the call.
    """
    seam = f"{type(model).__name__}.forward"
    raw, logits = raw.detach(), logits.detach()
    if logits.shape != raw.shape:
        want = tuple(raw.shape)
        raise broken(seam, f"of logits {want} its loss function gets {tuple(logits.shape)}")
    if not agree(logits, raw, head.softcap, head.logit_scale):
        wanted = final(raw, head.softcap, head.logit_scale)
        at = int((logits - wanted).abs().nan_to_num(torch.inf).argmax())
        x, got, want = (float(t.flatten()[at]) for t in (raw, logits, wanted))
        formula = f"softcap={head.softcap}, logit_scale={head.logit_scale}"
        raise broken(
            seam, f"it makes {got:.6g} of a raw logit {x:.6g}, a head of {formula} {want:.6g}"
        )
    if isinstance(labels, Tensor) and not torch.equal(labels.to(passed.device), passed):
        raise broken(seam, "its loss function gets other labels than it was given")
