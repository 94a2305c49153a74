"""The command line: `python -m headloss plan | check | doctor | terms | train | compare`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import __version__, kernels, train
from .arguments import did_you_mean
from .command import Parser, parsers, until_nobody_reads
from .engine.checks import check_segments
from .engine.plan import make_plan
from .engine.plan_inputs import PlanInputs
from .losses.catalogue import TERMS, sample, table
from .losses.term import Objective
from .objective.reads import reads
from .options import SCHEDULES, Options
from .testing import doctor, gate

MOST_TOKENS = 1 << 24  # a plan lists the segments and chunks of all tokens
DTYPES = {gate.name_of(d): d for d in (*gate.DTYPES, torch.float64)}
SHOWN = ("schedule", "reason", "backend", "chunk_tokens", "tile", "bytes", "total_bytes")
SHOWN += ("peak_bytes", "plain_bytes")  # Fields of a plan.
ASKED = ("schedule", "chunk_tokens", "memory_budget")  # `Options` fields that a command line sets.
NUMBER = r"\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?"
UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@until_nobody_reads()
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code.

    The exit code is 0 for success, 1 if a check (`gate`) failed or training met NaN, 2 for bad
    arguments or no arguments, 130 for training stopped by Ctrl-C or SIGTERM, and 141 for output
    whose reader has closed.
    """
    parser = _parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help()
        return 2
    arguments = parser.parse_args(argv)
    try:
        return arguments.command(arguments) or 0
    except arguments.errors as error:
        parser.error(str(error))


def _plan(arguments: argparse.Namespace) -> None:
    elsewhere = arguments.gpu_memory is not None
    dtype = DTYPES[arguments.dtype]
    if elsewhere and arguments.device == "cpu":
        raise ValueError("--gpu-memory: got it beside --device cpu, want --device cuda, or none")
    device = torch.device("cuda" if elsewhere else arguments.device or _default_device())
    problem = _problem(arguments, device.type == "cuda")
    options = Options(**{name: getattr(arguments, name) for name in ASKED})
    # A GPU given by --gpu-memory is assumed to have Triton.
    assumed = "triton" if elsewhere and dtype != torch.float64 else None
    backend = assumed or kernels.choose("auto", device, dtype)
    plan = make_plan(problem, options, backend)
    sizes = f"hidden {problem.width}, vocabulary {problem.vocabulary}, {arguments.dtype}"
    if arguments.plot is not None:
        title = f"{arguments.objective}\n{sizes}, {device.type}"
        for note in _draw(problem, options, backend, title, arguments.plot):
            print(f"headloss: not drawn: {note}", file=sys.stderr)
    if arguments.json:
        shown = {name: getattr(plan, name) for name in SHOWN}
        return print(json.dumps(shown | {"chunks": len(plan.chunks)}, indent=2))
    segments = f"{len(problem.lengths or [])} segments of at most {arguments.segment_length}"
    print(f"{problem.tokens} tokens in {segments}, {sizes}, {device.type}")
    print(f"objective  {arguments.objective}: {problem.scope}-scoped")
    print(plan)


