"""Tasks: problems to train on, held-out problems, and the scores of completions."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import math
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, cast

from datasets import Dataset
from pyarrow.lib import ArrowException

from .errors import RecipeError
from .schema import Recipe, unknown
from .split import Split, digest

Row = dict[str, Any]
# After 1000 repeated problems in a row, a generator of problems counts as exhausted.
REPEATS = 1000
# By default, 4096 training problems are drawn from a generator of problems.
GENERATED = 4096


@dataclass(frozen=True, kw_only=True)
class Task:
    """Problems of a run and their reward; a problem is a row of "prompt", "answer" and further
    fields that the reward reads.

    Attributes:
        train, held_out: rows; no prompt occurs twice in `train` and `held_out` together.
        reward: function with the arguments of TRL's reward functions; returns a score per
            completion.
        split: split of the problems, with the record of the model that the run starts from.
        name: name of the reward in messages.
        completion: function from a row to its answer in the form of a completion.
    """

    train: list[Row]
    held_out: list[Row]
    reward: Callable[..., list[float]]
    completion: Callable[[Row], str]
    split: Split
    name: str = "reward"

    def prompts(self) -> Dataset:
        """Return the rows as the dataset that the trainers of `headloss.rl` read."""
        return _dataset(self.train)

    def demonstrations(self) -> Dataset:
        """Return the rows as the dataset that TRL's supervised trainer reads."""
        return _dataset(
            [{"prompt": row["prompt"], "completion": self._turn(row)} for row in self.train]
        )

    @functools.cached_property
    def scored(self) -> Callable[..., list[float | None]]:
        """Reward function that checks each score; a score of None means no score, as in TRL.

        Raises:
            RecipeError: if a score is not a finite number, or the number of scores is wrong.
        """

        @functools.wraps(self.reward)
        def scored(completions: list[Any], **given: Any) -> list[float | None]:
            got = self.reward(completions=completions, **given)
            try:
                scores = [None if score is None else float(score) for score in got]
            except (TypeError, ValueError):
                raise RecipeError(
                    f"reward: {self.name} gave {_short(got)}, want a list of numbers"
                ) from None
            if len(scores) != len(completions):
                raise RecipeError(
                    f"reward: {self.name} gave {len(scores)} scores for {len(completions)} "
                    "completions, want one for each"
                )
            for i, score in enumerate(scores):
                if score is not None and not math.isfinite(score):
                    raise RecipeError(
                        f"reward: {self.name} gave {score} for completion {i + 1} of "
                        f"{len(scores)}, want a finite number"
                    )
            return scores

        return scored

    def scores(self, rows: list[Row], completions: list[Any]) -> list[float | None]:
        """Return the score of one completion per row, for use outside of a trainer."""
        columns = {name: [row.get(name) for row in rows] for name in rows[0]}
        found = self.scored(prompts=columns.pop("prompt"), completions=completions, **columns)
        if all(score is None for score in found):
            raise RecipeError(f"reward: {self.name} gave None for all of {len(found)} completions")
        return found

    def rehearse(self) -> None:
        """Call the reward function on a few right answers; raise RecipeError if the function
        fails."""
        rows = self.train[:8]
        self.scores(rows, [self._turn(row) for row in rows])

    def longest(self, tokenizer: Any) -> int:
        """Return the largest number of tokens of a held-out answer, end token included."""
        texts = [self.completion(row) for row in self.held_out]
        return max(map(len, tokenizer(texts)["input_ids"])) + 1

    def _turn(self, row: Row) -> Any:
        text = self.completion(row)
        if isinstance(row["prompt"], str):
            return text
        return [{"role": "assistant", "content": text}]


