"""Conversions of the token ids that a sampler kept (by top-k or top-p), from the formats of
samplers to a batch's `support_ids`.

Symbols: B completions, C tokens per completion, N tokens in all, V vocabulary size, P pairs (token,
kept id), K largest number of kept ids of a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import chain, islice
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ..arguments import INT64, check_dense, check_device, check_integers, check_number
from .segments import offsets_of


def support_from_scores(scores: Tensor) -> Tensor:
    """Return the ids whose scores a sampler kept, [.., K] int64 in ascending order, padded with -1,
    for `support_ids`.

    A row that keeps all ids or no id is all -1, which means the whole vocabulary. K is at least 1;
    it is the largest number of kept ids in a row, not counting rows that keep all ids.

    >>> inf = float("inf")
    >>> support_from_scores(torch.tensor([[0.5, -inf, 1.0], [0.1, 0.2, 0.3]]))
    tensor([[ 0,  2],
            [-1, -1]])

    Args:
        scores: [.., V] floats, kept where finite, such as logits after the logits processors of
            Transformers; or bool, kept where True.

    Raises:
        TypeError: scores that are neither floats nor bool.
        ValueError: scores without a dimension V >= 1.
    """
    of_bool = getattr(scores, "dtype", None) is torch.bool
    if not (isinstance(scores, Tensor) and (of_bool or scores.is_floating_point())):
        got = getattr(scores, "dtype", type(scores).__name__)
        raise TypeError(f"scores: got {got}, want floats or bool, [.., V]")
    check_dense("scores", scores)
    if not scores.dim() or not scores.shape[-1]:
        raise ValueError(f"scores: got shape {tuple(scores.shape)}, want [.., V] with V >= 1")
    mask = scores if of_bool else scores.isfinite()
    padded = padded_pairs(*pairs_of(mask.reshape(-1, scores.shape[-1])))
    return padded.view(*scores.shape[:-1], padded.shape[1])


def pairs_of(mask: Tensor) -> tuple[Tensor, Tensor]:
    """[P] column ids of the True elements of a [N, V] mask, row by row, and [N] their number per
    row. For a row of `mask` whose elements are all True, no ids are returned.

    If `mask` is on a GPU, the CPU waits until the number P of returned ids is known.
    """
    restricted = mask & ~mask.all(1, keepdim=True)
    return restricted.nonzero()[:, 1], restricted.sum(1)


def padded_pairs(ids: Tensor, counts: Tensor) -> Tensor:
    """Return [N, K] int64 ids from [P] ids and [N] counts, with -1 in unused entries; K is at least
    1."""
    most = max(1, int(counts.max())) if len(counts) else 1
    slots = torch.arange(most, device=counts.device) < counts.unsqueeze(1)
    padded = torch.full(slots.shape, -1, dtype=torch.int64, device=ids.device)
    return padded.masked_scatter_(slots, ids.long())


def support_from_lists(lists: Any, columns: int | None = None) -> tuple[Tensor, Tensor]:
    """Return `support_ids` for targets [B, C], from the lists of kept ids that vLLM or SGLang
    return for each token. The result is a pair, int64 on the CPU: the ids of all tokens [P], and
    the offsets [B C + 1] at which each token's ids begin.

    The returned ids have the order of the ids in the argument `lists`. Move ids and offsets to a
    device with `.to(device)`.

    >>> support_from_lists([[[7, 3], [5]], [None, [2, 9, 4]], None])
    (tensor([7, 3, 5, 2, 9, 4]), tensor([0, 2, 3, 3, 6, 6, 6]))

    Args:
        lists: `lists[b][c]` has the ids of token c of completion b: a list, a NumPy array or a
            tensor; None or an empty list for a token without ids. Use None in place of the list
            `lists[b]` if no token of completion b has ids.
        columns: number C of tokens of each completion in the result, by default the length of the
            longest completion. A completion shorter than C tokens is padded with tokens that have
            no ids; a completion longer than C tokens is cut to C tokens.

    Raises:
        TypeError: ids that are not integers.
        ValueError: an id that is negative or exceeds 64 bits.
    """
    rows = [_listed(row, f"lists[{b}]") for b, row in enumerate(_listed(lists, "lists"))]
    if columns is None:
        columns = max(map(len, rows), default=0)
    check_number("columns", columns, "a whole number", "one >= 0", lambda c: c >= 0, Integral)
    counts: list[int] = []
    flat: list[int] = []
    for b, row in enumerate(rows):
        tokens = [_ids(ids, f"lists[{b}][{c}]") for c, ids in enumerate(islice(row, columns))]
        counts += [*map(len, tokens), *[0] * (columns - len(tokens))]
        flat += chain.from_iterable(tokens)
    ids = torch.tensor(flat, dtype=torch.int64, device="cpu")
    return ids, offsets_of(torch.tensor(counts, dtype=torch.int64, device="cpu"))


def _listed(value: Any, name: str) -> Sequence[Any]:
    """Return the list of a tensor, an array or a sequence; an empty list for None."""
    if value is None:
        return []
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        got = f"{type(value).__name__} for {name}"
        raise TypeError(f"support_from_lists: got {got}, want a list, an array or a tensor")
    return value


def _ids(value: Any, name: str) -> Sequence[int]:
    """Check the list of one token's allowed ids, and return the ids."""
    ids = _listed(value, name)
    if wrong := {cls for cls in map(type, ids) if cls is bool or not issubclass(cls, Integral)}:
        bad = next(x for x in ids if type(x) in wrong)
        raise TypeError(f"support_from_lists: {name} has {bad!r}, want integers")
    low = min(ids, default=0)
    high = max(ids, default=0)
    if low < 0 or high >= INT64:
        got = low if low < 0 else high
        want = "ids >= 0; a token without ids has an empty list"
        raise ValueError(f"support_from_lists: {name} has {got}, want {want}")
    return ids


