"""All kernels compile for absent GPUs, in a process without Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# KiB of shared memory.
TARGETS = {"cuda:80": 163, "cuda:89": 99, "cuda:90": 227, "cuda:100": 227, "hip:gfx942": 64}
ACCELERATED = ("cuda:90", "cuda:100")  # Targets with a tensor memory accelerator.
OVERLAPPING = {f"overlapping_{name}_kernel" for name in ("product", "slab")}
FUSED = {"product_kernel", "slab_kernel"}


def compiled(*arguments: str) -> tuple[list[dict], set[str]]:
    """Return all compiled kernels, each without an error, and the names of all kernels."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *sys.path])
    command = [sys.executable, str(HERE / "helpers" / "compiled_kernels.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    *found, last = (json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{")
    for row in found:
        assert not row["error"], row
        # `narrow_kernel` runs only on GPUs with a tensor memory accelerator.
        used = row["kernel"] != "narrow_kernel" or row["target"] in ACCELERATED
        assert not used or row["shared"] <= TARGETS[row["target"]] << 10, row
    return found, set(last["kernels"])


def names(found: list[dict], target: str) -> set[str]:
    return {row["kernel"] for row in found if row["target"] == target}


def test_a_product_and_a_slab() -> None:
    """The Triton kernels that multiply hidden states with a block of vocabulary rows compile for
    Hopper, including the Gluon kernel with an overlapping epilogue."""
    found, _ = compiled("cuda:90", "--only", "slab", "--forms", "least")
    assert names(found, "cuda:90") == {"overlapping_slab_kernel", "gradient_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel(target: str) -> None:
    """Every Triton kernel compiles for each GPU target, except kernels that the target does not
    use."""
    found, kernels = compiled(target, "--dtypes", "bfloat16", "float32")
    mine = names(found, target)
    never = {"cuda:90": {"product_kernel", "slab_kernel"}, "cuda:100": set()}
    assert kernels - mine == never.get(target, FUSED)
    assert (target == "cuda:90") is (mine >= OVERLAPPING)
