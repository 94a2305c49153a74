"""Forms in which samplers return the ids that they kept, as `support_ids` of a batch.

B completions of C tokens, N tokens in all, V vocabulary, P pairs of a token and an id, K the most
ids of a token.
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
    """[.., K] int64 ids that scores leave, ascending, then -1; what `support_ids` takes.

    A row that lost nothing, like one that has nothing left, is all -1: the whole vocabulary. K is
    the most that a row which lost something has kept, at least 1.

    >>> inf = float("inf")
    >>> support_from_scores(torch.tensor([[0.5, -inf, 1.0], [0.1, 0.2, 0.3]]))
    tensor([[ 0,  2],
            [-1, -1]])

    Args:
        scores: [.., V] floats, kept where finite, as logits that went through Transformers'
            processors; or bool, kept where True.

    Raises:
        TypeError: anything but floats or bool.
        ValueError: no vocabulary.
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
    """[P] ids that are True in [N, V], row by row, and [N] how many; none of a row without False.

    On a GPU the host waits for their number.
    """
    restricted = mask & ~mask.all(1, keepdim=True)
    return restricted.nonzero()[:, 1], restricted.sum(1)


def padded_pairs(ids: Tensor, counts: Tensor) -> Tensor:
    """[N, K] int64 of [P] ids and [N] counts, -1 in empty slots; K is at least 1."""
    most = max(1, int(counts.max())) if len(counts) else 1
    slots = torch.arange(most, device=counts.device) < counts.unsqueeze(1)
    padded = torch.full(slots.shape, -1, dtype=torch.int64, device=ids.device)
    return padded.masked_scatter_(slots, ids.long())


def support_from_lists(lists: Any, columns: int | None = None) -> tuple[Tensor, Tensor]:
    """([P] ids, [B C + 1] offsets), int64 on the CPU, for targets [B, C]: vLLM's and SGLang's form.

    Ids stay in their order. Move both with `.to(device)`.

    >>> support_from_lists([[[7, 3], [5]], [None, [2, 9, 4]], None])
    (tensor([7, 3, 5, 2, 9, 4]), tensor([0, 2, 3, 3, 6, 6, 6]))

    Args:
        lists: `lists[b][c]` has the ids of token c of completion b: a list, a NumPy array or a
            tensor; None or empty: the token has none. None for a completion: no token of it has.
        columns: C; the longest completion's by default. Tokens that are missing have no ids, those
            beyond are cut off.

    Raises:
        TypeError: what are no integers.
        ValueError: an id that is negative, or beyond 64 bits.
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
    """Of a tensor or an array its list, of None an empty one."""
    if value is None:
        return []
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        got = f"{type(value).__name__} for {name}"
        raise TypeError(f"support_from_lists: got {got}, want a list, an array or a tensor")
    return value


def _ids(value: Any, name: str) -> Sequence[int]:
    """Of one token."""
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
    """([P] ids, [N + 1] offsets), int64: of prime-rl, of SGLang's store, of NeMo-RL.

    >>> support_from_counts(torch.tensor([[7, 3, 0], [5, 0, 0]]), torch.tensor([2, 1]))
    (tensor([7, 3, 5]), tensor([0, 2, 3]))

    Args:
        ids: flat [P], one token's after another's, or padded [.., K] with anything in the slots
            beyond a token's count; a tensor or a NumPy array.
        counts: [..] N numbers in any shape: how many ids each token has.

    Raises:
        TypeError: what are no integers.
        ValueError: counts that are negative, larger than K, or not of as many as the flat ids; ids
            of another shape.
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
    """A tensor or an array of integers, as int64."""
    if not isinstance(value, Tensor) and hasattr(value, "dtype"):
        with contextlib.suppress(TypeError):  # of an array of objects
            value = torch.as_tensor(value.copy(), device="cpu")  # whatever its strides are
    return check_integers(name, value, "integers, as a tensor or a NumPy array").long()
