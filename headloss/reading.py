"""Reading the device from the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Misguessed(Exception):
    """A call began before something was read that turned out otherwise: it is made again."""


class Reading:
    """Values of a tensor that were copied when this was made; the host waits when it asks."""

    def __init__(self, values: Tensor) -> None:
        self._values, self.event = values, None
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self.event = torch.Event("cuda")  # torch.cuda.Event takes the host four times as long
            self.event.record()

    def tolist(self) -> list[Any]:
        """The values; waits for their copy alone, and for nothing that was queued behind it."""
        if self.event is not None:
            self.event.synchronize()
        return self._values.tolist()  # type: ignore[no-any-return]
