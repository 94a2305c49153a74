"""The path of hidden states through the package: all files that receive them during a call, up to
the gradient.

    PYTHONPATH=.:tests python tests/helpers/stays.py # print how a GRPO call hands on hidden states

A *stay* is a call of a function with hidden states among its arguments, where the function is in
another file than its caller. With `derived=True`, tensors that are computed from hidden states,
such as statistics, count as hidden states. A *climb* is a call that hands hidden states up the
import order: the called function is in a file that imports the calling file. The kernels of the
GRPO call are empty Triton kernels, so that no GPU is needed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from test_project import MODULES, PACKAGE, imports, module_name
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import headloss as hl
from headloss import kernels
from headloss.kernels.triton import launch, product

T, H, V = 16, 16, 32


class Followed(TorchDispatchMode):
    """Track the memory of hidden states through all operations; with `derived` also the memory of
    tensors computed from hidden states."""

    def __init__(self, *inputs: Tensor, derived: bool) -> None:
        super().__init__()
        self.derived = derived
        self.alive: list[Tensor] = []  # keeps addresses unique
        self.inputs = {start_of(t) for t in inputs}
        self.made: set[int] = set()

    def holds(self, value: Any, depth: int = 5) -> bool:
        """Return True if `value` is or contains a tensor whose memory is in `self.made`."""
        if isinstance(value, Tensor):
            return start_of(value) in self.made
        if depth == 0:
            return False
        if isinstance(value, dict):
            return any(self.holds(v, depth - 1) for v in value.values())
        if isinstance(value, list | tuple):
            return any(self.holds(v, depth - 1) for v in value)
        if type(value).__module__.startswith("headloss"):
            return self.holds(getattr(value, "__dict__", {}), depth - 1)
        return False

    def made_of(self, before: Any, after: Any) -> None:
        tensors = [t for t in tree_leaves(after) if isinstance(t, Tensor)]
        self.alive += tensors
        inputs = [t for t in tree_leaves(before) if isinstance(t, Tensor)]
        if self.derived and any(map(self.holds, inputs)):
            self.made |= {start_of(t) for t in tensors} - self.inputs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.made_of((args, kwargs), found)
        return found

    def launched(self, *arguments: Any, **_: Any) -> None:
        """Treat each tensor that a kernel receives as an output of the kernel, computed from all
        tensors that the kernel receives."""
        leaves = tree_leaves(arguments)
        numbers = {a for a in leaves if isinstance(a, int)}
        by_address = [t for t in self.alive if t.data_ptr() in numbers]
        given = [*by_address, *(t for t in leaves if isinstance(t, Tensor))]
        self.made_of(given, given)


def start_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextlib.contextmanager
def without_kernels(followed: Followed) -> Iterator[None]:
    """Run the Triton backend on a CPU with kernel launches replaced by a function that only notes
    the arguments."""

    def call(self: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        followed.launched(*arguments)

    with contextlib.ExitStack() as stack:
        for where, name, value in (
            (kernels, "choose", lambda *_: "triton"),
            (kernels, "can_write_exp", lambda *_: True),
            (product, "overlaps", lambda *_: False),
            (launch.Launcher, "__call__", call),
        ):
            stack.enter_context(patch.object(where, name, value))
        yield


def stays(derived: bool) -> list[tuple[str, str]]:
    """Return (module, function) of each call that hands hidden states to another file; with
    `derived` also tensors computed from hidden states."""
    hidden = torch.randn(T, H).bfloat16().requires_grad_()
    weight = torch.randn(V, H).bfloat16().requires_grad_()
    old, advantages = -torch.rand(T), torch.randn(4)
    segments = hl.Segments.from_lengths([4] * 4)
    batch = hl.Batch(torch.arange(T), segments, advantages=advantages, old_logps=old)
    # a first call, which computes and caches the order of tokens
    hl.head_loss(hidden, hl.Head(weight), batch, hl.grpo())
    followed = Followed(weight, batch.targets, segments.ids, advantages, old, derived=derived)
    followed.made.add(start_of(hidden))
    found: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            return
        takes = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 12)
        given = frame.f_locals
        if any(followed.holds(given.get(name)) for name in code.co_varnames[:takes]):
            module = module_name(Path(code.co_filename))
            if not found or found[-1][0] != module:
                found.append((module, code.co_name))

    hl.clear_cache()
    # Leave out `skip_rows`, which reads from the device, and metrics, which do not lead to the
    # gradient.
    options = hl.Options(skip_rows=False, metrics=False)
    with without_kernels(followed):
        hl.head_loss(hidden, hl.Head(weight), batch, hl.grpo(), options).loss.backward()
        hidden.grad = weight.grad = None
        with followed:
            sys.setprofile(note)
            try:
                out = hl.head_loss(hidden, hl.Head(weight), batch, hl.grpo(), options)
                out.loss.backward()
            finally:
                sys.setprofile(None)
    hl.clear_cache()
    return found


def climbs(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return pairs of files (from, to) in which `to` imports `from`."""
    names = [name for name, _ in found]
    above = []
    for left, entered in itertools.pairwise(names):
        path = MODULES[entered]
        if left in imports(entered, path.read_text(), path.name == "__init__.py"):
            above.append((left, entered))
    return above


if __name__ == "__main__":
    for what, derived in (("hidden states", False), ("or what was made of them", True)):
        stations = stays(derived)
        for name, function in stations:
            print(f"{name:24} {function}")
        print(f"{what}: {len(stations)} stays, {len(climbs(stations))} climbs\n")
