"""Schema of recipes: keys and types, read from YAML and "key=value" overrides."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .errors import RecipeError

SHIPPED = Path(__file__).with_name("recipes")
ALGORITHMS = ("sft", "grpo", "gspo", "cispo", "ppo", "reinforce")


@dataclass
class Tiny:
    """Size of the Llama that `model: tiny` builds."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    max_position_embeddings: int = 512


@dataclass
class Recipe:
    """Settings of a run; `trainer` holds the fields of the algorithm's TRL configuration.

    Attributes:
        algorithm: one of `ALGORITHMS`.
        model: "tiny", a local folder or a Hugging Face id.
        tiny: size of the model "tiny", a random Llama with a byte-level tokenizer.
        dtype: dtype of the weights: "float32", "bfloat16", "float16" or "auto" (as saved).
        lora: fields of PEFT's `LoraConfig`; None trains all weights.
        task: "reasoning_gym:NAME", or a JSONL file with a "prompt" and an "answer" on each line.
        task_options: options of the reasoning_gym generator; an override of `task` on the command
            line drops the recipe's `task_options`.
        reward: "module:function", with the arguments of TRL's reward functions; "solved" gives 1
            for a full score of the reasoning_gym generator, else 0. With `reward=None` the reward
            is the generator's score for a reasoning_gym task; for a file the reward is 1 if the
            completion equals the line's answer, else 0.
        prompt: text of a prompt, with {question} and further fields of a line or of the generator's
            metadata in braces; an override of `task` on the command line drops the recipe's
            `prompt`.
        system: system message of a conversation.
        chat: True if prompts are conversations; None: True if the tokenizer has a chat template.
        answer_tag: name of the tag around the answer, <tag> to </tag>; None scores the whole
            completion.
        train_problems: number of problems to train on; None is every problem of a file that is not
            held out, and 4096 problems of a generator. An override of `task` drops the recipe's
            `train_problems`.
        held_out: number of problems kept out of training. Held-out problems are scored before and
            after training.
        held_out_steps: steps between evaluations during training; 0 for no such evaluation.
        terms: weights of "z_loss" and "entropy", which are added to the objective.
        split_seed: seed by which problems are generated and held-out problems chosen. The held-out
            problems do not depend on `seed`, so that a run that continues another run's model can
            have the same held-out problems.
        seed: seed of the first weights of the model "tiny", of the order of problems and of the
            sampling.
        output: folder of every file that the run writes.
        resume: continue from the last checkpoint in `output`.
        overwrite: replace the files of an earlier run in `output`.
        trainer: fields of TRL's `SFTConfig`, or of a configuration of `headloss.rl`.
    """

    algorithm: str = "???"
    model: str = "tiny"
    tiny: Tiny = field(default_factory=Tiny)
    dtype: str = "float32"
    lora: dict[str, Any] | None = None
    task: str = "???"
    task_options: dict[str, Any] = field(default_factory=dict)
    reward: str | None = None
    prompt: str = "{question}"
    system: str | None = None
    chat: bool | None = None
    answer_tag: str | None = None
    train_problems: int | None = None
    held_out: int = 256
    held_out_steps: int = 0
    terms: dict[str, float] = field(default_factory=dict)
    split_seed: int = 0
    seed: int = 0
    output: str = "runs/${algorithm}"
    resume: bool = False
    overwrite: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)


WANTED = {  # expected values of the recipe keys that have no default, for error messages
    "algorithm": f"one of {', '.join(ALGORITHMS)}",
    "task": "reasoning_gym:NAME, or a JSONL file with a prompt and an answer on each line",
}


# ---------------------------------------------------------------------- reading


def shipped() -> dict[str, str]:
    """Return the first comment of each shipped recipe, by name."""
    found = {}
    for path in sorted(SHIPPED.glob("*.yaml")):
        found[path.stem] = path.read_text().partition("\n")[0].removeprefix("# ")
    return found


