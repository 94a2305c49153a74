"""Configurations in which headloss's trainers are compared with other trainers, and functions that
build the four trainers of a configuration: headloss's, stock TRL's, one with full logits and one
with a float64 head.

Imported by trainers.py. Page: docs/train.md.

Completions are computed from the prompts, so that a run depends neither on the number of processes
nor on the generator.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib.util
import json
import os
import random
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
    training_args,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from headloss import Options, head_loss, rl
from headloss.integrations import trl as ours
from headloss.integrations.trl import forward

# ---------------------------------------------------------------------- configurations

CHOICES: dict[str, tuple[Any, ...]] = {
    "trainer": (
        *("GRPOTrainer", "SFTTrainer", "DPOTrainer"),
        *("GRPO", "GSPO", "CISPO", "PPO", "REINFORCE"),
    ),
    "wrapper": ("ddp", "fsdp2", "fsdp2, gathered"),  # fsdp_reshard_after_forward: false
    "precision": ("float32", "bf16"),
    "lora": ("", "body", "body, head"),
    "accumulation": (1, 2),
    "checkpointing": (False, True),
    "tied": (False, True),
    "experts": (False, True),  # mixture of experts with auxiliary loss
    "then": ("", "eval", "resume"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One trainer configuration, with the fields of `CHOICES`."""

    trainer: str
    wrapper: str = "ddp"
    precision: str = "float32"
    lora: str = ""
    accumulation: int = 1
    checkpointing: bool = False
    tied: bool = False
    experts: bool = False
    then: str = ""

    @property
    def name(self) -> str:
        words = [self.trainer, self.wrapper, self.precision]
        words += [f"LoRA on {self.lora}"] if self.lora else []
        words += [f"accumulation {self.accumulation}"] if self.accumulation > 1 else []
        words += [name for name in ("checkpointing", "tied", "experts") if getattr(self, name)]
        return "; ".join([*words, *([self.then] if self.then else [])])

    @property
    def reference(self) -> str:
        """Return the kind of trainer that headloss's trainer is compared with: "trl" if TRL has an
        equivalent trainer, else "logits" (a trainer with full logits)."""
        return "logits" if self.trainer in ("PPO", "REINFORCE") or "head" in self.lora else "trl"

    @property
    def allowed(self) -> bool:
        """Return True if a run with this combination of trainer, wrapper, LoRA and resumption is
        possible.

        A critic is saved with the model, and not with an adapter alone. transformers cannot load a
        mixture of experts from a DDP checkpoint, since the saved names differ.
        """
        without_critic = self.trainer == "PPO" and self.lora
        other_names = self.experts and self.wrapper == "ddp" and not self.lora
        return not (self.then == "resume" and (without_critic or other_names))


def pairwise(choices: dict[str, tuple[Any, ...]] = CHOICES, seed: int = 1) -> list[Case]:
    """Return few cases in which every pair of values of two fields occurs."""
    missing = {
        frozenset([(a, x), (b, y)])
        for a, b in combinations(choices, 2)
        for x, y in product(choices[a], choices[b])
    }
    candidates = [
        case
        for values in product(*choices.values())
        if (case := Case(**dict(zip(choices, values, strict=True)))).allowed
    ]
    random.Random(seed).shuffle(candidates)

    def pairs(case: Case) -> set[frozenset[tuple[str, Any]]]:
        values = [(name, getattr(case, name)) for name in choices]
        return {frozenset(pair) for pair in combinations(values, 2)}

    known = {case: pairs(case) for case in candidates}
    chosen = []
    while missing:
        best = max(candidates, key=lambda case: len(known[case] & missing))
        if not known[best] & missing:
            raise ValueError(f"pairs that no case allows: {missing}")
        missing -= known[best]
        chosen.append(best)
    order = {name: {x: i for i, x in enumerate(choices[name])} for name in choices}
    return sorted(chosen, key=lambda c: [order[f.name][getattr(c, f.name)] for f in fields(c)])


