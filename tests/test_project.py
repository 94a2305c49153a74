"""What holds for the project as a whole: its arrows, its sizes, and what every file may hold."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from counts import counts, tokens

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "headloss"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Who may import whom inside headloss. A name stands for the module and all below it that has no row
# of its own; "" is the package itself, with its public names. Imports under `if TYPE_CHECKING` are
# free.
PARTS = {
    "batch.batch",
    "objective.metrics",
    "batch.packing",
    "batch.reduction",
    "batch.segments",
    "arguments",
    "objective.statistics",
}
TERMS = {"losses.distillation", "losses.scope", "losses.teacher", "losses.term", "losses.trial"}
TERMS |= {"objective.bound", "objective.reads"}
ENGINE = {"objective.elsewhere", "objective.tolerance"}
LOGITS = {"kernels", "softmax.products", "softmax"}
VERBS = {"check_term", "head_function", "head_loss", "head_stats", "head_topk"}
PUBLIC = {"", *PARTS, "batch.support_forms", "head.head", "losses", "objective.reads", "options"}
PUBLIC |= {"run.plan", *VERBS}
ALLOWED: dict[str, set[str]] = {
    "naive": set(),  # torch alone
    "arguments": set(),
    "host_copy": set(),
    "objective.statistics": set(),
    "batch.segments": {"arguments", "ranks.collectives"},
    "objective.metrics": {"ranks.collectives"},
    "batch.reduction": {"arguments", "ranks.collectives", "batch.segments"},
    "options": {"arguments"},
    "softmax.products": {"kernels"},
    "batch.survey": {"arguments", "batch.segments", "host_copy"},
    "batch.support": {"arguments", "kernels", "batch.survey"},
    "batch.support_forms": {"arguments"},
    "batch.batch": {
        "arguments",
        "batch.reduction",
        "batch.segments",
        "batch.support",
        "batch.survey",
    },
    "batch.packing": {
        "batch.batch",
        "batch.segments",
        "batch.support",
        "objective.statistics",
        "batch.survey",
    },
    "losses": {
        "arguments",
        "losses",
        "objective.divergence",
        "objective.statistics",
        "batch.segments",
        "batch.reduction",
        "objective.metrics",
        "ranks.collectives",
    },
    "losses.rejection": {"losses", *PARTS},  # packs what it is given
    "losses.second_moment": {"losses", *PARTS},  # packs what it is given
    "losses.prompts": {"losses", *PARTS},  # groups the segments
    "losses.values": {"losses", *PARTS, "objective.bound"},  # packs what it is given, and weighs it
    "losses.catalogue": {"losses", *PARTS},  # traces the terms on a sample
    "kernels": {"kernels", "objective.divergence", "objective.statistics"},
    "run.problem": {"options", "softmax.products"},
    "run.plan": {"batch.segments", "options", "run.problem", "softmax.products"},
    "head": {"arguments", "head", "softmax.products"},
    "objective.sample": {*PARTS, "losses.term"},
    "objective.elsewhere": {*PARTS, "losses.identity", *TERMS},
    "objective.weights": PARTS,
    "objective.bound": {*PARTS, "losses.term", "objective.sample", "objective.weights"},
    "objective.reads": {
        *PARTS,
        "losses.identity",
        "losses.term",
        "losses.trial",
        "objective.sample",
    },
    "objective.tolerance": {*PARTS, "kernels", "objective.bound"},
    "softmax": {
        *LOGITS,
        "losses.distillation",
        "losses.teacher",
        "objective.bound",
        "objective.statistics",
        "host_copy",
    },
    "ranks.collectives": set(),
    "ranks.vocabulary": {*LOGITS, "batch.segments", "ranks", "objective.statistics"},
    "ranks.agreement": {"ranks.collectives", "host_copy"},
    "ranks.facts": {*PARTS, "head.head", "kernels", "options", "losses.term", "ranks.agreement"},
    "ranks.place": {"batch.batch", "head.head", "ranks"},
    "ranks": set(),
    "run.checks": {
        "head.dtensor",
        *PARTS,
        *TERMS,
        "kernels",
        "objective.sample",
        "head.head",
        "options",
        "ranks.place",
    },
    "run.work": {
        *PARTS,
        *LOGITS,
        *TERMS,
        "options",
        "ranks.place",
        "run.plan",
        "run.prepare",
        *ENGINE,
    },
    "run.pull_back": {*PARTS, *LOGITS, "objective.bound", "run.work"},
    "run.loop": {
        *PARTS,
        *LOGITS,
        "objective.bound",
        "ranks.collectives",
        "run.pull_back",
        "run.work",
        *ENGINE,
    },
    "run.operator": {
        *PARTS,
        "kernels",
        "softmax",
        "head.head",
        "objective.bound",
        "objective.elsewhere",
        "options",
        "run",
    },
    "run.prepare": {
        "run.problem",
        "ranks.place",
        *PARTS,
        *TERMS,
        *LOGITS,
        "objective.sample",
        "run.checks",
        "head.head",
        "options",
        "run.plan",
    },
    "run.teachers": {"head.dtensor", *PARTS, *TERMS, *LOGITS, "run.checks", "ranks", "run.work"},
    "run.calls": {
        *PARTS,
        *TERMS,
        *LOGITS,
        "run.checks",
        "head.head",
        "options",
        "run.plan",
        "ranks",
        "run",
        "objective.tolerance",
    },
    "run": set(),
    "batch": set(),
    "objective": set(),
    "head_loss": {
        "head.dtensor",
        *PARTS,
        "objective.elsewhere",
        *TERMS,
        "run.checks",
        "head.head",
        "kernels",
        "options",
        "run.plan",
        "ranks",
        "run",
    },
    "head_function": {
        "head.dtensor",
        *PARTS,
        "head.head",
        "head_stats",
        "losses.scope",
        "losses.term",
        "objective.elsewhere",
        "options",
        "ranks",
        "run",
        "run.checks",
    },
    "head_stats": {
        "head.dtensor",
        *PARTS,
        "head.head",
        "objective.elsewhere",
        "options",
        "run.plan",
        "ranks",
        "run",
    },
    "head_topk": {
        "run.problem",
        "head.dtensor",
        *PARTS,
        *LOGITS,
        "head.head",
        "options",
        "ranks",
        "run.checks",
        "run.plan",
        "run.work",
    },
    "check_term": {*PARTS, *TERMS, "objective.sample"},
    "": PUBLIC,
    "testing": {*PUBLIC, *TERMS},
    "gate": {*PUBLIC, *TERMS, "testing"},
    "doctor": {"", "kernels", "integrations"},  # which frameworks it fits
    "__main__": {
        *PUBLIC, *TERMS, "doctor", "gate", "kernels", "run.checks", "run.problem", "train"
    },
    "integrations": {*PUBLIC, "head.adapters", "integrations"},  # how a model is looked into
    "rl": {*PUBLIC, "rl", "integrations"},
    "train": {*PUBLIC, "train", "rl", "integrations"},
}
BACKENDS = ("reference", "triton", "hopper")  # files of kernels/, by how their names begin

LINES_PER_FILE = 400
LINES_PER_FUNCTION = 70
LINES_PER_KERNEL = 110
MOST = {"core lines": 10_466, "core tokens": 76_528}
MOST |= {"kernels lines": 4_310, "kernels tokens": 34_943, "files on top": 14}


def most_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """A kernel names each pointer and each option on a line of its own, and so does its launch."""
    source = ast.unparse(function)
    launches = "jit" in "".join(map(ast.unparse, function.decorator_list)) or "num_warps=" in source
    return LINES_PER_KERNEL if launches else LINES_PER_FUNCTION


def module_name(path: Path) -> str:
    """`headloss/losses/term.py` -> `losses.term`, `headloss/__init__.py` -> ``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in SOURCES}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(node: ast.AST, types_too: bool = False) -> Iterator[ast.AST]:
    """Every node that runs: the bodies of `if TYPE_CHECKING` left out, or with `types_too` not."""
    yield node
    skipped = is_type_checking(node) and not types_too
    children = node.orelse if skipped else ast.iter_child_nodes(node)  # type: ignore[attr-defined]
    for child in children:
        yield from walk(child, types_too)


