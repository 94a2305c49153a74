"""Problems to train on, problems kept aside, and how completions are scored."""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, cast

from datasets import Dataset

from . import RecipeError
from .schema import Recipe, unknown

Row = dict[str, Any]
REPEATS = 1000  # problems in a row that were seen before: there are no others


@dataclass(frozen=True, kw_only=True)
class Task:
    """Rows have "prompt", "answer", and whatever the scorer reads.

    Attributes:
        train, held_out: rows; no prompt is in both, nor twice in one of them.
        reward: with the arguments of a reward function of TRL; a score per completion.
        completion: the text that a row's answer is as a completion.
    """

    train: list[Row]
    held_out: list[Row]
    reward: Callable[..., list[float]]
    completion: Callable[[Row], str]

    def prompts(self) -> Dataset:
        """For the trainers of `headloss.rl`."""
        return Dataset.from_list(self.train)

    def demonstrations(self) -> Dataset:
        """For the supervised trainer."""
        return Dataset.from_list(
            [{"prompt": row["prompt"], "completion": self._turn(row)} for row in self.train]
        )

    def longest(self, tokenizer: Any) -> int:
        """Tokens of a held-out answer with its end, at most."""
        texts = [self.completion(row) for row in self.held_out]
        return max(map(len, tokenizer(texts)["input_ids"])) + 1

    def _turn(self, row: Row) -> Any:
        text = self.completion(row)
        if isinstance(row["prompt"], str):
            return text
        return [{"role": "assistant", "content": text}]


def load(recipe: Recipe, chat: bool) -> Task:
    """The task of a recipe; `chat`: prompts are conversations.

    Raises:
        RecipeError: a file, a function, a generator or an option that does not exist.
    """
    source, _, name = recipe.task.partition(":")
    tag = recipe.answer_tag
    if source == "reasoning_gym":
        rows, score = _generated(name, recipe)
    else:
        rows, score = _from_file(Path(recipe.task), recipe.seed), _exact
    distinct = _distinct(rows)
    held_out = list(islice(distinct, recipe.held_out))
    train = list(islice(distinct, recipe.train_problems))
    if len(held_out) < recipe.held_out or not train:
        found = len(held_out) + len(train)
        raise RecipeError(
            f"task: {recipe.task} has {found} different problems, want {recipe.held_out} to hold "
            "out and some to train on"
        )
    for row in (*held_out, *train):
        row["prompt"] = _prompt(row, recipe, chat)
        for name in ("question", *row.pop("fields", ())):
            del row[name]
    return Task(
        train=train,
        held_out=held_out,
        reward=_reward_of(recipe, score),
        completion=lambda row: f"<{tag}>{row['answer']}</{tag}>" if tag else row["answer"],
    )


def _distinct(rows: Iterator[Row]) -> Iterator[Row]:
    """Each question once, as long as there are new ones."""
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
    if not isinstance(row["question"], str):  # a conversation already
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
    """Endless problems of a reasoning_gym generator, and its scorer."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise RecipeError(f"task: needs {error.name}: pip install reasoning-gym") from None
    if name not in DATASETS:
        raise RecipeError(unknown(f"task: reasoning_gym:{name}", name, DATASETS))
    try:
        options = {**recipe.task_options, "seed": recipe.seed, "size": 1 << 40}
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
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            row["question"] = row.pop("prompt")
            row["answer"] = str(row["answer"])
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise RecipeError(
                f'task: {path}, line {number}: want {{"prompt": ..., "answer": ...}}'
            ) from None
        rows.append(row)
    random.Random(seed).shuffle(rows)
    return iter(rows)


# ---------------------------------------------------------------------- scores


def _exact(answer: str, row: Row) -> float:
    return float(answer == row["answer"].strip())


SOLVED = 0.999  # a score of 1, less rounding


def _reward_of(recipe: Recipe, score: Callable[[str, Row], float]) -> Callable[..., list[float]]:
    if recipe.reward is None:
        return _reward(score, recipe.answer_tag)
    if recipe.reward == "solved":
        return _reward(lambda *given: float(score(*given) >= SOLVED), recipe.answer_tag)
    return _function(recipe.reward)


def _reward(score: Callable[[str, Row], float], tag: str | None) -> Callable[..., list[float]]:
    """TRL's form of a scorer of one answer."""

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        names = ("answer", "entry") if "entry" in columns else ("answer",)
        return [
            score(answer_in(text(completion), tag), {name: columns[name][i] for name in names})
            for i, completion in enumerate(completions)
        ]

    return reward


def text(completion: Any) -> str:
    """Of a completion, which is a text or the turns of a conversation."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def answer_in(completion: str, tag: str | None) -> str:
    """What stands between the last <tag> and </tag>; without a tag, all of it."""
    if tag is None:
        return completion.strip()
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", completion, re.DOTALL)
    return found[-1].strip() if found else ""


def _function(name: str) -> Callable[..., list[float]]:
    """`module:function`, from the path or the current folder."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise RecipeError(f"reward: got {name!r}, want module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise RecipeError(f"reward: {name}: {error}") from None
    if callable(found):
        return cast(Callable[..., list[float]], found)
    raise RecipeError(f"reward: {name} is no function")
