"""Asynchronous copies of a tensor's numbers to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor's values to pinned memory that does not block the host. `tolist` waits for
    the copy alone, and not for GPU work that was queued after the copy."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._copied = None
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(values.device))

    def tolist(self) -> list:
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()  # type: ignore[no-any-return]
