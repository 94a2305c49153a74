"""The error of a model's gradient with each implementation of the head, against a float64 head on
one backbone.

Page: benchmarks/README.md.

    python benchmarks/studies/gradient_truth.py --output benchmarks/results/gradient_truth.json \\
        --markdown benchmarks/results/gradient_truth.md --plot benchmarks/results/gradient_truth.png
    python benchmarks/studies/gradient_truth.py --quick --device cpu    # seconds, tiny shapes

A random backbone of Qwen2's shape computes the hidden states once, in bfloat16. The head's weight
is scaled until the largest logit has the wanted size, and every target is sampled from the model.
An implementation computes the gradients of hidden states and weight; the hidden gradient is then
backpropagated through the common backbone. The reference head computes in float64.

The old policy differs from the current policy by noise on the hidden states. For GRPO the noise on
the old policy's hidden states changes a token's log-prob by 0.1 (standard deviation), so that a few
percent of the tokens are clipped. For GSPO the noise on the old policy's hidden states changes a
sequence's mean log-prob by 3.5e-4, so that about a fifth of the sequences are clipped. In "grpo"
and "gspo" all implementations get identical old log-probs from a float64 head, like those of an
exact sampler. In "grpo, own old" and "gspo, own old" each implementation under test computes the
old log-probs itself, like a trainer that scores a batch before the first update. If a trainer makes
only one update per batch, the old log-probs equal the current log-probs, and no token is clipped.
Without clipped tokens, the gradient has the rounding error that this study measures for
cross-entropy ("ce").

T tokens in B sequences of C, H hidden width, V vocabulary.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import contestants
import measure
import report
import torch
import works
from run import PACKAGES, Results, about, write
from step_cases import QWEN, TINY
from torch import Tensor
from works import Inputs, Values, Work

BLOCK = 1 << 28  # In float64 a block of logits needs 2 GiB.
PLAIN = "eager"
NAMES = {PLAIN: "plain bf16 logits"}
CHOSEN = {
    "ce": (PLAIN, "torch.compile", "TRL", "Liger FLCE, fp32 sums", "QuACK", "headloss"),
    "grpo": (PLAIN, "torch.compile", "TRL", "Liger GRPO", "headloss"),
    "gspo": (PLAIN, "torch.compile", "TRL", "Liger GSPO", "headloss"),
}
CLIP = {"grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4)}
OWN = ", own old"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model and the batch, and the sizes of the largest logit (`logits`) at which
    errors are measured."""

    sizes: dict[str, Any]
    sequences: int
    length: int
    logits: tuple[float, ...]

    @property
    def call(self) -> works.Setting:
        """Return the setting with which the timed implementations are prepared."""
        return works.Setting(
            tokens=self.sequences * self.length,
            width=self.sizes["hidden_size"],
            vocabulary=self.sizes["vocab_size"],
            segments=self.length,
        )


FULL = Shape(
    sizes={**QWEN, "num_hidden_layers": 12},
    sequences=32,
    length=256,
    logits=(5, 10, 15, 20, 27, 40, 50, 60),
)
QUICK = Shape(sizes={**TINY, "hidden_size": 64}, sequences=8, length=64, logits=(5, 40))

