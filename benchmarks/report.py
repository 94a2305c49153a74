"""Results as Markdown and plots: `python benchmarks/report.py table.json --plots FOLDER`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from named_lines import name_lines

GIB = 1 << 30
MIB = 1 << 20
Row = dict[str, Any]

NOTES = """\
*of limit*: time of the limit over time, medians of runs in turn. The limit is the vendor's products
that the work needs (logits, a teacher's, dX, dW) in chunks of 4096 tokens with outputs in the
inputs' dtype, or a copy of logits that are given; TFLOP/s count these products. *peak*: the
allocator's peak beyond the inputs, in MiB; *returned*: gradients and values per token in it; *dW
sum*: a float32 accumulator of dW in it, during which the dW that is returned does not exist; *MiB*:
the peak without these.
*log-prob*, *loss*: largest absolute error against float64, over all tokens. *dX*, *dW*: norm of the
error over the norm, on sampled rows; of a bias and an adapter's factors in *dW*, the largest.
*gate*: `exact` allows 1e-4, 1e-3 on entropies and 1e-2 on
gradients; `rounded`, for those who round logits or leave small gradients out by design, 1e-1."""


# ---------------------------------------------------------------------- Markdown


def tables(results: dict) -> str:
    """Return a Markdown table for each benchmark case, with one line per implementation."""
    parts, marks = [machine(results), NOTES], marks_of(results)
    for name, rows in _by_case(results["rows"]):
        about = _about(max(rows, key=lambda row: row["run"]))
        parts.append(f"### {name}\n\n{about}\n\n{_case_table(rows, marks)}")
    return "\n\n".join(parts) + "\n"


def goals(results: dict) -> str:
    """Return a Markdown table with one line per benchmark case: headloss's speed, the speed that
    headloss should reach, and the best other library."""
    head = ("work", "shape", "goal", "headloss, of limit", "MiB (peak)", "best peer, of limit")
    head = (*head, "MiB (peak)", "limit")
    lines = [head, ("---",) * len(head)]
    results = _of(results, "table")
    for _, found in _by_case(results["rows"]):
        newest = max(row["run"] for row in found)
        found = [row for row in found if row["run"] == newest]
        first, mark = found[0], marks_of(results)[newest]
        ours = [r for r in found if is_ours(r) and "ms" in r]
        peers = [r for r in found if not is_ours(r) and "ms" in r]
        peer = max(peers, key=lambda r: r["of_limit"], default=None)
        shape = f"N={first['tokens']} H={first['width']} V={first['vocabulary']}"
        shown = [f"{r['of_limit']:.2f} {_short(r)}" for r in ours]
        memory = [_memory(row) for row in ours]
        best = "-" if peer is None else f"{peer['of_limit']:.2f} {peer['contestant']}"
        size = "-" if peer is None else _memory(peer)
        limit = f"{first['limit_ms']:.2f} ms"
        cells = (first["row"] + mark, shape, first["goal"], "<br>".join(shown), "<br>".join(memory))
        lines.append((*cells, best, size, limit))
    return f"{machine(results)}\n\n{markdown(lines)}"


def log_prob_errors(results: dict) -> str:
    """Return a sentence with the largest errors of log-probs in the table."""
    rows = [row for row in _of(results, "table")["rows"] if "logps" in row.get("errors", ())]
    ours = [row["errors"]["logps"] for row in rows if is_ours(row)]
    rounded = [r["errors"]["logps"] for r in rows if r["tolerance"] == "rounded" and not is_ours(r)]
    return (
        f"The largest error of a log-prob against float64 is {max(ours):.1e} for headloss in\n"
        f"all rows of this run, and {min(rounded):.0e} to {max(rounded):.0e} for contestants that\n"
        "round logits."
    )


def _memory(row: Row) -> str:
    """Format working memory in MiB, with the peak (including returned tensors and the dW
    accumulator) in brackets."""
    return f"{row['working_bytes'] / MIB:.0f} ({row['peak_bytes'] / MIB:.0f})"


def behind(results: dict) -> str:
    """List the libraries that are faster or need less memory than headloss, for each case of the
    table."""
    lines = []
    for found, ours, peers in _sides(results):
        fastest, least = max(ours, key=lambda r: r["of_limit"]), min(ours, key=_beyond)
        faster = [r for r in peers if _ahead(r, fastest["of_limit"])]
        faster.sort(key=lambda r: -r["of_limit"])
        less = sorted((r for r in peers if _beyond(r) < _beyond(least)), key=_beyond)
        said = []
        if faster:
            shares = ", ".join(f"{r['contestant']} {r['of_limit']:.2f}" for r in faster)
            said.append(f"faster than {fastest['of_limit']:.2f} {_short(fastest)}: {shares}")
        if less:
            sizes = ", ".join(f"{r['contestant']} {_beyond(r) / MIB:.0f} MiB" for r in less)
            said.append(f"less than {_beyond(least) / MIB:.0f} MiB {_short(least)}: {sizes}")
        if said:
            lines.append(f"- *{found[0]['case']}*: {'; '.join(said)}")
    return "\n".join(lines) or "Nobody, in any row."


def _ahead(row: Row, share: float) -> bool:
    """Return True if the row's speed `of_limit` exceeds `share`, after rounding both to the two
    digits that the table shows."""
    return round(row["of_limit"], 2) > round(share, 2)


def losing(results: dict) -> str:
    """Return a short Markdown list of the cases in which another library is faster than headloss or
    needs less memory, including small calls."""
    said, less = [], set()
    for found, ours, peers in _sides(results):
        best, least = max(r["of_limit"] for r in ours), min(map(_beyond, ours))
        ahead = sorted((r for r in peers if _ahead(r, best)), key=lambda r: -r["of_limit"])
        shares = [f"{r['contestant']} {r['of_limit']:.2f}" for r in ahead]
        sizes = f"H = {found[0]['width']}, V = {found[0]['vocabulary']}"
        if shares:
            said.append(f"{found[0]['row']}, {sizes}: {', '.join(shares)}; headloss {best:.2f}")
        less |= {r["contestant"] for r in peers if _beyond(r) < least}
    if less:
        said.append(f"less memory than any setting in some row: {', '.join(sorted(less))}")
    said += _losing_small(results)
    return "\n".join(f"- {line}" for line in said) or "- nowhere in these rows"


NAMES = {"ce": "cross-entropy", "grpo": "GRPO", "gspo": "GSPO", "dpo": "DPO", "scores": "log-probs"}


def _losing_small(results: dict) -> list[str]:
    rows = [row for row in _of(results, "small")["rows"] if "ms" in row]
    said = []
    kinds = dict.fromkeys((_kind(row), row["work"]) for row in rows)
    for kind, work in kinds:
        of = [row for row in rows if (_kind(row), row["work"]) == (kind, work)]
        name = NAMES.get(work, work)
        name += "" if kind == f", {name}" else kind
        cases = [{row["contestant"]: row for row in found} for _, found in _by_case(of)]
        # Calls that failed the correctness gate have no time.
        cases = [found for found in cases if len(found) > 1]
        slower, more = [], []
        for found in cases:
            own = [found.pop(name) for name in list(found) if is_ours(found[name])]
            if not (own and found):
                continue
            ours = min(own, key=lambda row: row["ms"])
            behind = ours["ms"] - min(row["ms"] for row in found.values())
            if behind > TIE * (ours["ms"] - behind):
                slower.append((ours["tokens"], behind))
            if "eager" in found and _whole(ours) > (1 + TIE) * _whole(found["eager"]):
                more.append(_whole(ours) - _whole(found["eager"]))
        if slower:
            most, by = max(n for n, _ in slower), max(ms for _, ms in slower)
            said.append(
                f"small calls of {name}: torch.compile or eager PyTorch is faster in {len(slower)} "
                f"of {len(cases)}, of {most} tokens at most, by up to {by:.1f} ms"
            )
        if more:
            said.append(
                f"small calls of {name}: eager PyTorch needs less memory in {len(more)} of "
                f"{len(cases)}, by up to {max(more) / MIB:.0f} MiB"
            )
    return said


def _kind(row: Row) -> str:
    """Return the variant in a small call's name (", LoRA" for example); empty for a call without a
    variant."""
    return row["row"].removeprefix("small calls")


def _sides(results: dict) -> Iterator[tuple[list[Row], list[Row], list[Row]]]:
    """For each benchmark case and loss, yield three lists of the newest run's rows: all rows, the
    rows of headloss, and the rows of other libraries."""
    for _, found in _by_case(_of(results, "table")["rows"]):
        newest = max(row["run"] for row in found)
        found = [row for row in found if row["run"] == newest and "ms" in row]
        for work in dict.fromkeys(row["work"] for row in found):
            rows = [row for row in found if row["work"] == work]
            ours, peers = [r for r in rows if is_ours(r)], [r for r in rows if not is_ours(r)]
            if ours and peers:
                yield rows, ours, peers


def _beyond(row: Row) -> int:
    """Return the peak bytes in excess of the inputs and the returned tensors. If the float32
    accumulator of dW is larger than the returned dW, the result includes the difference of their
    bytes."""
    return row["working_bytes"] + max(0, row["accumulator_bytes"] - _returned_weight(row))


def _returned_weight(row: Row) -> int:
    """Return the bytes of the returned dW."""
    size = 4 if row["dtype"] == "float32" else 2
    return size * row["vocabulary"] * row["width"]


FEW = ("GRPO", "GSPO, ragged", "cross-entropy", "log-prob and entropy, no gradient")
OURS = ("headloss", "headloss, 5 GiB", "headloss, recompute")
PEERS = ("torch.compile", "TRL", "Liger", "QuACK", "CCE")
TIE = 0.02  # relative difference of two equal runs


def few(results: dict) -> str:
    """Return a table of four cases at H=4096: headloss by default, in further budgets and under
    recompute, and the fastest configuration of each library."""
    results = _of(results, "table")
    rows = [r for r in results["rows"] if r["width"] == 4096 and r["tokens"] == 16384]
    ran = {r["contestant"] for r in rows}
    names = [name for name in OURS if name in ran]
    head = ("16384 tokens, H=4096, V=128256, bf16", *names, *PEERS)
    lines = [head, ("---", *("---:",) * (len(head) - 1))]
    for name in FEW:
        of = [r for r in rows if r["row"] == name]
        of = [r for r in of if "ms" in r and r["run"] == max(row["run"] for row in of)]
        by_name = {r["contestant"].replace("head_stats", "headloss"): r for r in of}
        if "headloss" not in by_name:
            continue
        shown = [by_name.get(ours) for ours in names]
        for peer in PEERS:
            by = [r for r in of if r["contestant"].startswith(peer)]
            shown.append(max(by, key=lambda r: r["of_limit"], default=None))
        lines.append((name, *_shares(shown)))
    return f"{machine(results)}\n\n{markdown(lines)}"


def _shares(rows: list[Row | None]) -> list[str]:
    most = max(row["of_limit"] for row in rows if row)
    cells = []
    for row in rows:
        share = f"{row['of_limit']:.2f}" if row else ""
        share = f"**{share}**" if row and row["of_limit"] >= most - TIE else share
        cells.append(f"{share}, {row['peak_bytes'] / GIB:.1f} GiB" if row else "-")
    return cells


def small(results: dict) -> str:
    """Return a table of small calls that were timed one at a time: time, CPU time, and peak memory
    of each call."""
    names = ("headloss", "torch.compile", "eager")
    head = ("H, V", "N", "work", *names)
    lines = [head, (*("---",) * 3, *("---:",) * 3)]
    results = _of(results, "small")
    for _, found in _by_case([row for row in results["rows"] if "ms" in row]):
        for work in dict.fromkeys(row["work"] for row in found):
            of = {row["contestant"]: row for row in found if row["work"] == work}
            first = next(iter(of.values()))
            cells = [_alone(of[name]) if name in of else "-" for name in names]
            shape = f"{first['width']}, {first['vocabulary']}"
            lines.append((shape, str(first["tokens"]), work + _kind(first), *cells))
    return f"{machine(results)}\n\n{markdown(lines)}"


def invariance(rows: list[Row]) -> str:
    """Return the table of the cost of `Options(batch_invariant=True)` (studies/invariance.py)."""
    head = ("head", "N", "ms", "with the option", "ratio", "differ", "with the option")
    lines = [head, ("---",) + ("---:",) * 6]
    for row in rows:
        a, b = row["ms"]
        cells = ["/".join(map(str, found.values())) for found in row["differ"]]
        numbers = [f"{x:.2f}" for x in (a, b, b / a)]
        lines.append((row["kind"], str(row["sizes"][0]), *numbers, *cells))
    return markdown(lines)


def _of(results: dict, group: str) -> dict:
    """Return the results of one group of cases (`Case.group`): the rows of the group, and the
    descriptions of all benchmark runs up to the newest run that has a row of the group."""
    rows = [row for row in results["rows"] if row["group"] == group]
    runs = 1 + max((row["run"] for row in rows), default=-1)
    return {"runs": results["runs"][:runs] or results["runs"], "rows": rows}


def _alone(row: Row) -> str:
    return f"{row['ms']:.2f} ({row['host_ms']:.2f}), {row['peak_bytes'] / MIB:.0f} MiB"


def is_ours(row: Row) -> bool:
    return row["contestant"].startswith("head")


SEVERAL = ("one term and five", "GRPO and 64 candidates")  # cases with several works


def _short(row: Row) -> str:
    name = row["contestant"].removeprefix("headloss").strip(", ") or "default"
    several = row["work"] if row["row"] in SEVERAL else ""
    return f"({', '.join(filter(None, (name, several)))})"


def _by_case(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    names = list(dict.fromkeys(row["case"] for row in rows))
    ordered = sorted(rows, key=lambda row: names.index(row["case"]))
    return [(name, list(found)) for name, found in groupby(ordered, key=lambda r: r["case"])]


def machine(results: dict) -> str:
    """Describe the machine, the versions and the commit of the last run, and of each earlier run
    that still has rows in the results file."""
    runs, marks = results["runs"], marks_of(results)
    lines = [_run(runs[-1])]
    for number in sorted({row["run"] for row in results["rows"] if marks[row["run"]]}):
        lines.append(f"Rows marked{marks[number]} are of an earlier run: {_run(runs[number])}")
    return "\n\n".join(dict.fromkeys(lines))


def _run(run: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return f"{run['machine']}; {versions}; commit {run['commit']}."


def marks_of(results: dict) -> list[str]:
    """Return a mark for each run: empty for the last run's commit, else the run's commit."""
    commits = [run["commit"] for run in results["runs"]]
    return ["" if commit == commits[-1] else f" [{commit}]" for commit in commits]


def _about(row: Row) -> str:
    goal = f", goal: {row['goal']}" if row["goal"] else ""
    return f"limit {row['limit_ms']:.2f} ms{goal}"


COLUMNS = ("contestant", "ms", "of limit", "TFLOP/s", "MiB", "peak", "returned", "dW sum")
COLUMNS = (*COLUMNS, "log-prob", "loss", "dX", "dW", "gate", "how")


def _case_table(rows: list[Row], marks: list[str]) -> str:
    several = len({row["work"] for row in rows}) > 1
    rate = "GB/s" if any("gb_per_s" in row for row in rows) else "TFLOP/s"
    columns = tuple(rate if name == "TFLOP/s" else name for name in COLUMNS)
    lines = [columns, ("---", *("---:",) * 11, "---", "---")]
    for row in sorted(rows, key=lambda row: row.get("ms", float("inf"))):
        name = f"{row['contestant']}: {row['work']}" if several else row["contestant"]
        lines.append((name + marks[row["run"]], *_cells(row)))
    return markdown(lines)


def _cells(row: Row) -> tuple[str, ...]:
    def number(name: str, form: str, scale: float = 1) -> str:
        return format(row[name] * scale, form) if name in row else "-"

    found = row.get("errors", {})
    head = [error for name, error in found.items() if name in HEAD]
    found = found | ({"head": max(head)} if head else {})
    wrong = {name: f"{found[name]:.0e}" if name in found else "-" for name in QUANTITIES}
    loss = wrong["loss"] if "loss" in found else wrong["nll"]
    gate = row["status"]
    if gate == "ok":
        gate = row["tolerance"]
    elif row.get("reason"):
        gate = f"{gate}: {row['reason']}".replace("|", "/")
    rate = number("gb_per_s", ".0f") if "gb_per_s" in row else number("tflops", ".0f")
    return (
        number("ms", ".2f"),
        number("of_limit", ".2f"),
        rate,
        number("working_bytes", ".0f", 1 / MIB),
        number("peak_bytes", ".0f", 1 / MIB),
        number("returned_bytes", ".0f", 1 / MIB),
        number("accumulator_bytes", ".0f", 1 / MIB),
        wrong["logps"],
        loss,
        wrong["hidden"],
        wrong["head"],
        gate,
        row.get("how", ""),
    )


QUANTITIES = ("logps", "loss", "nll", "hidden", "head")
# Names of the gradients of the head's weight, bias and LoRA factors.
HEAD = ("weight", "bias", "lora_a", "lora_b")


def markdown(lines: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ---------------------------------------------------------------------- plots


def plots(results: dict, folder: Path) -> list[Path]:
    """Write PNG files of the available results: time against the numbers of tokens and of
    vocabulary ids, one term against five terms, and the table as bars."""
    import matplotlib

    matplotlib.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for group, axis, label in (
        ("tokens", "tokens", "tokens N"),
        ("vocabulary", "vocabulary", "vocabulary V"),
    ):
        rows = [row for row in results["rows"] if row["group"] == group]
        if rows:
            made.append(_sweep(rows, axis, label, folder / f"{group}.png"))
    rows = [row for row in results["rows"] if row["row"] == "one term and five" and "ms" in row]
    if rows:
        made.append(_one_and_five(rows, folder / "five_terms.png"))
    rows = [row for row in results["rows"] if row["group"] == "table" and "ms" in row]
    if rows:
        made.append(_bars(rows, folder / "table.png"))
    return made


def _sweep(
    rows: list[Row],
    axis: str,
    label: str,
    path: Path,
    names: dict[str, str] | None = None,
    title: str | None = None,
) -> Path:
    """Plot the time and the peak memory of each implementation against one size; each line has its
    label at its end.

    `names` maps implementations to labels; None plots all implementations under their own names. A
    line ends in a cross if the implementation ran out of memory.
    """
    import matplotlib.pyplot as plt

    figure, (time, memory) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    drawn: tuple[list[Any], list[Any]] = ([], [])
    for name in names or dict.fromkeys(row["contestant"] for row in rows):
        of = sorted((r for r in rows if r["contestant"] == name), key=lambda row: row[axis])
        found = [row for row in of if "ms" in row]
        if not found:
            continue
        sizes = [row[axis] for row in found]
        shown = (names or {}).get(name, name)
        ended = len(found) < len(of)
        shown += ", then out of memory" if ended and names else ""
        for panel, kept, values in (
            (time, drawn[0], [row["ms"] for row in found]),
            (memory, drawn[1], [_whole(row) / GIB for row in found]),
        ):
            kept += panel.plot(sizes, values, label=shown, **_style(found[0]))
            if ended:
                panel.plot(sizes[-1:], values[-1:], "x", color=kept[-1].get_color(), markersize=10)
    limits = sorted({row[axis]: row["limit_ms"] for row in rows}.items())
    bare = "bare matrix products" if names else "limit"
    drawn[0].extend(time.plot(*zip(*limits, strict=True), "k:", label=bare))
    for part, unit in ((time, "ms"), (memory, "GiB beyond the inputs, gradients included")):
        part.set_xscale("log", base=2)
        part.set_yscale("log")
        part.set_xlabel(label)
        part.set_ylabel(unit)
        part.grid(alpha=0.3)
    figure.suptitle(title or _title(rows[0], axis), fontsize=10)
    for panel, lines in zip((time, memory), drawn, strict=True):
        name_lines(panel, lines)
    return _saved(figure, path)


def _whole(row: Row) -> int:
    """Return the peak bytes in excess of the inputs; the peak includes returned gradients and the
    float32 accumulator of dW."""
    return row.get("peak_bytes", row["working_bytes"] + row["accumulator_bytes"])


PROBLEM = {  # Labels of the lines in the plot of the README.
    "headloss": "headloss",
    "headloss, 5 GiB": "headloss, 5 GiB budget",
    "headloss, recompute": "headloss, recompute",
    "eager": "plain PyTorch",
    "torch.compile": "torch.compile",
}


def problem(results: dict, path: Path) -> Path:
    """Plot time and memory of headloss and plain PyTorch against the number of tokens."""
    rows = [row for row in results["rows"] if row["group"] == "tokens"]
    sizes = "H = {width}, V = {vocabulary}, {dtype}".format_map(rows[0])
    gpu = results["runs"][-1]["machine"].partition(",")[0]
    title = f"GRPO, forward and backward: {sizes}, {gpu}"
    return _sweep(rows, "tokens", "scored tokens of a call", path, PROBLEM, title)


def _title(row: Row, axis: str) -> str:
    sizes = {"tokens": "N", "width": "H", "vocabulary": "V"}
    fixed = " ".join(f"{short}={row[name]}" for name, short in sizes.items() if name != axis)
    return f"{row['work']}, forward and backward, {fixed}, {row['dtype']}"


def _style(row: Row) -> dict[str, Any]:
    return {"marker": "o", "markersize": 4, "linewidth": 2.2 if is_ours(row) else 1.2}


def _one_and_five(rows: list[Row], path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure, (time, memory) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    names = [
        f"{row['work']},\n{'no' if 'no metrics' in row['contestant'] else 'all'} metrics"
        for row in rows
    ]
    time.bar(names, [row["ms"] for row in rows], color="tab:blue")
    time.axhline(rows[0]["limit_ms"], color="black", linestyle=":")
    time.set_ylabel("ms (dotted: limit)")
    memory.bar(names, [row["working_bytes"] / MIB for row in rows], color="tab:orange")
    memory.set_ylabel("MiB")
    for part in (time, memory):
        part.tick_params(axis="x", labelsize=7)
    return _saved(figure, path)


def _bars(rows: list[Row], path: Path) -> Path:
    """Plot the speed of every implementation, as a fraction of the speed of the necessary matrix
    products; each benchmark case has a panel."""
    import matplotlib.pyplot as plt

    cases = _by_case(rows)
    heights = [len(found) for _, found in cases]
    figure, panels = plt.subplots(
        len(cases),
        1,
        figsize=(9, 0.26 * sum(heights) + 0.9 * len(cases)),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
        sharex=True,
    )
    for panel, (name, found) in zip(panels[:, 0], cases, strict=True):
        found = sorted(found, key=lambda row: row["of_limit"])
        names = [f"{row['contestant']} ({row['work']})" for row in found]
        colors = ["tab:blue" if is_ours(row) else "tab:gray" for row in found]
        bars = panel.barh(names, [row["of_limit"] for row in found], color=colors)
        panel.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
        panel.axvline(1, color="black", linestyle=":")
        panel.set_title(name, fontsize=8, loc="left")
        panel.tick_params(axis="y", labelsize=7)
    panels[-1, 0].set_xlabel("fraction of the limit")
    return _saved(figure, path)


def _saved(figure, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


# ---------------------------------------------------------------------- the command


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Results as Markdown and as plots.")
    parser.add_argument("results", type=Path, help="JSON that run.py wrote")
    parser.add_argument("--goals", action="store_true", help="one line for each case")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="where to write PNG files")
    parser.add_argument("--problem", type=Path, metavar="FILE", help="the README's picture")
    arguments = parser.parse_args(argv)
    results = json.loads(arguments.results.read_text())
    print(goals(results) if arguments.goals else tables(results))
    if arguments.problem:
        print(problem(results, arguments.problem))
    if arguments.plots:
        for path in plots(results, arguments.plots):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
