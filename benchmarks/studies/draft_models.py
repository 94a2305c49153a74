"""Speed of draft-model losses, compared with speculators' fused losses on stored logits.

Page: docs/draft-models.md.

    python benchmarks/studies/draft_models.py --output drafts.json  # on one GPU, about two minutes
    python benchmarks/studies/draft_models.py --quick                 # small, on a CPU

The study first checks correctness against float64: every divergence, teacher rows that several
positions share, a vocabulary of another size, and additional columns of the head. For correct
calls the study measures the time of forward and backward, the error of the hidden gradient, and
the peak memory in excess of inputs and gradients. The heads of draft and verifier are frozen, as
in draft-model training. At the end, the study measures a training step of a whole draft model
(draft_cases.py). The losses of the library speculators are timed only if speculators can be
imported.

T positions, S unrolled steps, H hidden width, V vocabulary, R additional columns of the head.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import draft_cases
import torch
import torch.nn.functional as F
from run import about, write
from steps import PACKAGES
from steps import race as step_race
from timed import DEVICE, milliseconds, peak_mib
from torch import Tensor

import headloss as hl
from headloss.testing import error

try:
    from speculators.losses import fused
except ImportError:
    fused = None
DTYPE = torch.bfloat16
PLAIN = hl.Options(metrics=False)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a draft loss: T x S hidden states of the draft (T positions, S unrolled steps),
    compared with T hidden states of the verifier."""

    tokens: int
    steps: int
    width: int
    vocabulary: int
    beside: int = 0


class Region:
    """Hidden states of a draft and a verifier, with one frozen weight as head of both."""

    def __init__(self, shape: Shape, dtype: torch.dtype = DTYPE) -> None:
        torch.manual_seed(0)
        rows, self.shape = shape.tokens * shape.steps, shape
        self.weight = self.normal(shape.vocabulary, shape.width, dtype=dtype) * shape.width**-0.5
        self.states = self.normal(shape.tokens, shape.width, dtype=dtype) * 3
        self.index = torch.arange(shape.tokens, device=DEVICE).repeat_interleave(shape.steps)
        noise = self.normal(rows, shape.width, dtype=dtype)
        self.hidden = (self.states[self.index] * 0.8 + noise).requires_grad_()
        self.leaves = [self.hidden]
        if shape.beside:
            features = self.normal(rows, shape.beside, dtype=dtype).requires_grad_()
            columns = (self.normal(shape.vocabulary, shape.beside, dtype=dtype) / 16).detach()
            self.leaves += [features, columns.requires_grad_()]
        self.targets = torch.randint(shape.vocabulary, (rows,), device=DEVICE)
        self.step_weights = 0.8 ** (torch.arange(rows, device=DEVICE) % shape.steps).float()

    def widened(self) -> Region:
        """Convert the tensors of this `Region` to float64, in place, and return `self`."""
        self.leaves = [leaf.detach().double().requires_grad_() for leaf in self.leaves]
        self.hidden, self.weight = self.leaves[0], self.weight.double()
        self.states = self.states.double()
        return self

    @staticmethod
    def normal(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*size, device=DEVICE, dtype=dtype)

    # ------------------------------------------------------------------ ours

    def batch(self) -> hl.Batch:
        fields = {"teacher_hidden": self.states, "step_weights": self.step_weights}
        if self.shape.steps > 1:
            fields["teacher_index"] = self.index
        return hl.Batch(self.targets, **fields)

    def head(self) -> hl.Head:
        return hl.Head(self.weight, beside=(tuple(self.leaves[1:]),) if self.leaves[1:] else ())

    def ours(self, objective: Any, argmax: bool = False) -> Callable[[], list[Tensor]]:
        """Make a headloss call for all unrolled steps of the draft. With `argmax`, the verifier's
        likeliest token is the target."""
        batch, head = self.batch(), self.head()
        teacher = hl.Head(self.weight)

        def run() -> list[Tensor]:
            call = batch
            if argmax:
                call = hl.Batch(hl.head_topk(self.states, teacher, 1).ids[:, 0], **batch.fields)
            out = hl.head_loss(self.hidden, head, call, objective(teacher), PLAIN)
            return list(torch.autograd.grad(out.loss, self.leaves))

        return run

    # ------------------------------------------------------------------ theirs

    def theirs(self, losses: list[tuple[float, str]]) -> Callable[[], list[Tensor]]:
        """Make the computation of the library speculators: it computes the logits of the verifier
        and of each draft step, and keeps all of them for the backward pass."""
        steps, rows = self.shape.steps, len(self.hidden)

        def run() -> list[Tensor]:
            with torch.no_grad():
                targets = F.linear(self.states, self.weight)[None]
            total: Any = 0.0
            for step in range(steps):
                logits = F.linear(self.hidden[step::steps], self.weight)
                if self.shape.beside:
                    logits = logits + F.linear(*self.leaves[1:])
                for weight, name in losses:
                    value = getattr(fused, f"fused_{name}_loss")(logits[None], targets)
                    total = total + weight * 0.8**step * value.sum() / rows
            return list(torch.autograd.grad(total, self.leaves))

        return run


def eagle(teacher: hl.Head) -> hl.Term:
    return hl.distillation(teacher_head=teacher).weighted("step_weights")


def total_variation(teacher: hl.Head) -> hl.Term:
    term = hl.distillation(divergence="total_variation", teacher_head=teacher)
    return term.weighted("step_weights")


