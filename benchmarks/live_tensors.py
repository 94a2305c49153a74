"""A memory meter for CPU tensors, since PyTorch's CPU allocator counts no bytes."""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Track all tensors created by operators: the largest tensor, and the peak of live bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0  # Number of elements of the largest live tensor.
        self.peak = 0
        self._live: dict[int, int] = {}  # bytes by storage

    @property
    def live(self) -> int:
        return sum(self._live.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _key(tensor) not in inputs:
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._live or not storage.nbytes():
            return
        self.largest = max(self.largest, storage.nbytes() // tensor.element_size())
        self._live[key] = storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._live.pop, key)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
