"""What a batch finds out about the order of its tokens is used again only while it holds."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import headloss as hl

V = 9


def loss(batch: hl.Batch, objective: hl.Objective | hl.Term | None = None) -> float:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 4, generator=generator)
    head = hl.Head(torch.randn(V, 4, generator=generator))
    return float(hl.head_loss(hidden, head, batch, objective or hl.cross_entropy()).loss)


def made() -> hl.Batch:
    return hl.Batch(torch.tensor([3, -100, 2, -100, 1, 0]))


def test_other_targets_are_seen():
    batch, other = made(), torch.tensor([3, 1, 2, 5, 1, -100])
    before = loss(batch)
    batch.targets = other
    assert loss(batch) == loss(hl.Batch(other)) != before


def test_other_segments_are_seen():
    batch = made()
    objective = hl.cross_entropy().over("sequence_mean")
    before = loss(batch, objective)
    batch.segments = hl.Segments.from_lengths([1, 5])
    want = loss(hl.Batch(batch.targets, batch.segments), objective)
    assert loss(batch, objective) == want != before


@pytest.mark.parametrize("what", ["targets", "segments", "ids"])
def test_a_change_in_place_raises(what):
    ids = torch.tensor([[1, 2]] * 6)
    segments = hl.Segments.from_ids(torch.tensor([0, 0, 0, 1, 1, 1]), 2)
    logps = torch.full((6, 2), -1.5)
    batch = hl.Batch(
        torch.arange(6), segments, teacher_topk_ids=ids, teacher_topk_logps=logps
    )
    loss(batch, hl.distillation())
    changed = {"targets": batch.targets, "segments": segments.ids, "ids": ids}[what]
    changed.view(-1)[0] = V + 3 if what == "ids" else 1
    with pytest.raises(RuntimeError, match="changed in place since it was made"):
        loss(batch, hl.distillation())
    again = hl.Batch(
        batch.targets, segments, teacher_topk_ids=ids, teacher_topk_logps=logps
    )
    if what == "ids":
        with pytest.raises(ValueError, match=f"teacher_topk_ids: got {V + 3} at position 0"):
            loss(again, hl.distillation())
    else:
        loss(again, hl.distillation())


def test_with_fields_shares_the_order_and_not_the_fields():
    batch = made()
    loss(batch)
    other = batch.with_fields(old_logps=torch.full((6,), -2.0), advantages=torch.ones(6))
    assert other.found() is batch.found()
    assert "old_logps" not in batch.fields
    whole = hl.Batch(
        batch.targets, old_logps=torch.full((6,), -2.0), advantages=torch.ones(6)
    )
    assert loss(other, hl.grpo()) == loss(whole, hl.grpo())
    assert "advantages" not in other.with_fields(advantages=None).fields


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b)), lambda b: b.to("cpu")],
    ids=["copy", "deepcopy", "pickle", "to"],
)
def test_copies_find_their_order_anew(copied):
    batch = made()
    before = loss(batch)
    other = copied(batch)
    assert other.found() is not batch.found()
    assert loss(other) == before
