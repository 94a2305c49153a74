"""Ranks that must make the same call: what they say of it is compared, and errors are shared.

One all-gather of a record of fixed size per group and call. A rank that fails still takes part, so
that an error on one rank is raised on all of them, and no collective is left half attended.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

R = TypeVar("R")
FACTS = 24  # of a record, at most
TEXT = 64  # int64 words of an error message
ERRORS: tuple[type[Exception], ...] = (ValueError, TypeError)


class Facts(NamedTuple):
    """What a rank says of its call.

    Attributes:
        same: numbers, flags, names and checksums that must be equal on all ranks.
        own: numbers that may differ; every rank gets those of all.
    """

    same: Mapping[str, Any]
    own: Mapping[str, int]


def agree(
    name: str,
    group: ProcessGroup | None,
    act: Callable[[], R],
    describe: Callable[[R], Facts],
) -> tuple[R, dict[str, list[int]]]:
    """Run `act` on every rank of a group; its result, and each rank's `own` facts.

    Raises:
        ValueError, TypeError: what `act` raised on any of the ranks; a fact that is not the same
            on all of them; a rank outside of the group.
    """
    check_member(name, group)
    assert group is not None
    result, facts, error = None, Facts({}, {}), None
    try:
        result = act()
        facts = describe(result)
    except ERRORS as caught:
        error = caught
    records = _exchange(group, facts, error)
    me = distributed.get_rank(group)
    if error is not None:
        raise error
    for rank, record in enumerate(records):
        if record[0]:
            kind = ERRORS[record[0] - 1]
            raise kind(f"{_text(record)} (on rank {rank} of {name})")
    names = [*facts.same, *facts.own]
    for place, fact in enumerate(("call", *names), 1):
        found = [record[place] for record in records]
        if fact not in facts.own and len(set(found)) > 1:
            shown = facts.same.get(fact, 0)
            values = "" if isinstance(shown, Tensor | str) else f": got {found}"
            raise ValueError(
                f"{fact}: differs between the ranks of {name}{values}, want the same on all; "
                f"rank {next(r for r, x in enumerate(found) if x != found[me])} and this one, "
                f"rank {me}, do not agree"
            )
    own = {fact: [r[2 + names.index(fact)] for r in records] for fact in facts.own}
    return result, own  # type: ignore[return-value]


def check_member(name: str, group: Any) -> None:
    """ValueError for a process group that this rank is not in."""
    kind = getattr(distributed, "ProcessGroup", ())
    if not isinstance(group, kind) or distributed.get_rank(group) < 0:
        raise ValueError(
            f"{name}: got {group!r}, want a process group that this rank is in (new_group returns "
            "a placeholder to the ranks that it leaves out)"
        )


def checksum(*tensors: Tensor) -> Tensor:
    """[] int64 of the bits of tensors, in their order and places."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device if tensors else None)
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if flat.is_floating_point():
            flat = flat.view(INTEGERS[flat.element_size()])
        place = torch.arange(flat.numel(), device=flat.device)
        # Odd factors: each bit of each element shows. Sums of integers wrap and do not round.
        total = total * 31 + (flat.long() * (2 * place + 1)).sum() + flat.numel()
    return total


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _number(value: Any) -> int:
    if isinstance(value, str):
        return zlib.crc32(value.encode())
    return int(value)


def _exchange(group: ProcessGroup, facts: Facts, error: Exception | None) -> list[list[int]]:
    """Every rank's record: [error's kind, checksum of the facts' names, facts, message]."""
    device = _device(group)
    code = 0
    if error is not None:
        code = next(i for i, kind in enumerate(ERRORS, 1) if isinstance(error, kind))
    named = {**facts.same, **facts.own}
    if len(named) > FACTS:
        raise AssertionError(f"facts: got {len(named)}, want at most {FACTS}")
    head = [code, zlib.crc32(" ".join(named).encode())]
    head += [0 if isinstance(value, Tensor) else _number(value) for value in named.values()]
    head += [0] * (2 + FACTS - len(head))
    text = str(error or "").encode()[: 8 * TEXT].ljust(8 * TEXT, b"\0")
    words = [int.from_bytes(text[i : i + 8], "big", signed=True) for i in range(0, len(text), 8)]
    record = torch.tensor([*head, *words], dtype=torch.int64).to(device)
    for place, value in enumerate(named.values(), 2):
        if isinstance(value, Tensor):
            record[place] = value.to(device)
    found = record.new_empty(distributed.get_world_size(group), len(record))
    distributed.all_gather(list(found.unbind()), record, group=group)
    return found.tolist()


def _text(record: list[int]) -> str:
    words = record[2 + FACTS :]
    text = b"".join(word.to_bytes(8, "big", signed=True) for word in words)
    return text.rstrip(b"\0").decode(errors="ignore")


def _device(group: ProcessGroup) -> torch.device:
    """Where a group can send from."""
    backends = str(distributed.get_backend_config(group))
    if "nccl" in backends:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