def imports(name: str, source: str, is_package: bool, types_too: bool = False) -> Iterator[str]:
    """The modules of headloss that a module imports, at its top or inside its functions."""
    package = ["headloss", *filter(None, name.split("."))]
    if not is_package:
        package.pop()
    for node in walk(ast.parse(source), types_too):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            parent = ".".join([*base, *filter(None, [node.module])])
            # `from . import stats` names a module, `from .stats import merge` what one holds.
            found = [
                inner if inner.removeprefix("headloss.") in MODULES else parent
                for inner in (f"{parent}.{alias.name}" for alias in node.names)
            ]
        else:
            continue
        for module in found:
            if module == "headloss" or module.startswith("headloss."):
                yield module.removeprefix("headloss").removeprefix(".")


def below(module: str, parent: str) -> bool:
    return module == parent or (parent != "" and module.startswith(f"{parent}."))


def backend(module: str) -> str | None:
    head, _, rest = module.partition(".")
    return next((b for b in BACKENDS if head == "kernels" and rest.startswith(b)), None)


def broken_arrows(name: str, source: str, is_package: bool = False) -> list[str]:
    row = name if name in ALLOWED else name.partition(".")[0]
    if row not in ALLOWED:
        return [f"headloss.{name} has no row in ALLOWED"]
    broken = []
    for module in imports(name, source, is_package):
        fits = any(below(module, parent) for parent in ALLOWED[row])
        rivals = None not in (backend(name), backend(module)) and backend(name) != backend(module)
        if not fits or rivals:
            broken.append(f"headloss.{name} -> headloss.{module}")
    return broken


