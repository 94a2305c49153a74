"""Collectives of a process group, and errors for ranks that do not keep together.

A collective ends with an error, after the group's timeout at the latest, if another rank never
joins: a rank that was killed, or raised. After an exception on one rank alone its group cannot be
used any more: the other ranks are inside a collective that this rank never joined, and the next
collective of this rank would meet the wrong one of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, distributed

R = TypeVar("R")
PROCESS_GROUP = getattr(distributed, "ProcessGroup", ())
UNUSABLE = "the group cannot be used any more: end the processes of all ranks and start them again"


class RankError(RuntimeError):
    """A collective that not all ranks took part in."""


def together(
    what: str,
    group: distributed.ProcessGroup | None,
    run: Callable[..., R],
    /,
    *arguments: object,
    **options: object,
) -> R:
    """The result of `run`, a collective or the wait for one, on the other arguments; RankError if
    the backend gave up. None: of the default group."""
    try:
        return run(*arguments, **options)
    except RuntimeError as error:
        if not distributed.is_initialized():
            raise
        me = distributed.get_rank(group)
        ranks = distributed.get_process_group_ranks(group)
        raise RankError(
            f"{what}: rank {me} waited in vain for the other ranks of its group (global ranks "
            f"{ranks}): one was killed, raised, or made another call, as its own log will say; "
            f"{UNUSABLE}. The backend says: {error}"
        ) from error


def check_group(name: str, group: object) -> None:
    """TypeError for anything but a process group or None."""
    if group is not None and not isinstance(group, PROCESS_GROUP):
        raise TypeError(
            f"{name}: got {group!r}, want None or a process group that this rank is in (new_group "
            "returns a placeholder to the ranks that it leaves out)"
        )


def device_of(group: distributed.ProcessGroup | None) -> torch.device:
    """The device of a group's exchanges of host values: the CPU if possible, to wait for no GPU."""
    if re.search("cpu:(?!nccl)", str(distributed.get_backend_config(group))):  # as in "cpu:gloo"
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def summed(what: str, values: Tensor, group: distributed.ProcessGroup | None) -> Tensor:
    """The sum over the ranks, in the tensor's own memory."""
    together(what, group, distributed.all_reduce, values, group=group)
    return values


def gather(values: Tensor, group: distributed.ProcessGroup) -> Tensor:
    """[W, ..] of every rank's [..], in rank order."""
    of_ranks = values.new_empty(distributed.get_world_size(group), *values.shape)
    flat = values.contiguous().view(-1)  # gloo wants the output as one long tensor
    # The second name is deprecated where there is the first.
    run = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    together(
        "an exchange with the ranks of a group", group, run, of_ranks.view(-1), flat, group=group
    )
    return of_ranks


@contextmanager
def inside(device: str, *groups: distributed.ProcessGroup | None) -> Iterator[None]:
    """The surroundings of a call's own arithmetic: no autocast, and an exception of a rank that is
    not alone gets a note of what it means for the others."""
    try:
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                yield
        else:
            yield
    except Exception as error:
        if set(groups) != {None} and not isinstance(error, RankError):
            error.add_note(
                "headloss: this was raised between the collectives of a call. Unless every rank "
                "raised it at the same point, the others wait for this one until their group's "
                f"timeout, and {UNUSABLE}"
            )
        raise
