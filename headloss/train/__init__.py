"""Training from a recipe: `headloss train gspo model=Qwen/Qwen3-0.6B`.

from headloss import train
result = train.run(train.recipe("gspo", ["model=Qwen/Qwen3-0.6B"]))

Trainers, data handling, generation and distribution come from `headloss.rl`, TRL and accelerate,
which are imported only when a run starts.
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
    """Return the shipped recipes: a description by name."""
    return _module("schema").shipped()


def recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """Return a shipped recipe by name, or a recipe from a file, with "key=value" overrides.

    Raises:
        RecipeError: for an unknown recipe, a wrong key or a value of the wrong type.
    """
    return _module("schema").read(name, overrides or [])


def run(recipe: Recipe) -> Result:
    """Train, and write metrics, plots, checkpoints, the model and a report under `recipe.output`.

    Raises:
        RecipeError: before the first step, for a recipe whose model, task or settings do not exist
            or do not fit together.
        RunError: for a loss, gradient or weight that is NaN or infinite. Earlier checkpoints stay.
    """
    return _module("job").run(recipe)


def compare(outputs: Sequence[str | Path], to: str | Path = "compare.html") -> Path:
    """Write one HTML page about several runs: problems solved, curves and recipe differences.

    Args:
        outputs: the folders of two or more runs.
        to: the file to write. The page embeds its plots and opens without a network.

    Raises:
        RecipeError: for a folder without a run, or a file that cannot be written.
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
