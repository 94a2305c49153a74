"""Training runs survive or report NaN rewards, damaged files, an output folder with files of
another program, a second run in the same folder, kills and signals."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL trains")
pytest.importorskip("omegaconf", reason="recipes are read by it")
pytest.importorskip("reasoning_gym", reason="the tasks of the shipped recipes")
import torch
from accelerate import Accelerator
from blank_plots import blank_plots  # noqa: F401
from safetensors.torch import load_file, save_file
from test_train_runs import RL, SMALL, metrics, weights

from headloss.__main__ import main

# Three steps are an epoch, so that checkpoint-4 lies inside the second epoch.
STEPS = ["trainer.max_steps=4", "trainer.save_steps=1", "trainer.learning_rate=0.01", "held_out=3"]
RUN = Path("run")  # the output folder, in the test's temporary directory
CALLS: list[int] = []
ACTIONS: dict[int, Callable[[], None]] = {}


def acting(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    """Reward function that calls `ACTIONS[n]`, if it exists, in its nth call. SFT runs call the
    reward twice before and twice after training."""
    CALLS.append(len(completions))
    ACTIONS.get(len(CALLS), lambda: None)()
    if ACTIONS.get(-len(CALLS)) is not None:
        return [None] * len(completions)
    pairs = zip(prompts, completions, strict=True)
    return [sum((prompt + text).encode()) % 11 / 10 for prompt, text in pairs]


@pytest.fixture(autouse=True)
def at_rest() -> None:
    CALLS.clear()
    ACTIONS.clear()


def train(name: str, *overrides: str) -> int:
    further = STEPS if name == "sft" else [*RL, *STEPS]
    reward = f"reward={__name__}:acting"
    given = {override.partition("=")[0] for override in overrides}
    mine = [s for s in [*SMALL, *further, reward] if s.partition("=")[0] not in given]
    return main(["train", name, *mine, f"output={RUN}", *overrides])


def refused(capsys: Any, *overrides: str, name: str = "sft") -> str:
    """Return the only output line of a command with exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        train(name, *overrides)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1, printed.err
    return printed.err.removeprefix("headloss: ").strip()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> Path:
    """Return the parent folder of a finished run."""
    folder = tmp_path_factory.mktemp("whole")
    with contextlib.chdir(folder):
        assert train("sft") == 0
    return folder