def _problem(arguments: argparse.Namespace, on_gpu: bool) -> PlanInputs:
    """Return the `PlanInputs` that a call of `head_loss` would derive from tensors of these
    sizes."""
    objective = objective_of(arguments.objective)
    dtype = DTYPES[arguments.dtype]
    length = arguments.segment_length
    check_segments(-(-arguments.tokens // length), objective)
    if arguments.vocab * max(arguments.tokens, arguments.hidden) >= 1 << 60:
        raise ValueError("--vocab: got logits or a weight of 2^60 elements or more, want fewer")
    if arguments.tokens > MOST_TOKENS:
        raise ValueError(f"--tokens: got {arguments.tokens}, want at most {MOST_TOKENS} in a call")
    terms = reads(objective, sample()[1].kinds(), torch.float32, torch.device("cpu"), observe=False)
    teachers = objective.teachers
    # The kernel that writes exp(logits) supports bfloat16 heads of a width that 8 divides.
    exp_tiles = on_gpu and dtype == torch.bfloat16 and arguments.hidden % 8 == 0 and not teachers
    here = torch.device(_default_device() if arguments.gpu_memory is None else "cpu")
    multiprocessors = kernels.multiprocessors(here) or 132  # multiprocessors of an H100 or H200
    return PlanInputs(
        tokens=arguments.tokens,
        width=arguments.hidden,
        vocabulary=arguments.vocab,
        scope=objective.scope,
        lengths=[min(length, arguments.tokens - at) for at in range(0, arguments.tokens, length)],
        segments_per_unit=objective.segments_per_unit,
        logp_only=all(term.gradients <= {"logp"} for term in terms.values()),
        weight_gradient=not arguments.frozen_head,
        element_size=dtype.itemsize,
        weight_size=dtype.itemsize,
        rescaled=dtype == torch.float16,
        row_bytes=2 if exp_tiles else max(4, dtype.itemsize) * (1 + len(teachers)),
        on_gpu=on_gpu,
        multiprocessors=multiprocessors if on_gpu else 0,
        memory=arguments.gpu_memory or kernels.memory(here),
        exp_tiles=exp_tiles,
    )


def _draw(problem: PlanInputs, options: Options, backend: str, title: str, path: Path) -> list[str]:
    """Draw a plot of planned bytes against the number of tokens; return one reason for each
    schedule that does not support the objective or the head.

    Raise ValueError if matplotlib is not installed or does not support the suffix of `path`.
    """
    try:
        from .train import plots
    except ModuleNotFoundError as error:
        raise ValueError(f"--plot needs {error.name}: pip install 'headloss[plot]'") from None
    # log2 of the largest number of tokens on the plot's axis
    last = max(17, (4 * problem.tokens - 1).bit_length())
    tokens = sorted({problem.tokens, *(1 << n for n in range(8, 1 + last))})
    problems = [replace(problem, tokens=n) for n in tokens]
    curves = dict[str, list[float]]()
    notes = list[str]()
    for schedule in (s for s in SCHEDULES if s != "auto"):
        fixed = replace(options, schedule=schedule)
        try:
            plans = [make_plan(size, fixed, backend) for size in problems]
        except ValueError as error:
            notes.append(f"{schedule}: {error}")
            continue
        curves[schedule] = [plan.total_bytes / UNITS["GiB"] for plan in plans]
        curves["plain logits"] = [plan.plain_bytes / UNITS["GiB"] for plan in plans]
    try:
        plots.memory(path, title, tokens, curves, problem.tokens)
    except OSError as error:
        raise ValueError(f"--plot: cannot write {path}: {error.strerror}") from None
    return notes


def objective_of(text: str) -> Objective:
    """Parse terms with default options and weights: "gspo + 1e-4*z_loss - 0.01*entropy"."""
    factories = {f.__name__: f for f in TERMS}
    first, *others = re.split(r"(?<!\d[eE])([+-])", text)
    signed = zip(others[::2], others[1::2], strict=True)
    parts = []
    for sign, part in [("+", first), *signed][not first.strip() and len(others) > 0 :]:
        weight, times, name = (word.strip() for word in part.rpartition("*"))
        if name not in factories:
            want = f"want names of terms joined by '+'; {did_you_mean(name, factories)}"
            raise ValueError(f"--objective: got {name!r}, {want}")
        if times and not re.fullmatch(NUMBER, weight):
            raise ValueError(f"--objective: got {part.strip()!r}, want NUMBER*TERM: 1e-4*{name}")
        parts.append((float(f"{sign}{weight or 1}"), factories[name]()))
    return Objective(tuple(parts))


def _check(arguments: argparse.Namespace) -> int:
    device = arguments.device
    threads = f"{device}, {torch.get_num_threads()} threads"
    where = doctor.described(device) if device.type == "cuda" else threads
    print(f"torch {torch.__version__} on {where}")
    print("error against float64 / budget: 3 x the error of plain torch + 1e-6\n")
    shown = {"loss": "loss", "logps": "log-probs", "hidden": "grad hidden", "weight": "grad weight"}
    rows = [["objective", "schedule", "dtype", "backend", *shown.values(), ""]]
    verdicts = [gate.check(case, device) for case in gate.cases(arguments.quick)]
    for verdict in verdicts:
        cells = {c.quantity: f"{c.error:.0e}/{c.budget:.0e}" for c in verdict.comparisons}
        errors = [cells.get(name, "-") for name in shown]
        end = "ok" if verdict.ok else "FAIL"
        rows.append([*verdict.case.names, verdict.backend or "-", *errors, end])
    _print_table(rows)
    well = sum(verdict.ok for verdict in verdicts)
    print(f"\n{well} of {len(verdicts)} cases within budget")
    for verdict in verdicts:
        if verdict.failure:
            print(f"{', '.join(verdict.case.names)}: {verdict.failure}")
    return 0 if well == len(verdicts) else 1


def _print_table(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip(), flush=True)


def _train(arguments: argparse.Namespace) -> int | None:
    if arguments.list:
        return _print_table([list(pair) for pair in train.recipes().items()])
    if arguments.recipe is None:
        raise train.RecipeError("train: want a recipe, see headloss train --list")
    try:
        result = train.run(train.recipe(arguments.recipe, arguments.overrides))
    except train.RunError as error:
        print(f"headloss: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("headloss: stopped at once; what was saved before stays", file=sys.stderr)
        return 130
    return 0 if result.finished else 130


def _parser() -> Parser:
    parser, commands = parsers(__version__)

    def command(name: str, run: Callable, errors: Any) -> Callable:
        """Return the method `add_argument` of the subparser `name`; exceptions of the types
        `errors` are reported as bad arguments."""
        commands[name].set_defaults(command=run, errors=errors)
        return commands[name].add_argument

    number = {"type": _positive, "metavar": "N"}
    flag = {"action": "store_true"}
    bad = (ValueError, TypeError)

    add = command("plan", _plan, bad)
    add("--tokens", **number, required=True, help="scored tokens, T")
    add("--hidden", **number, required=True, help="hidden width, H")
    add("--vocab", **number, required=True, help="vocabulary, V")
    add("--objective", default="cross_entropy", metavar="TERMS", help="e.g. gspo+1e-4*z_loss+kl")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of hidden and weight")
    add("--segment-length", **number, default=2048, help="tokens per segment")
    add("--device", choices=("cuda", "cpu"), help="the device to plan for; default: a GPU, if any")
    add("--gpu-memory", type=_bytes, metavar="SIZE", help="plan for such a GPU, e.g. 80GiB")
    add("--frozen-head", **flag, help="the head needs no gradient")
    add("--chunk-tokens", **number)
    add("--memory-budget", type=_bytes, metavar="SIZE", help="e.g. 512MiB or 2GiB")
    add("--schedule", choices=SCHEDULES, default="auto")
    add("--json", **flag)
    add("--plot", type=Path, metavar="FILE", help="draw memory against tokens for every schedule")

    add = command("check", _check, bad)
    add("--device", type=_device, default=_default_device(), help="e.g. cuda:1; default: a GPU")
    add("--quick", **flag, help="a third of the cases")

    command("doctor", lambda _: print(*doctor.report(), sep="\n"), ())
    command("terms", lambda _: print(table()), ())

    add = command("train", _train, train.RecipeError)
    add("recipe", nargs="?", metavar="RECIPE", help="a YAML file, or a name")
    add("overrides", nargs="*", metavar="key=value", help="e.g. model=gpt2")
    add("--list", **flag, help="the recipes there are")

    add = command("compare", lambda a: print(train.compare(a.runs, a.output)), train.RecipeError)
    add("runs", nargs="+", metavar="FOLDER", help="what a run wrote to")
    add("--output", default="compare.html", metavar="FILE", help="default: compare.html")
    return parser


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, want a positive integer")
    return int(text)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]iB|B)?", text)
    size = float(match[1]) * UNITS[match[2] or ""] if match else 0
    if not 1 <= size < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, want bytes, e.g. 512MiB, 2GiB or 1000000")
    return int(size)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"got {text!r}, want cpu, cuda or cuda:N") from None
    present = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(device.type, 0)
    if (device.index or 0) >= present:
        raise argparse.ArgumentTypeError(f"got {text!r}, which this machine or torch does not have")
    return device


if __name__ == "__main__":
    sys.exit(main())
