"""What packing has to know of a batch, from kernels and plain PyTorch, position by position."""

from __future__ import annotations

import itertools

import pytest
import torch
from triton_cases import DEVICE

import headloss as hl
from headloss.batch import survey as headloss_survey
from headloss.batch.batch import IGNORE
from headloss.batch.packing import pack
from headloss.kernels import reference
from headloss.kernels import triton as triton_backend

BACKENDS = [triton_backend, reference]
CASES = {
    "nothing": (0, 3),
    "one": (1, 1),
    "a few": (7, 4),
    "rows": (2064, 6),
    "one segment": (1100, 1),
    "any order": (1500, 9),
    "all scored": (1030, 5),
    "none scored": (40, 2),
}


@pytest.fixture(autouse=True)
def poisoned(fresh_memory_is_nan):
    """What an act leaves unwritten is NaN, or the largest integer."""


def case_of(name: str):
    """Targets and ids (strided where they are rows), and a field of ids."""
    n, count = CASES[name]
    generator = torch.Generator().manual_seed(n)
    targets = torch.randint(0, 90, (n,), generator=generator)
    if name != "all scored":
        share = 2 if name == "none scored" else 0.4
        targets[torch.rand(n, generator=generator) < share] = IGNORE
    ids = torch.randint(0, count, (n,), generator=generator).sort().values
    if name == "any order":
        ids = torch.randint(-2, count + 2, (n,), generator=generator)
    field = torch.randint(-1, 200, (n, 3), generator=generator)
    if name == "rows":
        both = torch.stack([targets, targets], 1).view(count, -1)
        targets = both.to(DEVICE)[:, ::2]
        ids = hl.Segments.rows(count, n // count, DEVICE).ids
    return targets.to(DEVICE), ids.to(DEVICE), count, field.to(DEVICE)


def counted(targets, ids, count, field) -> list[int]:
    """The same facts, one position after another."""
    targets, ids = (t.reshape(-1).tolist() for t in (targets, ids))
    clamped = [min(max(i, -1), count) for i in ids]
    scored = [i for i, target in enumerate(targets) if target != IGNORE]
    bins = [0] * (count + 3)
    for target, segment in zip(targets, clamped, strict=True):
        bins[count + 2 if target == IGNORE else segment + 1] += 1
    return [
        sum(b < a for a, b in itertools.pairwise(clamped)),
        min([0, *(targets[i] for i in scored)]),
        max([0, *(targets[i] for i in scored)]),
        max([0, *(max(field[i].tolist()) for i in scored)]),
        *bins,
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_facts_and_order(backend, name):
    targets, ids, count, field = case_of(name)
    found = backend.survey(targets, ids, count, IGNORE, id_fields=(field,))
    assert found.facts.tolist() == counted(targets, ids, count, field)
    host = torch.full((count + 6,), 7, pin_memory=DEVICE != "cpu")
    few = backend.survey(targets, ids, count, IGNORE, host=host)
    assert few.facts.tolist() == [*found.facts[:3].tolist(), *found.facts[4:].tolist()]
    assert host.tolist() == few.facts.tolist()  # behind the wait
    one, zeros = (backend.survey(targets, i, 1, IGNORE) for i in (None, torch.zeros_like(targets)))
    assert torch.equal(one.facts, zeros.facts)
    flat, scored = targets.reshape(-1), targets.reshape(-1) != IGNORE
    order = backend.compact(targets, ids, IGNORE, found.scored, int(scored.sum()))
    index = scored.nonzero().squeeze(1)
    assert torch.equal(order.index, index) and torch.equal(order.targets, flat[index])
    assert torch.equal(order.ids, ids.reshape(-1)[index])
    assert torch.equal(order.unscored, (~scored).nonzero().squeeze(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_facts_take_part_of_a_larger_room(backend):
    """Pinned memory is kept in sizes of powers of two."""
    targets = torch.arange(4, device=DEVICE)
    host = torch.full((8,), 7, pin_memory=DEVICE != "cpu")
    found = backend.survey(targets, None, 1, IGNORE, host=host)
    assert [*found.facts.tolist(), 7] == host.tolist() == [0, 0, 3, 0, 4, 0, 0, 7]


@pytest.mark.parametrize("kind", ["rows", "packed", "any order", "dense"])
def test_a_batch_packed_by_kernels(kind, monkeypatch):
    """Order, lengths and fields are those of a stable sort, whichever way they are found."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, 30, (4, 9), generator=generator).to(DEVICE)
    segments = None
    if kind != "dense":
        targets[:, :2], targets[1, 6:], targets[2] = IGNORE, IGNORE, IGNORE
    if kind == "packed":
        segments = hl.Segments.from_lengths(torch.tensor([10, 0, 20, 6], device=DEVICE))
        targets = targets.flatten()
    if kind == "any order":
        ids = torch.randint(0, 5, (36,), generator=generator).to(DEVICE)
        segments, targets = hl.Segments.from_ids(ids, 5), targets.flatten()
    values = torch.rand(targets.shape, generator=generator).to(DEVICE)
    batch = hl.Batch(targets, segments, advantages=values)
    monkeypatch.setattr(headloss_survey, "choose", lambda *_: "triton")
    packed = pack(batch, 30, torch.float32)
    flat, ids = targets.reshape(-1), batch.segments.ids.reshape(-1)
    index = (flat != IGNORE).nonzero().squeeze(1)
    index = index[ids[index].argsort(stable=True)]
    assert (packed.packing.index is None) == (kind == "dense")
    assert torch.equal(packed.batch.targets, flat[index])
    assert torch.equal(packed.batch.segments.ids, ids[index])
    assert torch.equal(packed.batch.advantages, values.reshape(-1)[index])
    assert packed.packing.lengths == ids[index].bincount(minlength=batch.segments.count).tolist()


def test_what_is_refused_is_named_from_facts_of_kernels(monkeypatch):
    monkeypatch.setattr(headloss_survey, "choose", lambda *_: "triton")
    targets = torch.tensor([[3, IGNORE, 31], [1, 2, 3]], device=DEVICE)
    with pytest.raises(ValueError, match=r"targets: got 31 at position 2, want -100 or 0 <="):
        pack(hl.Batch(targets), 30, torch.float32)
    segments = hl.Segments(torch.tensor([[0, 9, 0], [1, 1, -1]], device=DEVICE), 2)
    with pytest.raises(ValueError, match=r"segments: got -1 at position 5, want 0 <= id < 2"):
        pack(hl.Batch(targets, segments), 32, torch.float32)