def dspark(teacher: hl.Head) -> hl.Term:
    return hl.dspark(gamma=None, teacher_head=teacher)


def everything(teacher: hl.Head) -> hl.Objective:
    kinds = ("forward_kl", "reverse_kl", "js", "total_variation")
    terms = [hl.distillation(divergence=kind, teacher_head=teacher) for kind in kinds]
    return sum(terms) + hl.nla(teacher_head=teacher) + 0.1 * hl.cross_entropy()


def check(shape: Shape) -> dict[str, float]:
    """Return errors of float32 gradients by the backend `auto`, against float64; ValueError if an
    error is too large."""
    found: dict[str, float] = {}
    for name, objective in {"eagle": eagle, "dspark": dspark, "everything": everything}.items():
        region = Region(shape, torch.float32)
        mine = region.ours(objective)()
        exact = region.widened().ours(objective)()
        found[name] = max(error(a, b) for a, b in zip(mine, exact, strict=True))
    best = hl.head_topk(region.states.to(DTYPE), hl.Head(region.weight.to(DTYPE)), 1)
    plain = region.states.to(DTYPE).float() @ region.weight.to(DTYPE).float().t()
    found["top1"] = float((best.ids[:, 0] != plain.argmax(1)).double().mean())
    if max(found.values()) > 1e-4:
        raise ValueError(f"wrong: {found}")
    return found


def gradient_errors(shape: Shape) -> dict[str, dict[str, float]]:
    """Return the errors of the bfloat16 hidden gradient by loss, against float64 from identical
    inputs."""
    found: dict[str, dict[str, float]] = {}
    for name, objective in {"kl_div": eagle, "tv": total_variation}.items():
        region = Region(shape)
        calls = {"headloss": region.ours(objective)}
        if fused is not None:
            calls["speculators"] = region.theirs([(1.0, name)])
        gradients = {who: run()[0] for who, run in calls.items()}
        (want,) = region.widened().ours(objective)()
        found[name] = {who: error(gradient, want) for who, gradient in gradients.items()}
    return found


Calls = dict[str, Callable[[], list[Tensor]]]


def calls_of(name: str, region: Region, alone: bool) -> Calls:
    """Return the implementations that are timed against each other, by name; with `alone`, the
    library speculators is left out."""
    if name == "DSpark":
        calls: Calls = {
            "headloss": region.ours(dspark),
            "headloss, argmax": region.ours(dspark, argmax=True),
        }
        theirs = [(0.1, "ce"), (0.9, "tv")]
    else:
        calls = {"headloss": region.ours(eagle)}
        theirs = [(1.0, "kl_div")]
    if fused is not None and not alone:
        calls["speculators"] = region.theirs(theirs)
    return calls


def race(name: str, shape: Shape, alone: bool) -> list[dict[str, Any]]:
    """Measure time and memory of each call."""
    region, rows = Region(shape), []
    sizes = {"tokens": shape.tokens, "steps": shape.steps}
    for who, run in calls_of(name, region, alone).items():
        returned = sum(gradient.nbytes for gradient in run())
        memory = peak_mib(run, returned)
        row = {"loss": name, **sizes, "by": who, "ms": milliseconds(run, 6), "MiB": memory}
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def training_step(quick: bool) -> list[dict[str, Any]]:
    """Time a training step of a draft model; return a row for each implementation of its loss."""
    setting = draft_cases.TINY if quick else draft_cases.Setting()
    model = draft_cases.make_model(setting, DEVICE)
    batch = draft_cases.make_batch(setting, DEVICE)
    same = {"tokens": setting.rows * setting.length, "steps": setting.steps}
    contestants = draft_cases.CONTESTANTS
    raced = step_race("draft", model, batch, contestants, DEVICE, draft_cases.exact)
    rows = [same | {"contestant": who} | row for who, row in raced.items()]
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


SHAPES = {
    "EAGLE-3": Shape(tokens=8192, steps=7, width=4096, vocabulary=32000),
    "EAGLE-3, long": Shape(tokens=32768, steps=7, width=4096, vocabulary=32000),
    "DSpark": Shape(tokens=24576, steps=1, width=4096, vocabulary=151936, beside=256),
}


def main(argv: list[str] | None = None) -> int:
    """Run the study; return 0 if every headloss step ran correctly, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--commit", help="of the tree, where git cannot say")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)
    quick = arguments.quick
    small = Shape(tokens=24 if quick else 300, steps=3, width=64, vocabulary=500)
    lone = Shape(tokens=40 if quick else 300, steps=1, width=64, vocabulary=500, beside=8)
    tokens, vocabulary = (16, 500) if quick else (512, 32000)
    middle = Shape(tokens=tokens, steps=2, width=1024, vocabulary=vocabulary)
    result: dict[str, Any] = about(DEVICE, arguments.commit, (*PACKAGES, "speculators"))
    result |= {"check": check(small), "check beside": check(lone)}
    result["gradient error"] = gradient_errors(middle)
    print(json.dumps(result), flush=True)
    shapes = {"EAGLE-3": small, "DSpark": lone} if quick else SHAPES
    result["races"] = [
        row for name, shape in shapes.items() for row in race(name, shape, "long" in name)
    ]
    gc.collect()
    result["step"] = training_step(quick)
    if arguments.output:
        write(arguments.output, json.dumps(result, indent=1) + "\n")
    ours = [row for row in result["step"] if row["contestant"].startswith("headloss")]
    return int(any(row["status"] != "ok" for row in ours))


if __name__ == "__main__":
    sys.exit(main())
