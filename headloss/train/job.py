"""A training run: from a recipe to a folder of metrics, plots, checkpoints, model and report."""

from __future__ import annotations

import contextlib
import functools
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import transformers
from accelerate.utils import broadcast_object_list

from . import callbacks, evaluate, files, folder, model, pages, plots, report, split, task, trainers
from .errors import RecipeError
from .result import Result
from .schema import Recipe


def run(recipe: Recipe) -> Result:
    """Train a model as `recipe` says; see `headloss.train.run`."""
    begun = time.perf_counter()
    quiet()
    folder.check(recipe)
    with callbacks.Interrupt() as interrupt, contextlib.ExitStack() as held:
        transformers.set_seed(recipe.seed)
        language_model, tokenizer = model.load(recipe)
        chat = tokenizer.chat_template is not None if recipe.chat is None else recipe.chat
        if chat and tokenizer.chat_template is None:
            raise RecipeError(f"chat: got true, but {recipe.model} has no chat template")
        if recipe.system is not None and not chat:
            raise RecipeError(f"system: {recipe.model} has no chat template")
        work = task.load(recipe, chat)
        with folder.without_trace(Path(recipe.output)):
            trainer = trainers.build(recipe, work, language_model, tokenizer)
            if recipe.algorithm != "sft" and not work.held_out:
                # without held-out problems, no evaluation runs the reward function before the
                # training
                work.rehearse()
        checkpoint = _claim(trainer, recipe, work.split, held)
        score = functools.partial(_score, trainer, tokenizer, work)
        measure, bar, between = _watch(trainer, recipe, interrupt, score)
        before = after = None
        try:
            before = _held_out(trainer, score, recipe, "before", checkpoint)
            _train(trainer, checkpoint)
            stopped = interrupt.stopped
            if not stopped:
                trainer.check_weights()
                _save_model(trainer, tokenizer, work.split, Path(recipe.output) / "model")
                after = _held_out(trainer, score, recipe, "after")
        except KeyboardInterrupt:
            stopped = True
        finally:
            bar.close()
        found = _points(before, between.found, after, trainer.state.global_step)
        finished, notes = not stopped, work.split.note
        return _ending(
            recipe, trainer, measure.entries, finished, before, after, notes, found, begun
        )


def _claim(
    trainer: Any, recipe: Recipe, parts: split.Split, held: contextlib.ExitStack
) -> str | None:
    """Return the checkpoint to resume from, on all ranks. The main process locks the output folder
    until the `ExitStack` `held` is closed."""
    found: list[Any] = [None, None]
    if trainer.accelerator.is_main_process:
        try:
            held.enter_context(folder.locked(Path(recipe.output)))
            found[0] = folder.claim(recipe)
            files.write_json(Path(recipe.output) / split.FILE, parts.record())
            if parts.others:
                folder.warn(parts.note)
            if found[0] is not None:
                print(f"goes on from {found[0]}", flush=True)
        except RecipeError as error:
            found[1] = str(error)
    broadcast_object_list(found)
    checkpoint, error = found
    if error is not None:
        raise RecipeError(error)
    return checkpoint


def _train(trainer: Any, checkpoint: str | None) -> None:
    if checkpoint is not None:
        state = json.loads((Path(checkpoint) / "trainer_state.json").read_text())
        trainer.count_on(state["log_history"])
    trainer.train(resume_from_checkpoint=checkpoint)


def _ending(
    recipe: Recipe,
    trainer: Any,
    entries: list[dict[str, Any]],
    finished: bool,
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
    notes: str,
    held_out: plots.HeldOut,
    begun: float,
) -> Result:
    output, main = Path(recipe.output), trainer.accelerator.is_main_process
    result = Result(
        output=output,
        finished=finished,
        steps=trainer.state.global_step,
        before=before,
        after=after,
        split=notes,
        held_out=list(held_out),
        metrics=entries,
        plots=plots.draw(entries, output / "plots", held_out) if main else [],
        seconds=time.perf_counter() - begun,
    )
    if main:
        size = sum(p.numel() for p in trainer.model.parameters())
        files.write(result.report, report.of_run(recipe, result, size))
        files.write(result.page, pages.of_run(recipe, result, size))
        print(report.ending(result), flush=True)
    return result


def quiet() -> None:
    """Silence other libraries' progress bars, and their warnings about which users can do
    nothing."""
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing` is deprecated", FutureWarning)
    # Python warns when it first compiles certain packages that reasoning_gym's tasks import
    warnings.filterwarnings("ignore", '"is( not)?" with', SyntaxWarning)
    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


# ---------------------------------------------------------------------- evaluation and saving


def _score(trainer: Any, tokenizer: Any, work: task.Task) -> dict[str, Any]:
    length = getattr(trainer.args, "max_completion_length", None) or work.longest(tokenizer)
    return evaluate.held_out(trainer, tokenizer, work, length)


def _points(
    before: dict[str, Any] | None,
    between: plots.HeldOut,
    after: dict[str, Any] | None,
    last: int,
) -> plots.HeldOut:
    """Return (step, scores) of all evaluations of a run, in order."""
    first = [] if before is None else [(0, before)]
    return [*first, *between, *([] if after is None else [(last, after)])]


def _held_out(
    trainer: Any,
    score: Callable[[], dict[str, Any]],
    recipe: Recipe,
    name: str,
    checkpoint: str | None = None,
) -> dict[str, Any] | None:
    """Score the held-out problems and write NAME.json; a resumed run reads NAME.json instead, if
    the checkpoint holds the checksum of NAME.json.

    Raises:
        RunError: if scoring fails and the model's weights are not finite.
    """
    if not recipe.held_out:
        return None
    path = Path(recipe.output) / f"{name}.json"
    if folder.kept_before(checkpoint, path.parent):
        return json.loads(path.read_text())
    try:
        found = score()
    except RuntimeError:
        trainer.check_weights()
        raise
    if trainer.accelerator.is_main_process:
        files.write_json(path, found)
        print(f"held-out {name}: {report.score(found)}", flush=True)
    return found


def _watch(
    trainer: Any,
    recipe: Recipe,
    interrupt: callbacks.Interrupt,
    score: Callable[[], dict[str, Any]],
) -> tuple[callbacks.Measure, callbacks.Bar, callbacks.HeldOut]:
    output = Path(recipe.output)
    measure = callbacks.Measure(files.Lines(output / "metrics.jsonl"))
    bar = callbacks.Bar(recipe.algorithm, measure)
    every = recipe.held_out_steps if recipe.held_out else 0
    between = callbacks.HeldOut(files.Lines(output / "held_out.jsonl"), every, score)
    interrupt.trainer = trainer
    for callback in (measure, bar, between, interrupt):
        trainer.add_callback(callback)
    return measure, bar, between


def _save_model(trainer: Any, tokenizer: Any, parts: split.Split, path: Path) -> None:
    """Save the weights as safetensors, the tokenizer, and the record of training and held-out
    problems; all ranks take part in the save."""
    partial = path.with_name(f"{files.PARTIAL}-{path.name}")
    trainer.save_model(str(partial))
    if trainer.accelerator.is_main_process:
        tokenizer.save_pretrained(partial)
        files.write_json(partial / split.FILE, parts.record())
        files.remove(path)
        partial.rename(path)
    trainer.accelerator.wait_for_everyone()
