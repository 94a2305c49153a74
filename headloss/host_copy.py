"""Asynchronous copies of a tensor's values to CPU memory."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a GPU tensor's values to pinned CPU memory, made without blocking the CPU. The
    method `tolist` waits until the values are in CPU memory, and not for GPU work that was queued
    after the copy to the CPU."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._copied = None
        if values.is_cuda:
            self._values = values.to("cpu", non_blocking=True)  # In pinned memory.
            self._copied = torch.cuda.current_stream(values.device).record_event()

    def tolist(self) -> list:
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()  # type: ignore[no-any-return]
