"""Rewrite the generated parts of README.md and of the pages in place: `python docs readme`.

`PLACES` lists the parts of each file. A part stands between `<!-- name -->` and `<!-- /name -->`.
Tables of terms come from docstrings, bytes from the planner, and measurements from
benchmarks/results; no part is typed by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from headloss.engine.plan import MIB, PlanInputs, make_plan
from headloss.losses.catalogue import modifier_table, table
from headloss.options import Options

ROOT = Path(__file__).parents[1]
for folder in ("docs", "benchmarks", "benchmarks/studies"):
    sys.path.insert(0, str(ROOT / folder))
import study_tables  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
MEMORY = RESULTS / "cpu_memory.json"
TRUTH = RESULTS / "gradient_truth.json"
STEPS = RESULTS / "steps.json"

GIB = 1 << 30
SHAPES = ((8192, 2304, 256000), (16384, 2048, 151936), (16384, 4096, 128256), (65536, 4096, 128256))


def logits() -> str:
    """Return planned peaks on a GPU in bfloat16, next to the size of the float32 logits."""
    head = ("T tokens", "H", "V", "logits, float32", "headloss", "headloss, recompute")
    rows = [head, ("---:",) * len(head)]
    for tokens, width, vocabulary in SHAPES:
        plans = [
            _plan(tokens, width, vocabulary, schedule) for schedule in ("one_pass", "recompute")
        ]
        sizes = (tokens * vocabulary * 4, *(plan.peak_bytes for plan in plans))
        shown = (f"{size / GIB:.1f} GiB" for size in sizes)
        rows.append((f"{tokens}", f"{width}", f"{vocabulary}", *shown))
    return _markdown(rows)


def _plan(tokens: int, width: int, vocabulary: int, schedule: str):
    problem = PlanInputs(
        tokens=tokens,
        width=width,
        vocabulary=vocabulary,
        scope="token",
        lengths=[tokens],
        element_size=2,
        weight_size=2,
        on_gpu=True,
        multiprocessors=132,  # a Hopper GPU, whose product writes softmax terms in 16 bits
        memory=80 * GIB,
        exp_tiles=True,
        row_bytes=2,
    )
    return make_plan(problem, Options(schedule=schedule), "triton")


def cpu_memory() -> str:
    """Return the table of benchmarks/studies/cpu_memory.py."""
    found = json.loads(MEMORY.read_text())
    rows = [
        ("contestant", "peak extra memory", "of which returned gradients", "loss"),
        ("---", *("---:",) * 3),
    ]
    for row in found["rows"]:
        peak, kept = (row[name] / MIB for name in ("peak_bytes", "returned_gradient_bytes"))
        rows.append((row["contestant"], f"{peak:.0f} MiB", f"{kept:.0f} MiB", f"{row['loss']:.4f}"))
    sizes = f"T={found['tokens']}, H={found['hidden']}, V={found['vocabulary']}, {found['dtype']}"
    return f"{sizes}; {found['machine']}, torch {found['torch']}:\n\n{_markdown(rows)}"


def speed() -> str:
    """Return the table of goals, from the results of `benchmarks/run.py --table`."""
    from report import goals

    return goals(json.loads((RESULTS / "table.json").read_text()))


def problem() -> str:
    """Return the numbers of the README's picture as a table."""
    from report import PROBLEM

    found = json.loads((RESULTS / "full.json").read_text())["rows"]
    of = {(r["contestant"], r["tokens"]): r for r in found if r["group"] == "tokens"}
    names = [name for name in PROBLEM if any(name == ran for ran, _ in of)]
    rows = [("tokens", *(PROBLEM[name] for name in names)), ("---:",) * (1 + len(names))]
    for tokens in sorted({tokens for _, tokens in of}):
        cells = (_time_and_memory(of[name, tokens]) for name in names)
        rows.append((str(tokens), *cells))
    return _markdown(rows)


def _time_and_memory(row: dict) -> str:
    if "ms" not in row:
        return "out of memory"
    return f"{row['ms']:.0f} ms, {row['peak_bytes'] / GIB:.1f} GiB"


def few() -> str:
    """Return four rows of the table of goals, with the best result of each library."""
    from report import few

    return few(json.loads((RESULTS / "table.json").read_text()))


def errors() -> str:
    """Return the errors of log-probs in the table of goals."""
    from report import log_prob_errors

    return log_prob_errors(json.loads((RESULTS / "table.json").read_text()))


def behind() -> str:
    """Return the libraries ahead of headloss in the table of goals."""
    from report import behind

    return behind(json.loads((RESULTS / "table.json").read_text()))


def losing() -> str:
    """Return the libraries ahead of headloss as a list, including small calls."""
    from report import losing

    return losing(json.loads((RESULTS / "table.json").read_text()))


