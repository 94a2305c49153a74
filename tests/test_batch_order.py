"""A batch reuses its cached token order only while the order is valid."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

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


def test_replaced_targets_change_the_loss():
    batch, other = made(), torch.tensor([3, 1, 2, 5, 1, -100])
    before = loss(batch)
    batch.targets = other
    assert loss(batch) == loss(hl.Batch(other)) != before


def test_replaced_segments_change_the_loss():
    batch = made()
    objective = hl.cross_entropy().over("sequence_mean")
    before = loss(batch, objective)
    batch.segments = hl.Segments.from_lengths([1, 5])
    want = loss(hl.Batch(batch.targets, batch.segments), objective)
    assert loss(batch, objective) == want != before


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("what", ["targets", "segments", "ids"])
def test_a_change_in_place_raises(what, called):
    """Changing a batch's tensor in place raises an error in the next loss call, also if no loss was
    called before."""
    ids = torch.tensor([[1, 2]] * 6)
    segments = hl.Segments.from_ids(torch.tensor([0, 0, 0, 1, 1, 1]), 2)
    logps = torch.full((6, 2), -1.5)
    batch = hl.Batch(
        torch.arange(6), segments, teacher_topk_ids=ids, teacher_topk_logps=logps
    )
    if called:
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


def test_a_field_that_is_assigned_to_raises():
    """Assigning to a field raises, because terms would still read the original values."""
    batch = hl.Batch(torch.arange(6), advantages=torch.ones(6))
    batch.advantages = torch.zeros(6)
    hidden, head = torch.ones(6, 4), hl.Head(torch.ones(V, 4))
    for options in (None, hl.Options(static=True)):
        with pytest.raises(ValueError, match="advantages: was assigned to, want batch.with_fields"):
            hl.head_loss(hidden, head, batch, hl.reinforce(), options)
    batch = hl.Batch(torch.arange(6))
    batch.support_ids = torch.arange(6).unsqueeze(1)
    with pytest.raises(ValueError, match="support_ids: was assigned to, want batch.with_fields"):
        hl.head_loss(hidden, head, batch, hl.cross_entropy())


def test_with_fields_shares_the_order_and_not_the_fields():
    batch = made()
    loss(batch)
    other = batch.with_fields(old_logps=torch.full((6,), -2.0), advantages=torch.ones(6))
    assert other._survey() is batch._survey()
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
def test_copies_of_a_batch_compute_their_own_order(copied):
    batch = made()
    before = loss(batch)
    other = copied(batch)
    assert other._survey() is not batch._survey()
    assert loss(other) == before


@pytest.mark.parametrize("schedule", ["auto", "recompute", "held"])
def test_segments_in_any_order(schedule):
    """Losses and gradients do not depend on whether a segment's tokens are contiguous, also with
    unscored tokens in between."""
    objective = hl.cross_entropy().over("sequence_mean") + 0.1 * hl.z_loss().over("sequence_sum")
    ids, weight = torch.tensor([1, 0, 1, 0, 0, 1]), torch.randn(V, 4, dtype=torch.float64)
    hidden, order = torch.randn(6, 4, dtype=torch.float64, requires_grad=True), ids.argsort()
    for targets in (torch.arange(6), torch.tensor([3, -100, 2, -100, 1, 0])):
        results = []
        for at in (torch.arange(6), order):
            batch = hl.Batch(targets[at], hl.Segments.from_ids(ids[at], 2))
            options = hl.Options(schedule=schedule)
            out = hl.head_loss(hidden[at], hl.Head(weight), batch, objective, options)
            results.append([out.loss, *torch.autograd.grad(out.loss, hidden)])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_bad_target_is_named_before_logits_are_overwritten(inplace):
    logits = torch.randn(6, V)
    before, bad = logits.clone(), hl.Batch(torch.tensor([3, V, 2, 5, 1, 0]))
    with pytest.raises(ValueError, match=f"targets: got {V} at position 1"):
        hl.logits_loss(logits, bad, hl.cross_entropy(), inplace=inplace)
    assert torch.equal(logits, before)
    ids = hl.Segments.from_ids(torch.tensor([0, 0, 3, 0, 1, 1]), 2)
    with pytest.raises(ValueError, match="segments: got 3 at position 2"):
        hl.logits_loss(logits, hl.Batch(torch.arange(6), ids), hl.cross_entropy())


@pytest.mark.parametrize("support", [None, torch.tensor([[3, 8, 2]]).expand(3, 3)])
@pytest.mark.parametrize("targets", [[3, 8, 2], [3, -100, 2]])
def test_a_batch_is_freed_with_its_last_name(targets, support):
    """Deleting the caller's last reference to a batch frees the batch without a run of the garbage
    collector, even while the loss is alive."""
    hidden, head = torch.randn(3, 4, requires_grad=True), hl.Head(torch.randn(V, 4))
    gc.disable()
    try:
        for _ in range(2):
            batch = hl.Batch(torch.tensor(targets), support_ids=support, more=torch.ones(3, 5))
            kept = weakref.ref(batch.targets), weakref.ref(batch.more), weakref.ref(batch._survey())
            out = hl.head_loss(hidden, head, batch, hl.cross_entropy())
            out.loss.backward()
            assert out.metrics["tokens"].value == 3 - targets.count(-100)
            del batch
            assert [found() for found in kept] == [None] * 3
    finally:
        gc.enable()


def test_a_group_of_vocabulary_and_of_segments(tmp_path):
    """One process group may split both the vocabulary and the segments.

    An invalid target in a later call on this group raises the same error as on one rank.
    """
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        group, weight = torch.distributed.group.WORLD, torch.randn(V, 4, requires_grad=True)
        losses = []
        for last in (0, 0, V, 0):
            targets, ids = torch.tensor([1, 2, 3, last]), torch.zeros(4, dtype=torch.int64)
            batch = hl.Batch(targets, hl.Segments.from_ids(ids, 1, group))
            call = torch.ones(4, 4), hl.Head(weight, vocab_group=group), batch, hl.cross_entropy()
            if last == V:
                with pytest.raises(ValueError, match=f"targets: got {V} at position 3"):
                    hl.head_loss(*call)
            else:
                losses.append(hl.head_loss(*call).loss.item())
        assert losses[0] == losses[1] == losses[2]
    finally:
        torch.distributed.destroy_process_group()
