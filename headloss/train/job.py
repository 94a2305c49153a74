"""One run, from a recipe to a folder with all that came of it."""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from pathlib import Path
from typing import Any

import datasets
import transformers
from accelerate.utils import broadcast_object_list

from . import callbacks, evaluate, files, folder, model, plots, report, task, trainers
from .errors import RecipeError
from .result import Result
from .schema import Recipe


def run(recipe: Recipe) -> Result:
    """See `headloss.train.run`."""
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
                work.rehearse()  # else the first evaluation does
        checkpoint = _claim(trainer, recipe, held)
        measure, bar = _watch(trainer, recipe, interrupt)
        before = after = None
        try:
            before = _held_out(trainer, tokenizer, work, recipe, "before", checkpoint)
            _train(trainer, checkpoint)
            stopped = interrupt.stopped
            if not stopped:
                trainer.check_weights()
                _save_model(trainer, tokenizer, Path(recipe.output) / "model")
                after = _held_out(trainer, tokenizer, work, recipe, "after")
        except KeyboardInterrupt:
            stopped = True
        finally:
            bar.close()
        return _ending(recipe, trainer, measure.entries, not stopped, before, after, begun)


def _claim(trainer: Any, recipe: Recipe, held: contextlib.ExitStack) -> str | None:
    """The checkpoint to go on from. The folder is locked while `held` is open; on all ranks."""
    found: list[Any] = [None, None]
    if trainer.accelerator.is_main_process:
        try:
            held.enter_context(folder.locked(Path(recipe.output)))
            found[0] = folder.claim(recipe)
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
    begun: float,
) -> Result:
    output, main = Path(recipe.output), trainer.accelerator.is_main_process
    result = Result(
        output=output,
        finished=finished,
        steps=trainer.state.global_step,
        before=before,
        after=after,
        metrics=entries,
        plots=plots.draw(entries, output / "plots") if main else [],
        seconds=time.perf_counter() - begun,
    )
    if main:
        size = sum(p.numel() for p in trainer.model.parameters())
        files.write(result.report, report.of_run(recipe, result, size))
        print(report.ending(result), flush=True)
    return result


def quiet() -> None:
    """One progress bar is enough."""
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing` is deprecated", FutureWarning)
    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


# ---------------------------------------------------------------------- around the training


def _held_out(
    trainer: Any,
    tokenizer: Any,
    work: task.Task,
    recipe: Recipe,
    name: str,
    checkpoint: str | None = None,
) -> dict[str, Any] | None:
    """Measured and written to a file of that name, or read from there if the checkpoint knows it.

    Raises:
        RunError: it fails, and the model's weights are not finite.
    """
    if not work.held_out:
        return None
    path = Path(recipe.output) / f"{name}.json"
    if folder.kept_before(checkpoint, path.parent):
        return json.loads(path.read_text())
    length = getattr(trainer.args, "max_completion_length", None) or work.longest(tokenizer)
    try:
        found = evaluate.held_out(trainer, tokenizer, work, length)
    except RuntimeError:
        trainer.check_weights()
        raise
    if trainer.accelerator.is_main_process:
        files.write_json(path, found)
        print(f"held-out {name}: {report.score(found)}", flush=True)
    return found


def _watch(
    trainer: Any, recipe: Recipe, interrupt: callbacks.Interrupt
) -> tuple[callbacks.Measure, callbacks.Bar]:
    measure = callbacks.Measure(files.Lines(Path(recipe.output) / "metrics.jsonl"))
    bar = callbacks.Bar(recipe.algorithm, measure)
    interrupt.trainer = trainer
    for callback in (measure, bar, interrupt):
        trainer.add_callback(callback)
    return measure, bar


def _save_model(trainer: Any, tokenizer: Any, path: Path) -> None:
    """Safetensors and the tokenizer; all ranks take part."""
    partial = path.with_name(f"{files.PARTIAL}-{path.name}")
    trainer.save_model(str(partial))
    if trainer.accelerator.is_main_process:
        tokenizer.save_pretrained(partial)
        files.remove(path)
        partial.rename(path)
    trainer.accelerator.wait_for_everyone()
