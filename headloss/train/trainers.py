"""TRL trainers for a recipe's algorithm, with added terms, full checkpoints and exact resuming."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback, get_scheduler
from transformers.integrations.integration_utils import get_available_reporting_integrations
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer import sft_config
from trl.trainer.utils import RepeatSampler

from .. import losses, rl
from ..integrations.shared import per
from ..integrations.trl import SFTTrainer
from ..integrations.trl.grpo_objective import tokens_of_the_step
from ..losses import Objective
from . import files, folder, model
from .errors import RecipeError, RunError
from .schema import Recipe, check_fields
from .split import FILE, Split
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
    """Mixin placed before a TRL trainer class; reads attributes of the TRL trainer."""

    terms: dict[str, float]
    split: Split
    args: Any
    state: Any
    accelerator: Any
    _partial = False
    _loss: Any = 0.0  # sum of the loss over the micro-batches of a step

    def count_on(self, log: list[dict[str, Any]]) -> None:
        """Continue the token count of a checkpoint's log."""

    def _terms(self, inputs: dict[str, Any]) -> Objective | None:
        parts = [weight * getattr(losses, name)() for name, weight in self.terms.items()]
        return sum(parts[1:], Objective.of(parts[0])) if parts else None

    @property
    def can_resume_here(self) -> bool:
        """Return True between two generations, because a checkpoint does not store the samples that
        TRL holds until the next generation."""
        generations = getattr(self.args, "steps_per_generation", None)
        if generations is None:
            return True
        return self._step % (generations * self.num_iterations) == 0  # type: ignore[attr-defined]

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Seed the order of an epoch by seed and epoch number, so that a resumed run repeats it."""
        sampler: Any = super()._get_train_sampler(*args, **kwargs)  # type: ignore[misc]
        if isinstance(sampler, RepeatSampler) and sampler.shuffle:
            seed = self.args.seed

            def set_epoch(epoch: int) -> None:
                sampler.generator.manual_seed(seed + epoch)

            setattr(sampler, "set_epoch", set_epoch)  # noqa: B010
        return sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Stop before an epoch if no step is left, because transformers checks only after a
        step."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # type: ignore[attr-defined]
            return
        super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self._loss = self._loss + loss
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Check loss and gradient norm in the last hook before the optimizer changes the
        weights."""
        norm = super()._get_grad_norm(*args, **kwargs)  # type: ignore[misc]
        measured = {"loss": self._loss, "grad_norm": norm}
        scaler = self.accelerator.scaler
        if scaler is not None and scaler.get_scale() > 1:
            # The float16 loss scaler skips a step with a gradient that is not finite, and lowers
            # its scale.
            del measured["grad_norm"]
        self._loss = 0.0
        self._stop_unless_finite(measured, self.state.global_step + 1)
        return norm

    def check_weights(self) -> None:
        """Raise RunError for a trained weight that is not finite; all ranks take part."""
        found = {}
        for name, weight in self.model.named_parameters():  # type: ignore[attr-defined]
            if weight.requires_grad and weight.numel():
                mine = weight.detach()
                mine = mine.to_local() if hasattr(mine, "to_local") else mine
                found[f"the weight {name}"] = torch.linalg.vector_norm(mine, math.inf)
        self._stop_unless_finite(found, self.state.global_step)

    def _stop_unless_finite(self, measured: dict[str, Any], step: int) -> None:
        device = self.accelerator.device
        values = [torch.as_tensor(v, device=device).detach().float() for v in measured.values()]
        bad = torch.stack([value.max() for value in values]).isfinite().logical_not().float()
        if self.accelerator.num_processes > 1:
            bad = self.accelerator.reduce(bad, "sum")
        bad = bad.tolist()
        if not any(bad):
            return
        first = next(i for i, what in enumerate(bad) if what)
        value = float(values[first])
        what = "not finite on another rank" if math.isfinite(value) else value
        kept = folder.checkpoints(Path(self.args.output_dir).parent)
        last = f"the last checkpoint is {kept[-1]}" if kept else "there is no checkpoint before it"
        raise RunError(f"step {step}: {list(measured)[first]} is {what}; {last}")

    def _get_output_dir(self, *args: Any, **kwargs: Any) -> str:
        folder = super()._get_output_dir(*args, **kwargs)  # type: ignore[misc]
        return str(Path(folder) / files.PARTIAL) if self._partial else folder

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save under a temporary name until all ranks have written their parts."""
        self.check_weights()
        checkpoints = Path(self.args.output_dir)
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._partial = True
        try:
            super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._partial = False
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            partial = checkpoints / files.PARTIAL
            files.write_json(partial / name / FILE, self.split.record())
            folder.seal(partial / name, checkpoints.parent)
            shutil.rmtree(checkpoints / name, ignore_errors=True)
            (partial / name).rename(checkpoints / name)
            files.remove(partial)
            kept = self.args.save_total_limit or 0
            for old in folder.checkpoints(checkpoints.parent)[:-kept] if kept > 0 else []:
                files.remove(old)
        self.accelerator.wait_for_everyone()

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `headloss train` writes a report in place of TRL's model card."""


