"""`Batch(candidate_ids=...)`: what the ids must be."""

from __future__ import annotations

import pytest
import torch

import headloss as hl


def loss(ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
    targets = torch.tensor([1, -100, 2]) if targets is None else targets
    head, batch = hl.Head(torch.ones(5, 4)), hl.Batch(targets, candidate_ids=ids)
    return hl.head_loss(torch.ones(*targets.shape, 4), head, batch, hl.cross_entropy()).loss


def test_an_id_twice_at_one_position_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"candidate_ids: got \[4, 0, 4\] at position 2, want dis"):
        loss(torch.tensor([[0, 1, 2], [0, 1, 2], [4, 0, 4]]))


def test_empty_slots_and_unscored_positions_may_repeat() -> None:
    loss(torch.tensor([[0, -1, -1], [3, 3, 77], [-5, 2, -5]]))


def test_an_id_beyond_the_vocabulary_is_an_error() -> None:
    with pytest.raises(ValueError, match="candidate_ids: got 5 at position 0, want id < 5"):
        loss(torch.tensor([[5], [0], [0]]))


@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        (torch.zeros(3), ValueError, r"candidate_ids: got shape \(3,\), want \(3, 'K'\)"),
        (torch.zeros(3, 0).long(), ValueError, "with 1 <= K <= 512"),
        (torch.zeros(3, 513).long(), ValueError, "with 1 <= K <= 512"),
        (torch.zeros(3, 2), TypeError, "candidate_ids: got torch.float32, want integers"),
    ],
)
def test_what_ids_must_be(ids: torch.Tensor, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        loss(ids)
