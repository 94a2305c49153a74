"""One run, from a recipe to a folder with all that came of it."""

from __future__ import annotations

import dataclasses
import json
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import transformers
import yaml

from . import RecipeError, callbacks, evaluate, files, model, plots, report, task, trainers
from .schema import Recipe
from .schema import write as recipe_text

MAY_CHANGE = {  # between a run and its continuation
    "resume",
    "trainer.max_steps",
    "trainer.num_train_epochs",
    "trainer.save_steps",
    "trainer.save_total_limit",
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to.

    Attributes:
        output: the folder.
        finished: False where Ctrl-C ended it; a checkpoint is there.
        steps: optimizer steps in all.
        before, after: of the problems kept aside, "accuracy", "score", "problems", "samples";
            None without such problems, and `after` where the run has not finished.
        metrics: the lines of metrics.jsonl.
        plots: paths of PNG files.
        seconds: of this call.
    """

    output: Path
    finished: bool
    steps: int
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    plots: list[Path]
    seconds: float

    @property
    def report(self) -> Path:
        return self.output / "report.md"

    @property
    def model(self) -> Path:
        return self.output / "model"


def run(recipe: Recipe) -> Result:
    """See `headloss.train.run`."""
    begun = time.perf_counter()
    quiet()
    output = Path(recipe.output)
    checkpoint = _checkpoint(recipe, output)
    transformers.set_seed(recipe.seed)
    language_model, tokenizer = model.load(recipe)
    chat = tokenizer.chat_template is not None if recipe.chat is None else recipe.chat
    if chat and tokenizer.chat_template is None:
        raise RecipeError(f"chat: got true, but {recipe.model} has no chat template")
    if recipe.system is not None and not chat:
        raise RecipeError(f"system: {recipe.model} has no chat template")
    work = task.load(recipe, chat)
    trainer = trainers.build(recipe, work, language_model, tokenizer)
    main = trainer.accelerator.is_main_process
    if main:
        files.write(output / "recipe.yaml", recipe_text(recipe))
        files.remove(output / "checkpoints" / files.PARTIAL)

    before = _held_out(
        trainer, tokenizer, work, output / "before.json", keep=checkpoint is not None
    )
    if checkpoint is not None:
        state = json.loads((Path(checkpoint) / "trainer_state.json").read_text())
        trainer.count_on(state["log_history"])
    measure, interrupt = _watch(trainer, recipe, output)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    finally:
        interrupt.restore()
    after = None
    if not interrupt.stopped:
        after = _held_out(trainer, tokenizer, work, output / "after.json", keep=False)
        _save_model(trainer, tokenizer, output / "model")
    result = Result(
        output=output,
        finished=not interrupt.stopped,
        steps=trainer.state.global_step,
        before=before,
        after=after,
        metrics=measure.entries,
        plots=plots.draw(measure.entries, output / "plots") if main else [],
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


# ---------------------------------------------------------------------- folders


def _checkpoint(recipe: Recipe, output: Path) -> str | None:
    """The last checkpoint, where the recipe resumes.

    Raises:
        RecipeError: nothing to resume, another recipe, or a folder that is taken.
    """
    folder, first = output / "checkpoints", output / "recipe.yaml"
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    if not recipe.resume:
        if found or (output / "model").exists():
            raise RecipeError(
                f"output: {output} holds a run; resume=true continues it, output= takes another "
                "folder"
            )
        return None
    if not found:
        raise RecipeError(f"resume: there is no checkpoint in {folder}")
    old, new = _flat(yaml.safe_load(first.read_text())), _flat(dataclasses.asdict(recipe))
    for key in sorted((old.keys() | new.keys()) - MAY_CHANGE):
        if old.get(key) != new.get(key):
            raise RecipeError(
                f"resume: {output} was begun with {key}={old.get(key)}, now it is {new.get(key)}"
            )
    return str(found[-1])


def _flat(mapping: dict[str, Any], at: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        inner = isinstance(value, dict)
        found |= _flat(value, f"{at}{key}.") if inner else {f"{at}{key}": value}
    return found


def _held_out(
    trainer: Any, tokenizer: Any, work: task.Task, path: Path, keep: bool
) -> dict[str, Any] | None:
    """Measured and written to `path`, or read from there if `keep`."""
    if not work.held_out:
        return None
    if keep and path.is_file():
        return json.loads(path.read_text())
    length = getattr(trainer.args, "max_completion_length", None) or work.longest(tokenizer)
    found = evaluate.held_out(trainer, tokenizer, work, length)
    if trainer.accelerator.is_main_process:
        files.write_json(path, found)
        print(f"held-out {path.stem}: {report.score(found)}", flush=True)
    return found


def _watch(
    trainer: Any, recipe: Recipe, output: Path
) -> tuple[callbacks.Measure, callbacks.Interrupt]:
    measure = callbacks.Measure(files.Lines(output / "metrics.jsonl"))
    interrupt = callbacks.Interrupt(trainer)
    for callback in (measure, callbacks.Bar(recipe.algorithm, measure), interrupt):
        trainer.add_callback(callback)
    return measure, interrupt


def _save_model(trainer: Any, tokenizer: Any, path: Path) -> None:
    """Safetensors and the tokenizer; all ranks take part."""
    partial = path.with_name(f"{files.PARTIAL}-{path.name}")
    trainer.save_model(str(partial))
    if trainer.accelerator.is_main_process:
        tokenizer.save_pretrained(partial)
        files.remove(path)
        partial.rename(path)
    trainer.accelerator.wait_for_everyone()
