"""What a batch finds out about the order of its tokens is used again only while it holds."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

import headloss as hl
from headloss.batch import survey
from headloss.batch.survey import Survey

V = 9
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
INTERPRETED = pytest.param("triton", marks=NO_GPU)


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


@pytest.fixture
def begun_early(monkeypatch):
    """As on a GPU that is busy: a call finds that nobody has read its batch yet. The guesses."""
    made, guessed = [], Survey.guessed
    monkeypatch.setattr(Survey, "is_asked", property(lambda self: self._read is None))
    monkeypatch.setattr(Survey, "guessed", lambda self: made.append(guessed(self)) or made[-1])
    hl.clear_cache()
    return made


@pytest.mark.parametrize("segments", [None, [2, 3, 1]], ids=["one", "three"])
@pytest.mark.parametrize("targets", [[3, 8, 2, 5, 1, 0], [3, -100, 2, -100, 1, 0], [-100] * 6])
def test_a_call_that_begins_before_its_batch_is_read(begun_early, monkeypatch, targets, segments):
    """Whole or not, it gives what it gives afterwards; a signature is guessed wrong once."""
    objective = hl.cross_entropy().over("sequence_mean")

    def run() -> tuple[float, float]:
        among = None if segments is None else hl.Segments.from_lengths(segments)
        batch = hl.Batch(torch.tensor(targets), among)
        return loss(batch, objective), loss(batch, objective)

    found = run()
    assert len(begun_early) == 1 and begun_early[0] is not None
    assert run() == found
    assert len(begun_early) == 1 + (-100 not in targets)
    monkeypatch.undo()
    assert run() == found


@pytest.mark.parametrize("schedule", ["auto", "recompute", "held"])
def test_segments_out_of_order_are_found_out(begun_early, monkeypatch, schedule):
    """Gradients too; nothing is added to a given main_grad before that."""
    objective = hl.cross_entropy().over("sequence_sum")
    ids, weight = torch.tensor([1, 0, 1, 0, 0, 1]), torch.randn(V, 4, requires_grad=True)
    hidden, results = torch.randn(6, 4, requires_grad=True), []
    for _ in range(2):
        total = torch.zeros(V, 4)
        options = hl.Options(schedule=schedule, main_grad=total, upstream=1.0)
        batch = hl.Batch(torch.arange(6), hl.Segments.from_ids(ids, 2))
        hl.head_loss(hidden, hl.Head(weight), batch, objective, options).loss.backward()
        results += [(total, hidden.grad)]
        hidden.grad = None
        assert len(begun_early) == 1 and begun_early[0].index is None
        monkeypatch.undo()
    for early, late in zip(*results, strict=True):
        assert torch.equal(early, late) and early.abs().max() > 0


@pytest.mark.parametrize("inplace", [False, True])
def test_a_bad_target_is_named_before_logits_are_overwritten(begun_early, inplace):
    logits = torch.randn(6, V)
    before, bad = logits.clone(), hl.Batch(torch.tensor([3, V, 2, 5, 1, 0]))
    with pytest.raises(ValueError, match=f"targets: got {V} at position 1"):
        hl.logits_loss(logits, bad, hl.cross_entropy(), inplace=inplace)
    assert torch.equal(logits, before)
    ids = hl.Segments.from_ids(torch.tensor([0, 0, 3, 0, 1, 1]), 2)
    with pytest.raises(ValueError, match="segments: got 3 at position 2"):
        hl.logits_loss(logits, hl.Batch(torch.arange(6), ids), hl.cross_entropy())
    stats = hl.head_stats(torch.randn(6, 4), hl.Head(torch.randn(V, 4)), torch.arange(6))
    assert stats.logp is not None and len(begun_early) == 3


@pytest.mark.parametrize("backend", ["reference", INTERPRETED])
@pytest.mark.parametrize("segments", ["rows", "ids"])
@pytest.mark.parametrize("targets", [[3, 8, 2, 5, 1, 0], [3, -100, 2, -100, 1, 0], [3, V] * 3])
def test_logits_are_overwritten_before_the_host_has_read_their_batch(
    begun_early, monkeypatch, targets, segments, backend
):
    """Where the device finds it to be as it was guessed, and segments' ids are known to be ids."""
    if backend == "triton":
        pytest.importorskip("triton")
    pristine, results = torch.randn(6, V), []
    for _ in range(2):
        logits = pristine.clone().requires_grad_()
        ids = torch.tensor([0, 0, 0, 1, 1, 1])
        among = hl.Segments.from_ids(ids, 2) if segments == "ids" else hl.Segments.rows(2, 3)
        given = torch.tensor(targets).view_as(among.ids)
        options = hl.Options(backend=backend)
        try:
            out = hl.logits_loss(
                logits.view(*given.shape, V), hl.Batch(given, among), hl.cross_entropy(),
                inplace=True, options=options,
            )  # fmt: skip
            (gradient,) = torch.autograd.grad(out.loss, logits)
            results.append((out.loss.detach(), gradient))
        except ValueError as error:
            assert torch.equal(logits, pristine) and V in targets
            results.append((str(error),))
        assert len(begun_early) == (segments == "rows")
        monkeypatch.undo()
    for early, late in zip(*results, strict=True):
        assert torch.equal(early, late) if isinstance(early, torch.Tensor) else early == late


