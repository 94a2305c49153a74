"""Two processes: under DDP again step for step as stock TRL, and a model that FSDP2 shards.

accelerate has no FSDP2 on a CPU, so that the model is sharded by hand.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is the trainer that headloss is put into")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


CASES = ("grpo", "sft", "dpo", "ppo", "fsdp2", "fsdp2_head", "fsdp2_lone_head")


def test_two_ranks() -> None:
    script = Path(__file__).with_name("trl_ranks.py")
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    root = str(script.parents[1])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, *launch, str(script), *CASES],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    for case in CASES:
        assert len(re.findall(rf"{case}: \d+ steps alike on rank [01]", ran.stdout)) == 2
