"""Test worlds: a few processes that are started once and then run functions on every rank."""

from __future__ import annotations

import multiprocessing as mp
import os
import runpy
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SECONDS = 60.0
PRELOADED = ["headloss.testing", "matrix"]
# Modules that a new rank process imports at its start if the process of the tests has imported
# them.
OF_TRAINERS = ["torch.distributed.fsdp", "torch.distributed.tensor"]
OF_TRAINERS += ["transformers.models.llama.modeling_llama", "trl.trainer.grpo_trainer"]


def forks() -> Any:
    """Return a fork server with torch and headloss imported."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED + [n for n in OF_TRAINERS if n in sys.modules])
    return context


def skip_any_row() -> None:
    """Let calls of any size skip token rows with a negligible gradient on a CPU, as `conftest.py`
    does."""
    from headloss.engine import plan

    plan.CPU_SKIP_WORTH = 0


def _serve(
    rank: int,
    world: int,
    store: str,
    pipe: Connection,
    prepare: Callable[[], None] | None,
    backend: str,
) -> None:
    """Run each received function, and send back (failed, result or traceback)."""
    import overhead
    import torch
    from torch import distributed

    overhead.spare()
    if prepare is not None:
        prepare()
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world
    )
    while True:
        function, args = pipe.recv()
        if function is None:
            break
        try:
            pipe.send((False, function(*args)))
        except Exception:
            pipe.send((True, traceback.format_exc()))
    distributed.destroy_process_group()


class World:
    """A group of waiting ranks; `run` returns each rank's result, or fails within a time limit.

    Args:
        prepare: function run first on every rank.
        backend: "gloo", or "nccl" with a GPU for each rank.
    """

    def __init__(
        self,
        size: int,
        folder: str,
        prepare: Callable[[], None] | None = skip_any_row,
        backend: str = "gloo",
    ) -> None:
        context = forks()
        self.size, self.pipes, self.processes = size, [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            args = (rank, size, str(Path(folder) / "store"), theirs, prepare, backend)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> list[Any]:
        """Run `function(*args)` on every rank; arguments and results are pickled."""
        for pipe in self.pipes:
            pipe.send((function, args))
        found = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(seconds):
                self.stop()
                raise TimeoutError(f"rank {rank} of {self.size} has not answered in {seconds} s")
            found.append(pipe.recv())
        failures = [f"rank {rank}:\n{text}" for rank, (bad, text) in enumerate(found) if bad]
        assert not failures, "\n".join(failures)
        return [result for _, result in found]

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send((None, ()))
        for process in self.processes:
            process.join(5)
        self.stop()


@contextmanager
def world_of(
    size: int, prepare: Callable[[], None] | None = skip_any_row, backend: str = "gloo"
) -> Iterator[World]:
    """Yield a `World` of `size` processes (ranks), and stop the processes when the context ends."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(size, folder, prepare, backend)
        try:
            yield world
        finally:
            world.close()


# ---------------------------------------------------------------------- scripts


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def _run_script(command: list[str], environment: dict[str, str], output: str) -> None:
    for stream, suffix in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}.{suffix}", os.O_WRONLY | os.O_CREAT), stream)
    import torch

    torch.set_num_threads(1)
    os.environ.update(environment)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


def script_on(size: int, *command: str, seconds: float = 120.0, **environment: str) -> str:
    """Return the output of a script on ranks with `torchrun`'s environment, in order of ranks."""
    place = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), **environment}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(size)]
        processes = []
        for rank, output in enumerate(outputs):
            of_rank = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            args = (list(command), of_rank, str(output))
            processes.append(forks().Process(target=_run_script, args=args, daemon=True))
            processes[-1].start()
        end, running = time.monotonic() + seconds, processes
        while running and time.monotonic() < end:
            wait([process.sentinel for process in running], end - time.monotonic())
            running = [process for process in running if process.is_alive()]
            if any(process.exitcode for process in processes):  # survivors may wait forever
                break
        for process in running:
            process.kill()
            process.join()
        codes = [process.exitcode for process in processes]
        out, errors = (
            "".join(output.with_suffix(suffix).read_text() for output in outputs)
            for suffix in (".out", ".err")
        )
    assert codes == [0] * size, f"ended with {codes}\n{out[-2000:]}\n{errors[-5000:]}"
    return out
