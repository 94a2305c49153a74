"""Train from a recipe: `headloss train gspo model=Qwen/Qwen3-0.6B`.

from headloss import train
result = train.run(train.recipe("gspo", ["model=Qwen/Qwen3-0.6B"]))

The trainers, data handling, generation and distribution are those of `headloss.rl`, TRL and
accelerate, which are imported only when a run starts.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import RecipeError, RunError

if TYPE_CHECKING:
    from .result import Result
    from .schema import Recipe

__all__ = ["Recipe", "RecipeError", "Result", "RunError", "compare", "recipe", "recipes", "run"]


def recipes() -> dict[str, str]:
    """The recipes that the package ships: what each is for, by name."""
    return _module("schema").shipped()


def recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """The recipe of that name, or in that file, with "key=value" overrides.

    Raises:
        RecipeError: no such recipe, a wrong key or a value of the wrong type.
    """
    return _module("schema").read(name, overrides or [])


def run(recipe: Recipe) -> Result:
    """Train, and write metrics, plots, checkpoints, the model and a report under `recipe.output`.

    Raises:
        RecipeError: what the recipe asks for does not exist or does not fit together. Raised before
            the first step.
        RunError: a loss, a gradient or a weight is NaN or infinite. The checkpoints from before it
            stay.
    """
    return _module("job").run(recipe)


def compare(outputs: Sequence[str | Path], to: str | Path = "compare.html") -> Path:
    """One page of HTML about several runs: what they solved, their curves, and how they differ.

    Args:
        outputs: the folders of two or more runs.
        to: the file to write. It holds its plots, and opens without a network.

    Raises:
        RecipeError: a folder holds no run, or the file cannot be written.
    """
    if isinstance(outputs, str | Path):
        raise RecipeError(f"compare: got {str(outputs)!r}, want the folders of two or more runs")
    _module("pages").compare([Path(path) for path in outputs], Path(to))
    return Path(to)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "headloss":
            raise
        raise RecipeError(
            f"headloss train needs {missing}: pip install 'headloss[train]'"
        ) from None


def __getattr__(name: str) -> Any:
    homes = {"Recipe": "schema", "Result": "result"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_module(homes[name]), name)