ZERO3 = (  # Cases of DeepSpeed's ZeRO-3, in addition to the cases from `pairwise()`.
    Case(trainer="GSPO", wrapper="zero3", accumulation=2, then="resume"),
    Case(trainer="SFTTrainer", wrapper="zero3", precision="bf16", lora="body, head", tied=True),
)


def matrix() -> list[Case]:
    """Return all cases to run."""
    there = importlib.util.find_spec("deepspeed") is not None
    return [*pairwise(), *(ZERO3 if there else ())]


# ---------------------------------------------------------------------- model and data


@dataclass(frozen=True, kw_only=True)
class Size:
    hidden: int
    layers: int
    vocabulary: int
    # The largest number of tokens of a completion; a prompt has at most a quarter of it.
    completion: int
    batch: int  # Sequences in a step of one process.


SMALL = Size(hidden=16, layers=2, vocabulary=120, completion=8, batch=2)
LARGE = Size(hidden=512, layers=4, vocabulary=65536, completion=384, batch=8)
ROWS = 64


@functools.cache
def tokenizer(size: Size) -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, size.vocabulary))]
    level = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=level, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def save_model(size: Size, tied: bool, experts: bool, folder: Path) -> Path:
    """Save a random model with varied label probabilities; return its path."""
    path = folder / f"model-{size.hidden}-{'tied' if tied else 'untied'}{'-experts' * experts}"
    if path.exists():
        return path
    heads = size.hidden // 64 or 2 - size.hidden % 2
    settings: dict[str, Any] = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": min(64, size.hidden // 4 * 2),
        "max_position_embeddings": 2 * size.completion,
        "initializer_range": 0.3 / size.hidden**0.25,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "tie_word_embeddings": tied,
    }
    if experts:
        settings |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("mixtral" if experts else "llama", **settings)
    set_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        scale = 2.0 / settings["initializer_range"] / size.hidden**0.5
        model.get_output_embeddings().weight.mul_(scale)
    path.parent.mkdir(parents=True, exist_ok=True)
    # One process writes the model, before ranks exist.
    model.save_pretrained(path.with_suffix(".partial"))
    path.with_suffix(".partial").rename(path)
    return path


def _words(seed: int, least: int, most: int, vocabulary: int) -> str:
    chosen = random.Random(seed)
    length = chosen.randint(least, most)
    return " ".join(f"w{chosen.randrange(3, vocabulary)}" for _ in range(length))


