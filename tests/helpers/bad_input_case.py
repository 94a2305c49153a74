"""Arguments of valid shapes whose values are NaN, and a fixture that fails a test as soon as a
call computes or reads logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headloss as hl
from headloss.head import products
from headloss.kernels import reference  # import `reference` before a fixture patches it
from headloss.logits.given import GivenLogits

T, H, V, S = 6, 4, 9, 2


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    """Fail as soon as a logit is computed or read."""

    def forbidden(*args, **kwargs):
        raise AssertionError("work was done on bad input")

    monkeypatch.setattr(products.PLAIN, "logits", forbidden)
    monkeypatch.setattr(GivenLogits, "raw", forbidden)
    monkeypatch.setattr(reference, "partials", forbidden)


def hidden(*shape: int, dtype=torch.float32) -> Tensor:
    """Return hidden states of NaN, since no code may read values."""
    return torch.full(shape or (T, H), torch.nan, dtype=dtype)


def weight(**given) -> Tensor:
    return torch.full((V, H), torch.nan, **given)


def targets(*values: int) -> Tensor:
    return torch.tensor(values or [0, 1, 2, 3, 4, 8])


def batch(**given) -> hl.Batch:
    fields = {
        "segments": hl.Segments.from_lengths([4, 2]),
        "advantages": torch.ones(S),
        "old_logps": torch.zeros(T),
        **given,
    }
    return hl.Batch(fields.pop("targets", targets()), **fields)


PAIR = (torch.arange(T), torch.arange(T + 1))  # support_ids with one id per position


def labelled(**fields) -> hl.Batch:
    return hl.Batch.from_labels(targets(), **fields)


def call(objective=None, x=None, head=None, data=None, **options):
    return hl.head_loss(
        hidden() if x is None else x,
        hl.Head(weight()) if head is None else head,
        batch() if data is None else data,
        objective or hl.grpo(),
        hl.Options(**options),
    )


def rejects(error, match, make) -> None:
    with pytest.raises(error, match=match):
        make()
