"""The trainer of an algorithm: further terms, whole checkpoints, exact resumption."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl.trainer import sft_config
from trl.trainer.utils import RepeatSampler

from .. import losses, rl
from ..integrations.trl import SFTTrainer
from ..integrations.trl.common import per
from ..integrations.trl.grpo_objective import tokens_of_the_step
from ..losses import Objective
from . import RecipeError, files, model
from .schema import Recipe, check_fields
from .task import Task

CONFIGS: dict[str, type] = {
    "sft": sft_config.SFTConfig,
    "grpo": rl.GRPOConfig,
    "gspo": rl.GSPOConfig,
    "cispo": rl.CISPOConfig,
    "ppo": rl.PPOConfig,
    "reinforce": rl.REINFORCEConfig,
}


class _Run:
    """Goes before a trainer. Attributes that it reads are TRL's."""

    terms: dict[str, float]
    args: Any
    state: Any
    accelerator: Any
    _partial = False

    def count_on(self, log: list[dict[str, Any]]) -> None:
        """Go on from what the log of a checkpoint says."""

    def _terms(self, inputs: dict[str, Any]) -> Objective | None:
        parts = [weight * getattr(losses, name)() for name, weight in self.terms.items()]
        return sum(parts[1:], Objective.of(parts[0])) if parts else None

    @property
    def can_resume_here(self) -> bool:
        """TRL's state between two generations is not part of a checkpoint."""
        generations = getattr(self.args, "steps_per_generation", None)
        if generations is None:
            return True
        return self._step % (generations * self.num_iterations) == 0  # type: ignore[attr-defined]

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """The order of an epoch depends on the seed and the epoch, not on the epochs before."""
        sampler: Any = super()._get_train_sampler(*args, **kwargs)  # type: ignore[misc]
        if isinstance(sampler, RepeatSampler) and sampler.shuffle:
            seed = self.args.seed

            def set_epoch(epoch: int) -> None:
                sampler.generator.manual_seed(seed + epoch)

            setattr(sampler, "set_epoch", set_epoch)  # noqa: B010
        return sampler

    def _get_output_dir(self, *args: Any, **kwargs: Any) -> str:
        folder = super()._get_output_dir(*args, **kwargs)  # type: ignore[misc]
        return str(Path(folder) / files.PARTIAL) if self._partial else folder

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Under another name until all ranks have written their part."""
        folder = Path(self.args.output_dir)
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._partial = True
        try:
            super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._partial = False
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / files.PARTIAL / name).rename(folder / name)
            files.remove(folder / files.PARTIAL)
            rotate_checkpoints(str(folder), self.args.save_total_limit)
        self.accelerator.wait_for_everyone()

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The report takes its place."""


class _Supervised(_Run, SFTTrainer):
    def count_on(self, log: list[dict[str, Any]]) -> None:
        """Tokens are counted from there, which TRL leaves out of a checkpoint."""
        seen = [entry["num_tokens"] for entry in log if "num_tokens" in entry]
        self._total_train_tokens = seen[-1] if seen else 0

    def objective(self, inputs: dict[str, Any]) -> Objective:
        further = self._terms(inputs)
        objective = super().objective(inputs)
        return objective if further is None else objective + further


class _Policy(_Run):
    def objective(self, inputs: dict[str, Any]) -> Objective:
        further = self._terms(inputs)
        objective = super().objective(inputs)  # type: ignore[misc]
        if further is None:
            return objective
        reduction = per(tokens_of_the_step(self, inputs))  # a mean over the optimizer step
        return objective + Objective(tuple((c, t.over(reduction)) for c, t in further.parts))


def build(recipe: Recipe, task: Task, language_model: Any, tokenizer: Any) -> Any:
    """The trainer of a recipe.

    Raises:
        RecipeError: a field that TRL's configuration does not have, or refuses.
    """
    arguments = {
        "model": language_model,
        "args": settings(recipe),
        "processing_class": tokenizer,
        "peft_config": model.adapter(recipe),
    }
    if recipe.algorithm == "sft":
        kind, data = _Supervised, {"train_dataset": task.demonstrations()}
    else:
        algorithm = getattr(rl, recipe.algorithm.upper())
        kind = type(algorithm.__name__, (_Policy, algorithm), {})
        data = {"train_dataset": task.prompts(), "reward_funcs": task.reward}
    try:
        trainer = kind(**arguments, **data)
    except (ValueError, TypeError, ImportError, NotImplementedError) as error:
        raise RecipeError(f"trainer: {' '.join(str(error).split())}") from None
    trainer.terms = recipe.terms
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    _check_saving(trainer)
    return trainer


def settings(recipe: Recipe) -> Any:
    """TRL's configuration: the recipe's fields, and defaults that fit the machine."""
    kind = CONFIGS[recipe.algorithm]
    check_fields(recipe.trainer, kind, at="trainer")
    on_gpu = torch.cuda.is_available() and not recipe.trainer.get("use_cpu", False)
    given = {
        "use_cpu": not on_gpu,
        "bf16": on_gpu and torch.cuda.is_bf16_supported(),
        "dataloader_pin_memory": on_gpu,
        "logging_steps": 1,
        "logging_first_step": False,
        "report_to": "none",
        "save_strategy": "steps",
        "save_total_limit": 2,
        "disable_tqdm": True,
        **recipe.trainer,
        "seed": recipe.seed,
        "output_dir": str(Path(recipe.output) / "checkpoints"),
    }
    try:
        return kind(**given)
    except (ValueError, TypeError, ImportError) as error:
        raise RecipeError(f"trainer: {' '.join(str(error).split())}") from None


def _check_saving(trainer: Any) -> None:
    """RecipeError for checkpoints between two generations, which would not resume exactly."""
    args = trainer.args
    if getattr(args, "steps_per_generation", None) is None or args.save_strategy != "steps":
        return
    micro = args.steps_per_generation * trainer.num_iterations
    if args.save_steps * args.gradient_accumulation_steps % micro:
        steps = micro // args.gradient_accumulation_steps
        raise RecipeError(
            f"trainer.save_steps: got {args.save_steps}, want a multiple of {steps}: one "
            f"generation serves {steps} steps, and a run resumes exactly only between generations"
        )
