"""Speed of the loss and the in-place gradient of logits passed in by the caller, compared with a
copy of the logits.

Page: benchmarks/NOTES.md.

    python benchmarks/studies/given.py                 # on one GPU, about five minutes
    python benchmarks/studies/given.py --quick         # small, in Triton's interpreter
    python benchmarks/studies/given.py --calls         # whole calls alone, or --kernels

For each vocabulary size the study prints the bandwidth of a copy, and the bandwidth of the kernel
in every launch shape as a fraction of the copy's (best first); a bandwidth is the bytes of one read
and one write over the time. For comparison with the one kernel, the study also prints the bandwidth
of two kernels that compute first the statistics and then the gradient. The study also times whole
calls of `logits_loss`, forward and backward, and prints the CPU time of the calls. Errors are
relative norms over a few rows, against float64.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from contestants import captured
from timed import DEVICE, milliseconds

import headloss as hl
from headloss.kernels.interface import LogitRows, Walk
from headloss.kernels.transform import Transform
from headloss.kernels.triton import given as triton_given
from headloss.kernels.triton.given import Shape, given_rows
from headloss.statistics.softmax import SoftmaxCoefficients, finish

NEEDS = frozenset({"logp"})


def sweep_of(v: int) -> list[Shape]:
    """Return the launch shapes (block sizes, numbers of warps ..) to try for logits with v
    columns."""
    found = []
    for warps, turns, registers in itertools.product((4, 8, 16, 32), (1, 4, 16, 64), (32, 64)):
        if v / warps >= 1000:
            found.append(Shape(warps, turns, registers))
    return found


class Problem:
    """Logits with a mean probability of the target near one half, an unchanged copy of the logits,
    and the other inputs of a `logits_loss` call."""

    def __init__(self, n: int, v: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.n, self.v = n, v
        self.pristine = torch.empty(n, v, dtype=torch.bfloat16, device=DEVICE)
        for rows in self.pristine.split(1024):
            rows.copy_(torch.randn(rows.shape, generator=generator, device=DEVICE))
        self.targets = torch.randint(v, (n,), generator=generator, device=DEVICE)
        boost = torch.log(torch.tensor(v * 1.65, device=DEVICE)).bfloat16()
        self.pristine[torch.arange(n, device=DEVICE), self.targets] = boost
        self.work = torch.empty_like(self.pristine)
        offsets = torch.arange(n, device=DEVICE) * v
        self.rows = LogitRows(self.work, offsets, v % 16 == 0)
        weight = torch.full((n,), -1 / n, device=DEVICE)
        self.ce = SoftmaxCoefficients(target=weight, prob=-weight)

    def restore(self) -> None:
        self.work.copy_(self.pristine)

    @property
    def moved(self) -> int:
        return 2 * self.pristine.numel() * 2


def line(name: str, ms: float, copy_ms: float, p: Problem, note: str = "") -> None:
    print(f"  {name:44} {ms:8.3f} ms  {p.moved / ms / 1e9:6.2f} TB/s  {copy_ms / ms:.3f}  {note}")
    sys.stdout.flush()


# ---------------------------------------------------------------------- kernels


def one_launch(p: Problem, shape: Shape | None = None):
    walk = Walk(p.rows, p.rows, None, p.targets, 0, Transform(), NEEDS, p.ce)
    return given_rows(walk, shape=shape)


def two_launches(p: Problem) -> None:
    partials = given_rows(Walk(p.rows, None, None, p.targets, 0, Transform(), NEEDS))
    normalizer = finish(partials, p.v, NEEDS)[1]
    given = (None, p.ce, None, normalizer)
    given_rows(Walk(p.rows, p.rows, None, p.targets, 0, Transform(), *given))


def errors(p: Problem, gradient: torch.Tensor, logps: torch.Tensor, scale: float) -> str:
    """Return the errors of the cross-entropy on a few rows."""
    rows = torch.arange(0, p.n, max(1, p.n // 16), device=DEVICE)
    log_p = p.pristine[rows].double().log_softmax(1)
    target = p.targets[rows].unsqueeze(1)
    want = log_p.exp().scatter_add_(1, target, torch.full_like(target, -1, dtype=torch.float64))
    got = gradient[rows].double() / scale
    off = (got - want).norm() / want.norm()
    logp = (logps[rows].double() - log_p.gather(1, target).squeeze(1)).abs().max()
    return f"gradient off by {off:.1e}, log-prob by {logp:.1e}"


def kernels(p: Problem, copy_ms: float, repeats: int, sweep: list[Shape]) -> None:
    """Print the kernel's speed in every launch shape, best first."""
    p.restore()
    partials = one_launch(p)
    logps = finish(partials, p.v, NEEDS)[0].logp
    note = errors(p, p.work, logps, 1 / p.n)
    line(
        "one launch, as it is",
        milliseconds(lambda: one_launch(p), repeats, p.restore),
        copy_ms,
        p,
        note,
    )
    line("two launches", milliseconds(lambda: two_launches(p), repeats, p.restore), copy_ms, p)
    found = []
    for shape in sweep:
        try:
            ms = milliseconds(lambda s=shape: one_launch(p, s), repeats, p.restore)
        except Exception as error:  # Some shapes need too much shared memory.
            print(f"  {shape}: {str(error).splitlines()[0][:80]}")
            continue
        found.append((ms, shape))
    found.sort(key=lambda pair: pair[0])
    for ms, shape in found:
        line(" ".join(f"{k} {v}" for k, v in shape._asdict().items()), ms, copy_ms, p)