def dataset(trainer: str, size: Size) -> Dataset:
    def column(seed: int, longest: int) -> list[str]:
        return [_words(1000 * seed + i, 2, longest, size.vocabulary) for i in range(ROWS)]

    prompts = column(1, max(3, size.completion // 4))
    if trainer == "SFTTrainer":
        return Dataset.from_dict({"text": column(2, size.completion)})
    if trainer == "DPOTrainer":
        answers = {"chosen": column(3, size.completion), "rejected": column(4, size.completion)}
        spaced = {name: [f" {text}" for text in texts] for name, texts in answers.items()}
        return Dataset.from_dict({"prompt": prompts, **spaced})
    return Dataset.from_dict({"prompt": prompts})


def completions(prompts: list[list[int]], size: Size) -> list[list[int]]:
    """Return completions computed from a prompt and its number of occurrences; some are cut off."""
    seen: dict[tuple[int, ...], int] = {}
    found = []
    for prompt in map(tuple, prompts):
        seen[prompt] = seen.get(prompt, -1) + 1
        chosen = random.Random(zlib.crc32(repr((prompt, seen[prompt])).encode()))
        length = chosen.randint(1, size.completion)
        ids = [chosen.randrange(3, size.vocabulary) for _ in range(length)]
        found.append(ids if length == size.completion else [*ids, 1])
    return found


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [sum(ids) % 97 / 30 + len(ids) % 5 / 4 for ids in completion_ids]


def _given_completions(kind: type, size: Size) -> type:
    class Given(kind):
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            return completions(prompt_ids, size), None

    Given.__name__ = kind.__name__
    return Given


# ---------------------------------------------------------------------- trainers

RL = ("GRPO", "GSPO", "CISPO", "PPO", "REINFORCE")
AS_TRL = {  # TRL configuration fields equivalent to an algorithm
    "GRPO": {"loss_type": "grpo"},
    "GSPO": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "CISPO": {"loss_type": "cispo", "epsilon_high": 1.28},
}  # fmt: skip


@contextlib.contextmanager
def launched(case: Case, processes: int = 2) -> Iterator[None]:
    """Set the environment variables that `accelerate launch` would set for the distributed wrapper
    and the precision of `case`."""
    mixed = "bf16" if case.precision == "bf16" else "no"
    given: dict[str, str] = {"ACCELERATE_MIXED_PRECISION": mixed}
    if case.wrapper == "zero3" and processes > 1:
        settings = json.dumps(_deepspeed(case)).encode()
        given |= {
            # accelerate ignores DeepSpeed if ACCELERATE_USE_CPU is "true".
            "ACCELERATE_USE_CPU": "false",
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": base64.urlsafe_b64encode(settings).decode(),
            **({} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}),
        }
    elif case.wrapper != "ddp" and processes > 1:
        given |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_RESHARD_AFTER_FORWARD": str(case.wrapper == "fsdp2").lower(),
            "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
            # If FSDP_CPU_RAM_EFFICIENT_LOADING is "true", accelerate ties weights again, which
            # fails with an adapter on a tied head.
            "FSDP_CPU_RAM_EFFICIENT_LOADING": str(not (case.tied and "head" in case.lora)).lower(),
            "FSDP_OFFLOAD_PARAMS": "false",
        }
    before = dict(os.environ)
    os.environ.update(given)
    _forget_state()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        _forget_state()


def _forget_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()


def _deepspeed(case: Case) -> dict[str, Any]:
    """Return a DeepSpeed configuration that shards every parameter, even small ones."""
    sharding = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {
        "zero_optimization": sharding,
        "bf16": {"enabled": case.precision == "bf16"},
        **dict.fromkeys((*sizes, "gradient_clipping"), "auto"),
    }


def allow_sharding_on_cpus() -> None:
    """Patch accelerate to allow FSDP and DeepSpeed on CPUs, where both run on gloo."""
    from accelerate.utils import DistributedType

    original, choose = PartialState.__init__, PartialState._prepare_backend

    def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            return "gloo", DistributedType.MULTI_CPU
        return choose(self, *args, **kwargs)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
        if sharded and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init  # type: ignore[method-assign]
    PartialState._prepare_backend = prepare_backend  # type: ignore[method-assign]
    training_args.is_torch_bf16_gpu_available = lambda: True  # checked unless `use_cpu`


def build(case: Case, kind: str, size: Size, folder: Path, processes: int, **options: Any) -> Any:
    """Build a trainer for `case`; the caller has entered the context `launched(case)`.

    `kind` is "headloss", "trl", "logits" (full logits from the model's own forward) or "exact" (a
    float64 head).

    Args:
        processes: number of processes; the global batch is that of two processes.
    """
    if (kind == "trl") > (case.reference == "trl"):
        raise ValueError(f"{case.name}: TRL has no such trainer")
    group = _is_group(case)
    settings = _settings(case, kind, size, folder, processes, options)  # turns on ZeRO-3
    arguments: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(
            save_model(size, case.tied, case.experts, folder), dtype=torch.float32
        ),
        "args": settings,
        "train_dataset": dataset(case.trainer, size),
        "eval_dataset": dataset(case.trainer, size).select(range(4 * size.batch)),
        "processing_class": tokenizer(size),
        "peft_config": _adapter(case),
    }
    chosen = _class(case, kind)
    if group:
        arguments["reward_funcs"] = reward
        chosen = _given_completions(chosen, size)
    set_seed(0)
    with _without_fusion(kind == "logits"):
        return chosen(**arguments)


def _is_group(case: Case) -> bool:
    return case.trainer not in ("SFTTrainer", "DPOTrainer")