def support_from_counts(ids: Any, counts: Any) -> tuple[Tensor, Tensor]:
    """Return ([P] ids, [N + 1] offsets), int64, from the ids and counts of prime-rl, SGLang's store
    or NeMo-RL.

    >>> support_from_counts(torch.tensor([[7, 3, 0], [5, 0, 0]]), torch.tensor([2, 1]))
    (tensor([7, 3, 5]), tensor([0, 2, 3]))

    Args:
        ids: a tensor or a NumPy array, flat [P] in the order of tokens, or padded [.., K] with
            arbitrary values in the entries beyond a token's count.
        counts: [..] N numbers in any shape: the number of ids of each token.

    Raises:
        TypeError: ids or counts that are not integers.
        ValueError: a count is negative or larger than K; the sum of `counts` is not the number of
            flat ids; or `ids` has neither the shape [P] nor the shape [.., K].
    """
    ids = _integers("ids", ids)
    counts = _integers("counts", counts)
    check_device("counts", counts, ids, "that of ids")
    padded = ids.dim() == counts.dim() + 1 and ids.shape[:-1] == counts.shape
    if not padded and ids.dim() != 1:
        want = f"flat [P], or {(*counts.shape, 'K')}"
        raise ValueError(f"ids: got shape {tuple(ids.shape)}, want {want}")
    counts = counts.reshape(-1)
    low, high = (int(counts.min()), int(counts.max())) if len(counts) else (0, 0)
    if low < 0 or (padded and high > ids.shape[-1]):
        bad, want = (low, ">= 0") if low < 0 else (high, f"<= K = {ids.shape[-1]}")
        raise ValueError(f"counts: got {bad}, want numbers {want}")
    if padded:
        slots = torch.arange(ids.shape[-1], device=ids.device) < counts.unsqueeze(1)
        ids = ids.reshape(slots.shape)[slots]
    elif (total := int(counts.sum())) != len(ids):
        raise ValueError(f"counts: got {total} in all, want as many as flat ids, {len(ids)}")
    return ids, offsets_of(counts)


def _integers(name: str, value: Any) -> Tensor:
    """Return a tensor or an array of integers as an int64 tensor."""
    if not isinstance(value, Tensor) and hasattr(value, "dtype"):
        # torch.as_tensor raises TypeError for a NumPy array of objects.
        with contextlib.suppress(TypeError):
            # Copy the NumPy array, since torch rejects NumPy arrays with negative strides.
            value = torch.as_tensor(value.copy(), device="cpu")
    return check_integers(name, value, "integers, as a tensor or a NumPy array").long()
