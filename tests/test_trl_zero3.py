"""All trainers under DeepSpeed's ZeRO-3 agree with DDP step by step, in two processes.

The tests run on CPUs, with gloo. DeepSpeed is an optional extra that installs without a toolchain:
DS_BUILD_OPS=0 pip install --no-build-isolation '.[zero3]'
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="TRL is the trainer that headloss is put into")
from trl_zero3_ranks import CASES
from worlds import free_port

import headloss as hl

NAMES = list(CASES)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: DS_BUILD_OPS=0 pip install '.[zero3]'",
)
@pytest.mark.parametrize(
    "cases", [NAMES[i : i + 4] for i in range(0, len(NAMES), 4)], ids=lambda x: x[0]
)
def test_as_under_ddp(cases: list[str], tmp_path: Path) -> None:
    script = Path(__file__).parent / "helpers" / "trl_zero3_ranks.py"
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    paths = [*map(str, script.parents[1:3]), os.environ.get("PYTHONPATH")]
    on_cpus = {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, *launch, str(script), str(tmp_path), *cases],
        env={**os.environ, **on_cpus, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
        timeout=590,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-5000:]
    for case in cases:
        assert len(re.findall(rf"\n{case}: well on rank [01]", ran.stdout)) == 2, case


def test_a_head_that_is_read_outside() -> None:
    """A head whose weight ZeRO-3 has partitioned has no shape, and the error says how to gather
    it."""
    layer = torch.nn.Linear(4, 6, bias=False)
    layer.weight = torch.nn.Parameter(torch.empty(0))
    layer.weight.ds_id = 0  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"weight: got shape \(0,\), .*GatheredParameters"):
        hl.Head.of(layer)