class _Supervised(_Run, SFTTrainer):
    def count_on(self, log: list[dict[str, Any]]) -> None:
        """Restore the token count, which TRL leaves out of a checkpoint."""
        seen = [entry["num_tokens"] for entry in log if "num_tokens" in entry]
        self._total_train_tokens = seen[-1] if seen else 0

    def objective(self, inputs: dict[str, Any]) -> Objective:
        further = self._terms(inputs)
        objective = Objective.of(super().objective(inputs))
        return objective if further is None else objective + further


class _Policy(_Run):
    def objective(self, inputs: dict[str, Any]) -> Objective:
        further = self._terms(inputs)
        objective = super().objective(inputs)  # type: ignore[misc]
        if further is None:
            return objective
        # Divide extra terms by the number of tokens of the whole optimizer step, so that the
        # logged values of the step's micro-batches add up to the mean over the step's tokens.
        reduction = per(tokens_of_the_step(self, inputs))
        return objective + Objective(tuple((c, t.over(reduction)) for c, t in further.parts))


def build(recipe: Recipe, task: Task, language_model: Any, tokenizer: Any) -> Any:
    """Return the trainer of the recipe's algorithm, with the recipe's settings.

    Raises:
        RecipeError: for a field that TRL's configuration does not have, or refuses.
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
        data = {"train_dataset": task.prompts(), "reward_funcs": task.scored}
    with _configuring():
        trainer = kind(**arguments, **data)
    trainer.terms, trainer.split = recipe.terms, task.split
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    _check_saving(trainer)
    _rehearse(trainer)
    return trainer


@contextlib.contextmanager
def _configuring() -> Iterator[None]:
    """Turn every error of TRL or transformers about a configuration into a short RecipeError."""
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:
        kind = "" if isinstance(error, ValueError | ImportError) else f"{type(error).__name__}: "
        raise RecipeError(f"trainer: {kind}{' '.join(str(error).split())}") from error


def _rehearse(trainer: Any) -> None:
    """Raise RecipeError for errors that would otherwise appear in the first training step."""
    args = trainer.args
    if not len(trainer.train_dataset):
        raise RecipeError(
            f"trainer.max_length: got {args.max_length}, which leaves no token of any answer"
        )
    with _configuring(), torch.random.fork_rng([]):
        loader = trainer.get_train_dataloader()
        if not len(loader):
            rows = len(trainer.train_dataset)
            raise RecipeError(f"train_problems: {rows} problems fill no batch of the trainer")
        steps = trainer.set_initial_training_values(args, loader)[-1]
        if not isinstance(trainer, _Supervised):
            trainer.policy_term()
        if args.eval_on_start:
            raise ValueError("eval_on_start: there is no eval_dataset; see held_out")
        of: Any = trainer.model
        kind, options = trainer.get_optimizer_cls_and_kwargs(args, of)
        # An optimizer with the option `params`, `model` or `optimizer_dict` needs the model's own
        # parameters, so its options cannot be checked with a dummy parameter.
        if options.keys() & {"params", "model", "optimizer_dict"}:
            return
        like: Any = {"dtype": torch.float32, "device": args.device}
        optimizer = kind([torch.nn.Parameter(torch.zeros(1, **like))], **options)
        get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )


def settings(recipe: Recipe) -> Any:
    """Return TRL's configuration: the recipe's fields, and defaults that fit the machine."""
    kind = CONFIGS[recipe.algorithm]
    check_fields(recipe.trainer, kind, at="trainer")
    if recipe.trainer.get("deepspeed") or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise RecipeError(
            "trainer.deepspeed: is not supported, since DeepSpeed has taken its step before a "
            "gradient that is not finite can stop the run; use FSDP2, or a trainer of headloss.rl"
        )
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
    with _configuring():
        found: Any = kind(**given)
    there = get_available_reporting_integrations()
    for name in found.report_to:
        if name not in there:
            wanted = ", ".join(["none", *there])
            raise RecipeError(f"trainer.report_to: got {name!r}, want what is installed: {wanted}")
    return found


def _check_saving(trainer: Any) -> None:
    """Raise RecipeError if checkpoints would be saved while a generation's completions are partly
    used, as such a run would not resume exactly."""
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
