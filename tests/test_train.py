"""`headloss train` accepts valid recipes, and reports an invalid recipe in one line."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL trains")
pytest.importorskip("omegaconf", reason="recipes are read by it")
pytest.importorskip("reasoning_gym", reason="the tasks of the shipped recipes")

from headloss import train
from headloss.__main__ import main
from headloss.train import evaluate, files, plots
from headloss.train.model import adapter, byte_tokenizer, load
from headloss.train.schema import Recipe, write
from headloss.train.task import answer_in
from headloss.train.task import load as load_task
from headloss.train.trainers import settings

ALGORITHMS = {"sft", "grpo", "gspo", "cispo", "ppo", "reinforce"}


def error_of(capsys: Any, *arguments: str) -> str:
    """Return the single stderr line of a command with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("headloss: ") and printed.err.count("\n") == 1, printed.err
    return printed.err.removeprefix("headloss: ").strip()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "train: want a recipe"),
        (["gspoo"], "recipe: got 'gspoo', which is neither a file nor one of cispo, grpo, gspo"),
        (["none.yaml"], "recipe: got 'none.yaml', which is neither a file"),
        (["gspo", "modle=tiny"], "modle: no such key, did you mean model?"),
        (["gspo", "learning_rate=1"], "learning_rate: no such key, did you mean trainer.lear"),
        (["sft", "max_step=5"], "max_step: no such key, did you mean trainer.max_steps?"),
        (["sft", "tiny.hidden=3"], "tiny.hidden: no such key, did you mean hidden_size?"),
        (["sft", "tiny.hidden_size=wide"], "tiny.hidden_size: "),
        (["sft", "held_out"], "held_out: want key=value"),
        (["sft", "held_out=-1"], "held_out: got -1, want"),
        (["sft", "algorithm=dqn"], "algorithm: got 'dqn', want one of sft, grpo"),
        (["sft", "dtype=int8"], "dtype: got 'int8', want one of float32"),
        (["sft", "terms.kl=1"], "terms.kl: want z_loss or entropy"),
        (["sft", "prompt='{words}'"], "prompt: {words} is none of "),
        (["sft", "prompt=hello"], "prompt: got 'hello', want a text with {question} in it"),
        (["sft", "trainer.lerning_rate=1"], "trainer.lerning_rate: no such key, did you mean lear"),
        (["sft", "trainer.num_generations=4"], "trainer.num_generations: no such key"),
        (["sft", "trainer.learning_rate=fast"], "trainer.learning_rate: got 'fast', want float"),
        (["sft", "trainer.max_steps=1.5"], "trainer.max_steps: got 1.5, want int"),
        (["sft", "trainer.output_dir=x"], "trainer.output_dir: is set by the recipe's key output"),
        (["sft", "trainer.optim=magic"], "trainer: "),
        (["gspo"], "model: there is no folder runs/sft/model; `headloss train sft` makes it"),
        (["sft", "model=./none"], "model: there is no folder ./none"),
        (
            ["sft", "task=none.jsonl"],
            "task: got 'none.jsonl', which is no file; want reasoning_gym",
        ),
        (["sft", "task=reasoning_gym:chainsum"], "task: reasoning_gym:chainsum: no such key, did"),
        (["sft", "task_options.words=3"], "task_options: spell_backward: "),
        (["sft", "task_options.min_word_len=9"], "task_options: spell_backward: "),
        (
            ["sft", "task_options.max_word_len=3", "held_out=9999"],
            "task: reasoning_gym:spell_backward has 1",
        ),
        (["sft", "chat=true"], "chat: got true, but tiny has no chat template"),
        (["sft", "resume=true"], "resume: there is no checkpoint in runs/sft/checkpoints"),
        (["sft", "lora.rank=3"], "lora.rank: no such key"),
        (["gspo", "model=tiny", "trainer.num_generations=7"], "trainer: "),
        (["gspo", "model=tiny", "trainer.loss_type=best"], "trainer: loss_type: got 'best'"),
        (
            ["gspo", "model=tiny", "trainer.num_iterations=4", "trainer.save_steps=2"],
            "trainer.save_steps: got 2, want a multiple of 4: one generation serves 4 steps",
        ),
        (["reinforce", "model=tiny", "trainer.num_iterations=2"], "trainer: num_iterations: got 2"),
        (["sft", "reward=math"], "reward: got 'math', want module:function"),
        (["sft", "reward=math:none"], "reward: math:none: module 'math' has no attribute"),
    ],
)
def test_errors(
    capsys: Any, monkeypatch: Any, tmp_path: Path, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["train_problems=8", "held_out=4"] if arguments else []
    name, overrides = arguments[:1], arguments[1:]
    given = {override.partition("=")[0] for override in overrides}
    kept = [s for s in small if s.partition("=")[0] not in given]
    assert error_of(capsys, *name, *kept, *overrides).startswith(said)
    assert not list(tmp_path.rglob("*.partial")) and not (tmp_path / "runs" / "sft").is_dir()


def test_bad_files(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("algorithm: [sft\n")
    assert error_of(capsys, "a.yaml").startswith("a.yaml: is not YAML: ")
    Path("b.yaml").write_text("algorithm: sft\n")
    assert error_of(capsys, "b.yaml").startswith("task: is missing, want reasoning_gym:NAME, or a")
    Path("d.yaml").write_text("task: reasoning_gym:spell_backward\n")
    wanted = "one of sft, grpo, gspo, cispo, ppo, reinforce"
    assert error_of(capsys, "d.yaml") == f"algorithm: is missing, want {wanted}"
    Path("c.jsonl").write_text('{"prompt": "1 + 1", "answer": 2}\n{"prompt": "1 + 2"}\n')
    said = error_of(capsys, "sft", "task=c.jsonl")
    assert said.startswith("task: c.jsonl, line 2: want ")


def test_other_errors_keep_their_traceback(monkeypatch: Any) -> None:
    """Errors other than recipe errors keep their traceback."""

    def run(recipe: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(train, "run", run)
    with pytest.raises(ValueError, match="a bug"):
        main(["train", "sft"])


def test_list(capsys: Any) -> None:
    assert main(["train", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == ALGORITHMS
    assert all(len(line) > 40 for line in lines)


def test_recipes_read_back(tmp_path: Path) -> None:
    for name in train.recipes():
        path = tmp_path / f"{name}.yaml"
        recipe = train.recipe(name, ["trainer.learning_rate=1e-5", "seed=3"])
        assert recipe.trainer["learning_rate"] == 1e-5 and recipe.seed == 3
        assert recipe.output == f"runs/{name}"
        path.write_text(write(recipe))
        assert train.recipe(str(path)) == recipe


@pytest.mark.parametrize("number", [0, 1])
def test_recipes_of_the_page_are_whole(number: int, tmp_path: Path) -> None:
    """The recipes on the page docs/train.md list every key of a recipe, and only options that the
    trainer's configuration knows."""
    page = (Path(__file__).parents[1] / "docs" / "train.md").read_text()
    text = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[number]
    assert re.findall(r"^(\w+):", text, re.MULTILINE) == [f.name for f in fields(Recipe)]
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    recipe = train.recipe(str(path), ["trainer.use_cpu=true", "dtype=float32"])
    assert recipe.algorithm == ("sft", "gspo")[number]
    settings(recipe)
    adapter(recipe)
    task = load_task(recipe, chat=True)
    assert len(task.train) == recipe.train_problems and len(task.held_out) == recipe.held_out
    table = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert {f.name for f in fields(Recipe)} == set(re.findall(r"`(\w+)`", "".join(table)))


# ---------------------------------------------------------------------- tasks and models


def test_bytes() -> None:
    tokenizer = byte_tokenizer()
    text = "größe <pad> 1 + 1 =\n∑"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and len(tokenizer) == 258
    assert len(tokenizer("∑∑")["input_ids"]) == 6
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_tiny_is_its_seed() -> None:
    weights = [load(train.recipe("sft", [f"seed={seed}"]))[0].lm_head.weight for seed in (0, 0, 1)]
    assert weights[0].equal(weights[1]) and not weights[0].equal(weights[2])


def test_held_out_is_not_trained_on() -> None:
    task = load_task(train.recipe("sft", ["train_problems=3000", "held_out=200"]), chat=False)
    train_prompts = [row["prompt"] for row in task.train]
    held_out = {row["prompt"] for row in task.held_out}
    assert len(train_prompts) == len(set(train_prompts)) == 3000 and len(held_out) == 200
    assert not held_out & set(train_prompts)
    again = load_task(train.recipe("sft", ["train_problems=3000", "held_out=200"]), chat=False)
    assert again.train == task.train and again.held_out == task.held_out


def test_generated_task() -> None:
    recipe = train.recipe(
        "sft", ["train_problems=20", "held_out=5", "answer_tag=answer", "reward=null"]
    )
    task = load_task(recipe, chat=True)
    row = task.train[0]
    assert row["prompt"][0]["role"] == "user" and row["prompt"][0]["content"].endswith(" -> ")
    columns = {"answer": [row["answer"]] * 3, "entry": [row["entry"]] * 3}
    texts = [task.completion(row), row["answer"], f"so <answer>{row['answer'][0]}</answer>"]
    turns = [[{"role": "assistant", "content": text}] for text in texts]
    got = task.reward(completions=turns, prompts=[], **columns)
    assert got == pytest.approx([1.0, 0.0, 1 / len(row["answer"])])
    recipe.reward = "solved"
    solved = load_task(recipe, chat=True).reward(completions=turns, prompts=[], **columns)
    assert solved == [1.0, 0.0, 0.0]
    shown = task.demonstrations()[0]
    assert shown["completion"] == [{"role": "assistant", "content": texts[0]}]


def shouting(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(c == a.upper()) for c, a in zip(completions, answer, strict=True)]


def test_file_task(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    lines = [{"prompt": f"{i} + {i} =", "answer": 2 * i, "level": i % 3} for i in range(10)]
    path.write_text("".join(json.dumps(line) + "\n\n" for line in [*lines, lines[0]]))
    options = [f"task={path}", "held_out=3", "prompt='Q: {question}'"]
    recipe = train.recipe("sft", options)
    assert recipe.task_options == {}
    task = load_task(recipe, chat=False)
    assert len(task.train) == 7 and len(task.held_out) == 3
    row = task.train[0]
    assert row["prompt"].startswith("Q: ") and row["answer"] == str(
        2 * int(row["prompt"].split()[1])
    )
    assert task.reward(completions=[f" {row['answer']}\n", "x"], answer=[row["answer"]] * 2) == [
        1.0,
        0.0,
    ]
    assert set(task.prompts().column_names) == {"prompt", "answer", "level"}
    recipe.reward = f"{__name__}:shouting"
    assert load_task(recipe, chat=False).reward is shouting


def test_answers() -> None:
    assert answer_in(" a b \n", None) == "a b"
    assert answer_in("<x>1</x> no, <x> 2\n</x>.", "x") == "2"
    assert answer_in("2", "x") == ""


# ---------------------------------------------------------------------- files and plots


def test_files_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    files.write(path, "one")
    with contextlib.suppress(RuntimeError), files.replacing(path) as partial:
        partial.write_text("two")
        raise RuntimeError
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]
    lines = files.Lines(tmp_path / "m.jsonl")
    assert lines.read() == []
    lines.add({"step": 1})
    with lines.path.open("a") as file:
        file.write('{"step": 2, "lo')  # a process killed in the middle of a line
    assert lines.read() == [{"step": 1}]


def test_plots(tmp_path: Path) -> None:
    entries = [
        {
            "step": i,
            "loss": 1 / i,
            "headloss/grpo/kl_old_k3": 0.1,
            **({"reward": 1.0} if i % 2 else {}),
        }
        for i in range(1, 30)
    ]
    paths = plots.draw(entries, tmp_path / "plots")
    assert [path.name for path in paths] == ["reward.png", "loss.png", "kl_old.png"]
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in paths)
    assert len(list((tmp_path / "plots").iterdir())) == 3


def test_greedy_completions_do_not_depend_on_padding() -> None:
    model, tokenizer = load(train.recipe("sft", ["tiny.num_hidden_layers=1"]))
    model.eval()
    rows = [{"prompt": "abc"}, {"prompt": "a much longer prompt"}]
    together = evaluate.generate(model, tokenizer, rows, 5)
    alone = [evaluate.generate(model, tokenizer, [row], 5)[0] for row in rows]
    assert together == alone
