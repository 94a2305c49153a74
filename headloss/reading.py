"""Reading the device from the host."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Misguessed(Exception):
    """A call began before something was read that turned out otherwise: it is made again."""


class Room(NamedTuple):
    """Pinned memory that a kernel writes to, and the event behind it; to make them takes long."""

    values: Tensor  # [a power of two] int64
    event: torch.Event  # torch.cuda.Event takes the host four times as long
    free: list[Any]  # where it goes when nobody needs it any more


_FREE: defaultdict[tuple[int, int], list[Room]] = defaultdict(list)  # by size and device


def room_for(size: int, device: int) -> Room:
    """Room for at least so many values, that nothing writes to any more."""
    free = _FREE[size := 1 << (size - 1).bit_length(), device]
    try:
        room = free.pop()
        if room.event.query():
            return room
        free.insert(0, room)  # nobody has waited for it, and it is still written to
    except IndexError:  # there is none, or another thread was faster
        pass
    values = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)
    return Room(values, torch.Event("cuda"), free)


class Reading:
    """Values of a tensor that were on their way when this was made: they were copied, or a kernel
    writes them to a `room`. The host waits when it asks."""

    def __init__(self, values: Tensor, room: Room | None = None) -> None:
        self._values, self._room, self.event = values, room, None
        if room is not None:
            self._values, self.event = room.values, room.event
        elif values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self.event = torch.Event("cuda")
        if self.event is not None:
            here = values.get_device() == torch._C._cuda_getDevice()  # whose stream is the default
            self.event.record(*([] if here else [torch.cuda.current_stream(values.device)]))

    def tolist(self) -> list[Any]:
        """The values, or all that there is room for; waits for nothing that was queued behind."""
        if self.event is not None:
            self.event.synchronize()
        return self._values.tolist()  # type: ignore[no-any-return]

    def __del__(self) -> None:
        if self._room is not None:
            self._room.free.append(self._room)