def test_adapters_and_temperatures_of_tokens_wait(begun_early):
    """Dropout is drawn once; a temperature counts at scored positions alone."""
    hidden, weight = torch.randn(6, 4), torch.randn(V, 4)
    a, b = torch.randn(2, 4), torch.randn(V, 2)
    lora = (hl.Lora(a=a, b=b, scaling=1.0),)
    for head in (hl.Head(weight, lora=lora), hl.Head(weight, temperature=torch.ones(6))):
        hl.head_loss(hidden, head, made(), hl.cross_entropy())
    assert not begun_early


def test_a_call_on_another_stream_waits(monkeypatch):
    """What its kernels read of a batch's survey is not there before."""
    found = made().found()
    monkeypatch.setattr(found, "_read", None)
    monkeypatch.setattr(found, "_stream", 1, raising=False)
    monkeypatch.setattr(found._reading, "event", object())
    for stream, order in ((1, True), (2, False)):
        monkeypatch.setattr(survey, "_stream", lambda _, s=stream: s)
        assert (found.guessed() is not None) is order


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("support", [None, torch.tensor([[3, 8, 2]]).expand(3, 3)])
@pytest.mark.parametrize("targets", [[3, 8, 2], [3, -100, 2]])
def test_a_batch_is_freed_with_its_last_name(begun_early, monkeypatch, targets, support, early):
    """Without a collection of cycles, and though the loss is kept."""
    if not early:
        monkeypatch.undo()
    hidden, head = torch.randn(3, 4, requires_grad=True), hl.Head(torch.randn(V, 4))
    gc.disable()
    try:
        for _ in range(2):  # guessed wrong once
            batch = hl.Batch(torch.tensor(targets), support_ids=support, more=torch.ones(3, 5))
            kept = weakref.ref(batch.targets), weakref.ref(batch.more), weakref.ref(batch.found())
            out = hl.head_loss(hidden, head, batch, hl.cross_entropy())
            out.loss.backward()
            assert out.metrics["tokens"].value == 3 - targets.count(-100)
            del batch
            assert [found() for found in kept] == [None] * 3
    finally:
        gc.enable()


def test_ids_of_ones_own_are_known_to_be_unchanged():
    segments = hl.Segments.from_lengths([1, 2])
    batch = hl.Batch(torch.tensor([3, 1, 2]), segments)
    assert segments.made and batch.to("cpu").segments.made
    segments.ids[0] = 7
    assert not segments.made
    other = hl.Batch(torch.tensor([3, 1, 2])).to("cpu").segments
    assert other.made and other.ids.tolist() == [0, 0, 0]
    other.ids = torch.tensor([0, 0, 1])
    assert not other.made and other.ids.tolist() == [0, 0, 1]


def test_a_group_of_vocabulary_and_of_segments(tmp_path):
    """One group may be both; what is wrong with a later call is said as in the first."""
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
