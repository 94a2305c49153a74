"""Output folder of a run: write access, the lock, and the checkpoint to resume from."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from . import files, split
from .errors import RecipeError
from .schema import Recipe
from .schema import write as recipe_text

LOCK = ".lock"
CHECKSUMS = "checksums.json"
BEFORE = "before.json"
WRITTEN = (  # files and folders that a run writes into its output folder
    "recipe.yaml",
    split.FILE,
    BEFORE,
    "metrics.jsonl",
    "held_out.jsonl",
    "checkpoints",
    "model",
    "after.json",
    "plots",
    "report.md",
    "report.html",
)
NEEDED = ("trainer_state.json", "scheduler.pt")  # Files in every checkpoint.
OPTIMIZERS = ("optimizer", "global_step")  # Prefixes of the optimizer's files in a checkpoint.
MAY_CHANGE = {  # Recipe keys that may differ when a run resumes.
    "resume",
    "overwrite",
    "trainer.max_steps",
    "trainer.num_train_epochs",
    "trainer.save_steps",
    "trainer.save_total_limit",
}


def check(recipe: Recipe) -> None:
    """Raise RecipeError if a run may not write to `recipe.output`; write nothing."""
    output = Path(recipe.output)
    _check_place(output)
    if recipe.overwrite and recipe.resume:
        raise RecipeError("overwrite: got true beside resume=true, want one of them")
    if recipe.overwrite and output.resolve() in (Path(recipe.model).resolve().parents):
        raise RecipeError(f"overwrite: {output} holds the model {recipe.model} that is asked for")
    if (output / LOCK).is_file():
        # raise an error if a run holds the lock; a shared lock lets several processes check at once
        with locked(output, fcntl.LOCK_SH):
            pass
    if recipe.resume:
        checkpoint(recipe, whole=False)
    elif not recipe.overwrite:
        _check_vacant(recipe, output)


def claim(recipe: Recipe) -> str | None:
    """Return the checkpoint to resume from, or None; the caller must hold the output folder's lock.

    The unfinished checkpoint of an earlier run is removed. With `overwrite`, every file of an
    earlier run is removed.
    """
    output = Path(recipe.output)
    found = checkpoint(recipe, whole=True) if recipe.resume else None
    if recipe.overwrite:
        for name in WRITTEN:
            files.remove(output / name)
    elif not recipe.resume:
        _check_vacant(recipe, output)
    files.remove(output / "checkpoints" / files.PARTIAL)
    files.write(output / "recipe.yaml", recipe_text(recipe))
    return found


@contextlib.contextmanager
def locked(output: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the folder's lock; the operating system releases the lock if the process dies.

    Raises:
        RecipeError: if another run holds the lock, or the folder cannot be written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = (output / LOCK).open("a")
    except OSError as error:
        raise RecipeError(f"output: cannot write to {output}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecipeError(
                f"output: another run is writing to {output}; output= takes another folder"
            ) from None
        except OSError as error:
            warn(f"{output} cannot be locked against a second run: {error.strerror}")
        yield


@contextlib.contextmanager
def without_trace(output: Path) -> Iterator[None]:
    """Make the folder for checkpoints; remove the folders that were made if the `with` block raises
    an error."""
    paths = [output / "checkpoints", output, *output.parents]
    made = [path for path in paths if not path.exists()]
    try:
        try:
            paths[0].mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecipeError(f"output: cannot write to {output}: {error.strerror}") from None
        yield
    except BaseException:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def warn(text: str) -> None:
    print(f"headloss: warning: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- write access


def _check_place(output: Path) -> None:
    try:
        above = next(path for path in (output, *output.absolute().parents) if path.exists())
    except (OSError, ValueError) as error:
        raise RecipeError(f"output: got {str(output)!r}: {error}") from None
    if not above.is_dir():
        raise RecipeError(f"output: got {output}, but {above} is a file, want a folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise RecipeError(f"output: cannot write to {output}: {above} is not writable")


def _check_vacant(recipe: Recipe, output: Path) -> None:
    """Raise RecipeError unless the output folder is empty, or was begun with an equal recipe and
    has no checkpoint yet."""
    inside = sorted(output.iterdir()) if output.is_dir() else []
    names = [path.name for path in inside if not _is_nothing(path)]
    if not names:
        return
    found, old = checkpoints(output), _recipe_in(output)
    if old == dataclasses.asdict(recipe) and not found and "model" not in names:
        return
    what = "a run" if old else ", ".join(names[:3]) + ", ..." * (len(names) > 3)
    raise RecipeError(
        f"output: {output} holds {what}; {'resume=true continues it, ' if old and found else ''}"
        "output= takes another folder, overwrite=true "
        f"{'begins anew' if old else 'replaces what a run writes there'}"
    )


def _is_nothing(path: Path) -> bool:
    """Return whether a path is a lock or a partial file, which an interrupted run may leave
    behind."""
    if path.name == "checkpoints" and path.is_dir():
        return all(inner.name.startswith(files.PARTIAL) for inner in path.iterdir())
    return path.name == LOCK or path.name.startswith(files.PARTIAL)


def _recipe_in(output: Path) -> dict[str, Any] | None:
    """Return the recipe stored in the folder, or None without a complete recipe."""
    try:
        found = yaml.safe_load((output / "recipe.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None
    fields = {field.name for field in dataclasses.fields(Recipe)}
    whole = isinstance(found, dict) and fields - {"overwrite"} <= found.keys()
    return {"overwrite": False, **found} if whole else None


# ---------------------------------------------------------------------- checkpoints


def checkpoints(output: Path) -> list[Path]:
    """Return the checkpoint folders, the newest last."""
    found = (output / "checkpoints").glob("checkpoint-*")
    named = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in found if path.is_dir()}
    return sorted((p for p, m in named.items() if m), key=lambda p: int(p.name.split("-")[1]))


def seal(checkpoint: Path, output: Path) -> None:
    """Write the checksums of a checkpoint's files and of before.json (the evaluation before the
    run)."""
    paths = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    found = {str(path.relative_to(checkpoint)): files.digest(path) for path in paths}
    sums = {"files": found, BEFORE: files.digest(output / BEFORE)}
    files.write_json(checkpoint / CHECKSUMS, {**sums, "own": _own(sums)})


def _own(sums: dict[str, Any]) -> str:
    """Return one checksum over the checkpoint's list of checksums."""
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


