"""`support_ids` accepts the forms returned by samplers, checked against plain Python."""

from __future__ import annotations

import itertools
import time
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import Tensor

import headloss as hl

INF = float("inf")


def lists_of(support: Tensor) -> list[list[int]]:
    """Return a list of each token's ids, from the tensor `support` [.., K] padded with negative
    numbers."""
    return [[i for i in row if i >= 0] for row in support.flatten(0, -2).tolist()]


def lists_of_pairs(ids: Tensor, offsets: Tensor) -> list[list[int]]:
    return [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)]


@hypothesis.given(
    st.integers(1, 9).flatmap(
        lambda v: st.lists(st.lists(st.booleans(), min_size=v, max_size=v), max_size=6).map(
            lambda rows: torch.tensor(rows, dtype=torch.bool).view(-1, v)
        )
    ),
    st.sampled_from([torch.bool, torch.float32, torch.bfloat16, torch.float64]),
)
def test_scores(kept: Tensor, dtype: torch.dtype) -> None:
    scores = kept
    if dtype is not torch.bool:
        scores = torch.randn(kept.shape).to(dtype).masked_fill(~kept, -INF)
    got, vocabulary = hl.support_from_scores(scores), kept.shape[1]
    want = [[i for i, k in enumerate(row) if k] for row in kept.tolist()]
    want = [[] if len(ids) == vocabulary else ids for ids in want]
    assert lists_of(got) == want and got.dtype == torch.int64
    assert got.shape == (len(kept), max([1, *map(len, want)]))
    most = got.shape[1]
    assert got.tolist() == [ids + [-1] * (most - len(ids)) for ids in want]
    assert torch.equal(hl.support_from_scores(scores.unsqueeze(0)), got.unsqueeze(0))


def test_scores_of_one_row_and_of_what_is_not_finite() -> None:
    assert hl.support_from_scores(torch.tensor([1.0, -INF, 2.0])).tolist() == [0, 2]
    assert hl.support_from_scores(torch.tensor([float("nan"), 1.0, INF])).tolist() == [1]
    assert hl.support_from_scores(torch.ones(2, 3, 4)).tolist() == [[[-1]] * 3] * 2
    strided = torch.ones(3, 2).T.clone().T
    strided[1, 0] = -INF
    assert hl.support_from_scores(strided).tolist() == [[-1], [1], [-1]]


IDS = st.lists(st.integers(0, 1 << 40), max_size=5)
FORMS: tuple[Any, ...] = (
    list,
    tuple,
    lambda ids: np.array(ids, dtype=np.int32 if max(ids, default=0) < 1 << 31 else np.int64),
    lambda ids: torch.tensor(ids, dtype=torch.int64),
    lambda ids: [np.int64(i) for i in ids],
    lambda ids: ids or None,
)


@hypothesis.given(
    st.lists(st.none() | st.lists(IDS, max_size=4), max_size=4),
    st.none() | st.integers(0, 5),
    st.lists(st.sampled_from(FORMS), min_size=1, max_size=7),
)
def test_lists(lists: list[Any], columns: int | None, forms: list[Any]) -> None:
    forms = forms * 16
    given = [
        row and [forms[4 * b + c](ids) for c, ids in enumerate(row)] for b, row in enumerate(lists)
    ]
    ids, offsets = hl.support_from_lists(given, columns)
    most = max((len(row or []) for row in lists), default=0) if columns is None else columns
    want = [(row or [])[c : c + 1] for row in lists for c in range(most)]
    assert lists_of_pairs(ids, offsets) == [token[0] if token else [] for token in want]
    assert ids.dtype == offsets.dtype == torch.int64 and len(offsets) == len(lists) * most + 1


def test_lists_may_be_arrays_of_any_depth() -> None:
    want = hl.support_from_lists([[[3, 5], [7, 1]], [[2, 8], [4, 6]]])
    array = np.array([[[3, 5], [7, 1]], [[2, 8], [4, 6]]])
    for given in (array, [*array], torch.tensor(array), [[*row] for row in array]):
        assert all(map(torch.equal, hl.support_from_lists(given), want))


