"""Whether the gradient of a term is known before the statistics are.

The slope of cross-entropy or of an entropy bonus is the same whatever the statistics hold; that of
a clipped surrogate is not. They are told apart by following what the statistics touch through the
term and its gradient: every result of an operation that reads them is marked, comparisons and
detached values included. What cannot be followed counts as marked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from .losses.term import TRACING, Term
from .packing import PackedBatch
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
    """Marks memory that depends on the values of `sources`.

    `lost`: a value has left for Python.
    """

    def __init__(self, sources: list[Any]) -> None:
        super().__init__()
        self.kept = [t for t in sources if isinstance(t, Tensor)]  # no memory is given away twice
        self.marked = {_memory(t) for t in self.kept}
        self.seen = set(self.marked)
        self.lost = False

    def know(self, clean: list[Tensor]) -> None:
        """Tensors that do not depend on the sources; what was never seen counts as marked."""
        self.seen |= {_memory(t) for t in clean}

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


class Known(NamedTuple):
    """That a term's gradient does not depend on the statistics.

    Attributes:
        everywhere: the gradient with respect to each statistic, where it does not depend on the
            batch either; None where it does.
    """

    everywhere: dict[str, float] | None


def known(term: Term, stats: Statistics, batch: PackedBatch) -> Known | None:
    """What is known of a term's gradient with respect to the statistics before they are.

    Args:
        stats, batch: a sample; statistics are leaves that require a gradient.

    Returns:
        None where the gradient depends on them, or may.
    """
    elsewhere = stats.map(lambda t: (1.5 * t.detach() - 0.3).requires_grad_(t.requires_grad))
    try:
        first, from_batch = _gradient(term, stats, batch)
        second, _ = _gradient(term, elsewhere, batch)
    except (RuntimeError, TypeError):  # what cannot be followed
        return None
    # The second point is for what leaves no trace, `tolist` for one.
    if first is None or second is None or first.keys() != second.keys():
        return None
    if not all(torch.equal(first[name], second[name]) for name in first):
        return None
    # Beyond token scope, a number of tokens or segments may have come in as a Python number.
    if term.scope != "token" or from_batch or any((g != g[0]).any() for g in first.values()):
        return Known(None)
    return Known({name: float(g[0]) for name, g in first.items()})


def _gradient(
    term: Term, stats: Statistics, batch: PackedBatch
) -> tuple[dict[str, Tensor] | None, bool]:
    """d term / d statistic, None where it hangs on the statistics; whether it does on the batch."""
    leaves = {name: t for name, t in stats.tensors().items() if name in DIFFERENTIABLE}
    batch = batch.on(stats)
    fields = [batch.targets, *batch.fields.values(), *batch.wide.values()]
    fields += vars(batch.segments).values()
    followed = _Follow(list(stats.tensors().values())), _Follow(fields)
    for mode, other in (followed, followed[::-1]):
        mode.know(other.kept)
    token = TRACING.set(True)
    try:
        with torch.enable_grad(), followed[0], followed[1]:
            values = term(stats, batch)
            one = torch.ones(values.shape, dtype=values.dtype, device=values.device)
            gradients = torch.autograd.grad(values, list(leaves.values()), one, allow_unused=True)
    finally:
        TRACING.reset(token)
    found = {n: g for n, g in zip(leaves, gradients, strict=True) if g is not None}
    depends = [mode.lost or any(map(mode.depends, found.values())) for mode in followed]
    return (None if depends[0] else found), depends[1]