# ---------------------------------------------------------------------- true gradients


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Float64 log-probs [T], and gradients of hidden states [T, H] and weight [V, H]."""

    logp: Tensor
    hidden: Tensor
    weight: Tensor


def _blocks(inputs: Inputs) -> tuple[Tensor, ...]:
    rows = torch.arange(len(inputs.targets), device=inputs.targets.device)
    return rows.split(max(1, BLOCK // len(inputs.weight)))


@torch.no_grad()
def exact_logps(hidden: Tensor, inputs: Inputs) -> Tensor:
    """Return [T] float64 log-probs of the targets."""
    weight, found = inputs.weight.double(), []
    for rows in _blocks(inputs):
        log_p = (hidden[rows].double() @ weight.t()).log_softmax(-1)
        found.append(log_p.gather(1, inputs.targets[rows, None]).squeeze(1))
    return torch.cat(found)


def find_truth(work: Work, inputs: Inputs) -> Truth:
    """Return the float64 gradients. A token's logit gradient is s (onehot - p), with the
    derivative s of the loss with respect to the token's log-prob, the one-hot target and the
    probabilities p."""
    logp = exact_logps(inputs.hidden, inputs).requires_grad_()
    (slopes,) = torch.autograd.grad(work.loss(Values(logp), inputs), logp)
    with torch.no_grad():
        weight = inputs.weight.double()
        into_hidden, into_weight = [], torch.zeros_like(weight)
        for rows in _blocks(inputs):
            x = inputs.hidden[rows].double()
            slope = slopes[rows, None]
            gradient = (x @ weight.t()).softmax(-1).mul_(-slope)
            gradient.scatter_add_(1, inputs.targets[rows, None], slope)
            into_hidden.append(gradient @ weight)
            into_weight.addmm_(gradient.t(), x)
    return Truth(logp=logp.detach(), hidden=torch.cat(into_hidden), weight=into_weight)


def beyond_clip(work: str, logp: Tensor, inputs: Inputs) -> Tensor:
    """Return the distance of a log-ratio beyond the clip, [T] or [B] for GSPO; negative if not
    clipped."""
    low, high = CLIP[work]
    difference = logp.double() - inputs.old
    advantages = inputs.advantages
    if work == "gspo":
        difference = inputs.segment_mean(difference)
    else:
        advantages = advantages[inputs.ids]
    return torch.where(
        advantages > 0, difference - math.log1p(high), math.log1p(-low) - difference
    )


# ---------------------------------------------------------------------- the model


class Bench:
    """A backbone, its hidden states, and inputs for its head."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        from transformers import AutoConfig, AutoModel

        self.shape, self.device = shape, device
        config = AutoConfig.for_model("qwen2", **shape.sizes)
        torch.manual_seed(seed)
        self.generator = torch.Generator(device).manual_seed(seed)
        with torch.device(device):
            self.backbone = AutoModel.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            )
        ids = torch.randint(
            shape.sizes["vocab_size"],
            (shape.sequences, shape.length),
            generator=self.generator,
            device=device,
        )
        self.out = self.backbone(input_ids=ids, use_cache=False).last_hidden_state
        self.parameters = [p for p in self.backbone.parameters() if p.requires_grad]
        self.hidden = self.out.detach().flatten(0, 1)  # [T, H]
        size = (shape.sizes["vocab_size"], shape.sizes["hidden_size"])
        self.weight = self.noise(*size) * size[1] ** -0.5

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    @torch.no_grad()
    def inputs(self, largest: float) -> tuple[Inputs, float]:
        """Return a batch with a largest logit near `largest`, and the actual largest logit."""
        weight = self.weight.to(torch.bfloat16)
        weight = (self.weight * (largest / self._largest(weight))).to(torch.bfloat16)
        shape = self.shape
        tokens = shape.sequences * shape.length
        ids = torch.arange(shape.sequences, device=self.device).repeat_interleave(shape.length)
        targets = []
        for x in self.hidden.split(max(1, BLOCK // len(weight))):
            p = (x.double() @ weight.double().t()).softmax(-1)
            targets.append(_sampled(p, self.generator))
        found = Inputs(
            hidden=self.hidden.clone().requires_grad_(),
            weight=weight.clone().requires_grad_(),
            targets=torch.cat(targets),
            ids=ids,
            lengths=torch.full((shape.sequences,), shape.length, device=self.device),
            advantages=self.noise(shape.sequences),
            old=torch.zeros(tokens, device=self.device),
            ref=torch.zeros(tokens, device=self.device),
        )
        return found, self._largest(weight)

    def _largest(self, weight: Tensor) -> float:
        parts = self.hidden.split(max(1, BLOCK // len(weight)))
        return max(float((x.double() @ weight.double().t()).abs().max()) for x in parts)

    @torch.no_grad()
    def earlier(self, work: str, inputs: Inputs) -> Tensor:
        """Return the [T, H] hidden states of the old policy."""
        want = 0.1 if work == "grpo" else 3.5e-4
        now, noise = exact_logps(inputs.hidden, inputs), self.noise(*inputs.hidden.shape)
        size = 1e-2
        hidden = inputs.hidden.detach()
        # Noise on the hidden states, multiplied by `size`, changes log-probs nearly in proportion
        # to `size`. Five corrections of `size` bring the standard deviation of the log-probs'
        # change near `want`.
        for _ in range(5):
            old = (hidden + size * hidden.float().square().mean().sqrt() * noise).to(hidden.dtype)
            moved = now - exact_logps(old, inputs)
            found = float((moved if work == "grpo" else inputs.segment_mean(moved)).std())
            if abs(found / want - 1) < 0.05:
                break
            size *= want / max(found, 1e-12)
        return old

    def whole(self, hidden: Tensor) -> list[Tensor]:
        """Return the backbone's gradients from the gradient of its hidden states, [T, H]."""
        gradient = hidden.to(self.out.dtype).view_as(self.out)
        return list(torch.autograd.grad(self.out, self.parameters, gradient, retain_graph=True))


def _sampled(p: Tensor, generator: torch.Generator) -> Tensor:
    """Sample one column per row by the exponential-race method, for any number of columns."""
    race = torch.empty_like(p).exponential_(generator=generator)
    return (p / race).argmax(-1)


def _square(tensors: list[Tensor]) -> float:
    return sum(float(t.double().square().sum()) for t in tensors)


def _square_between(found: list[Tensor], true: list[Tensor]) -> float:
    pairs = zip(found, true, strict=True)
    return sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)


# ---------------------------------------------------------------------- measurements


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A batch with the float64 gradients of its loss."""

    work: str
    inputs: Inputs
    earlier: Tensor | None  # [T, H] hidden states of the old policy
    truth: Truth
    whole: list[Tensor]  # true gradients of the backbone's parameters


def take(bench: Bench, work: str, inputs: Inputs) -> Sample:
    """Make a batch with old log-probs and its true gradients."""
    earlier = None
    if work in CLIP:
        earlier = bench.earlier(work, inputs)
        inputs = replace(inputs, old=exact_logps(earlier, inputs).float())
    truth = find_truth(works.WORKS[work], inputs)
    return Sample(
        work=work, inputs=inputs, earlier=earlier, truth=truth, whole=bench.whole(truth.hidden)
    )


def errors(bench: Bench, sample: Sample, run: contestants.Run, inputs: Inputs) -> dict[str, Any]:
    """Return the error of each gradient of an implementation: the norm of the difference from
    float64, divided by the norm of the float64 gradient."""
    found = run(inputs).read()
    hidden, weight = (found.values[n].detach() * found.factor for n in ("hidden", "weight"))
    whole, truth = bench.whole(hidden), sample.truth
    body = _square_between(whole, sample.whole), _square(sample.whole)
    head = _square_between([weight], [truth.weight]), _square([truth.weight])
    row: dict[str, Any] = {
        "error": ((body[0] + head[0]) / (body[1] + head[1])) ** 0.5,
        "backbone": (body[0] / body[1]) ** 0.5,
        "head": (head[0] / head[1]) ** 0.5,
        "how": found.how,
    }
    if "logps" in found.values:
        logp = found.values["logps"]
        row["logp_error"] = float((logp.double() - truth.logp).abs().max())
        if sample.work in CLIP:
            beyond = beyond_clip(sample.work, truth.logp, sample.inputs)
            true = beyond > 0
            wrong = (beyond_clip(sample.work, logp, inputs) > 0) != true
            row |= {"wrong_side": float(wrong.double().mean())}
            row |= {"wrong_by": float((beyond.abs() * wrong).max())}
            row |= {"clipped": float(true.double().mean())}
    if not all(x == x and abs(x) < 1e30 for x in (row["error"], row["head"])):
        return {"status": "failed", "reason": "the gradient is not finite"}
    return row | {"status": "ok", "reason": ""}


class Runs:
    """Prepared computations: for each implementation and loss, the function that runs the loss, or
    the reason why the implementation cannot run it."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.made: dict[tuple[str, str], contestants.Run | str] = {}

    def of(self, name: str, work: str) -> contestants.Run | str:
        if (name, work) not in self.made:
            self.made[name, work] = self._make(contestants.CONTESTANTS[name], works.WORKS[work])
        return self.made[name, work]

    def _make(self, contestant: contestants.Contestant, work: Work) -> contestants.Run | str:
        reason = measure.unserved(contestant, work, self.device)
        if reason:
            return reason
        try:
            return contestant.make(work, self.shape.call)
        except Exception as missing:  # an import of a library may raise any error
            return measure.one_line(missing)


def measured(bench: Bench, sample: Sample, runs: Runs, name: str, own: bool) -> dict[str, Any]:
    """Measure one implementation on one batch; an error becomes part of the row."""
    run = runs.of(name, sample.work)
    if isinstance(run, str):
        return {"status": "skipped", "reason": run}
    try:
        inputs, whose = sample.inputs, ""
        if own:
            inputs, whose = _with_own_old(sample, runs, name, run)
        row = errors(bench, sample, run, inputs)
        return row | ({"how": whose} if whose else {})
    except NotImplementedError as unfit:
        return {"status": "skipped", "reason": measure.one_line(unfit)}
    except Exception as failure:
        return {"status": "failed", "reason": measure.one_line(failure)}


def _with_own_old(
    sample: Sample, runs: Runs, name: str, run: contestants.Run
) -> tuple[Inputs, str]:
    """Return the batch with old log-probs computed by the implementation, or from plain logits if
    the implementation returns no log-probs."""
    assert sample.earlier is not None
    before = replace(sample.inputs, hidden=sample.earlier.clone().requires_grad_())
    values, whose = run(before).read().values, ""
    if "logps" not in values:
        plain = runs.of(PLAIN, sample.work)
        assert not isinstance(plain, str)
        values, whose = plain(before).read().values, f"old log-probs of {NAMES[PLAIN]}"
    return replace(sample.inputs, old=values["logps"].detach().float()), whose


def run_shape(
    bench: Bench, chosen: Callable[[str], bool], wanted: tuple[str, ...]
) -> Iterator[list[dict[str, Any]]]:
    """For each size of the largest logit, yield the list of result rows."""
    runs = Runs(bench.shape, bench.device)
    for largest in bench.shape.logits:
        inputs, true_size = bench.inputs(largest)
        rows = []
        for work in wanted:
            sample = take(bench, work, inputs)
            for own in (False, True) if work in CLIP else (False,):
                for name in filter(chosen, CHOSEN[work]):
                    row = {"case": f"largest logit {largest:g}", "work": work + OWN * own}
                    row |= {"contestant": name, "size": largest, "largest": true_size}
                    rows.append(row | measured(bench, sample, runs, name, own))
            del sample
        gc.collect()
        yield rows


# ---------------------------------------------------------------------- table, plot, claim

TITLES = {
    "ce": "cross-entropy",
    "grpo": "GRPO",
    "gspo": "GSPO",
    "grpo" + OWN: "GRPO, each with its own old log-probs",
    "gspo" + OWN: "GSPO, each with its own old log-probs",
}
NOTES = """\
Error of the whole model's gradient: norm of the difference over the norm of what a float64 head on
the same bfloat16 backbone gives. *wrong side*: tokens (of GSPO: sequences) whose gradient the clip
stops and should not, or the other way round, at each contestant's own log-probs; in brackets how
far from the clip the farthest of them truly is, as a log-ratio. One of 32 sequences is 3.1 %, and
some 10 % of the gradient."""


def shown(name: str) -> str:
    return NAMES.get(name, name)


def percent(value: float) -> str:
    return f"{100 * value:.2f} %" if value < 0.00995 else f"{100 * value:.1f} %"


def table(results: dict) -> str:
    """Return a Markdown table with a line per loss and implementation, and a column per size of the
    largest logit."""
    parts = [report.machine(results), NOTES]
    for work, rows in _by_work(results):
        sizes = sorted({row["size"] for row in rows})
        lines = [("largest logit", *(f"{s:g}" for s in sizes)), ("---", *("---:",) * len(sizes))]
        lines += _lines(rows, sizes, "error", "")
        lines += _lines(rows, sizes, "wrong_side", ", wrong side")
        parts.append(f"### {TITLES[work]}\n\n{report.markdown(lines)}")
    return "\n\n".join(parts) + "\n"


def _side(row: dict[str, Any]) -> str:
    """Format the fraction of tokens or sequences that an implementation puts on the wrong side of
    the clip bound, and the largest float64 distance from the clip bound among these tokens or
    sequences."""
    far = f" ({row['wrong_by']:.0e})" if row.get("wrong_by") else ""
    return percent(row["wrong_side"]) + far


def _lines(rows: list[dict], sizes: list[float], key: str, what: str) -> Iterator[tuple[str, ...]]:
    for name in dict.fromkeys(row["contestant"] for row in rows):
        mine = {row["size"]: row for row in rows if row["contestant"] == name}
        if key == "error":
            cells = [_cell(mine[size]) for size in sizes]
        elif any(key in row for row in mine.values()):
            cells = [_side(mine[s]) if key in mine[s] else "-" for s in sizes]
        else:
            continue
        if len(set(cells)) == 1 and not cells[0][0].isdigit():
            cells = [cells[0], *("",) * (len(sizes) - 1)]
        yield (shown(name) + what, *(c.replace("|", "/") for c in cells))


def _cell(row: dict) -> str:
    return percent(row["error"]) if row["status"] == "ok" else f"{row['status']}: {row['reason']}"


def _by_work(results: dict) -> Iterator[tuple[str, list[dict]]]:
    for work in TITLES:
        rows = [row for row in results["rows"] if row["work"] == work]
        if rows:
            yield work, rows


def _errors(results: dict, work: str, size: float) -> dict[str, float]:
    rows = (r for r in results["rows"] if (r["work"], r["size"]) == (work, size))
    return {r["contestant"]: r["error"] for r in rows if r["status"] == "ok"}


def claim(results: dict) -> str:
    """Return Markdown sentences for the README with the gradient errors of plain PyTorch, TRL and
    headloss under GRPO."""
    found = (_errors(results, "grpo", size) for size in (27, 40))
    small, large = (
        [f"{100 * errors[name]:.2g} %" for name in (PLAIN, "TRL", "headloss")] for errors in found
    )
    return (
        "**Nearer to the true gradient, because log-probs are exact.** Plain PyTorch and TRL round "
        "logits to bfloat16,\nwhich moves tokens across GRPO's clip. If a model's largest logit is "
        "27, the gradient of all weights differs from a\nfloat64 head's gradient by "
        f"{small[0]} in plain PyTorch, {small[1]} in TRL and {small[2]} in headloss. If the "
        f"largest logit is 40,\nthe gradient's error is {large[0]} in plain PyTorch, {large[1]} in "
        f"TRL and {large[2]} in headloss "
        "([measured](benchmarks/README.md#the-gradient-that-you-get))."
    )


def summary(results: dict) -> str:
    """Return a Markdown table with a line for each loss and implementation, for the losses in which
    all implementations get identical old log-probs."""
    kept = {"runs": results["runs"], "rows": [r for r in results["rows"] if r["work"] in CHOSEN]}
    sizes = sorted({row["size"] for row in kept["rows"]})
    lines = [("loss", "contestant", *(f"{s:g}" for s in sizes)), ("---", "---")]
    lines[1] = ("---", "---", *("---:",) * len(sizes))
    for work, rows in _by_work(kept):
        lines += [(TITLES[work], *line) for line in _lines(rows, sizes, "error", "")]
    return f"{report.machine(kept)}\n\n{report.markdown(lines)}"


def plot(results: dict, path: Path) -> Path:
    """Plot a panel per loss, with the implementation's name at the end of each line."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    found = list(_by_work(results))
    columns = min(3, len(found))
    height = -(-len(found) // columns)
    figure, panels = plt.subplots(
        height, columns, figsize=(5.2 * columns, 4 * height), layout="constrained", squeeze=False
    )
    names = list(dict.fromkeys(row["contestant"] for _, rows in found for row in rows))
    for panel in panels.flat[len(found) :]:
        panel.set_axis_off()
    for panel, (work, rows) in zip(panels.flat, found, strict=False):
        _panel(panel, [row for row in rows if row["status"] == "ok"], names)
        panel.set_title(TITLES[work], fontsize=10)
        panel.set_xlabel("largest logit")
        panel.set_ylabel("error of the whole model's gradient, %")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _panel(panel: Any, rows: list[dict], names: list[str]) -> None:
    from matplotlib.ticker import LogFormatter

    ends = []
    for name in dict.fromkeys(row["contestant"] for row in rows):
        line = sorted((r["size"], 100 * r["error"]) for r in rows if r["contestant"] == name)
        color = f"C{names.index(name)}"
        width = 2.4 if name.startswith("head") else 1.2
        panel.plot(*zip(*line, strict=True), marker="o", markersize=3, linewidth=width, color=color)
        ends.append((line[-1][1], shown(name), color))
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(LogFormatter())
    panel.yaxis.set_minor_formatter(LogFormatter())
    panel.grid(alpha=0.3)
    left, right = panel.get_xlim()
    panel.set_xlim(left, right + 0.42 * (right - left))  # space for labels
    groups = _together(ends)
    for i, (end, together) in enumerate(groups):
        text, color = "\n".join(name for name, _ in together), together[-1][1]
        side = "bottom" if 0 < i < len(groups) - 1 else "top"  # keeps close labels apart
        panel.text(right, end, text, color=color, va=side, fontsize=8)


def _together(ends: list[tuple[float, str, str]]) -> list[tuple[float, list[tuple[str, str]]]]:
    """Group lines of the plot whose right ends are so close that their labels would overlap."""
    groups: list[tuple[float, list[tuple[str, str]]]] = []
    for end, name, color in sorted(ends, key=lambda line: line[0]):
        if not groups or end > 1.02 * groups[-1][0]:
            groups.append((end, []))
        groups[-1][1].append((name, color))
    return groups


# ---------------------------------------------------------------------- the command


def main(argv: list[str] | None = None) -> int:
    """Run the study; return 0 if every headloss configuration was measured, else 1."""
    arguments = _parse(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    shape = QUICK if arguments.quick else FULL
    if arguments.logits:
        shape = replace(shape, logits=tuple(arguments.logits))
    packages = (*PACKAGES, "transformers")
    results = Results(arguments.output, about(device, arguments.commit, packages))
    begun = time.perf_counter()
    bench = Bench(shape, device)

    def chosen(name: str) -> bool:
        return not arguments.contestants or any(fnmatch(name, p) for p in arguments.contestants)

    red = 0
    for rows in run_shape(bench, chosen, tuple(arguments.works)):
        results.add(rows)
        for row in rows:
            text = percent(row["error"]) if "error" in row else f"{row['status']}: {row['reason']}"
            if "wrong_side" in row:
                text += f", wrong side {percent(row['wrong_side'])} (clipped {row['clipped']:.1%})"
            seconds = time.perf_counter() - begun
            print(
                f"{seconds:6.1f} s  {row['case']:18} {row['work']:14} "
                f"{shown(row['contestant']):22} {text}",
                flush=True,
            )
            red += row["status"] != "ok" and report.is_ours(row)
    if arguments.markdown:
        write(arguments.markdown, table(results.content))
    if arguments.plot:
        plot(results.content, arguments.plot)
    return 1 if red else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--logits", nargs="+", type=float, help="largest logits; default: the list")
    parser.add_argument("--works", nargs="+", choices=list(CHOSEN), default=list(CHOSEN))
    parser.add_argument("--contestants", nargs="+", metavar="PATTERN")
    parser.add_argument("--output", type=Path, help="JSON to write or to append to")
    parser.add_argument("--markdown", type=Path, help="where to write the table")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    parser.add_argument("--commit", help="of the tree, where git cannot say")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