@hypothesis.given(st.lists(IDS, max_size=6), st.integers(0, 3), st.booleans(), st.booleans())
def test_counts(lists: list[list[int]], more: int, padded: bool, array: bool) -> None:
    """Padded entries beyond a row's count are ignored; NeMo-RL fills them with 0."""
    counts = torch.tensor([len(ids) for ids in lists], dtype=torch.int32)
    most = max(map(len, lists), default=0) + more
    flat = torch.tensor([i for ids in lists for i in ids], dtype=torch.int64)
    ids = flat
    if padded:
        ids = torch.tensor([ids + [0] * (most - len(ids)) for ids in lists], dtype=torch.int64)
        ids = ids.view(len(lists), most)
    given: Any = (ids, counts)
    got = hl.support_from_counts(*((t.numpy() for t in given) if array else given))
    assert lists_of_pairs(*got) == lists and got[0].dtype == got[1].dtype == torch.int64
    if len(lists) % 2 == 0:
        shape = (2, len(lists) // 2)
        ids = ids.view(*shape, most) if padded else ids
        assert all(map(torch.equal, hl.support_from_counts(ids, counts.view(shape)), got))


def test_counts_of_views() -> None:
    got = hl.support_from_counts(np.arange(6)[::-1], np.array([[2, 0], [1, 3]], dtype=np.uint8))
    assert lists_of_pairs(*got) == [[5, 4], [], [3], [2, 1, 0]]
    assert lists_of_pairs(*hl.support_from_counts(torch.tensor([4, 9]), torch.tensor(1))) == [[4]]


def test_all_forms_give_one_loss() -> None:
    """All forms of `support_ids` for a top-k sampler give the same loss, with the sampler's
    log-probs."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 8, generator=generator)
    weight = torch.randn(40, 8, generator=generator)
    scores = hidden @ weight.T
    scores[scores < scores.topk(6).values[..., -1:]] = -INF
    scores[1, 2] = hidden[1, 2] @ weight.T  # an unfiltered token
    targets = scores.softmax(-1).flatten(0, 1).multinomial(1, generator=generator).view(2, 5)
    padded = hl.support_from_scores(scores)
    sets = [[[i for i in ids if i >= 0] for ids in row] for row in padded.tolist()]
    counts = (padded >= 0).sum(-1)
    forms: dict[str, Any] = {
        "scores": padded,
        "mask": hl.support_from_scores(scores > -INF),
        "lists": hl.support_from_lists(sets),
        "counts": hl.support_from_counts(padded, counts),
        "flat": hl.support_from_counts(padded[padded >= 0], counts),
    }
    want = scores.log_softmax(-1).gather(2, targets.unsqueeze(2)).squeeze(2)
    for support in forms.values():
        batch = hl.Batch(targets, old_logps=want, advantages=torch.ones(2), support_ids=support)
        out = hl.head_loss(hidden, hl.Head(weight), batch, hl.grpo())
        torch.testing.assert_close(out.logps, want, rtol=1e-5, atol=1e-5)
        assert out.metrics.compute()["grpo/ratio"] == pytest.approx(1, abs=1e-5)
    short = [[ids[:] for ids in row[:3]] for row in sets]
    batch = hl.Batch(targets, support_ids=hl.support_from_lists(short, columns=5))
    got = hl.head_stats(hidden, hl.Head(weight), batch).logp
    torch.testing.assert_close(got[:, :3], want[:, :3], rtol=1e-5, atol=1e-5)
    whole = (hidden @ weight.T).log_softmax(-1).gather(2, targets.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(got[:, 3:], whole[:, 3:], rtol=1e-5, atol=1e-5)


BAD: tuple[tuple[Any, type[Exception], str], ...] = (
    (lambda: hl.support_from_scores(torch.ones(2, 3).long()), TypeError, "scores: got torch.int64"),
    (lambda: hl.support_from_scores([[1.0]]), TypeError, "scores: got list"),  # type: ignore[arg-type]
    (lambda: hl.support_from_scores(torch.tensor(1.0)), ValueError, r"scores: got shape \(\)"),
    (lambda: hl.support_from_scores(torch.ones(2, 0)), ValueError, r"scores: got shape \(2, 0\)"),
    (lambda: hl.support_from_lists(3), TypeError, "support.* got int for lists,"),
    (lambda: hl.support_from_lists([[3]]), TypeError, r"support.* got int for lists\[0\]\[0\]"),
    (lambda: hl.support_from_lists(["ab"]), TypeError, r"support.* got str for lists\[0\],"),
    (
        lambda: hl.support_from_lists([[[1]], [[2], [3, 4.0]]]),
        TypeError,
        r"lists\[1\]\[1\] has 4.0",
    ),
    (lambda: hl.support_from_lists([[[True]]]), TypeError, r"support.*lists\[0\]\[0\] has True"),
    (lambda: hl.support_from_lists([[np.array([0.5])]]), TypeError, "support.* has 0.5"),
    (lambda: hl.support_from_lists([[[[1]]]]), TypeError, r"support.* has \[1\]"),
    (
        lambda: hl.support_from_lists([[[1], []], [[], [2, -1]]]),
        ValueError,
        r"lists\[1\]\[1\] has -1",
    ),
    (lambda: hl.support_from_lists([[[1 << 70]]]), ValueError, r"support.*lists\[0\]\[0\] has 118"),
    (lambda: hl.support_from_lists([], columns=-1), ValueError, "columns: got -1"),
    (lambda: hl.support_from_lists([], columns=1.5), TypeError, "columns: got 1.5"),  # type: ignore[arg-type]
    (lambda: hl.support_from_counts([1], [1]), TypeError, "ids: got list"),
    (
        lambda: hl.support_from_counts(torch.ones(2), torch.ones(1)),
        TypeError,
        "ids: got torch.float",
    ),
    (
        lambda: hl.support_from_counts(torch.ones(2).long(), torch.ones(2).bool()),
        TypeError,
        "counts",
    ),
    (lambda: hl.support_from_counts(np.array([None]), np.array([1])), TypeError, "ids: got object"),
    (
        lambda: hl.support_from_counts(np.array([4, 5]), np.array([1])),
        ValueError,
        "counts: got 1 in",
    ),
    (
        lambda: hl.support_from_counts(np.array([4, 5]), np.array([3, -1])),
        ValueError,
        "counts: got -1",
    ),
    (
        lambda: hl.support_from_counts(np.array([[[4, 5]]]), np.array([[3]])),
        ValueError,
        "counts: got 3, want numbers <= K = 2",
    ),
    (
        lambda: hl.support_from_counts(np.ones((2, 2), int), np.array([3])),
        ValueError,
        "ids: got shape",
    ),
)


@pytest.mark.parametrize(("call", "error", "match"), BAD)
def test_bad_input_is_named(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def test_many_tokens_take_no_loop_over_pairs() -> None:
    """64 completions of 1,024 tokens with 8 kept ids each are converted in less than a second,
    without a Python loop over ids."""
    lists = [[[7, 3, 9, 1, 4, 2, 8, 5]] * 1024] * 64
    start = time.process_time()
    ids, offsets = hl.support_from_lists(lists)
    assert time.process_time() - start < 2
    assert len(ids) == 64 * 1024 * 8 and len(offsets) == 64 * 1024 + 1