@pytest.mark.parametrize("name", MODULES)
def test_arrows(name: str) -> None:
    path = MODULES[name]
    broken = broken_arrows(name, path.read_text(), path.name == "__init__.py")
    assert broken == []


@pytest.mark.parametrize(
    ("name", "source", "broken"),
    [
        (
            "losses.policy",
            "from ..objective.statistics import Statistics\nfrom .term import term",
            [],
        ),
        (
            "losses.policy",
            "from ..kernels import reference",
            ["losses.policy -> kernels.reference"],
        ),
        (
            "losses.policy",
            "def f():\n    from ..head_loss import plan",
            ["losses.policy -> head_loss"],
        ),
        ("losses.term", "if TYPE_CHECKING:\n    from ..batch.packing import PackedBatch", []),
        (
            "losses.term",
            "from ..batch.packing import PackedBatch",
            ["losses.term -> batch.packing"],
        ),
        ("kernels.reference", "import headloss.losses.term", ["kernels.reference -> losses.term"]),
        (
            "kernels.triton_a",
            "from .triton_b import f\nfrom ..objective.statistics import FLOOR",
            [],
        ),
        ("kernels.triton_a", "from .reference import f", ["kernels.triton_a -> kernels.reference"]),
        ("head_loss", "from .integrations import trl", ["head_loss -> integrations.trl"]),
        ("integrations.trl", "import headloss as hl\nfrom headloss.losses import gspo", []),
        ("objective.metrics", "import headloss", ["objective.metrics -> "]),
    ],
)
def test_arrows_are_seen(name: str, source: str, broken: list[str]) -> None:
    found = broken_arrows(name, source)
    assert [arrow.replace("headloss.", "") for arrow in found] == broken


def test_no_circle_of_files() -> None:
    """Imports for type checking included."""
    graph = {}
    for name, path in MODULES.items():
        package = path.name == "__init__.py"
        found = imports(name, path.read_text(), package, types_too=True)
        graph[name] = {module for module in found if module in MODULES} - {name}
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names one


def test_the_core_and_the_kernels_do_not_grow() -> None:
    """Lower a number when the code has fallen well below it."""
    found = counts(PACKAGE)
    print(found)
    assert {name: most for name, most in MOST.items() if found[name] > most} == {}


def test_tokens_are_those_of_the_code() -> None:
    source = '"""A docstring."""\ndef f(x):  # a comment\n    """Another."""\n    return x + "a"\n'
    assert tokens(source) == len(["def", "f", "(", "x", ")", ":", "return", "x", "+", '"a"'])


def test_hidden_states_take_a_short_way() -> None:
    """Stays in a file and climbs to one above, see stays.py; those of statistics in the functions
    of terms are among them."""
    from stays import climbs, stays

    found = stays()
    assert len(found) <= 36 and len(climbs(found)) <= 7, found


HEAVY = ("triton", "transformers", "trl", "peft", "accelerate", "datasets")