@pytest.fixture
def finished(whole: Path, tmp_path: Path, monkeypatch: Any) -> Path:
    """Copy the finished run to the test's folder, and change to that folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole / RUN, RUN)
    return whole / RUN


def assert_as(whole: Path) -> None:
    assert metrics(RUN) == metrics(whole)
    for key, value in weights(whole).items():
        assert value.equal(weights(RUN)[key]), key
    for name in ("before.json", "after.json"):
        assert json.loads((RUN / name).read_text()) == json.loads((whole / name).read_text())


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# ---------------------------------------------------------------------- NaN and infinity


def test_a_weight_that_is_nan(finished: Path, capsys: Any) -> None:
    shutil.copytree(RUN / "model", "model")
    tensors = load_file("model/model.safetensors")
    tensors["model.norm.weight"][3] = math.nan
    save_file(tensors, "model/model.safetensors", metadata={"format": "pt"})
    for held_out, said in ((0, "step 1: loss is nan"), (3, "step 0: the weight model.norm.wei")):
        capsys.readouterr()
        options = (f"held_out={held_out}", f"output=nan{held_out}")
        assert train("sft", "model=./model", *options) == 1
        printed = capsys.readouterr()
        assert printed.err.startswith(f"headloss: {said}")
        assert "; there is no checkpoint before it" in printed.err
        assert printed.err.count("\n") == 1 and "loss" not in printed.out
        assert not Path(f"nan{held_out}/model").exists()


def test_weights_that_explode(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["trainer.learning_rate=1e30", "trainer.save_total_limit=1"]
    assert train("sft", *options) == 1
    said = capsys.readouterr().err
    ended = re.fullmatch(
        r"headloss: step ([234]): (loss|grad_norm) is (nan|inf); "
        r"the last checkpoint is run/checkpoints/(checkpoint-\d)\n",
        said,
    )
    assert ended is not None, said
    step = int(ended[1])
    assert ended[4] == f"checkpoint-{step - 1}"
    found = load_file(RUN / "checkpoints" / ended[4] / "model.safetensors")
    assert all(value.isfinite().all() for value in found.values())
    assert [line["step"] for line in metrics(RUN)] == list(range(1, step))
    assert not (RUN / "model").exists()


def test_a_gradient_that_is_infinite(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """If a gradient becomes infinite, training stops before the weights change, although the loss
    is finite."""
    monkeypatch.chdir(tmp_path)
    real, calls = Accelerator.backward, []

    def backward(self: Any, loss: Any, **kwargs: Any) -> None:
        real(self, loss, **kwargs)
        calls.append(loss)
        if len(calls) == 3:
            next(p for m in self._models for p in m.parameters()).grad[0, 0] = math.inf

    monkeypatch.setattr(Accelerator, "backward", backward)
    assert train("sft", "trainer.max_grad_norm=0") == 1
    said = capsys.readouterr().err
    assert said.startswith("headloss: step 3: grad_norm is inf; the last checkpoint is ")
    assert [path.name for path in sorted((RUN / "checkpoints").iterdir())][-1] == "checkpoint-2"


def test_a_weight_that_becomes_nan(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """A weight that becomes NaN in the last update is saved in neither checkpoint nor model."""
    monkeypatch.chdir(tmp_path)
    real = torch.optim.AdamW.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = real(self, *args, **kwargs)
        CALLS.append(0)
        if CALLS.count(0) == 4:
            self.param_groups[0]["params"][0].data[0, 0] = math.nan
        return found

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    assert train("sft", "trainer.save_total_limit=1") == 1
    said = capsys.readouterr().err
    assert said.startswith("headloss: step 4: the weight ") and " is nan; " in said
    assert [path.name for path in (RUN / "checkpoints").glob("checkpoint-*")] == ["checkpoint-3"]
    assert not (RUN / "model").exists()


def test_metrics_hold_no_nan(tmp_path: Path, monkeypatch: Any) -> None:
    """A generation without scores has a null reward in the metrics file, and not NaN."""
    monkeypatch.chdir(tmp_path)
    # The reward function is called twice for held-out prompts, then once per generation. Let the
    # fourth call of the reward function, for the second generation, return None for each answer.
    ACTIONS[-4] = lambda: None
    assert train("grpo", "trainer.num_iterations=1", "trainer.max_steps=3") == 0

    def bare(name: str) -> None:
        raise AssertionError(name)

    text = (RUN / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=bare) for line in text.splitlines()]
    assert [line["reward"] is None for line in lines] == [False, True, False]
    assert "reward" in (RUN / "report.md").read_text() and (RUN / "plots/reward.png").is_file()


# ---------------------------------------------------------------------- resuming


@pytest.mark.parametrize("killed", [False, True])
def test_a_finished_run_trains_no_further(finished: Path, capsys: Any, killed: bool) -> None:
    if killed:  # as if killed after the last checkpoint, before the model was saved
        shutil.rmtree(RUN / "model")
        for name in ("after.json", "report.md"):
            (RUN / name).unlink()
    kept = contents(RUN / "checkpoints")
    assert train("sft", "resume=true") == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == f"goes on from {newest()}"
    assert "5/4" not in printed and "sft " not in printed and "held-out after" in printed
    assert "finished after 4 steps" in (RUN / "report.md").read_text()
    assert contents(RUN / "checkpoints") == kept
    assert_as(finished)


def test_a_finished_policy_trains_no_further(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["trainer.num_iterations=2", "trainer.max_steps=4", "trainer.save_steps=2"]
    assert train("gspo", *options) == 0
    before = weights(RUN)
    assert train("gspo", *options, "resume=true") == 0
    assert all(value.equal(weights(RUN)[key]) for key, value in before.items())
    assert [line["step"] for line in metrics(RUN)] == [1, 2, 3, 4]


def newest() -> Path:
    return RUN / "checkpoints" / "checkpoint-4"


@pytest.mark.parametrize(
    "name",
    ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "model.safetensors"],
)
def test_a_checkpoint_that_lacks_a_file(finished: Path, capsys: Any, name: str) -> None:
    (newest() / name).unlink()
    kept = contents(RUN)
    said = refused(capsys, "resume=true")
    where = f"resume: run/checkpoints/checkpoint-4/{name} is missing; "
    assert said == f"{where}without checkpoint-4 it goes on from checkpoint-3"
    assert contents(RUN) == kept


def test_a_damaged_checkpoint(finished: Path, capsys: Any) -> None:
    """Resuming from a checkpoint with one changed byte raises; after its removal the older
    checkpoint leads to the same result."""
    path = newest() / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    said = refused(capsys, "resume=true")
    assert said.startswith("resume: run/checkpoints/checkpoint-4/model.safetensors is damaged; ")
    assert said.endswith("without checkpoint-4 it goes on from checkpoint-3")
    (RUN / "checkpoints/checkpoint-3/optimizer.pt").write_bytes(b"")
    assert refused(capsys, "resume=true").endswith("; no other one is intact")
    shutil.rmtree(newest())
    shutil.copytree(finished / "checkpoints/checkpoint-3", RUN / "again")
    shutil.rmtree(RUN / "checkpoints/checkpoint-3")
    (RUN / "again").rename(RUN / "checkpoints/checkpoint-3")
    assert train("sft", "resume=true") == 0
    assert_as(finished)


def test_other_folders_among_the_checkpoints(finished: Path, capsys: Any) -> None:
    (RUN / "checkpoints/checkpoint-best").mkdir()
    (RUN / "checkpoints/checkpoint-2-of-mine").mkdir()
    (RUN / "checkpoints/checkpoint-20").mkdir()
    said = refused(capsys, "resume=true")
    assert said.startswith("resume: run/checkpoints/checkpoint-20 is empty; without checkpoint-20 ")
    (RUN / "checkpoints/checkpoint-20").rmdir()
    shutil.rmtree(newest())
    assert train("sft", "resume=true", "trainer.save_total_limit=1") == 0
    assert {p.name for p in (RUN / "checkpoints").iterdir()} == {
        "checkpoint-4", "checkpoint-best", "checkpoint-2-of-mine",
    }  # fmt: skip
    assert_as(finished)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "run/recipe.yaml is missing"),
        (b"", "run/recipe.yaml is damaged"),
        (b"\xff\x00 seed", "run/recipe.yaml is damaged"),
        (b"- a list\n", "run/recipe.yaml is damaged"),
        (b"at: 2024-99-99\n", "run/recipe.yaml is damaged"),
    ],
)
def test_a_damaged_recipe(finished: Path, capsys: Any, data: bytes | None, said: str) -> None:
    (RUN / "recipe.yaml").unlink() if data is None else (RUN / "recipe.yaml").write_bytes(data)
    assert refused(capsys, "resume=true").startswith(f"resume: {said}")


def test_damaged_metrics(finished: Path, capsys: Any) -> None:
    """Damaged metrics are rewritten from the checkpoint, with a warning."""
    path = RUN / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    cases = {
        2: [lines[0], b"\xff\xfe bytes\n", *lines[2:]],
        3: [*lines[:2], lines[2].replace(b'"loss": ', b'"loss": 1'), lines[3]],
        5: [*lines, b"no JSON\n"],
    }
    for number, damaged in cases.items():
        path.write_bytes(b"".join(damaged))
        capsys.readouterr()
        assert train("sft", "resume=true", "held_out=3") == 0
        warned = capsys.readouterr().err
        assert warned.startswith(f"headloss: warning: run/metrics.jsonl, line {number}: ")
        assert warned.count("\n") == 1
        assert metrics(RUN) == metrics(finished)
        assert all(json.loads(line)["step_time"] > 0 for line in path.read_text().splitlines())


def test_a_damaged_evaluation(finished: Path, capsys: Any) -> None:
    path = RUN / "before.json"
    path.write_text(path.read_text().replace('"problems": 3', '"problems": 4'))
    assert train("sft", "resume=true") == 0
    printed = capsys.readouterr()
    assert printed.err == "headloss: warning: run/before.json is damaged and is measured anew\n"
    assert_as(finished)


# ---------------------------------------------------------------------- run folders


def test_two_runs_in_a_folder(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """A second run in a folder is refused while a first run is active."""
    monkeypatch.chdir(tmp_path)
    ended: list[Any] = []

    def second() -> None:
        if not ended:
            ended.append(None)
            for option in ("resume=false", "resume=true", "overwrite=true"):
                ended.append(refused(capsys, option))

    ACTIONS[1] = second
    assert train("sft") == 0
    said = "output: another run is writing to run; output= takes another folder"
    assert ended[1:] == [said] * 3
    assert len(metrics(RUN)) == 4


@pytest.mark.parametrize("name", ["report.md", "recipe.yaml", "metrics.jsonl", "notes.txt"])
def test_files_of_other_people(tmp_path: Path, monkeypatch: Any, capsys: Any, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    RUN.mkdir()
    (RUN / name).write_text("algorithm: sft\n")
    said = refused(capsys)
    assert said.startswith(f"output: run holds {name}; output= takes another folder, overwrite=tr")
    assert "resume" in refused(capsys, "resume=true")
    assert contents(RUN) == {name: b"algorithm: sft\n"}


def test_overwrite(finished: Path, capsys: Any) -> None:
    (RUN / "notes.txt").write_text("mine")
    said = refused(capsys)
    ways = "resume=true continues it, output= takes another folder, overwrite=true begins anew"
    assert said == f"output: run holds a run; {ways}"
    assert refused(capsys, "overwrite=true", "resume=true").startswith("overwrite: got true besi")
    assert "holds the model" in refused(capsys, "overwrite=true", "model=./run/model")
    assert train("sft", "overwrite=true", "trainer.max_steps=1") == 0
    assert len(metrics(RUN)) == 1 and (RUN / "notes.txt").read_text() == "mine"
    assert [p.name for p in (RUN / "checkpoints").iterdir()] == ["checkpoint-1"]
    assert metrics(RUN)[0]["loss"] == metrics(finished)[0]["loss"]


# ---------------------------------------------------------------------- signals


def press(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "call", "steps"), [(signal.SIGINT, 1, 0), (signal.SIGTERM, 3, 4)]
)
def test_a_signal_in_an_evaluation(
    finished: Path, capsys: Any, number: int, call: int, steps: int
) -> None:
    shutil.rmtree(RUN)
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    ACTIONS[call] = press(number)
    assert train("sft") == 130
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    printed = capsys.readouterr()
    assert printed.err == "" and f"stopped after {steps} steps" in printed.out
    assert len(CALLS) == call
    assert train("sft", *(["resume=true"] if steps else [])) == 0
    assert_as(finished)


def test_sigterm_in_training(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """After SIGTERM, as after Ctrl-C, a training run finishes the steps of the current generation,
    saves a checkpoint and stops; the resumed run gives the same metrics."""
    monkeypatch.chdir(tmp_path)
    options = ["trainer.num_iterations=2", "trainer.save_steps=2"]
    assert train("grpo", *options, "output=whole") == 0
    CALLS.clear()
    ACTIONS[3] = press(signal.SIGTERM)
    assert train("grpo", *options) == 130
    printed = capsys.readouterr()
    assert "stopping after this step" in printed.err and "stopped after 2 steps" in printed.out
    assert [p.name for p in (RUN / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert train("grpo", *options, "resume=true") == 0
    assert metrics(RUN) == metrics(Path("whole"))


# ---------------------------------------------------------------------- random faults


def in_a_child(act: Callable[[], Any]) -> int:
    """Run `act` in a silent child process, for at most two minutes; return its status."""
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        code = 1
        try:
            code = act() or 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(operation: int) -> None:
    """Kill this process at its nth file operation inside the run's folder (`operation`); 0 only
    counts the operations."""
    seen = [0]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"):
            path = arguments[0]
            if isinstance(path, str | os.PathLike) and f"{RUN}/" in f"{path}/":
                seen[0] += 1
                if seen[0] == operation:
                    os.kill(os.getpid(), signal.SIGKILL)
                if not operation:
                    os.truncate("count", seen[0])

    sys.addaudithook(hook)


@pytest.fixture(scope="module")
def operations(tmp_path_factory: Any, whole: Path) -> int:
    """Return how many open, rename and remove operations a run makes in its folder."""
    with contextlib.chdir(tmp_path_factory.mktemp("count")):
        Path("count").touch()
        assert in_a_child(lambda: (killed_at(0), train("sft"))[1]) == 0
        return Path("count").stat().st_size


KILLS = [*range(2), *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, 60))]


@pytest.mark.parametrize("seed", KILLS)
def test_killed(seed: int, operations: int, finished: Path) -> None:
    """A run that is killed at any two file operations resumes to the result of an uninterrupted
    run."""
    shutil.rmtree(RUN)
    draw = random.Random(seed)
    killed = 0
    for _ in range(2):
        resume = "resume=true" if list((RUN / "checkpoints").glob("checkpoint-*")) else "seed=0"
        at = draw.randrange(1, operations)
        status = in_a_child(lambda at=at, resume=resume: (killed_at(at), train("sft", resume))[1])
        assert status in (0, -signal.SIGKILL)
        killed += status != 0
        if status == 0:
            break
    assert killed >= 1
    if status:
        found = list((RUN / "checkpoints").glob("checkpoint-*"))
        assert train("sft", "resume=true" if found else "seed=0") == 0
    assert_as(finished)
    assert not [path for path in RUN.rglob("*") if path.name.startswith(".partial")]


def damage(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    kind = draw.choice(["bit", "bytes", "cut", "more", "zeros", "gone"])
    at = draw.randrange(len(data))
    if kind == "bit":
        data[at] ^= 1 << draw.randrange(8)
    elif kind == "bytes":
        data[at : at + 16] = draw.randbytes(16)
    elif kind == "cut":
        del data[at:]
    elif kind == "more":
        data += draw.randbytes(16)
    elif kind == "zeros":
        data[at:] = bytes(len(data) - at)
    path.unlink() if kind == "gone" else path.write_bytes(data)
    return kind


BYTES = [*range(10), *(pytest.param(i, marks=pytest.mark.slow) for i in range(10, 500))]


@pytest.mark.parametrize("seed", BYTES)
def test_random_bytes(seed: int, finished: Path, capsys: Any) -> None:
    """Random damage to any file of a run gives a one-line error with the file's name, or changes no
    result."""
    draw = random.Random(seed)
    read = [RUN / name for name in ("recipe.yaml", "metrics.jsonl", "before.json")]
    read += sorted(path for path in newest().iterdir() if path.name != "training_args.bin")
    path = read[seed % len(read)]
    kind = damage(path, draw)
    capsys.readouterr()
    try:
        code = train("sft", "resume=true")
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr().err
    assert printed.count("\n") <= 1, printed
    if code == 2:
        named = path.name in printed or (path.name == "recipe.yaml" and "was begun with" in printed)
        assert named, (kind, printed)
    else:
        assert code == 0 and (not printed or path.name in printed)
        assert_as(finished)
