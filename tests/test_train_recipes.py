"""Invalid recipes give a one-line error with the key, before any evaluation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL trains")
pytest.importorskip("omegaconf", reason="recipes are read by it")
pytest.importorskip("reasoning_gym", reason="the tasks of the shipped recipes")
from test_train import error_of
from test_train_runs import RL, SMALL

from headloss import train
from headloss.train.task import load as load_task


def nan(completions: list[str], **columns: Any) -> list[float]:
    return [0.0, math.nan, *[0.0] * (len(completions) - 2)]


def infinite(completions: list[str], **columns: Any) -> list[float]:
    return [math.inf] * len(completions)


def nothing(completions: list[str], **columns: Any) -> None:
    return None


def no_scores(completions: list[str], **columns: Any) -> list[None]:
    return [None] * len(completions)


def too_few(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * (len(completions) - 1)


def words(completions: list[str], **columns: Any) -> list[str]:
    return ["good"] * len(completions)


def one_number(completions: list[str], **columns: Any) -> float:
    return 1.0


def other_arguments(texts: list[str]) -> list[float]:
    return [0.0] * len(texts)


number = 3


def said(capsys: Any, name: str, *overrides: str) -> str:
    given = {override.partition("=")[0] for override in overrides}
    small = SMALL if name == "sft" else [*SMALL, *RL]
    kept = [s for s in small if s.partition("=")[0] not in given]
    return error_of(capsys, name, *kept, *overrides)


NUMBERS = [  # (recipe, field, invalid values, expected range)
    ("sft", "per_device_train_batch_size", ("0", "-1"), "[1, inf)"),
    ("gspo", "per_device_train_batch_size", ("0",), "[1, inf)"),
    ("sft", "gradient_accumulation_steps", ("0", "-2"), "[1, inf)"),
    ("gspo", "gradient_accumulation_steps", ("0",), "[1, inf)"),
    ("gspo", "temperature", ("0", "-1", ".nan", ".inf"), "(0, inf)"),
    ("gspo", "epsilon", ("-1", ".nan"), "[0, inf)"),
    ("gspo", "epsilon_high", ("-1",), "[0, inf]"),
    ("gspo", "delta", ("-1",), "(0, inf)"),
    ("gspo", "beta", ("-1", ".nan"), "[0, inf)"),
    ("gspo", "top_k", ("-1",), "[0, inf)"),
    ("gspo", "top_p", ("0", "2"), "(0, 1]"),
    ("gspo", "min_p", ("2",), "[0, 1]"),
    ("gspo", "repetition_penalty", ("0",), "(0, inf)"),
    ("gspo", "num_generations", ("0",), "[1, inf)"),
    ("gspo", "num_iterations", ("0", "-1"), "[1, inf)"),
    ("gspo", "steps_per_generation", ("0",), "[1, inf)"),
    ("gspo", "generation_batch_size", ("0",), "[1, inf)"),
    ("gspo", "top_entropy_quantile", ("-1", "2"), "(0, 1]"),
    ("ppo", "dual_clip", ("0.5",), "(1, inf)"),
    ("ppo", "gamma", ("2", ".nan"), "[0, 1]"),
    ("ppo", "value_coef", (".nan",), "[0, inf)"),
    ("sft", "learning_rate", ("-1", ".nan", ".inf"), "[0, inf)"),
    ("sft", "adam_beta2", ("2",), "[0, 1)"),
    ("sft", "weight_decay", (".nan",), "[0, inf)"),
    ("sft", "max_grad_norm", ("-1", ".nan"), "[0, inf]"),
    ("sft", "warmup_steps", ("-1",), "[0, inf)"),
    ("sft", "num_train_epochs", ("0", ".nan"), "(0, inf)"),
    ("sft", "max_length", ("0", "-1"), "[1, inf)"),
    ("sft", "pad_to_multiple_of", ("0",), "[1, inf)"),
    ("sft", "dataloader_num_workers", ("-1",), "[0, inf)"),
    ("sft", "neftune_noise_alpha", ("-1",), "[0, inf)"),
]


@pytest.mark.parametrize(("name", "field", "values", "wanted"), NUMBERS)
def test_numbers_of_the_trainer(
    capsys: Any, tmp_path: Path, monkeypatch: Any, name: str, field: str, values: Any, wanted: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in values:
        line = said(capsys, name, f"trainer.{field}={value}")
        shown = value.lstrip(".")
        assert line == f"trainer.{field}: got {shown}, want a number in {wanted}"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "overrides", "wanted"),
    [
        ("sft", ["seed=-1"], "seed: got -1, want 0 to 2**32 - 1"),
        ("sft", ["seed=4294967296"], "seed: got 4294967296, want 0 to"),
        ("sft", ["tiny.hidden_size=18"], "tiny.hidden_size: got 18, want a multiple of 4: 2 att"),
        ("sft", ["tiny.hidden_size=6"], "tiny.hidden_size: got 6, want a multiple of 4: 2 atten"),
        ("sft", ["tiny.num_attention_heads=0"], "tiny.num_attention_heads: got 0, want a positi"),
        ("sft", ["tiny.num_hidden_layers=-1"], "tiny.num_hidden_layers: got -1, want a positive"),
        ("sft", ["tiny.intermediate_size=0"], "tiny.intermediate_size: got 0, want a positive"),
        ("sft", ["answer_tag='a(b'"], "answer_tag: got 'a(b', want a name"),
        ("sft", ["answer_tag='['"], "answer_tag: got '[', want a name"),
        ("sft", ["answer_tag=''"], "answer_tag: got '', want a name"),
        ("sft", ["terms.z_loss=.nan"], "terms.z_loss: got nan, want a finite number"),
        ("sft", ["lora.task_type=MAGIC"], "lora: Invalid task type: 'MAGIC'"),
        ("sft", ["trainer.report_to=wandb"], "trainer.report_to: got 'wandb', want what is insta"),
        ("sft", ["trainer.report_to=[none, tensorboard]"], "trainer.report_to: got "),
        ("sft", ["trainer.max_length=3"], "trainer.max_length: got 3, which leaves no token"),
        ("gspo", ["train_problems=1"], "train_problems: 1 problems fill no batch of the trainer"),
        ("sft", ["trainer.optim=lomo"], "trainer: You need to install `lomo_optim`"),
        ("sft", ["trainer.optim_args=foo"], "trainer: "),
        ("sft", ["trainer.lr_scheduler_kwargs={a: 1}"], "trainer: TypeError: "),
        ("sft", ["trainer.eval_on_start=true"], "trainer: eval_on_start: "),
        ("sft", ["trainer.deepspeed=zero3.json"], "trainer.deepspeed: is not supported, "),
        ("sft", ["trainer.accelerator_config=none.json"], "trainer: FileNotFoundError: "),
        ("gspo", ["trainer.scale_rewards=magic"], "trainer.scale_rewards: got 'magic', want one o"),
        ("gspo", ["trainer.multi_objective_aggregation=x"], "trainer.multi_objective_aggregation:"),
    ],
)
def test_settings(
    capsys: Any, tmp_path: Path, monkeypatch: Any, name: str, overrides: list[str], wanted: str
) -> None:
    from headloss.train import trainers

    monkeypatch.chdir(tmp_path)
    # Hide installed reporters such as wandb or tensorboard, which would change the printed text.
    monkeypatch.setattr(trainers, "get_available_reporting_integrations", list)
    assert said(capsys, name, *overrides).startswith(wanted)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        ("file", "output: got file, but file is a file, want a folder"),
        ("file/run", "output: got file/run, but "),
        ("/dev/null/run", "output: got /dev/null/run, but /dev/null is a file, want a folder"),
        ("x" * 300, f"output: got '{'x' * 300}': "),
        ("''", "output: got '', want a folder"),
        pytest.param(
            "/proc/nowhere",
            "output: cannot write to /proc/nowhere: ",
            marks=pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc"),
        ),
    ],
)
def test_places(capsys: Any, tmp_path: Path, monkeypatch: Any, output: str, wanted: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    assert said(capsys, "sft", f"output={output}").startswith(wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_files_that_are_no_recipe(capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.yaml").write_text("- algorithm\n- task\n")
    assert error_of(capsys, "list.yaml") == "list.yaml: got a list, want key: value"
    Path("number.yaml").write_text("3")
    assert error_of(capsys, "number.yaml").startswith("number.yaml: cannot be read: ")
    Path("bytes.yaml").write_bytes(b"\xff\xfe\x00a")
    assert error_of(capsys, "bytes.yaml").startswith("bytes.yaml: cannot be read as UTF-8: ")


@pytest.mark.parametrize("key", ["trainer", "task_options", "terms", "lora", "tiny", "seed"])
def test_a_list_in_place_of_what_a_key_is(capsys: Any, tmp_path: Path, key: str) -> None:
    path, wanted = tmp_path / "list.yaml", f"{key}: got a list"
    path.write_text(f"algorithm: sft\n{key}: [a]\n")
    assert error_of(capsys, str(path)).startswith(wanted)
    assert error_of(capsys, "sft", f"{key}=[a]").startswith(wanted)


def test_a_weight_that_is_a_list(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "weight.yaml"
    path.write_text("algorithm: sft\ntask: x.jsonl\nterms: {z_loss: [1]}\n")
    assert error_of(capsys, str(path)) == "terms.z_loss: got [1], want a finite number"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (b"\x80\xff\x00", "want {"),
        (b'{"prompt": "a", "answer": "\xff"}', "want {"),
        (b"[" * 100_000, "want {"),
        (b'{"prompt": 3, "answer": 1}', "prompt: got 3, want a text, or a list of messages"),
        (b'{"prompt": "", "answer": 1}', "prompt: got '', want"),
        (b'{"prompt": [{"who": "user"}], "answer": 1}', "prompt: got [{'who': 'user'}], want"),
        (b'{"prompt": "a", "answer": null}', "answer: got null, want a text or a number"),
        (b'{"prompt": "a", "answer": 1, "completions": 2}', "completions: is a name that"),
        (b'{"prompt": "a", "answer": 1, "fields": ["x"]}', "fields: is a name that"),
    ],
)
def test_lines(capsys: Any, tmp_path: Path, monkeypatch: Any, line: bytes, wanted: str) -> None:
    monkeypatch.chdir(tmp_path)
    good = "".join(json.dumps({"prompt": f"{i}", "answer": i}) + "\n" for i in range(40))
    Path("task.jsonl").write_bytes(good.encode() + line + b"\n")
    found = said(capsys, "sft", "task=task.jsonl")
    assert found.startswith(f"task: task.jsonl, line 41: {wanted}")


def test_rows_of_several_kinds(capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = ["text", [{"role": "user", "content": "turn"}]]
    rows = [{"prompt": prompts[i % 2], "answer": i, "n": i} for i in range(2)]
    rows += [{"prompt": f"{i}", "answer": i, "n": 10**30} for i in range(40)]
    Path("task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = said(capsys, "gspo", "task=task.jsonl")
    assert found.startswith("task: rows of several kinds: ")


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    ends = "\u2028 \u2029 \x85"
    rows = [{"prompt": f"{i}{ends}{i}", "answer": f"{i}{ends}"} for i in range(10)]
    path = tmp_path / "task.jsonl"
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes(text.encode())
    task = load_task(train.recipe("sft", [f"task={path}", "held_out=2"]), chat=False)
    found = {(row["prompt"], row["answer"]) for row in (*task.train, *task.held_out)}
    assert found == {(row["prompt"], row["answer"]) for row in rows}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("nan", "gave nan for completion 2 of {n}, want a finite number"),
        ("infinite", "gave inf for completion 1 of {n}, want a finite number"),
        ("nothing", "gave None, want a list of numbers"),
        ("no_scores", "gave None for all of {n} completions"),
        ("too_few", "gave {less} scores for {n} completions, want one for each"),
        ("words", "gave ['good', "),
        ("one_number", "gave 1.0, want a list of numbers"),
    ],
)
def test_rewards(capsys: Any, tmp_path: Path, monkeypatch: Any, name: str, wanted: str) -> None:
    """A reward function that fails is reported by the evaluation before training or, without
    held-out prompts, by a trial on right answers."""
    monkeypatch.chdir(tmp_path)
    reward = f"{__name__}:{name}"
    for held_out, n in ((6, 6), (0, 8)):
        options = (f"reward={reward}", f"held_out={held_out}", f"output=run{held_out}")
        found = said(capsys, "gspo", *options)
        text = wanted.replace("{n}", str(n)).replace("{less}", str(n - 1))
        assert found.startswith(f"reward: {reward} {text}")


def test_functions_that_are_no_reward(capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("broken_reward.py").write_text("def x(:\n")
    Path("raising_reward.py").write_text("1 / 0\n")
    for name, wanted in (
        (f"{__name__}:other_arguments", "missing a required argument"),
        (f"{__name__}:number", "is no function"),
        ("broken_reward:x", "SyntaxError: invalid syntax"),
        ("raising_reward:x", "ZeroDivisionError: division by zero"),
        ("..:x", "TypeError: "),
    ):
        found = said(capsys, "gspo", f"reward='{name}'")
        assert found.startswith(f"reward: {name}") and wanted in found
