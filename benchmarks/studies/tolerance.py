"""`Options(gradient_tolerance=x)`: saved time, gradient error, and training curves.

Page: docs/concepts.md.

    python benchmarks/studies/tolerance.py time --output time.json       # on one GPU, a minute
    python benchmarks/studies/tolerance.py curves --output curves.json --plot curves.png
    python benchmarks/studies/tolerance.py time --quick  # on a CPU; `curves` accepts --quick, too

`time` measures GRPO on tokens like a trained model's: 60 % with p(y) > 0.99 (log-uniform 1 - p),
the remaining tokens with realistic probabilities. Each question has eight answers; the advantages
of a question with only right or only wrong answers are 0. Calls with a gradient tolerance are
timed in turn with the three matrix products that a call without a tolerance needs. The study prints
how much the gradients dX and dW differ from the gradients with tolerance 0, an upper bound of this
difference, and, for comparison, the error from rounding an exact gradient to bfloat16.

`curves` trains a small language model on a CPU until the model has memorised a source file and is
certain of most tokens. The training runs with different tolerances start from equal weights and
read equal batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import torch
from measure import Stretch, make_limit, synchronize
from report import markdown
from run import about, write
from torch import Tensor, nn
from torch.nn import functional
from works import WORKS, Inputs, Setting, make_inputs

import headloss as hl

TOLERANCES = (0.0, 0.001, 0.004)
SIZES = Setting(tokens=16384, width=4096, vocabulary=128256, segments=256, certain=0.6)
QUICK = replace(SIZES, tokens=512, width=32, vocabulary=256, dtype=torch.float32, segments=16)

# ---------------------------------------------------------------------- time


def step(inputs: Inputs, tolerance: float, **options: Any) -> hl.Output:
    """Run forward and backward; gradients are in `.grad`."""
    inputs.hidden.grad = inputs.weight.grad = None
    given = hl.Options(gradient_tolerance=tolerance, **options)
    batch = WORKS["grpo"].batch(inputs)
    out = hl.head_loss(inputs.hidden, hl.Head(inputs.weight), batch, hl.grpo(), given)
    out.loss.backward()
    return out


def errors(inputs: Inputs, tolerance: float, exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the number of tokens that headloss skips because of `gradient_tolerance`
    (`skipped_rows`), the relative error of each gradient, and the bound of the relative error."""
    out = step(inputs, tolerance)
    measured, found = out.metrics.compute(), {}
    found["skipped_rows"] = measured.get("skipped_rows", 0.0)
    found["skipped_mass"] = measured.get("skipped_mass", 0.0)
    factors = {"hidden": inputs.weight, "weight": inputs.hidden}
    for name, other in factors.items():
        value = getattr(inputs, name).grad
        norm = _norm(exact[name])
        found[f"{name}_error"] = _norm(value, exact[name]) / norm
        if tolerance:
            norms = [rows.float().norm(dim=1).max() for rows in other.detach().split(4096)]
            largest = float(torch.stack(norms).max())
            found[f"{name}_bound"] = float(out.metrics["skipped_mass"].sum) * largest / norm
    return found


def _norm(value: Tensor, less: Tensor | None = None) -> float:
    """Return the norm of the difference of two tensors, computed a few rows at a time to save
    memory."""
    total = 0.0
    for rows in torch.arange(len(value), device=value.device).split(4096):
        part = value[rows].float()
        part = part if less is None else part - less[rows].float()
        total += float(part.square().sum(dtype=torch.float64))
    return total**0.5


def time_all(setting: Setting, device: torch.device, rounds: int) -> dict[str, Any]:
    inputs = make_inputs(setting, device)
    with torch.no_grad():
        p = hl.head_stats(inputs.hidden, hl.Head(inputs.weight), inputs.targets).logp.exp()
    exact = {}
    step(inputs, 0.0)
    for name in ("hidden", "weight"):
        exact[name] = getattr(inputs, name).grad
    rows = [{"tolerance": x, **errors(inputs, x, exact)} for x in TOLERANCES]
    rounded = {name: _norm(g, g.to(torch.bfloat16)) / _norm(g) for name, g in exact.items()}
    # Gradients in bfloat16 are already rounded: their rounding error is estimated as uniformly
    # distributed within half a unit in the last place.
    if setting.dtype == torch.bfloat16:
        rounded = dict.fromkeys(exact, 2**-9 / 3**0.5)
    del exact
    limit = make_limit(setting, inputs)
    runs = [lambda: limit(inputs), *(lambda x=x: step(inputs, x) for x in TOLERANCES)]
    times: list[list[Stretch]] = [[] for _ in runs]
    for round_ in range(rounds + 2):
        for run, found in zip(runs, times, strict=True):
            inputs.hidden.grad = inputs.weight.grad = None
            stretch = Stretch(device)
            with stretch:
                run()
            if round_ > 1:
                found.append(stretch)
    synchronize(device)
    ms = [statistics.median(s.ms for s in found) for found in times]
    for row, own in zip(rows, ms[1:], strict=True):
        row |= {"ms": own, "of_limit": ms[0] / own}
    return {
        "about": about(device, None),
        "sizes": [setting.tokens, setting.width, setting.vocabulary],
        "certain": float((p > 0.99).float().mean()),
        "without_advantage": float((inputs.advantages == 0).float().mean()),
        "limit_ms": ms[0],
        "rounded_to_bf16": rounded,
        "rows": rows,
    }