def load(recipe: Recipe, chat: bool) -> Task:
    """Return the `Task` that `recipe.task` names; with `chat`, its prompts are conversations.

    Raises:
        RecipeError: for a file, function, generator or option that does not exist, or for fewer
            problems than the recipe holds out and trains on.
    """
    source, _, name = recipe.task.partition(":")
    tag = recipe.answer_tag
    if source == "reasoning_gym":
        rows, score = _generated(name, recipe)
        wanted = recipe.train_problems or GENERATED
    else:
        rows, score = _from_file(Path(recipe.task), recipe.split_seed), _exact
        wanted = recipe.train_problems
    distinct = _distinct(rows)
    held_out = list(islice(distinct, recipe.held_out))
    train = list(islice(distinct, wanted))
    if len(held_out) < recipe.held_out or len(train) < (wanted or 1):
        raise RecipeError(
            f"task: {recipe.task} has {len(held_out) + len(train)} different problems, want "
            f"{recipe.held_out} to hold out and {wanted or 'some'} to train on"
        )
    digests = [[digest(row["question"]) for row in part] for part in (held_out, train)]
    split = Split.of(recipe, *digests)
    for row in (*held_out, *train):
        row["prompt"] = _prompt(row, recipe, chat)
        for name in ("question", *row.pop("fields", ())):
            del row[name]
    return Task(
        train=train,
        held_out=held_out,
        reward=_reward_of(recipe, score),
        split=split,
        completion=lambda row: f"<{tag}>{row['answer']}</{tag}>" if tag else row["answer"],
        name=recipe.reward or "the task's scorer",
    )


def _dataset(rows: list[Row]) -> Dataset:
    try:
        return Dataset.from_list(rows)
    except (ArrowException, OverflowError) as error:
        raise RecipeError(f"task: rows of several kinds: {' '.join(str(error).split())}") from None