def read(name: str, overrides: Iterable[str]) -> Recipe:
    for override in overrides:
        if "=" not in override:
            raise RecipeError(f"{override}: want key=value")
    try:
        given: Any = OmegaConf.load(_path(name))
        if not OmegaConf.is_dict(given):
            raise RecipeError(f"{name}: got a list, want key: value")
        changes = OmegaConf.from_dotlist(list(overrides))
        for part in (given, changes):
            for key, value in OmegaConf.to_container(part).items():  # type: ignore[union-attr]
                if isinstance(value, list):
                    raise RecipeError(f"{key}: got a list, which no key of a recipe is")
        if "task" in changes:  # an override of `task` drops options that were made for another task
            for key in ("task_options", "prompt", "train_problems"):
                given.pop(key, None)
        found = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Recipe), given, changes))
    except OmegaConfBaseException as error:
        raise RecipeError(_one_line(error)) from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{name}: is not YAML: {' '.join(str(error).split())}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{name}: cannot be read as UTF-8: {error}") from None
    except OSError as error:  # OmegaConf raises OSError also for YAML that is a single number
        raise RecipeError(f"{name}: cannot be read: {error}") from None
    assert isinstance(found, Recipe)
    _check(found)
    return found


def write(recipe: Recipe) -> str:
    """Return the recipe as YAML, with every key."""
    return yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False)


def _path(name: str) -> Path:
    path, own = Path(name), SHIPPED / f"{name}.yaml"
    if path.is_file():
        return path
    if "/" not in name and own.is_file():
        return own
    raise RecipeError(
        f"recipe: got {name!r}, which is neither a file nor one of {', '.join(shipped())}"
    )


def _one_line(error: OmegaConfBaseException) -> str:
    """Return the message of an OmegaConf error in one line, or a suggestion for an unknown key."""
    key = error.full_key or "recipe"
    kind, last = error.object_type, str(error.key)
    text = str(error.msg or error).partition("\n")[0]
    if type(error).__name__ == "ConfigKeyError" and dataclasses.is_dataclass(kind):
        return unknown(key, last, [f.name for f in dataclasses.fields(kind)])
    if type(error).__name__ == "MissingMandatoryValue":
        return f"{key}: is missing, want {WANTED[key]}"
    return f"{key}: {text}"


def unknown(key: str, name: str, known: Iterable[str]) -> str:
    """Return one line about an unknown key, with the nearest known key."""
    near = difflib.get_close_matches(name, list(known), 1)
    if not near and "." not in key:  # `key` may be a field of the trainer's configuration
        near = [f"trainer.{n}" for n in difflib.get_close_matches(name, [*INTERVALS, *CHOICES], 1)]
    return f"{key}: no such key" + (f", did you mean {near[0]}?" if near else "")


# ---------------------------------------------------------------------- checking


def _check(recipe: Recipe) -> None:
    """Raise RecipeError for errors that a check finds without an import and without reading a
    file."""
    for name in ("train_problems", "held_out", "held_out_steps"):
        count = getattr(recipe, name)
        if count is not None and count < (name == "train_problems"):
            raise RecipeError(f"{name}: got {count}, want a positive number")
    if recipe.algorithm not in ALGORITHMS:
        wanted = ", ".join(ALGORITHMS)
        raise RecipeError(f"algorithm: got {recipe.algorithm!r}, want one of {wanted}")
    if recipe.dtype not in (dtypes := ("float32", "bfloat16", "float16", "auto")):
        raise RecipeError(f"dtype: got {recipe.dtype!r}, want one of {', '.join(dtypes)}")
    for name in ("seed", "split_seed"):
        if not 0 <= (seed := getattr(recipe, name)) < 1 << 32:
            raise RecipeError(f"{name}: got {seed}, want 0 to 2**32 - 1")
    for term, weight in recipe.terms.items():
        if term not in ("z_loss", "entropy"):
            raise RecipeError(f"terms.{term}: want z_loss or entropy")
        if not isinstance(weight, float) or not math.isfinite(weight):
            raise RecipeError(f"terms.{term}: got {weight}, want a finite number")
    if not re.search(r"{\w+}", recipe.prompt):
        raise RecipeError(f"prompt: got {recipe.prompt!r}, want a text with {{question}} in it")
    if recipe.system is not None and recipe.chat is False:
        raise RecipeError("system: is a message of a conversation, which chat=false rules out")
    if recipe.task_options and not recipe.task.startswith("reasoning_gym:"):
        raise RecipeError("task_options: are of a reasoning_gym generator, not of a file")
    if recipe.answer_tag is not None and not re.fullmatch(r"[\w.:-]+", recipe.answer_tag):
        raise RecipeError(f"answer_tag: got {recipe.answer_tag!r}, want a name such as answer")
    if not recipe.output:
        raise RecipeError("output: got '', want a folder")
    if recipe.model == "tiny":
        _check_tiny(recipe.tiny)


