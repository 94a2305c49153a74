"""Tables of the results of the training studies, which `readme.py` writes into the pages."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
STACKS = {"stock": "TRL, bf16", "cast": "TRL, float32 cast", "headloss": "headloss"}
SAMPLING = {"sets": "replayed sets", "whole": "whole vocabulary"}
RATES = {"grpo": 1e-5, "gspo": 1e-6}  # learning rates of the shown rows
GIB = 1 << 30


def clip_sides() -> str:
    """Return the shares on the clip's wrong side and the gradient errors, at one rate per loss."""
    found = _read("clip_sides")
    heads = ("loss", "largest logit", "steps", "clipped", *STACKS.values())
    rows = [heads, ("---", *("---:",) * (len(heads) - 1))]
    chosen = [row for row in found["rows"] if row["rate"] == RATES[row["work"]]]
    chosen.sort(key=lambda row: (row["work"], row["largest"], row["steps"]))
    for row in chosen:
        if row["stack"] != "stock":
            continue
        move = ("work", "largest", "steps")
        same = {r["stack"]: r for r in chosen if all(r[k] == row[k] for k in move)}
        of = [same[stack] for stack in STACKS]
        cells = (f"{_percent(r['wrong'])}; {_percent(r['error'])}" for r in of)
        shown = row["work"].upper(), f"{row['largest']:.0f}", str(row["steps"])
        rows.append((*shown, _percent(row["clipped"]), *cells))
    return f"{_machine(found)}\n\n{_markdown(rows)}"


def training() -> str:
    """Return the results and the mean curves of training runs with the three stacks."""
    heads = ("loss, rate", "stack", "solved", "reward at the end", "wrong side", "clipped")
    heads = (*heads, "gradient's norm")
    rows = [heads, ("---", "---", *("---:",) * (len(heads) - 2))]
    names = ("stacks", "stacks_fast")
    for name in names:
        runs = _read(name)["runs"]
        for algorithm in ("grpo", "gspo"):
            for stack, title in STACKS.items():
                of = _runs(runs, algorithm, stack)
                if of:
                    loss = f"{algorithm.upper()}, {of[0]['rate']:g}"
                    shares = (_mean(of, _over(curve), 100, " %") for curve in ("wrong", "clipped"))
                    ends = _mean(of, _after, 100, " %"), _mean(of, _reward)
                    rows.append((loss, title, *ends, *shares, _mean(of, _over("grad_norm"))))
    return f"{_machine(_read(names[0]))}\n\n{_markdown(rows)}"


def sampling() -> str:
    """Return the results of training runs with and without the sampler's sets of ids."""
    heads = ("loss", "log-probs over", "solved", "reward at the end", "first ratio", "mean ratio")
    heads = (*heads, "mismatch KL")
    rows = [heads, ("---", "---", *("---:",) * (len(heads) - 2))]
    found = _read("replay_curves")
    for algorithm in ("grpo", "gspo"):
        for stack, title in SAMPLING.items():
            of = _runs(found["runs"], algorithm, stack)
            ends = _mean(of, _after, 100, " %"), _mean(of, _reward)
            ratios = (_mean(of, v, digits=4) for v in (_first_ratio, _over("ratio")))
            mismatch = _mean(of, _over("mismatch"), digits=5)
            rows.append((algorithm.upper(), title, *ends, *ratios, mismatch))
    return f"{_machine(found)}\n\n{_markdown(rows)}"


def replay() -> str:
    """Return the times of a GRPO step over sampled sets of ids, of generation and of the loss."""
    found = _read("replay")
    names = list(dict.fromkeys(row["contestant"] for row in found["step"]))
    rows = [("mean number of ids", *names), ("---:",) * (1 + len(names))]
    for mean in dict.fromkeys(row["mean"] for row in found["step"]):
        of = {row["contestant"]: row for row in found["step"] if row["mean"] == mean}
        rows.append((str(mean), *(_cell(of[name]) for name in names)))
    said = [
        f"under {row['filter']} (a mean of {row['kept']:.0f} ids) {row['on_ms_a_token']:.1f} ms "
        f"with and {row['off_ms_a_token']:.1f} ms without `record_support`"
        for row in found["generation"]
    ]
    count, crossing = found["generation"][0]["rows"], found["crossing"]
    return (
        f"{_markdown(rows)}\n\n"
        f"Generation of {count} rows was timed with and without `record_support`, which records "
        f"the ids that the sampler kept. Generation took, per token, {'; '.join(said)}. Without "
        f"the model, the loss needs {crossing['whole_ms']:.1f} ms over the whole vocabulary and "
        f"{crossing['points'][0]['ms']:.1f} ms over 8 kept ids per token. A loss "
        f"over {crossing['level_at']:.0f} kept ids per token needs as much time as a loss over the "
        "whole vocabulary.\n"
        f"{found['model']}, 16384 tokens, bfloat16. {_machine(found)}"
    )


