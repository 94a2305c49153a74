"""The code keeps its import layers, its size limits, and its rules for files."""

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

# Folders and files of the package, in import order: a file may import (also for type checking) only
# from its own folder and from earlier entries of this list.
LAYERS = [
    "naive",  # imports torch alone
    "arguments command host_copy private",
    "collectives options",
    "statistics",
    "kernels",
    "batch",
    "head",
    "losses",
    "objective",
    "parallel",
    "logits",
    "engine",
    "check_term head_loss head_stats head_topk",
    "head_function",
    "",
    "integrations",
    "rl",
    "train",
    "testing",
    "__main__",
]
LAYER = {name: i for i, line in enumerate(LAYERS) for name in line.split() or [""]}
# files in kernels/ belong to the backend that their name begins with
BACKENDS = ("reference", "triton", "hopper")

LINES_PER_FILE = 400
LINES_PER_FUNCTION = 70
LINES_PER_KERNEL = 110
MOST = {"core tokens": 73_000, "kernels tokens": 37_000, "files on top": 14}


def most_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return a function's line limit; kernels and launches may list one argument per line."""
    source = ast.unparse(function)
    launches = "jit" in "".join(map(ast.unparse, function.decorator_list)) or "num_warps=" in source
    return LINES_PER_KERNEL if launches else LINES_PER_FUNCTION


def module_name(path: Path) -> str:
    """Return the module name: `headloss/losses/term.py` -> `losses.term`, `headloss/__init__.py` ->
    ``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in SOURCES}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(node: ast.AST, types_too: bool = False) -> Iterator[ast.AST]:
    """Yield all nodes of the syntax tree that run; with `types_too` also the bodies of `if
    TYPE_CHECKING`."""
    yield node
    skipped = is_type_checking(node) and not types_too
    children = node.orelse if skipped else ast.iter_child_nodes(node)  # type: ignore[attr-defined]
    for child in children:
        yield from walk(child, types_too)


def imports(name: str, source: str, is_package: bool, types_too: bool = False) -> Iterator[str]:
    """Yield the headloss modules that a module imports, at the top or inside functions."""
    package = ["headloss", *filter(None, name.split("."))]
    if not is_package:
        package.pop()
    for node in walk(ast.parse(source), types_too):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            parent = ".".join([*base, *filter(None, [node.module])])
            # `from . import stats` names a module, `from .stats import merge` a module's object.
            found = [
                inner if inner.removeprefix("headloss.") in MODULES else parent
                for inner in (f"{parent}.{alias.name}" for alias in node.names)
            ]
        else:
            continue
        for module in found:
            if module == "headloss" or module.startswith("headloss."):
                yield module.removeprefix("headloss").removeprefix(".")


def backend(module: str) -> str | None:
    folder, _, inner = module.partition(".")
    return next((b for b in BACKENDS if folder == "kernels" and inner.startswith(b)), None)


def broken_arrows(name: str, source: str, is_package: bool = False) -> list[str]:
    folder, broken = name.partition(".")[0], []
    for module in imports(name, source, is_package, types_too=True):
        other = module.partition(".")[0]
        fits = folder == other or (other != "naive" and LAYER[other] < LAYER[folder])
        rivals = None not in (backend(name), backend(module)) and backend(name) != backend(module)
        if not fits or rivals:
            broken.append(f"headloss.{name} -> headloss.{module}")
    return broken


def test_arrows() -> None:
    for name, path in MODULES.items():
        assert broken_arrows(name, path.read_text(), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("name", "source", "broken"),
    [
        ("losses.policy", "from ..statistics.softmax import Slope\nfrom .term import term", []),
        ("losses.policy", "from ..engine import plan", ["losses.policy -> engine.plan"]),
        ("losses.term", "def f():\n    from ..head_loss import x", ["losses.term -> head_loss"]),
        ("batch.batch", "if TYPE_CHECKING:\n    from ..losses import a", ["batch.batch -> losses"]),
        ("kernels.reference", "import headloss.losses.a", ["kernels.reference -> losses.a"]),
        ("kernels.triton_a", "from .triton_b import f", []),
        ("kernels.triton_a", "from .reference import f", ["kernels.triton_a -> kernels.reference"]),
        ("head_loss", "from .integrations import trl", ["head_loss -> integrations.trl"]),
        ("integrations.trl", "import headloss as hl\nfrom headloss.losses import gspo", []),
        ("statistics.metrics", "import headloss", ["statistics.metrics -> "]),
        ("engine.loop", "from ..naive import one_pass", ["engine.loop -> naive"]),
    ],
)
def test_imports_against_the_layers_are_reported(name: str, source: str, broken: list[str]) -> None:
    found = broken_arrows(name, source)
    assert [arrow.replace("headloss.", "") for arrow in found] == broken


def test_no_circle_of_files() -> None:
    """No files form a circle of imports, including imports for type checking."""
    graph = {}
    for name, path in MODULES.items():
        package = path.name == "__init__.py"
        found = imports(name, path.read_text(), package, types_too=True)
        graph[name] = {module for module in found if module in MODULES} - {name}
    # raises a CycleError that names the modules of an import cycle
    graphlib.TopologicalSorter(graph).prepare()


def test_the_core_and_the_kernels_do_not_grow() -> None:
    """The code of the core and of the kernels has at most the numbers of tokens and files in
    `MOST`."""
    found = counts(PACKAGE)
    print(found)
    assert {name: most for name, most in MOST.items() if found[name] > most} == {}


def test_tokens_are_those_of_the_code() -> None:
    source = '"""A docstring."""\ndef f(x):  # a comment\n    """Another."""\n    return x + "a"\n'
    assert tokens(source) == len(["def", "f", "(", "x", ")", ":", "return", "x", "+", '"a"'])


def test_hidden_states_take_a_short_way() -> None:
    """A GRPO call passes hidden states from one source file to another at most 16 times, and at
    most twice from a file to a file that imports it. Tensors computed from hidden states may pass
    between files up to 34 times."""
    from stays import climbs, stays

    for derived, most, most_climbs in ((False, 16, 2), (True, 34, 7)):
        found = stays(derived)
        assert len(found) <= most and len(climbs(found)) <= most_climbs, found


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
    import headloss.testing
print(json.dumps(found | {{"names": dir(headloss)}}))
"""


