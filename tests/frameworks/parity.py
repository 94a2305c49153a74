"""Shared by the framework tests: a random training step, headloss's loss of the step, and functions
extracted from framework sources.

B rows of C columns, T scored tokens. The tests import each framework that can be imported without a
GPU. If a framework needs a GPU to be imported, the functions under test are extracted from the
framework's source file and run unchanged.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from folds import fold
from losses_case import assert_same, value_and_gradient
from torch import Tensor

import headloss as hl
from headloss.batch.packing import pack
from headloss.losses.term import Objective
from headloss.objective.weighted import bind
from headloss.statistics.softmax import Statistics

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / ".frameworks"  # sources of frameworks not on a package index
B, C = 5, 7
EDGES = ("random", "clipped", "one token", "overflow")
LAYOUTS = ("padded", "packed")
Step = dict[str, Tensor]


def step(edge: str = "random", seed: int = 0, per_token: bool = True, scale: float = 0.4) -> Step:
    """Return [B, C] float64 tensors; the last row has no scored tokens, the first row a gap.

    Edges: "clipped": the advantage pushes every ratio beyond any clip; "one token": each row has
    one scored token; "overflow": log-ratios are 90 or -90.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = [1] * 4 + [0] if edge == "one token" else [7, 4, 1, 5, 0]
    mask = torch.arange(C) < torch.tensor(lengths)[:, None]
    mask[0, 2] = False
    logp = -0.3 - normal(B, C).abs()
    advantages = normal(B, C) if per_token else normal(B, 1).expand(B, C).contiguous()
    old = (logp + scale * normal(B, C)).clamp_max(-1e-3)
    if edge == "clipped":
        logp = logp - 3
        old = logp - 2 * advantages.sign()
    if edge == "overflow":
        far = normal(B, C) > 0
        old, logp = logp - 90 * far, logp - 90 * ~far
    return {
        "mask": mask,
        "logp": logp,
        "advantages": advantages,
        "old_logps": old,
        "ref_logps": logp + scale * normal(B, C),
        "sampling_logps": (old + scale * normal(B, C)).clamp_max(-1e-3),
    }


def theirs(made: Step, loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return a framework's loss of log-probs, and its gradient at scored tokens."""
    leaf = made["logp"].clone().requires_grad_()
    value, gradient = value_and_gradient(loss(leaf), leaf)
    assert not gradient[~made["mask"]].any()
    return [value, gradient[made["mask"]]]


def batch_of(made: Step, layout: str, totals: Any = None, **more: Tensor) -> hl.Batch:
    """Return a training step as an `hl.Batch`, either in padded rows or packed to the scored
    tokens."""
    mask = made["mask"]
    fields = {n: t for n, t in made.items() if n not in ("mask", "logp")} | more
    if layout == "padded":
        return hl.Batch(torch.where(mask, 0, -100), totals=totals, **fields)  # type: ignore[arg-type]
    packed = {n: t[mask] if t.shape == mask.shape else t for n, t in fields.items()}
    targets = torch.zeros(int(mask.sum()), dtype=torch.int64)
    segments = hl.Segments.from_lengths(mask.sum(1))
    return hl.Batch(targets, segments, totals=totals, **packed)  # type: ignore[arg-type]


def ours(
    objective: hl.Term | hl.Objective,
    made: Step,
    layout: str = "padded",
    totals: hl.Totals | None = None,
    **more: Tensor,
) -> list[Tensor]:
    """Return headloss's loss, and its gradient at scored tokens."""
    batch = batch_of(made, layout, totals, **more)
    packed = pack(batch, 1, torch.float64)
    stats = Statistics(logp=made["logp"][made["mask"]])
    bound = bind(Objective.of(objective), packed, totals or hl.Totals.of(batch), 1, torch.float64)
    found = bound.coefficients(stats, packed, None)
    assert found.softmax.target is not None
    assert found.shares is not None
    return [bound.total(found.shares, stats), found.softmax.target]


def compare(
    objective: hl.Term | hl.Objective,
    made: Step,
    loss: Callable[[Tensor], Tensor],
    tolerance: float = 1e-12,
    totals: hl.Totals | None = None,
    **more: Tensor,
) -> None:
    """Compare loss values and gradients of padded and of packed rows."""
    want = theirs(made, loss)
    for layout in LAYOUTS:
        assert_same(ours(objective, made, layout, totals, **more), want, tolerance)


def measured(term: hl.Term, made: Step) -> dict[str, float]:
    """Return the metrics of a headloss term."""
    packed = pack(batch_of(made, "packed"), 1, torch.float64)
    assert term.observe is not None
    found = term.observe(Statistics(logp=made["logp"][made["mask"]]), packed)
    return {name: float(fold(seen).value) for name, seen in found.items()}


def filled_rows(made: Step) -> hl.Totals:
    """Return totals that leave out rows without scored tokens, as most frameworks do."""
    return hl.Totals(int(made["mask"].sum()), int(made["mask"].any(1).sum()))


# ---------------------------------------------------------------------- framework functions


def file_of(package: str, path: str) -> Path:
    """Return a file of an installed package or of a source tree; skip the test if there is
    neither."""
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]
    for place in (*places, SOURCES / package.replace("_", "-")):
        if (place / path).is_file():
            return place / path
    pytest.skip(f"{package} is not installed here: `make test-frameworks` compares with it")


def extracted(file: Path, *names: str, **namespace: Any) -> SimpleNamespace:
    """Extract functions and classes of a source file by "name" or "Class.method", unchanged."""
    tree, found = ast.parse(file.read_text()), []
    for name in names:
        holder, _, method = name.rpartition(".")
        body = tree.body
        if holder:
            body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == holder).body
        kinds = (ast.FunctionDef, ast.ClassDef)
        node = next(n for n in body if isinstance(n, kinds) and n.name == method)
        found.append(node)
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.fix_missing_locations(ast.Module([future, *found], type_ignores=[]))
    names_in = {"torch": torch, "math": math, "F": torch.nn.functional, "nn": torch.nn, **namespace}
    exec(compile(module, str(file), "exec"), names_in)
    return SimpleNamespace(**{node.name: names_in[node.name] for node in found})


def stubbed(framework: str, *names: str) -> None:
    """Install stubs of missing modules that a framework imports but the tests do not run.

    Skip if the framework itself is missing, without leaving stubs for the tests of other
    frameworks.
    """
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed here", allow_module_level=True)
    for name in names:
        if name not in sys.modules and importlib.util.find_spec(name.split(".")[0]) is None:
            stub = sys.modules[name] = MagicMock()
            stub.__spec__ = importlib.machinery.ModuleSpec(name, None)
