"""Runs that continue each other share one held-out split by default, and a report says if the split
changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL trains")
pytest.importorskip("omegaconf", reason="recipes are read by it")
pytest.importorskip("reasoning_gym", reason="the tasks of the shipped recipes")
from test_train import error_of
from test_train_runs import run

from headloss import train
from headloss.train.task import Task, load


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train four runs, each from the model of the run before: "b" changes the seed, "c" the
    held-out split, and "d" goes back to the split of "a"."""
    place = tmp_path_factory.mktemp("chain")
    lines = [json.dumps({"prompt": f"{i} ->", "answer": i}) for i in range(60)]
    (place / "task.jsonl").write_text("\n".join(lines))
    options = {
        "a": ["seed=3"],
        "b": [f"model={place}/a/model"],
        "c": [f"model={place}/b/model", "split_seed=1", "held_out=20"],
        "d": [f"model={place}/c/model"],
    }
    for name, overrides in options.items():
        assert run("sft", place / name, f"task={place}/task.jsonl", *overrides) == 0
    return place


def problems(place: Path, name: str) -> Task:
    return load(train.recipe(str(place / name / "recipe.yaml")), chat=False)


def prompts(rows: list[dict[str, Any]]) -> set[str]:
    return {row["prompt"] for row in rows}


def test_a_split_is_of_the_task_and_its_own_seed(chain: Path) -> None:
    a, b, c = (problems(chain, name) for name in "abc")
    assert (a.train, a.held_out) == (b.train, b.held_out)
    assert prompts(c.held_out) != prompts(a.held_out)
    for source in ("sft", "gspo"):
        drawn = [
            load(train.recipe(source, [f"seed={s}", f"split_seed={p}"]), chat=False).held_out
            for s, p in ((0, 0), (3, 0), (0, 3))
        ]
        assert drawn[0] == drawn[1] and prompts(drawn[0]) != prompts(drawn[2])


def test_reports_say_which_held_out_problems_were_trained_on(chain: Path) -> None:
    a, c, d = (problems(chain, name) for name in "acd")
    reports = {name: (chain / name / "report.md").read_text() for name in "abcd"}
    assert "None of these problems is among those that this run trained on. " in reports["a"]
    model = f"{chain}/a/model"
    none = "None of these problems is among those that this run trained on, nor the recorded runs "
    assert f"{none}behind {model}." in reports["b"]

    overlap = len(prompts(a.train) & prompts(c.held_out))
    other = f"{chain}/b/model was trained on another split (split_seed=0, here 1; held_out=6, here "
    assert f"{other}20): {overlap} of these 20 problems" in reports["c"] and overlap > 2

    overlap = len(prompts(c.train) & prompts(d.held_out))
    assert f"{overlap} of these 6 problems are among those that it trained on" in reports["d"]
    assert overlap > 0
    for name in "abcd":
        page = (chain / name / "report.html").read_text()
        assert ("another split" in page) == (name in "cd")
        copies = [chain / name / place / "split.json" for place in (".", "model")]
        copies.append(chain / name / "checkpoints" / "checkpoint-2" / "split.json")
        assert len({path.read_text() for path in copies}) == 1


def test_a_run_from_another_split_says_so_when_it_begins(chain: Path, capsys: Any) -> None:
    options = [f"task={chain}/task.jsonl", "trainer.max_steps=1", "overwrite=true"]
    for name, said in (("a", ""), ("c", "headloss: warning: ")):
        assert run("sft", chain / "next", *options, f"model={chain}/{name}/model") == 0
        warned = capsys.readouterr().err
        assert warned.startswith(said) and bool(warned) == bool(said)
        assert ("c/model was trained on another split (" in warned) == (name == "c")


def test_a_comparison_marks_runs_of_different_splits(chain: Path) -> None:
    same = train.compare([chain / "a", chain / "b"], chain / "same.html").read_text()
    assert "<th>split</th>" not in same and "different problems" not in same
    page = train.compare([chain / name for name in "abc"], chain / "all.html").read_text()
    assert "Runs of different splits were scored on different problems" in page
    rows = [row for row in page.split("<tr>") if "<td>before</td>" in row]
    assert [row.split("<td>")[2] for row in rows] == ["A</td>", "A</td>", "B</td>"]
    assert "<p>c: " in page and "<p>b: " not in page
    (chain / "b" / "split.json").rename(chain / "b" / "moved.json")
    try:
        page = train.compare([chain / name for name in "ab"], chain / "all.html").read_text()
    finally:
        (chain / "b" / "moved.json").rename(chain / "b" / "split.json")
    assert "?: this run has left no record of its split." in page


def test_a_model_whose_record_is_missing_or_damaged(
    chain: Path, tmp_path: Path, capsys: Any
) -> None:
    recipe = train.recipe(str(chain / "b" / "recipe.yaml"), [f"model={tmp_path}"])
    assert load(recipe, chat=False).split.note.endswith(f" {tmp_path} has no record of its split.")
    (tmp_path / "split.json").write_text('{"splits": [{}]}')
    with pytest.raises(train.RecipeError, match=f"model: {tmp_path}/split.json is damaged"):
        load(recipe, chat=False)


@pytest.mark.parametrize(
    ("wanted", "trained"), [(280, None), (241, None), (240, 240), ("null", 240)]
)
def test_problems_that_a_task_does_not_have(
    tmp_path: Path, capsys: Any, wanted: int | str, trained: int | None
) -> None:
    path = tmp_path / "task.jsonl"
    lines = [json.dumps({"prompt": f"{i} ->", "answer": i}) for i in range(300)]
    path.write_text("\n".join(lines))
    overrides = [f"task={path}", "held_out=60", f"train_problems={wanted}"]
    if trained is None:
        said = f"task: {path} has 300 different problems, want 60 to hold out and {wanted} to train"
        assert error_of(capsys, "sft", f"output={tmp_path}/run", *overrides).startswith(said)
    else:
        assert len(load(train.recipe("sft", overrides), chat=False).train) == trained