def replay_row(contestants: tuple[str, ...]) -> tuple[str, ...]:
    """Return the row of a GRPO step over a sampler's sets with a mean of 8 ids.

    Plain Transformers masks the logits; contestants other than Transformers and headloss have no
    such step, shown as "-".
    """
    found = _read("replay")
    names = {"masked logits": "Transformers", "headloss, the sets": "headloss"}
    of = {names.get(row["contestant"]): row for row in found["step"] if row["mean"] == 8}
    cells = _step_cells({name: of[name] for name in names.values()}, contestants)
    return (f"{found['model']}, GRPO over a sampler's sets", *cells)


def draft_row(contestants: tuple[str, ...]) -> tuple[str, ...]:
    """Return the row of a draft model's step; the column Transformers has stored logits of plain
    PyTorch."""
    of = _draft_steps()
    steps = {of[name]["steps"] for name in of}
    of["Transformers"] = of.pop("plain PyTorch")
    return (f"draft model, {steps.pop()} steps", *_step_cells(of, contestants))


def draft_note() -> str:
    """Return a sentence that explains the draft model's row."""
    release, commit = (_read("drafts")[key] for key in ("versions", "commit"))
    return (
        "In the table row *draft model* (commit "
        f"{commit}), the column *Transformers* is plain PyTorch with stored logits; speculators "
        f"{release['speculators']} with fused losses needs {_cell(_draft_steps()['speculators'])}."
    )


def drafts() -> str:
    """Return the table of the losses of draft models alone, and the errors of the gradient."""
    found = _read("drafts")
    rows: list[tuple[str, ...]] = [("loss", "headloss", "speculators"), ("---", "---:", "---:")]
    for loss, ours, name in (
        ("EAGLE-3", "headloss", "EAGLE-3, 7 steps of 8,192 positions, D = 32,000"),
        ("EAGLE-3, long", "headloss", "EAGLE-3, 7 steps of 32,768 positions"),
        ("DSpark", "headloss", "DSpark, 24,576 positions, V = 151,936, r = 256"),
        ("DSpark", "headloss, argmax", "DSpark, targets from the verifier"),
    ):
        of = {row["by"]: row for row in found["races"] if row["loss"] == loss}
        cells = (_loss_cell(of.get(by)) for by in (ours, "speculators"))
        rows.append((name, *cells))
    names = {"kl_div": "KL divergence", "tv": "total variation"}
    said = [
        f"{names[name]} {100 * of['headloss']:.2g} % and {100 * of['speculators']:.2g} %"
        for name, of in found["gradient error"].items()
    ]
    return (
        f"{_markdown(rows)}\n\nThe errors of the hidden gradients of headloss and speculators, "
        f"against a float64 head, are: {'; '.join(said)}.\n{_machine(found)}"
    )


def _loss_cell(row: dict[str, Any] | None) -> str:
    return f"{row['ms']:.1f} ms, {row['MiB'] / 1024:.1f} GiB" if row else "-"


def _draft_steps() -> dict[str, dict[str, Any]]:
    rows = _read("drafts")["step"]
    return {row["contestant"]: row for row in rows if row["status"] == "ok"}


def _step_cells(of: dict[str, dict[str, Any]], contestants: tuple[str, ...]) -> list[str]:
    """Return a cell for each contestant; "-" for a contestant without a row."""
    best = min(row["ms"] for row in of.values())
    cells = []
    for name in contestants:
        row = of.get(name)
        bold = "**" if row and row["ms"] == best else ""
        cells.append(f"{bold}{_cell(row, bold)}" if row else "-")
    return cells


def _cell(row: dict[str, Any], after: str = "") -> str:
    return f"{row['ms']:.0f}{after} ms, {row['peak_bytes'] / GIB:.1f} GiB"


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _runs(runs: list[dict], algorithm: str, stack: str) -> list[dict]:
    return [run for run in runs if (run["algorithm"], run["stack"]) == (algorithm, stack)]


def _after(run: dict) -> float:
    return run["after"]


def _first_ratio(run: dict) -> float:
    return run["ratio"][0]


def _reward(run: dict) -> float:
    return statistics.fmean(run["reward"][-5:])


def _over(curve: str) -> Callable[[dict], float]:
    return lambda run: statistics.fmean(run[curve])


def _mean(
    runs: list[dict], value: Callable[[dict], float], scale: int = 1, unit: str = "",
    digits: int | None = None
) -> str:  # fmt: skip
    """Return the mean of a value over seeds, with the standard error of the mean."""
    values = [scale * value(run) for run in runs]
    error = statistics.stdev(values) / math.sqrt(len(values))
    digits = digits or (1 if scale > 1 else 3)
    return f"{statistics.fmean(values):.{digits}f} ± {error:.{digits}f}{unit}"


def _percent(value: float | None) -> str:
    """Return the value in percent; "-" for None, the value of a row without any gradient."""
    return "-" if value is None else f"{100 * value:.2g} %" if value < 1 else f"{100 * value:.0f} %"


def _machine(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{found['machine']}; {versions}; commit {found['commit']}."


def _markdown(rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
