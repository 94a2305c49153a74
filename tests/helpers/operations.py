"""Recorder of PyTorch operations that launch GPU work, by the line of the package that calls
them."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode

import headloss

PACKAGE = Path(headloss.__file__).parent
# Places in the package whose operations are not counted: the kernels of a backend, and the three
# large matmuls.
LEFT_OUT = ("kernels/", "head/products.py")
# Operations without GPU work: empty memory, aliases of a tensor, an asynchronous check.
NOTHING = "empty new_empty empty_like empty_strided new_empty_strided _unsafe_view detach"
NOTHING += " _assert_async"


class Operations(TorchDispatchMode):
    """Record the innermost package line of each operation, except views and empty memory;
    "autograd" if no package line exists."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not (name in NOTHING.split() or is_view(func)):
            place = innermost()
            if not place.startswith(LEFT_OUT):
                self.noted.append(f"{place} {name}")
        return func(*args, **(kwargs or {}))

    def folders(self) -> dict[str, list[str]]:
        """Return the recorded GPU operations by folder or file of the package."""
        found: dict[str, list[str]] = {}
        for operation in sorted(self.noted):
            found.setdefault(re.split("[/:. ]", operation)[0], []).append(operation)
        return found

    def beyond(self, most: dict[str, int]) -> str:
        """Return lines of text: each folder of the package that launches more GPU operations than
        `most` allows, and the folder's operations."""
        lines = []
        for folder, operations in self.folders().items():
            if len(operations) > most.get(folder, 0):
                lines.append(f"{folder}: {len(operations)} operations, want {most.get(folder, 0)}")
                lines += [f"    {n} {place}" for place, n in Counter(operations).items()]
        return "\n".join(lines)


def is_view(func) -> bool:
    """Return True if the operator `func` is a view: its results share an argument's memory, and no
    values change."""
    aliases = [value.alias_info for value in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def innermost() -> str:
    """Return "file:line function" of the innermost stack frame in the package, or only the file if
    a frame of the stack is in `LEFT_OUT`."""
    frame, place = sys._getframe(2), "autograd"
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            name = path.relative_to(PACKAGE).as_posix()
            if name.startswith(LEFT_OUT):
                return name
            if place == "autograd":
                place = f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return place
