"""Collectives of a process group, and the error raised when a rank drops out.

If a rank was killed or raised an exception and never joins a collective, the collective ends with
an error after the group's timeout at the latest. After an exception on a single rank, the rank's
process group cannot be used any more, because the rank's next collective would be matched with an
earlier collective of the group.
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
    """The error raised when some ranks did not join a collective."""


def together(
    what: str,
    group: distributed.ProcessGroup | None,
    run: Callable[..., R],
    /,
    *arguments: object,
    **options: object,
) -> R:
    """Return the result of `run`, a collective or the wait for a collective, on the given
    arguments; RankError if the collective's backend gave up. A `group` of None is the default
    group."""
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
    """Return the device for a group's exchange of host values: the CPU if possible, so as not to
    wait for a GPU."""
    # For example, "cpu:gloo".
    if re.search("cpu:(?!nccl)", str(distributed.get_backend_config(group))):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def summed(what: str, values: Tensor, group: distributed.ProcessGroup | None) -> Tensor:
    """Return the sum over the ranks, written into the tensor `values`."""
    together(what, group, distributed.all_reduce, values, group=group)
    return values


def gather(values: Tensor, group: distributed.ProcessGroup) -> Tensor:
    """Return [W, ..], the tensors [..] of all W ranks in rank order."""
    of_ranks = values.new_empty(distributed.get_world_size(group), *values.shape)
    flat = values.contiguous().view(-1)  # gloo's all-gather accepts only vectors.
    # Newer versions of torch deprecate `all_gather_into_tensor` for `all_gather_single`.
    run = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    together(
        "an exchange with the ranks of a group", group, run, of_ranks.view(-1), flat, group=group
    )
    return of_ranks


@contextmanager
def inside(device: str, *groups: distributed.ProcessGroup | None) -> Iterator[None]:
    """Context of a call's computation: autocast is off, and an exception in a group of several
    ranks gets a note on the consequences for the other ranks."""
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
