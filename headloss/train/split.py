"""Split of a task into held-out and training problems, stored in a record next to each model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import RecipeError
from .schema import Recipe

# file that records which problems were held out, in the folders of run, model and checkpoints
FILE = "split.json"
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
# recipe keys that determine which problems are held out and trained on
KEYS = ("task", "task_options", "split_seed", "held_out")


def digest(question: Any) -> str:
    """Return the digest of a question (a text or a conversation): 64 bits of the SHA-256."""
    return hashlib.sha256(json.dumps(question).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Split:
    """Division of a run's problems into training and held-out problems, stored as digests of the
    questions; `history` holds the divisions of earlier runs that trained the model from which this
    run starts.

    Attributes:
        settings: recipe keys that determine the split.
        held_out, train: digests of this run's held-out and training problems.
        start: name or path of the model from which the run starts, used in messages.
        history: the divisions recorded in the starting model's folder; None if no record exists.
    """

    settings: dict[str, Any]
    held_out: list[str]
    train: list[str]
    start: str
    history: dict[str, Any] | None

    @classmethod
    def of(cls, recipe: Recipe, held_out: Iterable[str], train: Iterable[str]) -> Split:
        """Return the split of a recipe's problems, together with the splits of earlier runs that
        are recorded in the folder of the recipe's model.

        Raises:
            RecipeError: if the record next to the model is damaged.
        """
        path = Path(recipe.model) / FILE
        try:
            history = read(path)
        except DAMAGED:
            raise RecipeError(
                f"model: {path} is damaged; without it the split is unknown"
            ) from None
        return cls(
            settings={name: getattr(recipe, name) for name in KEYS},
            held_out=list(held_out),
            train=list(train),
            start=recipe.model,
            history=history,
        )

    @property
    def others(self) -> list[dict[str, Any]]:
        """The recorded splits (into training and held-out problems) of those earlier runs of the
        model whose held-out problems differ from this run's held-out problems."""
        splits = self.history["splits"] if self.history and self.held_out else []
        return [split for split in splits if split["digest"] != digest(self.held_out)]

    def record(self) -> dict[str, Any]:
        """Return the record stored with the model: the splits of earlier runs and of this run."""
        past: dict[str, Any] = self.history or {"splits": [], "trained_on": []}
        return {
            "splits": [*past["splits"], {**self.settings, "digest": digest(self.held_out)}],
            "differs": bool(self.others),
            "note": self.note,
            "trained_on": sorted({*past["trained_on"], *self.train}),
        }

    @property
    def note(self) -> str:
        """A note for the user: whether this run or earlier runs trained on the held-out
        problems."""
        if self.history is None:
            note = "None of these problems is among those that this run trained on."
            unknown = "" if self.start == "tiny" else f" {self.start} has no record of its split."
            return note + unknown
        if not self.others:
            return (
                "None of these problems is among those that this run trained on, nor the recorded "
                f"runs behind {self.start}."
            )
        last = self.others[-1]
        earlier = set(self.history["trained_on"]).intersection(self.held_out)
        named = [
            f"{name}={last[name]}, here {value}"
            for name, value in self.settings.items()
            if last[name] != value
        ]
        return (
            f"{self.start} was trained on another split ({'; '.join(named) or 'of other rows'}): "
            f"{len(earlier)} of these {len(self.held_out)} problems are among those that it "
            "trained on, none among those of this run."
        )


def read(path: Path) -> dict[str, Any] | None:
    """Return the contents of a `split.json` file, or None without a file; a damaged file raises an
    error of a type in the tuple `DAMAGED`."""
    if not path.is_file():
        return None
    record = json.loads(path.read_text())
    splits = [{name: split[name] for name in (*KEYS, "digest")} for split in record["splits"]]
    texts = [str(text) for text in record["trained_on"]]
    differs, note = bool(record["differs"]), str(record["note"])
    return {"splits": splits, "differs": differs, "note": note, "trained_on": texts}


def marks(runs: dict[str, dict[str, Any] | None]) -> tuple[list[str], list[str]]:
    """Return a letter per run, equal for runs with equal held-out problems, and notes for a
    comparison; no letters if all runs have equal held-out problems.

    The mapping `runs` holds the contents of each run's `split.json`, or None for a run without the
    file.
    """
    digests = {name: run["splits"][-1]["digest"] if run else None for name, run in runs.items()}
    notes = [f"{name}: {run['note']}" for name, run in runs.items() if run and run["differs"]]
    distinct = list(dict.fromkeys(digests.values()))
    if len(distinct) == 1 and None not in distinct:
        return [], notes
    letters = ["?" if d is None else chr(ord("A") + distinct.index(d)) for d in digests.values()]
    lines = ["Runs of different splits were scored on different problems: see the column split."]
    if None in distinct:
        lines.append("?: this run has left no record of its split.")
    return letters, [*lines, *notes]
