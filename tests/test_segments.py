"""Segments are constructed correctly, and their sums, means and expansion agree with loops."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import headloss as hl
from headloss.batch.segments import Chunk, Segments


def loop_sum(ids: Tensor, count: int, values: Tensor) -> Tensor:
    total = torch.zeros(count, dtype=values.dtype)
    for i, v in zip(ids.flatten().tolist(), values.flatten(), strict=True):
        total[i] += v
    return total


# ---------------------------------------------------------------------- construction


@pytest.mark.parametrize(
    "segments",
    [
        Segments.from_lengths([2, 0, 3]),
        Segments.from_lengths(torch.tensor([2, 0, 3], dtype=torch.int32)),
        Segments.from_cu_seqlens([0, 2, 2, 5]),
        Segments.from_cu_seqlens(torch.tensor([0, 2, 2, 5], dtype=torch.int32)),
        Segments.from_ids(torch.tensor([0, 0, 2, 2, 2])),
        Segments.from_ids(torch.tensor([0, 0, 2, 2, 2], dtype=torch.int32), count=3),
    ],
)
def test_the_constructors_agree(segments):
    assert segments.ids.tolist() == [0, 0, 2, 2, 2]
    assert segments.ids.dtype == segments.lengths.dtype == torch.int64
    assert segments.count == 3
    assert segments.lengths.tolist() == [2, 0, 3]
    assert repr(segments) == "Segments(count=3, shape=(5,))"


def test_rows():
    segments = Segments.rows(2, 3)
    assert segments.ids.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert segments.lengths.tolist() == [3, 3]


def test_trailing_empty_segments_count():
    segments = Segments.from_ids(torch.tensor([1, 0, 1]), count=5)
    assert segments.count == 5
    assert segments.lengths.tolist() == [1, 2, 0, 0, 0]


@pytest.mark.parametrize(
    "segments",
    [Segments.from_lengths([]), Segments.from_cu_seqlens([0]), Segments.rows(0, 4)],
)
def test_no_segments(segments):
    assert segments.count == 0 and segments.lengths.tolist() == []
    assert segments.sum(torch.zeros(segments.ids.shape)).shape == (0,)
    assert segments.expand(torch.zeros(0)).shape == segments.ids.shape


def test_no_tokens():
    segments = Segments.from_lengths([0, 0])
    assert segments.sum(torch.zeros(0)).tolist() == [0, 0]
    assert segments.mean(torch.zeros(0)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Segments.from_lengths([1, -2]), ValueError, r"lengths: .*-2.*>= 0"),
        (lambda: Segments.from_lengths(torch.ones(2)), TypeError, "lengths: .*float32.*int64"),
        (lambda: Segments.from_cu_seqlens([1, 2]), ValueError, "cu_seqlens: .*start at 0"),
        (lambda: Segments.from_cu_seqlens([]), ValueError, "cu_seqlens: .*start at 0"),
        (lambda: Segments.from_cu_seqlens([0, 3, 2]), ValueError, "cu_seqlens: .*not to decrease"),
        (
            lambda: Segments.from_cu_seqlens(torch.zeros(2, 2, dtype=torch.long)),
            TypeError,
            r"cu_seqlens: .*\(2, 2\)",
        ),
        (lambda: Segments.from_ids([0, 1]), TypeError, "ids: got list, want an integer tensor"),
        (lambda: Segments.from_ids(torch.zeros(2)), TypeError, "ids: got torch.float32"),
        (lambda: Segments.from_ids(torch.tensor([True])), TypeError, "ids: got torch.bool"),
        (lambda: Segments.from_ids(torch.tensor([0]), count=-1), ValueError, "count: got -1"),
    ],
)
def test_wrong_constructors(make, error, match):
    with pytest.raises(error, match=match):
        make()


# ---------------------------------------------------------------------- sums, means, expansion


@given(st.lists(st.integers(0, 5), max_size=20), st.integers(6, 8))
def test_sum_mean_and_expand_against_loops(ids, count):
    segments = Segments.from_ids(torch.tensor(ids, dtype=torch.int64), count=count)
    values = torch.randn(len(ids), dtype=torch.float64)
    total = loop_sum(segments.ids, count, values)
    lengths = torch.tensor([ids.count(i) for i in range(count)])
    torch.testing.assert_close(segments.sum(values), total)
    torch.testing.assert_close(segments.mean(values), total / lengths.clamp_min(1))
    per_segment = torch.randn(count, dtype=torch.float64)
    want = torch.tensor([float(per_segment[i]) for i in ids], dtype=torch.float64)
    assert segments.expand(per_segment).equal(want)


def test_tokens_of_any_shape():
    segments, values = Segments.rows(2, 3), torch.arange(6.0).view(2, 3)
    assert segments.sum(values).tolist() == [3, 12]
    assert segments.mean(values).tolist() == [1, 4]
    assert segments.expand(torch.tensor([5.0, 7.0])).tolist() == [[5, 5, 5], [7, 7, 7]]


@pytest.mark.parametrize(
    "ids", [[0, 0, 2, 2, 2], [2, 0, 2, 0, 2], [1, 1, 1, 1, 1]], ids=["sorted", "mixed", "one"]
)
def test_gradients(ids):
    segments = Segments.from_ids(torch.tensor(ids), count=4)  # at least one segment is empty
    values = torch.randn(5, dtype=torch.float64, requires_grad=True)
    per_segment = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(segments.sum, values)
    assert torch.autograd.gradcheck(segments.mean, values)
    assert torch.autograd.gradcheck(segments.expand, per_segment)
    assert torch.autograd.gradcheck(lambda v: segments.expand(segments.mean(v).exp()) * v, values)


def test_the_mean_of_an_empty_segment_is_zero_without_a_gradient():
    segments = Segments.from_lengths([0, 2])
    values = torch.tensor([1.0, 3.0], requires_grad=True)
    mean = segments.mean(values)
    assert mean.tolist() == [0, 2]
    mean[0].backward()
    assert values.grad is not None and values.grad.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_of_the_values_stays(dtype):
    segments, values = Segments.from_lengths([3, 1]), torch.ones(4, dtype=dtype)
    assert segments.sum(values).dtype == segments.mean(values).dtype == dtype
    assert segments.sum(values).tolist() == [3, 1]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32])
def test_sums_of_integers_are_counts(dtype):
    values = torch.ones(405, dtype=dtype)
    segments = Segments.from_lengths([400, 0, 5])
    assert segments.sum(values).tolist() == [400, 0, 5]
    some = values * (torch.arange(405) < 300)
    assert segments.mean(some).tolist() == [0.75, 0, 0]


def test_a_long_segment_keeps_the_digits_of_float32():
    values = torch.full((1 << 18,), 0.1)
    exact = float(values.double().sum())
    assert float(Segments.from_lengths([1 << 18]).sum(values)) == pytest.approx(exact, rel=1e-7)


def test_sums_do_not_depend_on_the_order_of_segments_or_on_the_run():
    """Each segment sums its tokens in order, so the sums have the same bits in every run and for
    every order of segments."""
    values, lengths = torch.randn(1000), [300, 1, 0, 499, 200]
    ordered = Segments.from_lengths(lengths)
    assert ordered.sum(values).equal(ordered.sum(values))
    other = torch.randperm(5)
    pieces = [values.split(lengths)[i] for i in other]
    moved = Segments.from_lengths([lengths[i] for i in other]).sum(torch.cat(pieces))
    assert moved.equal(ordered.sum(values)[other])
    # Interleaved segments, with each segment's tokens in order.
    places = torch.rand(1000).argsort()
    ids = ordered.ids[places]
    riffled = torch.empty(1000)
    riffled[ids.argsort(stable=True)] = values
    assert Segments.from_ids(ids, count=5).sum(riffled).equal(ordered.sum(values))


@pytest.mark.parametrize("cut", [(0, 2), (1, 3), (2, 4), (0, 4)])
def test_slices(cut):
    lengths = [2, 3, 0, 4]
    first, last = cut
    start, stop = sum(lengths[:first]), sum(lengths[:last])
    ids = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    whole = Segments(ids, 4, counts=torch.tensor(lengths))
    part = whole.slice(Chunk(start, stop, first, last))
    values = torch.randn(9)
    assert part.count == last - first
    assert part.sum(values[start:stop]).equal(whole.sum(values)[first:last])
    assert part.lengths.tolist() == lengths[first:last]


@pytest.mark.parametrize(
    ("use", "match"),
    [
        (lambda s: s.sum(torch.zeros(4)), r"values: got shape \(4,\).*per token, \(5,\)"),
        (lambda s: s.mean(torch.zeros(5, 1)), r"values: got shape \(5, 1\).*per token, \(5,\)"),
        (lambda s: s.expand(torch.zeros(5)), r"values: got shape \(5,\).*per segment, \(2,\)"),
    ],
)
def test_wrong_shapes(use, match):
    with pytest.raises(ValueError, match=match):
        use(Segments.from_lengths([2, 3]))


def test_each_constructor_says_which_empty_segments_count() -> None:
    """A sequence without scored tokens counts in the number of segments. Padding does not count as
    a segment if its segment ids are negative, or if repeated ends are removed from `cu_seqlens`."""
    hidden, head = torch.ones(5, 2), hl.Head(torch.arange(18.0).view(9, 2))
    filled = torch.tensor([0, 2, 5, 5, 5])
    ids = torch.tensor([0, 0, 1, 1, -1])
    targets = torch.tensor([1, 2, 3, 4, -100])
    want = [
        (Segments.from_lengths([2, 3]), 2),
        (Segments.from_lengths([2, 0, 3, 0]), 4),
        (Segments.from_cu_seqlens([0, 2, 2, 5, 5]), 4),
        (Segments.from_cu_seqlens(filled.unique_consecutive()), 2),
        (Segments.from_ids(ids), 2),
        (Segments.from_ids(ids, 4), 4),
    ]
    logps = hl.head_loss(hidden, head, hl.Batch(targets), hl.cross_entropy()).logps
    total = -logps[:2].mean() - logps[2:4].mean()
    for segments, count in want:
        batch = hl.Batch(targets, segments)
        out = hl.head_loss(hidden, head, batch, hl.cross_entropy().over("sequence_mean"))
        torch.testing.assert_close(out.loss, total / count)
        assert out.metrics["segments"].value == count == segments.count
    rows = hl.Batch(torch.stack([targets, torch.full((5,), -100)]), Segments.rows(2, 5))
    out = hl.head_loss(torch.ones(2, 5, 2), head, rows, hl.cross_entropy().over("sequence_mean"))
    torch.testing.assert_close(out.loss, -logps[:4].mean() / 2)


def test_padding_of_labels_predicts_nothing() -> None:
    """`Batch.from_labels` gives any number of padding tokens (segment id -1) the target -100,
    whatever labels these tokens have."""
    ids = torch.tensor([-1, -1, 0, 0, -1, 1, 1, -1, -1, -1])
    values = torch.arange(10)
    batch = hl.Batch.from_labels(values, Segments.from_ids(ids), w=values, align="labels")
    assert batch.targets.tolist() == [-100, -100, 3, -100, -100, 6, -100, -100, -100, -100]
    assert batch.w.tolist() == [0, 0, 3, 0, 0, 6, 0, 0, 0, 0]
    hl.head_loss(torch.ones(10, 2), hl.Head(torch.ones(10, 2)), batch, hl.cross_entropy())


@pytest.mark.parametrize("shape", [(7,), (2, 5), (3, 1), (2, 3, 4), (2, 0), (0, 4)])
def test_labels_by_rows(shape: tuple[int, ...]) -> None:
    """For labels in rows [.., L], `Batch.from_labels` shifts labels and fields as if each row had
    its own segment id."""
    labels = torch.arange(math.prod(shape)).view(shape)
    fields = {
        "w": labels.double(),
        "kept": labels % 2 == 0,
        "candidate_ids": torch.stack([labels, labels + 1], -1),
    }
    count = math.prod(shape[:-1])
    ids = torch.arange(count).view(*shape[:-1], 1).expand(shape)
    want = hl.Batch.from_labels(labels, Segments.from_ids(ids, count), align="labels", **fields)
    got = hl.Batch.from_labels(labels, align="labels", **fields)
    assert got.segments._ascends and got.segments.count == count
    for name in ("targets", *fields):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=0, atol=0)


@pytest.mark.parametrize("segments", [Segments.rows(2, 3), Segments.from_lengths([4, 2])])
def test_a_batch_elsewhere_knows_the_order_of_its_segments(segments: Segments) -> None:
    batch = hl.Batch(torch.arange(6).view(segments.ids.shape), segments).to("cpu")
    assert batch.segments._ascends and batch.segments._row == segments._row
    assert batch._survey().bins is None


def test_ranks_that_are_threads_sum_their_lengths_together(monkeypatch):
    """If ranks are threads of one process, all threads enter the collective that sums segment
    lengths; no lock makes a thread wait before the collective."""
    together = threading.Barrier(2)

    def over_ranks(segments, values):
        together.wait(timeout=10)
        return values

    monkeypatch.setattr(hl.Segments, "_over_ranks", over_ranks)
    segments = [hl.Segments.from_ids(torch.tensor([0, 0, 1]), count=2) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        lengths = list(pool.map(lambda one: one.lengths.tolist(), segments))
    assert lengths == [[2, 1], [2, 1]]
