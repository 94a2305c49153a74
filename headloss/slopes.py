"""Whether the gradient of a term is known before the statistics are.

The slope of cross-entropy or of an entropy bonus is the same whatever the statistics hold; that of
a clipped surrogate is not. They are told apart by following what the statistics touch through the
term and its gradient: every result of an operation that reads them is marked, comparisons and
detached values included. What cannot be followed counts as marked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from .batch import PackedBatch
from .losses.term import TRACING, Term
from .stats import DIFFERENTIABLE, Statistics

aten = torch.ops.aten
# These look at no value of their first argument.
SHAPE_ONLY = frozenset(
    {
        aten.zeros_like,
        aten.ones_like,
        aten.empty_like,
        aten.full_like,
        aten.new_zeros,
        aten.new_ones,
        aten.new_empty,
        aten.new_full,
        aten.new_empty_strided,
    }
)


class _Follow(TorchDispatchMode):
    """Marks memory that depends on the values of `sources`; `clean` is known not to.

    `lost`: a value has left for Python, or came from where it could not be followed.
    """

    def __init__(self, sources: list[Tensor], clean: list[Tensor]) -> None:
        super().__init__()
        self.kept = [*sources, *clean]  # so that no memory is given away twice
        self.marked = {_memory(t) for t in sources}
        self.seen = {_memory(t) for t in self.kept}
        self.lost = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        found = func(*args, **(kwargs or {}))
        made = [t for t in tree_iter(found) if isinstance(t, Tensor)]
        depends = func.overloadpacket not in SHAPE_ONLY and any(map(self.depends, given))
        if depends and not made:
            self.lost = True
        self.kept += made
        if depends:
            self.marked |= {_memory(t) for t in made}
        self.seen |= {_memory(t) for t in made}
        return found

    def depends(self, tensor: Tensor) -> bool:
        """Whether a tensor's values may depend on the sources."""
        memory = _memory(tensor)
        return memory in self.marked or memory not in self.seen


def _memory(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata


def constant(term: Term, stats: Statistics, batch: PackedBatch) -> bool:
    """Whether the term's gradient with respect to the statistics is the same at all statistics.

    Args:
        stats, batch: a sample; statistics are leaves that require a gradient.
    """
    try:
        first, second = (_gradient(term, s, batch) for s in (stats, _elsewhere(stats)))
    except (RuntimeError, TypeError):  # what cannot be followed, such as a function under vmap
        return False
    if first is None or second is None:
        return False
    # The second point is for what leaves no trace, `tolist` for one.
    return all(
        (a is None) == (b is None) and (a is None or (b is not None and torch.equal(a, b)))
        for a, b in zip(first, second, strict=True)
    )


def _elsewhere(stats: Statistics) -> Statistics:
    return stats.map(lambda t: (1.5 * t.detach() - 0.3).requires_grad_(t.requires_grad))


def _gradient(
    term: Term, stats: Statistics, batch: PackedBatch
) -> tuple[Tensor | None, ...] | None:
    """d term / d statistic for each that has one; None where it hangs on the statistics."""
    leaves = [t for name, t in stats.tensors().items() if name in DIFFERENTIABLE]
    batch = batch.on(stats)
    clean = [batch.targets, *batch.fields.values(), *batch.wide.values()]
    clean += vars(batch.segments).values()
    follow = _Follow(list(stats.tensors().values()), [t for t in clean if isinstance(t, Tensor)])
    token = TRACING.set(True)
    try:
        with torch.enable_grad(), follow:
            values = term(stats, batch)
            one = torch.ones(values.shape, dtype=values.dtype, device=values.device)
            found = torch.autograd.grad(values, leaves, one, allow_unused=True)
    finally:
        TRACING.reset(token)
    if follow.lost or any(g is not None and follow.depends(g) for g in found):
        return None
    return found