@functools.cache
def imported() -> dict:
    """In a subprocess, import each module of `IMPORTS`; return its time, the imported modules, and
    the public names of the package."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr  # the subprocess turns warnings into errors
    return json.loads(ran.stdout)


@pytest.mark.parametrize("module", IMPORTS)
def test_import_is_light(module: str) -> None:
    assert imported()[module][2] == []


def test_import_brings_the_package_alone() -> None:
    """Importing headloss imports only torch and headloss, in a small part of torch's import
    time."""
    seconds, modules, _ = imported()["headloss"]
    others = [name for name in modules if name.partition(".")[0] != "headloss"]
    assert others == [] and len(modules) <= 110
    assert seconds < 0.1 * imported()["torch"]


def test_names_of_the_package_after_its_modules_are_imported() -> None:
    assert imported()["names"] == sorted(importlib.import_module("headloss").__all__)


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return a function's number of lines from `def` to the end, without the docstring."""
    first = function.body[0]
    docstring = ast.get_docstring(function, clean=False) is not None
    described = (first.end_lineno or 0) - first.lineno + 1 if docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - described


def test_sizes() -> None:
    for name, path in MODULES.items():
        source = path.read_text()
        assert len(source.splitlines()) <= LINES_PER_FILE, name
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        found = [n for n in ast.walk(ast.parse(source)) if isinstance(n, functions)]
        too_long = {n.name: code_lines(n) for n in found if code_lines(n) > most_lines(n)}
        assert too_long == {}, name


FACTORIES = "as_tensor arange empty eye full linspace ones rand randint randn randperm tensor zeros"
# Modules that may create tensors on the default device, because they convert Python lists or make
# sample inputs.
OF_THE_DEFAULT_DEVICE = {"batch.segments", "testing.gate", "losses.catalogue"}


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    """Tensors are made with an explicit device and dtype, independent of a script's defaults."""
    made = {f"torch.{factory}" for factory in FACTORIES.split()}
    for path in (MODULES[name] for name in MODULES.keys() - OF_THE_DEFAULT_DEVICE):
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        found = [call for call in calls if ast.unparse(call.func) in made]
        bare = [c.lineno for c in found if not {"device", None} & {k.arg for k in c.keywords}]
        assert bare == [], path
        wide = {"torch.empty", "torch.ones", "torch.zeros"}
        wide = [c for c in found if ast.unparse(c.func) in wide and ast.unparse(c.args[0]) != "0"]
        bare = [c.lineno for c in wide if not {"dtype", None} & {k.arg for k in c.keywords}]
        assert bare == [], path


PRIVATE = re.compile(
    r"\bexec\(|object\.__new__|torch\._C\b|triton\.runtime import driver|triton\.runtime\.driver"
    r"|triton\.backends|packed_metadata|super\(torch\.autograd\.Function|forward_ad\._|_torchdynamo_"
)


def test_private_interfaces_stand_in_one_file() -> None:
    uses = {name: len(PRIVATE.findall(path.read_text())) for name, path in MODULES.items()}
    assert {name for name, count in uses.items() if count} == {"private"}
    assert uses["private"] <= 8


def test_no_path_of_any_machine() -> None:
    places = ["headloss", "tests", "benchmarks", "examples", "docs", ".ci"]
    suffixes = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".csv", ".svg", ""}
    # In a git worktree .git is a file with the path of the repository.
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
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