IMPORTS = ("headloss", "headloss.kernels.reference", "headloss.train")
PROGRAM = f"""
import compileall, gc, json, sys, tempfile, time, warnings
start = time.process_time()
import torch
found = {{"torch": time.process_time() - start}}
with tempfile.TemporaryDirectory() as sys.pycache_prefix:  # as after the first import on a machine
    compileall.compile_dir({str(PACKAGE)!r}, quiet=1)
    warnings.simplefilter("error")
    for name in {IMPORTS!r}:
        gc.collect()  # of torch's objects, whose turn would come in the middle of ours
        gc.disable()
        before, start = set(sys.modules), time.process_time()
        __import__(name)
        seconds = time.process_time() - start
        found[name] = [seconds, sorted(sys.modules.keys() - before)]
        found[name].append(sorted(sys.modules.keys() & {set(HEAVY)!r}))
print(json.dumps(found))
"""


@functools.cache
def imported() -> dict:
    """Each import in one process that has torch: its time, what it brought, what of it is heavy."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr  # a warning is an error there
    return json.loads(ran.stdout)


@pytest.mark.parametrize("module", IMPORTS)
def test_import_is_light(module: str) -> None:
    assert imported()[module][2] == []


def test_import_brings_the_package_alone() -> None:
    """Beside torch, no other module is read; its own take a small part of torch's time (50 ms where
    torch takes more than a second)."""
    seconds, modules, _ = imported()["headloss"]
    others = [name for name in modules if name.partition(".")[0] != "headloss"]
    assert others == [] and len(modules) <= 110
    assert seconds < 0.1 * imported()["torch"]


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From its `def` to its end, the docstring not counted."""
    first = function.body[0]
    docstring = ast.get_docstring(function, clean=False) is not None
    described = (first.end_lineno or 0) - first.lineno + 1 if docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - described


@pytest.mark.parametrize("name", MODULES)
def test_sizes(name: str) -> None:
    source = MODULES[name].read_text()
    lines = len(source.splitlines())
    assert lines <= LINES_PER_FILE
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [n for n in ast.walk(ast.parse(source)) if isinstance(n, functions)]
    too_long = {n.name: code_lines(n) for n in found if code_lines(n) > most_lines(n)}
    assert too_long == {}


FACTORIES = "as_tensor arange empty eye full linspace ones rand randint randn randperm tensor zeros"
OF_THE_DEFAULT_DEVICE = {"batch.segments", "gate", "losses.catalogue"}  # of lists; samples


@pytest.mark.parametrize("name", sorted(MODULES.keys() - OF_THE_DEFAULT_DEVICE))
def test_tensors_are_made_on_a_device_that_is_named(name: str) -> None:
    """A script's default device is not where a call's tensors are; nor is its dtype theirs."""
    calls = [n for n in ast.walk(ast.parse(MODULES[name].read_text())) if isinstance(n, ast.Call)]
    made = {f"torch.{factory}" for factory in FACTORIES.split()}
    found = [call for call in calls if ast.unparse(call.func) in made]
    bare = [c.lineno for c in found if not {"device", None} & {k.arg for k in c.keywords}]
    assert bare == []
    wide = [c for c in found if ast.unparse(c.func) in {"torch.empty", "torch.ones", "torch.zeros"}]
    full = [c for c in wide if ast.unparse(c.args[0]) != "0"]
    assert [c.lineno for c in full if not {"dtype", None} & {k.arg for k in c.keywords}] == []


def test_no_path_of_any_machine() -> None:
    places = ["headloss", "tests", "benchmarks", "examples", "docs", ".ci"]
    suffixes = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".csv", ".svg", ""}
    files = [path for path in ROOT.iterdir() if path.is_file()]
    files += [path for place in places for path in (ROOT / place).rglob("*") if path.is_file()]
    path = re.compile(r"(?<![\w./~-])/(?:home|mnt|opt|root|tmp|Users|work)/\w")
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        if file.suffix in suffixes
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1)
        if path.search(line)
    ]
    assert not found


def test_license_and_types() -> None:
    assert (ROOT / "LICENSE").read_text().split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert (PACKAGE / "py.typed").is_file()


def test_page_lists_the_terms() -> None:
    catalogue = importlib.import_module("headloss.losses.catalogue")
    page = (ROOT / "docs" / "terms.md").read_text()
    shown = re.search(r"<!-- terms -->\n(.*?)<!-- /terms -->", page, re.DOTALL)
    assert shown is not None, "docs/terms.md: no <!-- terms --> around its table"
    assert shown[1].strip() == catalogue.table().strip()
