"""Peak memory of one forward and backward on a CPU: headloss compared with eager PyTorch.

Page: benchmarks/README.md.

    python benchmarks/studies/cpu_memory.py --output benchmarks/results/cpu_memory.json

Each implementation runs in a separate process on identical inputs: T tokens, hidden width H,
vocabulary V. A call's memory is the largest resident set of the process during the call, minus the
resident set before the call (on Linux). A call's memory includes the returned gradients of hidden
states and weight. All implementations of a benchmarked loss must return equal values.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import headloss as hl
from headloss.testing import random_batch, trained_looking

MIB = 1 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def eager_cross_entropy(logits: Tensor, batch: hl.Batch) -> Tensor:
    """Return the usual mean cross-entropy over tokens."""
    return F.cross_entropy(logits, batch.targets)


def eager_gspo(logits: Tensor, batch: hl.Batch, low: float = 3e-4, high: float = 4e-4) -> Tensor:
    """Return -min(s A, clip(s) A) averaged over segments, with s = exp(mean_t(logp - old))."""
    logps = logits.log_softmax(-1).gather(1, batch.targets.unsqueeze(1)).squeeze(1)
    ratio = batch.segments.mean(logps - batch.old_logps).exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).mean()


def eager(hidden: Tensor, weight: Tensor, batch: hl.Batch, loss) -> Tensor:
    return loss(hidden @ weight.T, batch)


def ours(hidden: Tensor, weight: Tensor, batch: hl.Batch, objective, **options) -> Tensor:
    return hl.head_loss(hidden, hl.Head(weight), batch, objective, hl.Options(**options)).loss


CONTESTANTS: dict[str, tuple[str, Callable[[Tensor, Tensor, hl.Batch], Tensor]]] = {
    "eager": ("cross_entropy", lambda *a: eager(*a, eager_cross_entropy)),
    "head_loss": ("cross_entropy", lambda *a: ours(*a, hl.cross_entropy())),
    "head_loss, 64 MiB": (
        "cross_entropy",
        lambda *a: ours(*a, hl.cross_entropy(), memory_budget=64 * MIB),
    ),
    "eager GSPO": ("gspo", lambda *a: eager(*a, eager_gspo)),
    "head_loss GSPO": ("gspo", lambda *a: ours(*a, hl.gspo())),
    "head_loss GSPO + KL + entropy + z-loss": (
        "gspo and more",
        lambda *a: ours(*a, hl.gspo() + 0.01 * hl.kl() - 1e-3 * hl.entropy() + 1e-4 * hl.z_loss()),
    ),
}


def run_one(name: str, tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> dict:
    """Measure one implementation in this process."""
    work, loss = CONTESTANTS[name]
    loss(*_inputs(64, 16, 128, dtype)).backward()  # first use of libraries allocates memory
    hidden, weight, batch = _inputs(tokens, width, vocabulary, dtype)
    before = _status("VmRSS:")
    _reset_peak()
    value = loss(hidden, weight, batch)
    value.backward()
    assert hidden.grad is not None and weight.grad is not None
    gradients = hidden.grad.nbytes + weight.grad.nbytes
    return {
        "contestant": name,
        "work": work,
        "loss": float(value.detach()),
        "peak_bytes": _status("VmHWM:") - before,
        "returned_gradient_bytes": gradients,
    }


def _inputs(tokens: int, width: int, vocabulary: int, dtype: torch.dtype):
    hidden, weight, targets = trained_looking(tokens, width, vocabulary, dtype)
    segments = hl.Segments.from_lengths([tokens // 8] * 8)
    batch = random_batch(targets, segments, torch.full((tokens,), -1.0))
    return hidden.requires_grad_(), weight.requires_grad_(), batch


def _status(field: str) -> int:
    """Return a memory field of this process's status, in bytes (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def _reset_peak() -> None:
    """Reset the peak to the present resident set, if permitted; else the peak covers the process's
    life."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("the peak covers the whole process: it could not be reset", file=sys.stderr)


def measure(arguments: argparse.Namespace) -> dict:
    """Measure every implementation in a separate process."""
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("tokens", "hidden", "vocab")]
    rows = []
    for name in CONTESTANTS:
        command = [sys.executable, __file__, *sizes, "--dtype", arguments.dtype]
        ran = subprocess.run(
            [*command, "--contestant", name], stdout=subprocess.PIPE, text=True, check=True
        )
        rows.append(json.loads(ran.stdout))
        print(_line(rows[-1]), flush=True)
        first = next(row["loss"] for row in rows if row["work"] == rows[-1]["work"])
        if not abs(rows[-1]["loss"] - first) <= 1e-4 * abs(first):
            raise RuntimeError(f"{name}: got loss {rows[-1]['loss']}, want {first}")
    return {
        "tokens": arguments.tokens,
        "hidden": arguments.hidden,
        "vocabulary": arguments.vocab,
        "dtype": arguments.dtype,
        "machine": f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": rows,
    }


def _line(row: dict) -> str:
    return f"{row['contestant']:40}{row['peak_bytes'] / MIB:8.0f} MiB   loss {row['loss']:.6f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--contestant", choices=CONTESTANTS, help="measure this one alone")
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON")
    arguments = parser.parse_args(argv)
    if arguments.contestant:
        sizes = (arguments.tokens, arguments.hidden, arguments.vocab)
        print(json.dumps(run_one(arguments.contestant, *sizes, DTYPES[arguments.dtype])))
        return 0
    results = measure(arguments)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