def checkpoint(recipe: Recipe, whole: bool) -> str:
    """Return the path of the newest checkpoint; if `whole`, verify the checksums of all its files.

    Raises:
        RecipeError: the output folder has no checkpoint, the checkpoint is damaged, or the recipe
            stored in the folder differs from `recipe`.
    """
    output = Path(recipe.output)
    found = checkpoints(output)
    if not found:
        raise RecipeError(f"resume: there is no checkpoint in {output / 'checkpoints'}")
    _check_same(recipe, output)
    damage = _damage(found[-1], whole)
    if damage is None:
        return str(found[-1])
    older = next((p.name for p in reversed(found[:-1]) if _damage(p, whole) is None), None)
    way = f"without {found[-1].name} it goes on from {older}" if older else "no other one is intact"
    raise RecipeError(f"resume: {found[-1]}{damage}; {way}")


def kept_before(checkpoint: str | None, output: Path) -> bool:
    """Return whether before.json, the evaluation before training, still has the checksum stored in
    the checkpoint."""
    if checkpoint is None:
        return False
    noted = json.loads((Path(checkpoint) / CHECKSUMS).read_text())[BEFORE]
    found = files.digest(output / BEFORE)
    if found is not None and found != noted:
        warn(f"{output / BEFORE} is damaged and is measured anew")
    return found == noted


def _damage(path: Path, whole: bool) -> str | None:
    """Return the reason why a checkpoint is damaged, for an error message; None if intact."""
    try:
        noted = json.loads((path / CHECKSUMS).read_text())
        if noted.pop("own") != _own(noted):
            raise ValueError
        sums = noted["files"]
        known = {*sums, *(p.name for p in path.iterdir())}
    except FileNotFoundError:
        return f"/{CHECKSUMS} is missing" if any(path.iterdir()) else " is empty"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"/{CHECKSUMS} is damaged"
    for name, text in sums.items():
        if not (path / name).is_file():
            return f"/{name} is missing"
        if whole and files.digest(path / name) != text:
            return f"/{name} is damaged"
    for name in NEEDED:
        if name not in sums:
            return f"/{name} is missing"
    if not any(name.startswith(OPTIMIZERS) for name in known):
        return "/optimizer.pt is missing"
    return None


def _check_same(recipe: Recipe, output: Path) -> None:
    path = output / "recipe.yaml"
    if not path.is_file():
        raise RecipeError(f"resume: {path} is missing; report.md may show what it was")
    try:
        old = yaml.safe_load(path.read_text())
        if not isinstance(old, dict):
            raise ValueError
    except (OSError, ValueError, yaml.YAMLError):
        raise RecipeError(f"resume: {path} is damaged; report.md may show what it was") from None
    before, now = flat(old), flat(dataclasses.asdict(recipe))
    for key in sorted((before.keys() | now.keys()) - MAY_CHANGE):
        if before.get(key) != now.get(key):
            raise RecipeError(
                f"resume: {output} was begun with {key}={before.get(key)}, now it is {now.get(key)}"
            )


def flat(mapping: dict[str, Any], at: str = "") -> dict[str, Any]:
    """Flatten nested mappings: {"a": {"b": 1}} becomes {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        inner = isinstance(value, dict)
        found |= flat(value, f"{at}{key}.") if inner else {f"{at}{key}": value}
    return found