def _check_tiny(tiny: Tiny) -> None:
    for name, size in dataclasses.asdict(tiny).items():
        if size < 1:
            raise RecipeError(f"tiny.{name}: got {size}, want a positive number")
    unit = 2 * tiny.num_attention_heads
    if tiny.hidden_size % unit:
        raise RecipeError(
            f"tiny.hidden_size: got {tiny.hidden_size}, want a multiple of {unit}: "
            f"{tiny.num_attention_heads} attention heads of an even width"
        )


OURS = {  # fields of the trainer's configuration, and the recipe key that sets each field
    "output_dir": "output",
    "seed": "seed",
    "data_seed": "seed",
    "resume_from_checkpoint": "resume",
    "model_init_kwargs": "dtype",
    "reward_weights": "reward",
}

# Allowed intervals of the numeric fields of the trainer's configuration. NaN lies in no interval.
INTERVALS = {
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "num_generations",
            "gradient_accumulation_steps",
            "generation_batch_size",
            "steps_per_generation",
            "num_iterations",
            "max_length",
            "max_completion_length",
            "pad_to_multiple_of",
        ),
        "[1, inf)",
    ),
    **dict.fromkeys(
        (
            "learning_rate",
            "weight_decay",
            "adam_epsilon",
            "warmup_steps",
            "beta",
            "epsilon",
            "value_coef",
            "value_clip",
            "top_k",
            "save_total_limit",
            "neftune_noise_alpha",
            "dataloader_num_workers",
        ),
        "[0, inf)",
    ),
    **dict.fromkeys(
        (
            "temperature",
            "repetition_penalty",
            "delta",
            "save_steps",
            "logging_steps",
            "num_train_epochs",
        ),
        "(0, inf)",
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "[0, 1)"),
    **dict.fromkeys(("gamma", "lam", "min_p", "lora_dropout"), "[0, 1]"),
    **dict.fromkeys(("top_p", "top_entropy_quantile"), "(0, 1]"),
    **dict.fromkeys(("max_grad_norm", "epsilon_high"), "[0, inf]"),
    "dual_clip": "(1, inf)",
    "max_steps": "[-1, inf)",
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "scale_rewards": ("group", "batch", "none", True, False),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "train_sampling_strategy": ("random", "sequential", "group_by_length", "batch_seqlen"),
}


def check_fields(given: dict[str, Any], kind: type, at: str) -> None:
    """Raise RecipeError for a field that the dataclass `kind` does not have, or for a value of the
    wrong type."""
    hints = typing.get_type_hints(kind)
    known = {f.name for f in dataclasses.fields(kind) if f.init}
    for name, value in given.items():
        if at == "trainer" and name in OURS:
            raise RecipeError(f"{at}.{name}: is set by the recipe's key {OURS[name]}")
        if name not in known:
            raise RecipeError(unknown(f"{at}.{name}", name, known - OURS.keys()))
        wanted = _kinds(hints[name])
        if wanted and type(value) not in wanted:
            names = " or ".join(sorted(k.__name__.replace("NoneType", "null") for k in wanted))
            raise RecipeError(f"{at}.{name}: got {value!r}, want {names}")
        interval = INTERVALS.get(name)
        if interval and isinstance(value, int | float) and not _lies_in(value, interval):
            raise RecipeError(f"{at}.{name}: got {value!r}, want a number in {interval}")
        if name in CHOICES and value not in CHOICES[name]:
            names = ", ".join(map(str, CHOICES[name]))
            raise RecipeError(f"{at}.{name}: got {value!r}, want one of {names}")
        if isinstance(value, float) and math.isnan(value):
            raise RecipeError(f"{at}.{name}: got nan, want a number")


def _lies_in(value: float, interval: str) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    return above and (value <= high if interval[-1] == "]" else value < high)


def _kinds(hint: Any) -> set[type]:
    """Return the types bool, int, float and str that a type hint allows; empty if the hint allows
    any type beyond these."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    found = set(typing.get_args(hint)) if union else {hint}
    if not found <= {int, float, str, bool, type(None)}:
        return set()
    return found | {int} if float in found else found
