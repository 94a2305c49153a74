"""Reports as single HTML files with embedded plots, which open without a network."""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader

from . import files, folder, plots, report, split
from .errors import RecipeError
from .result import Result
from .schema import Recipe
from .schema import write as recipe_text

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True
)
# Errors raised while reading a run's JSON files if the files have a wrong structure.
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)


def of_run(recipe: Recipe, result: Result, parameters: int) -> str:
    """Return the HTML report of one run."""
    known = result.before is not None
    return TEMPLATES.get_template("run.html").render(
        title=report.title(recipe),
        state=report.state(recipe, result, parameters),
        legend=report.legend(result),
        solved=report.solved_rows(result.held_out, result.steps) if known else None,
        samples=report.sample_rows(result)[1:] if known else None,
        metrics=report.metric_rows(result.metrics) if result.metrics else None,
        images=_embedded(result.plots),
        recipe=recipe_text(recipe).strip(),
    )


def compare(outputs: Sequence[Path], to: Path) -> None:
    """Write a page that compares several runs; see `headloss.train.compare`."""
    runs = {name: _read(path) for name, path in _named(outputs).items()}
    drawn = {name: (run["entries"], run["held_out"]) for name, run in runs.items()}
    with tempfile.TemporaryDirectory() as room:
        images = _embedded(plots.overlay(drawn, Path(room)))
    letters, notes = split.marks({name: run["split"] for name, run in runs.items()})
    page = TEMPLATES.get_template("compare.html").render(
        title=f"{len(runs)} runs",
        notes=notes,
        solved=_solved(runs, letters),
        images=images,
        recipes=_differences({name: run["recipe"] for name, run in runs.items()}),
    )
    try:
        files.write(to, page)
    except OSError as error:
        raise RecipeError(f"--output: cannot write {to}: {error.strerror}") from None


def _embedded(paths: Sequence[Path]) -> list[dict[str, str]]:
    return [
        {"name": p.stem.replace("_", " "), "data": base64.b64encode(p.read_bytes()).decode()}
        for p in paths
    ]


def _named(outputs: Sequence[Path]) -> dict[str, Path]:
    """Return the folders by their paths relative to the deepest shared folder."""
    given = list(dict.fromkeys(path.resolve() for path in outputs))
    if len(given) < 2:
        raise RecipeError(f"compare: got {len(given)} run, want the folders of two or more")
    shared = os.path.commonpath(given)
    return {os.path.relpath(path, shared): path for path in given}


def _read(output: Path) -> dict[str, Any]:
    """Return metrics, evaluations, recipe and split from the folder of a run.

    Raises:
        RecipeError: for a folder without a run, or with a damaged file.
    """
    entries = [line for line in files.Lines(output / "metrics.jsonl").read() if "step" in line]
    try:
        if not entries:
            raise ValueError("metrics.jsonl is missing or empty")
        recipe = yaml.safe_load((output / "recipe.yaml").read_text())
        found = [(line["step"], line) for line in files.Lines(output / "held_out.jsonl").read()]
        for step, name in ((0, folder.BEFORE), (entries[-1]["step"], "after.json")):
            if (output / name).is_file():
                found.append((step, json.loads((output / name).read_text())))
        found.sort(key=lambda pair: pair[0])
        solved = report.solved_rows(found, entries[-1]["step"])
        made = {"entries": entries, "held_out": found, "recipe": folder.flat(recipe)}
        return {**made, "solved": solved, "split": split.read(output / split.FILE)}
    except (OSError, *DAMAGED, yaml.YAMLError) as error:
        raise RecipeError(f"compare: {output} holds no run that can be read: {error}") from None


def _solved(runs: dict[str, dict[str, Any]], letters: list[str]) -> list[list[str]] | None:
    """Return a table with one row per evaluation of each run. If the runs were evaluated on
    different held-out problems, a column has a letter for each run's set of held-out problems."""
    rows: list[list[str]] = []
    for i, (name, run) in enumerate(runs.items()):
        head, *found = run["solved"]
        rows = rows or [["run", *["split"][: len(letters)], *head]]
        rows += [[name, *letters[i : i + 1], *row] for row in found]
    return rows if len(rows) > 1 else None


def _differences(recipes: dict[str, dict[str, Any]]) -> list[list[str]]:
    keys = dict.fromkeys(key for recipe in recipes.values() for key in recipe)
    rows = [["key", *recipes]]
    for key in keys:
        values = [recipe.get(key) for recipe in recipes.values()]
        if any(value != values[0] for value in values):
            rows.append([key, *("" if value is None else str(value) for value in values)])
    return rows
