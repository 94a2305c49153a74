"""What the terms of an objective read, found by a trial and kept in one bounded table (law 4b)."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from ..batch.packing import MissingField
from ..losses.identity import fingerprint
from ..losses.term import Objective, Term
from ..losses.trial import Reads, check_cuts, trace
from .sample import Kinds, sample_batch, sample_statistics

OURS = ("sums over", "reads stats.")  # how errors begin that do not name the term yet
MOST = 256  # entries of the table
_TABLE: dict[Any, Reads] = {}
_LOCK = threading.Lock()


def clear_cache() -> None:
    """Forget what the terms of earlier calls read; the next ones find it out again.

    >>> import headloss as hl
    >>> hl.clear_cache()
    """
    with _LOCK:
        _TABLE.clear()


def reads(
    objective: Objective, kinds: Kinds, dtype: torch.dtype, device: torch.device, observe: bool,
    cuts: bool = False
) -> dict[str, Reads]:
    """What each term reads, by key; ValueError for what the batch lacks, or `cuts` would change.
    Equal terms share an entry of the table, so that one that is made anew in each step is traced
    once."""
    by_term = {}
    how = dtype, observe, cuts, torch.is_inference_mode_enabled()  # which has no gradients to see
    for name, _, term in objective.named():
        key = fingerprint(term, []), tuple(kinds.items()), how
        function: Any = term.function
        read = function if isinstance(function, Reads) else None  # of a loss that lives elsewhere
        with contextlib.suppress(TypeError):  # an option that has no hash
            read = read or _TABLE.get(key)
        if read is None:
            read = _traced(name, term, kinds, dtype, device, observe, cuts)
            with _LOCK, contextlib.suppress(TypeError):  # the first entry leaves first
                while len(_TABLE) >= MOST:
                    del _TABLE[next(iter(_TABLE))]
                _TABLE[key] = read
        by_term[name] = read
    return by_term


def _traced(
    name: str, term: Term, kinds: Kinds, dtype: torch.dtype, device: torch.device, observe: bool,
    cuts: bool
) -> Reads:
    sample = sample_batch(kinds, term, device)
    stats = sample_statistics(dtype, device, kinds, [term.teacher] if term.teacher else [])
    try:
        read = trace(term, stats, sample.on(stats), observe)
        if cuts:
            check_cuts(term, stats, sample)
    except ValueError as error:
        if isinstance(error, MissingField) or str(error).startswith(OURS):
            raise ValueError(f"term {name}: {error}") from None
        raise
    return read


def has_slopes(objective: Objective, kinds: Kinds) -> bool:
    """Whether `WeightedObjective.beforehand` serves: modifiers may read statistics, and CURRENT is
    one."""
    if any(dtype is None for dtype, _ in kinds.values()):
        return False
    return all(term.slopes is not None and not term.modifiers for _, term in objective.parts)