def _distinct(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield each question once; stop after `REPEATS` repeated questions in a row."""
    seen, repeated = set(), 0
    for row in rows:
        key = json.dumps(row["question"])
        repeated = repeated + 1 if key in seen else 0
        if repeated > REPEATS:
            return
        if not repeated:
            seen.add(key)
            yield row


def _prompt(row: Row, recipe: Recipe, chat: bool) -> Any:
    if not isinstance(row["question"], str):  # `question` is a list of messages, not a text
        return row["question"]

    def value(match: re.Match[str]) -> str:
        if match[1] not in row:
            raise RecipeError(f"prompt: {match[0]} is none of {', '.join(row)}")
        return str(row[match[1]])

    text = re.sub(r"{(\w+)}", value, recipe.prompt)
    if not chat:
        return text
    system = [] if recipe.system is None else [{"role": "system", "content": recipe.system}]
    return [*system, {"role": "user", "content": text}]


# ---------------------------------------------------------------------- sources


def _generated(name: str, recipe: Recipe) -> tuple[Iterator[Row], Callable[[str, Row], float]]:
    """Return an endless iterator over the problems of a reasoning_gym generator, and the
    generator's scorer."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise RecipeError(f"task: needs {error.name}: pip install reasoning-gym") from None
    if name not in DATASETS:
        raise RecipeError(unknown(f"task: reasoning_gym:{name}", name, DATASETS))
    try:
        options = {**recipe.task_options, "seed": recipe.split_seed, "size": 1 << 40}
        dataset: Any = reasoning_gym.create_dataset(name, **options)
        dataset[0]
    except (AssertionError, TypeError, ValueError) as error:
        why = str(error).replace("__init__() ", "") or "these values do not go together"
        raise RecipeError(f"task_options: {name}: {why}") from None

    def rows() -> Iterator[Row]:
        for i in count():
            entry = dataset[i]
            fields = {k: v for k, v in entry["metadata"].items() if isinstance(v, str | int)}
            own = {
                "question": entry["question"],
                "answer": entry["answer"],
                "entry": json.dumps(entry, default=str),
            }
            yield {**fields, **own, "fields": list(fields.keys() - own.keys())}

    def score(answer: str, row: Row) -> float:
        return float(dataset.score_answer(answer=answer, entry=json.loads(row["entry"])))

    return rows(), score


def _from_file(path: Path, seed: int) -> Iterator[Row]:
    if not path.is_file():
        raise RecipeError(
            f"task: got {str(path)!r}, which is no file; want reasoning_gym:NAME or a JSONL file"
        )
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(_row(json.loads(line.decode())))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise RecipeError(
                f'task: {path}, line {number}: want {{"prompt": ..., "answer": ...}} in UTF-8'
            ) from None
        except RecipeError as error:
            raise RecipeError(f"task: {path}, line {number}: {error}") from None
    random.Random(seed).shuffle(rows)
    return iter(rows)


RESERVED = {  # field names reserved for a scorer's arguments, or for images that TRL reads
    "question",
    "fields",
    "prompts",
    "completion",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environment",
    "environments",
    "image",
    "images",
}


def _row(row: Row) -> Row:
    question, answer = row["prompt"], row["answer"]
    turns = isinstance(question, list) and question and all(_is_turn(turn) for turn in question)
    if not (turns or (isinstance(question, str) and question)):
        raise RecipeError(f"prompt: got {_short(question)}, want a text, or a list of messages")
    if answer is None:
        raise RecipeError("answer: got null, want a text or a number")
    if taken := sorted(RESERVED & row.keys()):
        raise RecipeError(f"{taken[0]}: is a name that headloss or TRL uses itself")
    rest = {name: value for name, value in row.items() if name != "prompt"}
    return {**rest, "question": question, "answer": str(answer)}


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and {"role", "content"} <= turn.keys()


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---------------------------------------------------------------------- scores


def _exact(answer: str, row: Row) -> float:
    return float(answer == row["answer"].strip())


SOLVED = 0.999  # a score of at least 0.999 counts as full, so that rounding does not matter


def _reward_of(recipe: Recipe, score: Callable[[str, Row], float]) -> Callable[..., list[float]]:
    if recipe.reward is None:
        return _reward(score, recipe.answer_tag)
    if recipe.reward == "solved":
        return _reward(lambda *given: float(score(*given) >= SOLVED), recipe.answer_tag)
    return _function(recipe.reward)


def _reward(score: Callable[[str, Row], float], tag: str | None) -> Callable[..., list[float]]:
    """Return a reward function in TRL's form from a scorer of one answer."""

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        names = ("answer", "entry") if "entry" in columns else ("answer",)
        return [
            score(answer_in(text(completion), tag), {name: columns[name][i] for name in names})
            for i, completion in enumerate(completions)
        ]

    return reward


def text(completion: Any) -> str:
    """Return the text of a completion, which is a text or the turns of a conversation."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def answer_in(completion: str, tag: str | None) -> str:
    """Return the text between the last <tag> and </tag>; without a tag, the whole text."""
    if tag is None:
        return completion.strip()
    name = re.escape(tag)
    found = re.findall(rf"<{name}>(.*?)</{name}>", completion, re.DOTALL)
    return found[-1].strip() if found else ""


def _function(name: str) -> Callable[..., list[float]]:
    """Import `module:function` from Python's path, or from the current folder."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise RecipeError(f"reward: got {name!r}, want module:function")
    if "" not in sys.path:
        # the current folder comes last, so that a local file hides no installed module
        sys.path.append("")
    try:
        found: Any = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise RecipeError(f"reward: {name}: {error}") from None
    except Exception as error:  # the imported module may raise any error while it is imported
        raise RecipeError(f"reward: {name}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise RecipeError(f"reward: {name} is no function")
    with contextlib.suppress(ValueError):  # inspect.signature raises ValueError for some callables
        try:
            inspect.signature(found).bind(prompts=[], completions=[], completion_ids=[], answer=[])
        except TypeError as error:
            raise RecipeError(
                f"reward: {name}: {error}; want (prompts, completions, **columns)"
            ) from None
    return cast(Callable[..., list[float]], found)