def losing_large() -> str:
    """Return the list of `losing()` in four lines; the last line covers all small calls."""
    lines = [line.removeprefix("- ") for line in losing().splitlines()]
    memory = "less memory than any setting in some row: "
    ahead = [line for line in lines if not line.startswith(("small calls", memory))]
    alone = "no gradient, "
    shares = [x.partition(alone)[2].replace("; ", ", ") for x in ahead if alone in x]
    others = [line.replace(", H", " at H") for line in ahead if alone not in line]
    said = [f"*Faster, by share of the limit*: {'. '.join(others)}."] if others else []
    if shares:
        said.append(f"*Log-probs without a gradient*, shares of the limit: {'; '.join(shares)}.")
    for line in lines:
        if line.startswith(memory):
            said.append(f"*Less memory in some row*: {line.removeprefix(memory)}.")
    if any(line.startswith("small calls") for line in lines):
        page = "benchmarks/README.md#where-we-lose"
        small = "torch.compile or eager PyTorch is faster in some calls"
        said.append(f"*Few tokens*: {small} ([list]({page})).")
    return "\n".join(f"- {line}" for line in said)


def small() -> str:
    """Return the table of calls with few tokens."""
    from report import small

    return small(json.loads((RESULTS / "table.json").read_text()))


def claim() -> str:
    """Return the main result of benchmarks/studies/gradient_truth.py as a paragraph."""
    from gradient_truth import claim

    return claim(json.loads(TRUTH.read_text()))


def truth() -> str:
    """Return the table of the gradient error of each contestant, for GRPO."""
    from gradient_truth import summary

    return summary(json.loads(TRUTH.read_text()))


def support() -> str:
    """Return the results of benchmarks/studies/support.py as a paragraph."""
    found = json.loads((RESULTS / "support.json").read_text())
    sizes, row, dense = found["sizes"], found["uniform"], found["dense"]
    return (
        f"On an {found['device']}, forward and backward of {sizes['tokens']} tokens with "
        f"{sizes['ids']} ids each (H = {sizes['hidden']}, V = {sizes['vocabulary']}, bfloat16)\n"
        f"need {row['ms']:.1f} ms and {row['peak MiB']:.0f} MiB, compared with {dense['ms']:.1f} "
        f"ms and {dense['peak MiB']:.0f} MiB over the whole vocabulary.\nIf each call has a new "
        f"batch, forward and backward over 64 ids per token need {row['ms with a new batch']:.1f} "
        f"ms. The error of the log-probs over the kept ids is at most {row['errors']['logp']:.0e}."
    )


