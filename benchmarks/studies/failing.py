"""What happens to a rank after the other rank fails in the middle of a call: the error, and the
delay until the error.

Page: benchmarks/NOTES.md.

    python benchmarks/studies/failing.py --output benchmarks/results/failing.json      # NCCL
    python benchmarks/studies/failing.py --backend gloo                                # on the CPU

Two processes run calls of `head_loss` together: each process holds a slice of the vocabulary, or a
part of the tokens of common segments. Each pair of processes makes two calls; in the second call,
the loss term raises an error in the second process, or the second process is killed. The processes
are started directly, since a launcher such as torchrun would end the surviving process after a
failure. Each case has its own pair of processes, and all pairs run at the same time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import torch
from ranks import share_a_gpu
from torch import Tensor, distributed

import headloss as hl

TOKENS, WIDTH, VOCABULARY = 256, 64, 1024
# If the field `armed` of the batch contains this value, the loss term fails; when headloss tries a
# new term on made-up tokens, `armed` has other values.
ARMED = 100.0
SAYS = re.compile(r"RankError: .*|.*(?:Watchdog caught|timed out|remote process|Timeout).*", re.I)


@dataclass(frozen=True, kw_only=True)
class Case:
    over: str  # What the two processes share: the "vocabulary" or "segments".
    how: str  # The second process "raises" an error or is "killed".
    # With "blocking", TORCH_NCCL_BLOCKING_WAIT=1 makes the CPU wait for every collective.
    waits: str = ""


def cases(backend: str) -> list[Case]:
    found = [
        Case(over=over, how=how)
        for over in ("vocabulary", "segments")
        for how in ("raises", "killed")
    ]
    if backend == "nccl":
        found += [Case(over="vocabulary", how=h, waits="blocking") for h in ("raises", "killed")]
    return found


# ---------------------------------------------------------------------- one process


@hl.term
def fragile(stats: Any, batch: Any, how: str = "", folder: str = "") -> Tensor:
    """Fail on the second rank if `batch.armed` contains `ARMED`; the failure then happens in the
    middle of a call."""
    if distributed.get_rank() == 1 and bool((batch.armed == ARMED).any()):
        Path(folder, "failed").touch()
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("a bug of the user's")
    return -stats.logp


def call(case: Case, device: torch.device, folder: str, armed: float = 0.0) -> None:
    torch.manual_seed(0)
    rank, group = distributed.get_rank(), distributed.group.WORLD
    hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH)
    half = TOKENS // 2
    segments: Any = hl.Segments.from_lengths([half, half])
    head = {}
    if case.over == "segments":
        segments = hl.Segments.from_ids(segments.ids.to(device), count=2, group=group)
    else:
        weight, head = weight.chunk(2)[rank], {"vocab_group": group}
        segments = hl.Segments.from_ids(segments.ids.to(device), count=2)
    leaves = [t.to(device, copy=True).requires_grad_() for t in (hidden, weight)]
    batch = hl.Batch(
        torch.arange(TOKENS, device=device),
        segments,
        advantages=torch.ones(2, device=device),
        old_logps=torch.full((TOKENS,), -5.0, device=device),
        armed=torch.full((TOKENS,), armed, device=device),
    )
    objective = fragile(how=case.how, folder=folder) + hl.gspo()
    out = hl.head_loss(leaves[0], hl.Head(leaves[1], **head), batch, objective)
    out.loss.backward()
    out.loss.item()


def work(case: Case, rank: int, backend: str, folder: str, seconds: float) -> None:
    device = torch.device("cpu")
    if backend == "nccl":
        if torch.cuda.device_count() < 2:
            share_a_gpu(rank)
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=seconds),
    )
    call(case, device, folder)  # a correct call first, which also compiles kernels
    distributed.barrier()
    try:
        call(case, device, folder, ARMED)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # After a failed collective the process group cannot be destroyed.
    os._exit(0)


# ---------------------------------------------------------------------- starting the processes


def start(case: Case, rank: int, backend: str, folder: str, seconds: float) -> Any:
    command = [sys.executable, __file__, "--rank", str(rank), "--backend", backend]
    command += ["--folder", folder, "--seconds", str(seconds), "--case", json.dumps(asdict(case))]
    more = {"TORCH_NCCL_BLOCKING_WAIT": "1"} if case.waits else {}
    with Path(folder, f"log-{rank}").open("w") as log:
        return subprocess.Popen(
            command, env={**os.environ, **more}, stdout=log, stderr=subprocess.STDOUT
        )


def row_of(case: Case, pair: list[Any], ended: list[float], folder: str) -> dict[str, Any]:
    failed = Path(folder, "failed")
    logs = [Path(folder, f"log-{rank}").read_text(errors="replace") for rank in (0, 1)]
    says = [line.strip() for line in logs[0].splitlines() if SAYS.search(line)]
    return {
        **asdict(case),
        "exit_codes": [process.returncode for process in pair],
        "seconds": ended[0] - failed.stat().st_mtime if failed.exists() and ended[0] else None,
        "says": says[0][-600:] if says else "",
        "note": "headloss: this was raised between the collectives" in logs[1],
        "log": logs[0][-4000:],
    }


def run(backend: str, seconds: float, limit: float) -> list[dict[str, Any]]:
    began, pairs = time.time(), []
    for case in cases(backend):
        folder = tempfile.mkdtemp(prefix="headloss-failing-")
        pair = [start(case, rank, backend, folder, seconds) for rank in (0, 1)]
        pairs.append((case, pair, [0.0, 0.0], folder))
    while any(p.poll() is None for _, pair, _, _ in pairs for p in pair):
        for _, pair, ended, _ in pairs:
            for rank, process in enumerate(pair):
                if process.poll() is not None and not ended[rank]:
                    ended[rank] = time.time()
                elif process.poll() is None and time.time() - began > limit:
                    process.kill()
        time.sleep(0.05)
    for _, _, ended, _ in pairs:
        for rank in (0, 1):
            ended[rank] = ended[rank] or time.time()
    return [row_of(*each) for each in pairs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--seconds", type=float, default=10.0, help="the group's timeout")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds until all are killed")
    parser.add_argument("--output", type=Path)
    for name, kind in (("--rank", int), ("--folder", str), ("--case", str)):
        parser.add_argument(name, type=kind, help="of a process that this command starts")
    given = parser.parse_args()
    if given.rank is not None:
        case = Case(**json.loads(given.case))
        work(case, given.rank, given.backend, given.folder, given.seconds)
        return 0
    rows = run(given.backend, given.seconds, given.limit)
    for row in rows:
        of = ", ".join(filter(None, [row["over"], row["how"], row["waits"]]))
        took = "never" if row["seconds"] is None else f"{row['seconds']:.1f} s"
        print(f"{of}: ends after {took}, codes {row['exit_codes']}: {row['says'][:300]}")
    if given.output:
        given.output.write_text(json.dumps({"timeout": given.seconds, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