def _class(case: Case, kind: str) -> type:
    if kind == "trl":
        return getattr(trl, case.trainer if case.trainer.endswith("Trainer") else "GRPOTrainer")
    return getattr(rl if case.trainer in RL else ours, case.trainer)


@contextlib.contextmanager
def _without_fusion(on: bool) -> Iterator[None]:
    """Disable headloss in SFT and DPO trainers, which have no option for full logits."""
    before = forward.add_head
    if on:
        switches = forward.Switches(use_fused_loss=False)

        def add_head(*args: Any, **kwargs: Any) -> None:
            before(*args, **{**kwargs, "switches": switches})

        forward.add_head = add_head
    try:
        yield
    finally:
        forward.add_head = before


def _adapter(case: Case) -> LoraConfig | None:
    if not case.lora:
        return None
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    modules += ["lm_head"] if "head" in case.lora else []
    return LoraConfig(
        r=8, target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM",
        ensure_weight_tying=False,
    )  # fmt: skip


def _settings(
    case: Case, kind: str, size: Size, folder: Path, processes: int, options: dict[str, Any]
) -> Any:
    on_gpu = torch.cuda.is_available()
    rows = size.batch * 2 // processes
    shared: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": rows,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_checkpointing": case.checkpointing,
        "bf16": case.precision == "bf16",
        "use_cpu": not on_gpu and case.wrapper != "zero3",
        "optim": "sgd",  # With SGD, the change of the weights shows the gradient.
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "max_steps": 4,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": on_gpu,
        **({"router_aux_loss_coef": 0.1} if case.experts else {}),
        **options,
    }
    if case.trainer == "SFTTrainer":
        return trl.SFTConfig(**shared, max_length=2 * size.completion)
    if case.trainer == "DPOTrainer":
        return trl.DPOConfig(**shared, max_length=2 * size.completion)
    shared |= {
        "num_generations": size.batch,
        "max_completion_length": size.completion,
        "beta": 0.05,
        "temperature": 0.9,
        "num_iterations": 2,
    }
    if case.trainer == "REINFORCE" and case.lora and case.wrapper.startswith("fsdp2"):
        # The reference policy needs a forward with frozen adapters. FSDP2 fixes gradient dtypes in
        # the model's first forward, so the adapters must not be frozen in the first forward. With
        # beta = 0 the reference policy makes no forward.
        shared["beta"] = 0.0
    if kind == "trl" or case.trainer == "GRPOTrainer":
        return trl.GRPOConfig(**shared, **AS_TRL.get(case.trainer, {"loss_type": "dapo"}))
    config = getattr(rl, f"{case.trainer}Config")
    if case.trainer == "REINFORCE":
        shared["num_iterations"] = 1
    return config(**shared, use_fused_loss=None if kind != "logits" else False)


# ---------------------------------------------------------------------- a head in float64


@contextlib.contextmanager
def float64_head(on: bool) -> Iterator[None]:
    """Make headloss's trainers compute log-probs and losses by plain PyTorch on float64 logits;
    hidden states and weights do not change.

    Under autocast, hidden states and weights are first cast to the autocast dtype.
    """
    before = forward.head_loss
    if on:
        forward.head_loss = _exact_head_loss
    try:
        yield
    finally:
        forward.head_loss = before


def _exact_head_loss(hidden: Any, head: Any, batch: Any, objective: Any, options: Options) -> Any:
    device = hidden.device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def exact(x: Any) -> Any:
        return None if x is None else (x if cast is None else x.to(cast)).double()

    lora = tuple(replace(part, a=exact(part.a), b=exact(part.b)) for part in head.lora)
    head = replace(head, weight=exact(head.weight), bias=exact(head.bias), lora=lora)
    plain = Options(backend="reference", metrics=options.metrics, memory_budget=4 << 30)
    with torch.autocast(device, enabled=False):
        return head_loss(exact(hidden), head, batch, objective, plain)


def as_row(case: Case) -> dict[str, Any]:
    return {**asdict(case), "reference": case.reference}