def time_table(found: dict[str, Any]) -> str:
    names = "tolerance|ms|of the dense limit|rows left out|mass left out|error of dX|its bound"
    lines = [tuple((names + "|error of dW|its bound").split("|")), ("---:",) * 9]
    for row in found["rows"]:
        cells = [f"{row['tolerance']:g}", f"{row['ms']:.2f}", f"{row['of_limit']:.3f}"]
        cells += [f"{row['skipped_rows']:.0f}", f"{row['skipped_mass']:.2e}"]
        for name in ("hidden", "weight"):
            cells += [f"{row[f'{name}_error']:.1e}", f"{row.get(f'{name}_bound', 0):.1e}"]
        lines.append(tuple(cells))
    rounded = max(found["rounded_to_bf16"].values())
    return markdown(lines) + f"\n\nRounding a gradient to bfloat16 errs by {rounded:.1e}."


# ---------------------------------------------------------------------- curves

LENGTH, SENTENCES, WIDTH, LAYERS = 64, 8, 96, 2


class Model(nn.Module):
    """A causal byte transformer with a headloss head."""

    def __init__(self, vocabulary: int = 256, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.places[: ids.shape[1]]
        length = ids.shape[1]
        return self.norm(self.layers(x, self.mask[:length, :length], is_causal=True))


def corpus() -> tuple[Tensor, Tensor]:
    """Return training bytes, few enough to memorise, and held-out bytes, from modules of the
    standard library."""
    import bisect
    import inspect
    import textwrap

    texts = [inspect.getsource(m).encode() for m in (textwrap, bisect)]
    own, other = (torch.tensor(list(text)) for text in texts)
    return own, other


def windows(text: Tensor, starts: Tensor) -> Tensor:
    return torch.stack([text[start : start + LENGTH] for start in starts.tolist()])


def curve(tolerance: float, steps: int, every: int) -> dict[str, Any]:
    """Train a small language model with the given gradient tolerance. Return each step's training
    loss and number of tokens left out of the gradient, and the held-out loss every `every`
    steps."""
    torch.manual_seed(0)
    model, (text, other) = Model(), corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    draw = torch.Generator().manual_seed(1)
    test = windows(other, torch.arange(0, len(other) - LENGTH, LENGTH))
    options = hl.Options(gradient_tolerance=tolerance)
    found: dict[str, Any] = {"tolerance": tolerance, "loss": [], "skipped": [], "held_out": []}
    for at in range(steps):
        starts = torch.randint(len(text) - LENGTH, (SENTENCES,), generator=draw)
        ids = windows(text, starts)
        rate = min(1.0, (at + 1) / 50) * (0.05 + 0.95 * (1 - at / steps))
        optimizer.param_groups[0]["lr"] = 3e-3 * rate
        batch, head = hl.Batch.from_labels(ids), hl.Head.of(model.head)
        out = hl.head_loss(model(ids), head, batch, hl.cross_entropy(), options)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        found["loss"].append(round(float(out.loss.detach()), 5))
        rows = float(out.metrics["skipped_rows"]) if tolerance else 0.0
        found["skipped"].append(round(rows / float(out.metrics["tokens"]), 4))
        if (at + 1) % every == 0 or at == steps - 1:
            with torch.no_grad():
                hidden = model(test)[:, :-1].flatten(0, 1)
                lost = functional.cross_entropy(model.head(hidden), test[:, 1:].flatten())
            found["held_out"].append([at + 1, round(float(lost), 5)])
    return found


def plot(found: dict[str, Any], path: Path) -> None:
    """Plot smoothed training losses, and the fraction of tokens that the gradient tolerance leaves
    out."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for row in found["rows"]:
        name = f"gradient_tolerance={row['tolerance']:g}"
        width = max(1, len(row["loss"]) // 60)
        for panel, key in ((left, "loss"), (right, "skipped")):
            values = torch.tensor(row[key]).unfold(0, width, width).mean(1)
            panel.plot([width * (i + 0.5) for i in range(len(values))], values, label=name)
    left.set(xlabel="step", ylabel="training loss", yscale="log")
    right.set(xlabel="step", ylabel="share of tokens left out", ylim=(0, 1))
    left.legend()
    partial = path.with_name(f".{path.name}")
    figure.savefig(partial, dpi=110, format="png")
    partial.replace(path)
    plt.close(figure)


# ---------------------------------------------------------------------- the command


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("time", "curves"))
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--device", help="cuda where there is one")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--output", type=Path, help="JSON to write")
    parser.add_argument("--plot", type=Path, help="PNG to write, of curves")
    given = parser.parse_args(argv)
    if given.what == "time":
        device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        setting = QUICK if given.quick or device.type == "cpu" else SIZES
        found = time_all(setting, device, 1 if given.quick else given.rounds)
        print(time_table(found))
    else:
        steps = 4 if given.quick else given.steps
        rows = [curve(x, steps, max(1, steps // 12)) for x in TOLERANCES]
        found = {"about": about(torch.device("cpu"), None), "rows": rows}
        for row in rows:
            lost = sum(row["loss"][-50:]) / len(row["loss"][-50:])
            skipped = sum(row["skipped"]) / steps
            held_out = row["held_out"][-1][1]
            what = f"{lost:.4f}, held out {held_out:.4f}, {skipped:.1%} of tokens left out"
            print(f"{row['tolerance']:g}: {what}")
        if given.plot:
            plot(found, given.plot)
    if given.output:
        write(given.output, json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