# ---------------------------------------------------------------------- whole calls


def calls(p: Problem, copy_ms: float, repeats: int) -> None:
    p.restore()
    with torch.no_grad():
        old = torch.empty(p.n, device=DEVICE)
        for rows in torch.arange(p.n, device=DEVICE).split(512):
            log_p = p.pristine[rows].float().log_softmax(1)
            old[rows] = log_p.gather(1, p.targets[rows].unsqueeze(1)).squeeze(1)
        old += 0.1 * torch.randn_like(old)
    advantages = torch.randn(p.n, device=DEVICE)
    grpo = hl.Batch(p.targets, advantages=advantages, old_logps=old)
    plain = hl.Batch(p.targets)
    options = {"backend": "triton"}
    cases = {
        "cross-entropy": (plain, hl.cross_entropy, {"metrics": False}),
        "cross-entropy, upstream declared": (
            plain,
            hl.cross_entropy,
            {"metrics": False, "upstream": 1.0},
        ),
        "cross-entropy, static": (plain, hl.cross_entropy, {"metrics": False, "static": True}),
        "cross-entropy, captured": (plain, hl.cross_entropy, {"metrics": False, "static": True}),
        "cross-entropy, metrics": (plain, hl.cross_entropy, {}),
        "grpo": (grpo, hl.grpo, {"metrics": False}),
        "grpo, metrics": (grpo, hl.grpo, {}),
        "gspo (two launches)": (grpo, hl.gspo, {"metrics": False}),
        "cross-entropy + z-loss (two launches)": (
            plain,
            lambda: hl.cross_entropy() + 1e-4 * hl.z_loss(),
            {"metrics": False},
        ),
    }
    for name, (batch, objective, more) in cases.items():
        if name == "cross-entropy, captured" and DEVICE.type == "cpu":
            continue
        # Make a new leaf: autograd ties a leaf to the CUDA stream of the graph that first used it.
        leaf = p.work.detach().requires_grad_()
        host: list[float] = []

        def run(leaf=leaf, batch=batch, objective=objective, more=more, host=host):
            begin = time.perf_counter()
            out = hl.logits_loss(
                leaf, batch, objective(), inplace=True, options=hl.Options(**options, **more)
            )
            (gradient,) = torch.autograd.grad(out.loss, leaf)
            host.append(1e3 * (time.perf_counter() - begin))
            return out, gradient

        def before():
            with torch.no_grad():
                p.restore()

        if name == "cross-entropy, captured":
            graph, (out, gradient) = captured(run)

            def run(graph=graph, out=out, gradient=gradient, host=host):
                begin = time.perf_counter()
                graph.replay()
                host.append(1e3 * (time.perf_counter() - begin))
                return out, gradient

        before()
        out, gradient = run()
        assert gradient.data_ptr() == leaf.data_ptr()
        note = errors(p, gradient, out.logps, 1 / p.n) if name.startswith("cross-entropy,") else ""
        host.clear()
        ms = milliseconds(run, repeats, before)
        line(name, ms, copy_ms, p, f"host {statistics.median(host):.2f} ms  {note}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Given logits against a copy of them.")
    parser.add_argument("--quick", action="store_true", help="small, on a CPU")
    parser.add_argument("--calls", action="store_true", help="whole calls alone")
    parser.add_argument("--logits", type=int, default=1 << 33, help="how many, in all")
    parser.add_argument("--kernels", action="store_true", help="kernels alone")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32768, 128256, 151936, 262144])
    arguments = parser.parse_args()
    sizes = [(arguments.logits // v // 512 * 512 or 64, v) for v in arguments.sizes]
    repeats = arguments.repeats
    if arguments.quick:
        sizes, repeats = [(6, 1000), (5, 4128)], 1
    if DEVICE.type == "cuda":
        print(torch.cuda.get_device_name(), torch.__version__, triton_given.triton.__version__)
    for n, v in sizes:
        p = Problem(n, v)
        copy_ms = milliseconds(p.restore, repeats)
        print(f"N={n} V={v}")
        line("copy", copy_ms, copy_ms, p)
        if not arguments.calls:
            sweep = [Shape(warps=1)] if arguments.quick else sweep_of(v)
            kernels(p, copy_ms, repeats, sweep)
        if not arguments.kernels:
            calls(p, copy_ms, repeats)
        del p


if __name__ == "__main__":
    main()
