"""Tools for one rank of a process group: steps whose names are printed, timers, and a counter of
the bytes that collectives send.

A hanging step can be identified: the name of a step is printed before the step begins, every rank's
stack is printed after `HANG` seconds, and a collective with a missing rank fails after `TIMEOUT`
seconds.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast (NVLS) needs a fabric manager.
HANG, TIMEOUT = 45, 60  # Seconds.


def share_a_gpu(rank: int) -> None:
    """Let NCCL run two ranks on one GPU, which NCCL refuses for ranks on one host.

    Each rank gets a host name of its own, and the ranks communicate over sockets. `share_a_gpu`
    must be called before a process group exists.
    """
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")


class Ranks:
    """One rank of a process group: with a GPU on NCCL and gloo, without a GPU on gloo.

    Args:
        quick: run on the CPU even if the machine has GPUs.
        limit: seconds from now after which no new work begins.
    """

    def __init__(self, quick: bool = False, limit: float = 75.0) -> None:
        self.began, self.limit = time.perf_counter(), limit
        self.device, backend = torch.device("cpu"), "gloo"
        options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=TIMEOUT)}
        self.rank = int(os.environ["RANK"])
        with self.step("join the process group"):
            if not quick:
                self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                # By gloo, ranks compare the arguments of a call without the GPU.
                backend = "cpu:gloo,cuda:nccl"
                torch.cuda.set_device(self.device)
                # With a device id, NCCL makes its communicators at once, not at the first
                # collective.
                options["device_id"] = self.device
            distributed.init_process_group(backend, **options)
            self.size, self.group = distributed.get_world_size(), distributed.group.WORLD
            self.wait()

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def say(self, text: str) -> None:
        """Print from rank 0."""
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.began:6.1f} s] {text}", flush=True)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Print a line before and after a named piece of work, and all stacks if the work hangs."""
        self.say(f"{name} ...")
        start = time.perf_counter()
        faulthandler.dump_traceback_later(HANG, exit=False, file=sys.__stderr__)
        try:
            yield
            self.settle()
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.say(f"{name}: {time.perf_counter() - start:.1f} s")

    def settle(self) -> None:
        """Wait for this rank's device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def wait(self) -> None:
        """Wait for all ranks."""
        distributed.all_reduce(torch.zeros(1, device=self.device))
        self.settle()

    def most(self, value: float) -> float:
        """Return the maximum of all ranks' values, on every rank."""
        found = torch.tensor([value], dtype=torch.float64, device=self.device)
        distributed.all_reduce(found, distributed.ReduceOp.MAX)
        return float(found)

    def is_late(self) -> bool:
        """Return True on all ranks if the time limit has passed on any rank."""
        return self.most(time.perf_counter() - self.began) > self.limit

    def share(self, *tensors: Tensor) -> None:
        """Copy rank 0's values to all ranks, because sums by atomics differ in their last bits."""
        for tensor in tensors:
            distributed.broadcast(tensor.detach(), 0)

    def milliseconds(
        self, step: Callable[[], Any], repeats: int, warm: int = 3, in_a_row: int = 1
    ) -> list[float]:
        """Return the milliseconds of each repetition of a step on this rank: isolated on an idle
        device, or averaged over back-to-back steps."""
        found = []
        for turn in range(warm + repeats):
            self.settle()
            start = time.perf_counter()
            if self.on_gpu:
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                events[0].record()
                for _ in range(in_a_row):
                    step()
                events[1].record()
                self.settle()
                spent = events[0].elapsed_time(events[1])
            else:
                for _ in range(in_a_row):
                    step()
                spent = 1e3 * (time.perf_counter() - start)
            if turn >= warm:
                found.append(spent / in_a_row)
        return found

    def close(self) -> None:
        distributed.destroy_process_group()


def middle(times: list[float]) -> dict[str, float]:
    """Return the median and the spread of times in milliseconds."""
    return {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}


# ---------------------------------------------------------------------- collectives


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _others(group: Any) -> float:
    return distributed.get_world_size(group) - 1


def _share(group: Any) -> float:
    return _others(group) / (_others(group) + 1)


# For each collective: the index of the argument that holds the tensor to send, and how many times a
# ring algorithm sends this tensor.
SENT: dict[str, tuple[int, Callable[[Any], float]]] = {
    "all_gather_into_tensor": (1, _others),
    "all_gather_single": (1, _others),
    "all_reduce": (0, lambda group: 2 * _share(group)),
    "reduce_scatter_tensor": (1, _share),
    "reduce_scatter_single": (1, _share),
    "all_to_all_single": (1, _share),
}


def sent_bytes(name: str, args: tuple, options: dict[str, Any]) -> float:
    """Return the bytes that a rank sends in one collective call."""
    place, times = SENT[name]
    named = (options[key] for key in ("input", "input_tensor", "tensor") if key in options)
    own = next(named) if len(args) <= place else args[place]
    return times(options.get("group")) * _size(own)


@contextmanager
def counted() -> Iterator[dict[str, float]]:
    """Count this rank's collective calls, and the bytes sent by ring algorithms."""
    found = {"calls": 0.0, "bytes": 0.0}
    plain = {name: getattr(distributed, name) for name in SENT if hasattr(distributed, name)}

    def counting(name: str) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            found["calls"] += 1
            found["bytes"] += sent_bytes(name, args, options)
            return plain[name](*args, **options)

        return run

    for name in plain:
        setattr(distributed, name, counting(name))
    try:
        yield found
    finally:
        for name, run in plain.items():
            setattr(distributed, name, run)


def shares(step: Callable[[], Any], ranks: Ranks, turns: int = 3) -> dict[str, float]:
    """Return how the time from a step's first to its last kernel is spent, as medians over `turns`
    steps.

    "collectives" is the fraction of the step's time in which a collective runs. "exposed" is the
    fraction in which a collective runs and no other kernel does. "idle" is the fraction in which no
    kernel runs.
    """
    from torch.profiler import ProfilerActivity, profile

    found = []
    for _ in range(turns):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            ranks.wait()  # profilers of different ranks start at different times
            step()
            ranks.settle()
        spans = [
            (event.time_range.start, event.time_range.end, "nccl" in event.name.lower())
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        waited = min(end for _, end, sends in spans if sends)
        found.append(_shares([span for span in spans if span[0] > waited]))
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def _shares(spans: list[tuple[float, float, bool]]) -> dict[str, float]:
    total = max(end for _, end, _ in spans) - min(start for start, *_ in spans)
    sent, busy = (covered([s[:2] for s in spans if s[2] == sends]) for sends in (True, False))
    both = covered([s[:2] for s in spans])
    found = {"collectives": sent, "exposed": both - busy, "idle": total - both}
    return {name: value / total for name, value in found.items()}


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