def invariance() -> str:
    """Return the table of benchmarks/studies/invariance.py."""
    from report import invariance

    found = json.loads((RESULTS / "invariance.json").read_text())
    about = found["about"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    head = f"{about['machine']}; {versions}; commit {about['commit']}."
    return f"{head}\n\n{invariance(found['rows'])}"


def invariance_cost() -> str:
    """Return the time ratios of benchmarks/studies/invariance.py as a sentence."""
    found = json.loads((RESULTS / "invariance.json").read_text())
    named = {"bias": "with a bias", "adapter": "with an adapter", "bfloat16": "in bfloat16"}
    ratios = {row["kind"]: row["ms"][1] / row["ms"][0] for row in found["rows"]}
    said = [f"{ratio:.2f} {named.get(kind, f'in {kind}')}" for kind, ratio in ratios.items()]
    name = found["about"]["machine"].split(",")[0]
    return (
        f"On an {name}, `batch_invariant=True` multiplies the time of forward and backward by\n"
        f"{', '.join(said[:-1])} and {said[-1]}."
    )


def candidates() -> str:
    """Return the time that 64 candidates add to GRPO, as a paragraph."""
    found = json.loads((RESULTS / "table.json").read_text())
    rows = [r for r in found["rows"] if r["row"] == "GRPO and 64 candidates" and "ms" in r]
    ms = {(row["work"], row["contestant"]): row["ms"] for row in rows}
    one, two = "headloss", "headloss, recompute"
    chosen, rest = "grpo+candidates", "grpo+candidates+rest"
    name = found["runs"][0]["machine"].split(",")[0]
    return (
        f"On an {name}, forward and backward of GRPO with 16384 tokens (H = 4096, V = 128256, "
        f"bfloat16) need {ms['grpo', one]:.1f} ms.\nGRPO plus a term over 64 candidates needs "
        f"{ms[chosen, one]:.1f} ms, and GRPO plus a term over the candidates and `candidate_tail` "
        f"needs {ms[rest, one]:.1f} ms.\nUnder the schedule *recompute*, GRPO needs "
        f"{ms['grpo', two]:.1f} ms, {ms[chosen, two]:.1f} ms with 64 candidates, and "
        f"{ms[rest, two]:.1f} ms with `candidate_tail`."
    )


def steps() -> str:
    """Return the table of training steps, and the errors of the gradients."""
    return _of_steps(lambda bench, found: f"{bench.errors(found)}\n\n{bench.table(found)}")


def few_steps() -> str:
    """Return the training steps of the largest batch by default settings, with a comparison."""
    return _of_steps(_few_steps)


DEFAULTS = ("headloss", "headloss, recompute", "Transformers", "Liger", "TRL")
FEW_WORKS = ("SFT", "GRPO")  # DPO needs the same time within 2 ms


def _few_steps(bench: Any, found: dict) -> str:
    named = [row for row in found["rows"] if row["contestant"] in DEFAULTS and "ms" in row]
    most = max(row["tokens"] for row in named)
    rows = [(f"a step of {most} tokens", *DEFAULTS), ("---", *("---:",) * len(DEFAULTS))]
    times: dict[int, list[float]] = {}  # of headloss's step, in percent of Transformers' step
    less = []  # GiB of memory saved, at the largest batch
    for (model, work, tokens), group in _grouped(named, "model", "work", "tokens"):
        of = {row["contestant"]: row for row in group}
        if {"Transformers", "headloss"} <= of.keys():
            stock, ours = of["Transformers"], of["headloss"]
            times.setdefault(tokens, []).append(100 * ours["ms"] / stock["ms"])
            if tokens == most:
                less.append((stock["peak_bytes"] - ours["peak_bytes"]) / GIB)
        if tokens == most and work in FEW_WORKS:
            best = min(row["ms"] for row in group)
            cells = (bench._cell(of.get(name), best) for name in DEFAULTS)
            rows.append((f"{model}, {work}", *cells))
    rows += [study_tables.replay_row(DEFAULTS), study_tables.draft_row(DEFAULTS)]
    falling = sorted(times.items(), reverse=True)
    said = [f"{min(of):.0f} to {max(of):.0f} % at {n} tokens" for n, of in falling]
    return (
        f"{_markdown(rows)}\n\nCompared with *Transformers*, headloss needs {min(less):.0f} to "
        f"{max(less):.0f} GiB less memory at {most} tokens. The time "
        "of a headloss step, in percent of the time of a *Transformers* step, is "
        f"{', '.join(said)}.\n"
        f"{study_tables.draft_note()} {bench.report.machine(found)}"
    )


def _grouped(rows: list[dict], *names: str) -> Iterable[tuple[Any, list[dict]]]:
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups.items()


def _of_steps(show: Callable[[Any, dict], str]) -> str:
    if not STEPS.exists():
        return (
            "Not measured yet: `python3 benchmarks/steps.py --json benchmarks/results/steps.json`."
        )
    import steps

    return show(steps, json.loads(STEPS.read_text()))


def scaling() -> str:
    """Return the table of times of benchmarks/studies/parallel.py."""
    import parallel

    results = json.loads((RESULTS / "parallel.json").read_text())
    return parallel.table(results, parallel.DETAILS).strip()


def _markdown(rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


PARTS: dict[str, Callable[[], str]] = {
    "logits": logits,
    "claim": claim,
    "truth": truth,
    "support": support,
    "candidates": candidates,
    "invariance": invariance,
    "invariance-cost": invariance_cost,
    "terms": table,
    "modifiers": modifier_table,
    "steps": steps,
    "few-steps": few_steps,
    "few": few,
    "problem": problem,
    "speed": speed,
    "behind": behind,
    "errors": errors,
    "losing": losing,
    "losing-large": losing_large,
    "small": small,
    "scaling": scaling,
    "cpu-memory": cpu_memory,
    "clip-sides": study_tables.clip_sides,
    "training": study_tables.training,
    "sampling": study_tables.sampling,
    "replay": study_tables.replay,
    "drafts": study_tables.drafts,
}

PLACES: dict[str, tuple[str, ...]] = {
    "README.md": ("claim", "few-steps", "few", "losing-large"),
    "docs/concepts.md": ("logits", "invariance-cost"),
    "docs/candidates.md": ("candidates",),
    "docs/support.md": ("support",),
    "docs/does-it-matter.md": ("clip-sides", "training", "sampling"),
    "docs/replay.md": ("replay",),
    "docs/draft-models.md": ("drafts",),
    "docs/terms.md": ("terms", "modifiers"),
    "benchmarks/README.md": (
        "steps",
        "truth",
        "errors",
        "speed",
        "problem",
        "behind",
        "losing",
        "small",
        "scaling",
        "support",
        "invariance",
        "cpu-memory",
    ),
}


def fill(text: str, names: Iterable[str] = PARTS, file: str = "README.md") -> str:
    """Return the text with the named parts regenerated.

    Raises:
        ValueError: the text has no place for a named part.
    """
    for name in names:
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not place.search(text):
            raise ValueError(f"{file}: has no place <!-- {name} --> ... <!-- /{name} -->")
        made = PARTS[name]()
        text = place.sub(lambda match, made=made: f"{match[1]}{made}\n{match[2]}", text)
    return text


def main() -> int:
    for file, names in PLACES.items():
        text = fill((ROOT / file).read_text(), names, file)
        (ROOT / file).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
