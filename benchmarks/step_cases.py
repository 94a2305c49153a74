"""Cases of benchmarks/steps.py: models of known shapes, batches, and implementations of the head
for one backbone.

B sequences of L tokens, H hidden width, V vocabulary. In DPO a chosen sequence is followed by its
rejected sequence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from oracle import EXACT, ROUNDED, Tolerance
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import headloss as hl
from headloss.integrations import transformers as adapter

# ---------------------------------------------------------------------- models

CAP = 262144  # The largest number of tokens in a sequence.
BETA = 0.1  # The beta of the DPO loss.

QWEN: dict[str, Any] = {  # Qwen2.5-0.5B
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": CAP,
}
LLAMA_1B: dict[str, Any] = {  # Llama-3.2-1B
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "max_position_embeddings": CAP,
}
LLAMA_8B = LLAMA_1B | {  # Llama-3-8B with 4 of its 32 layers
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "intermediate_size": 14336,
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model of the transformers `family`, and the sizes (B, L) of its training batches.

    The search for the longest sequence uses multiples of `unit` tokens, up to `cap`, which is 4
    units times a power of 2.
    """

    family: str
    sizes: dict[str, Any]
    batches: tuple[tuple[int, int], ...] = ((1, 1024), (2, 2048), (8, 2048))
    dtype: torch.dtype = torch.bfloat16
    unit: int = 1024
    cap: int = CAP


SETTINGS = {
    "Qwen2.5-0.5B": Setting(family="qwen2", sizes=QWEN),
    "Llama-3.2-1B": Setting(family="llama", sizes=LLAMA_1B),
    "Llama-3-8B, 4 layers": Setting(family="llama", sizes=LLAMA_8B),
}
QUICK = {
    name: Setting(
        family=setting.family,
        sizes={**TINY, "tie_word_embeddings": setting.sizes["tie_word_embeddings"]},
        batches=((1, 16), (4, 24)),
        dtype=torch.float32,
        unit=16,
        cap=256,
    )
    for name, setting in SETTINGS.items()
}


def make_model(setting: Setting, device: torch.device) -> Any:
    """Make a model with random weights on `device`, with predictions like a trained model's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(setting.family, **setting.sizes, use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=setting.dtype, attn_implementation="sdpa"
        )
    sharpen(model, torch.randint(config.vocab_size, (1, 512), device=device))
    return model.train()


@torch.no_grad()
def sharpen(model: Any, ids: Tensor) -> None:
    """Scale the last norm, and thus the logits, until labels drawn from the model have a mean
    probability of a half: E[p(y)] = sum_j p_j^2."""
    logits = model(input_ids=ids).logits[0].float()  # [L, V]
    low, high = 1e-3, 1e3
    for _ in range(24):
        scale = math.sqrt(low * high)
        mean = (scale * logits).softmax(-1).square().sum(-1).mean()
        low, high = (scale, high) if mean < 0.5 else (low, scale)
    model.base_model.norm.weight.mul_(scale)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch of tokens and loss inputs.

    Attributes:
        ids: [B, L] int64, random.
        labels: [B, L]; `labels[:, t + 1]` is sampled from the model's prediction at t, the first
            label is -100: B (L - 1) tokens are scored.
        advantages: [B] float32, all nonzero.
        log_ratios: [B] float32, log-prob of a sequence minus DPO's reference log-prob; beta times
            the differences of pairs have a standard deviation of 1.
        ref_logps: [B, L] float32, reference log-probs by a float32 head; the last one of a row is
            unused.
        probability: mean p(y) of the labels.
    """

    ids: Tensor
    labels: Tensor
    advantages: Tensor
    log_ratios: Tensor
    ref_logps: Tensor
    probability: float


@torch.no_grad()
def make_batch(model: Any, rows: int, length: int, device: torch.device) -> Batch:
    generator = torch.Generator(device).manual_seed(0)
    size = (rows, length)
    ids = torch.randint(model.config.vocab_size, size, generator=generator, device=device)
    labels, chances = torch.full_like(ids, -100), []
    ref_logps, weight = torch.zeros(size, device=device), model.lm_head.weight.float()
    for row, hidden in enumerate(model.base_model(input_ids=ids).last_hidden_state):
        p = model.lm_head(hidden[:-1]).float().softmax(-1)  # [L - 1, V]
        drawn = torch.multinomial(p, 1, generator=generator)
        labels[row, 1:] = drawn[:, 0]
        chances.append(p.gather(1, drawn).mean())
        ref_logps[row, :-1] = score(hidden[:-1], drawn[:, 0], weight)
    log_ratios = torch.randn(rows, generator=generator, device=device) / (BETA * math.sqrt(2))
    return Batch(
        ids=ids,
        labels=labels,
        advantages=torch.linspace(-1, 1, rows, device=device) + 0.25,
        log_ratios=log_ratios,
        ref_logps=ref_logps - log_ratios[:, None] / (length - 1),
        probability=float(torch.stack(chances).mean()),
    )


def long_batch(model: Any, length: int, device: torch.device) -> Batch:
    """Make a batch of one long sequence with random labels for SFT and GRPO, since sampling labels
    from the model would need its logits."""
    ids = torch.randint(model.config.vocab_size, (1, length), device=device)
    labels = ids.clone()
    labels[:, 0] = -100
    one = torch.ones(1, device=device)
    return Batch(
        ids=ids,
        labels=labels,
        advantages=one,
        log_ratios=one,
        ref_logps=torch.zeros((1, length), device=device),
        probability=math.nan,
    )


# ---------------------------------------------------------------------- losses


def mean_loss(work: str, logps: Tensor, batch: Batch) -> Tensor:
    """Return the mean loss of log-probs [B, L - 1].

    GRPO's old log-probs equal `logps`, as in a first update. In DPO the reference log-prob of a
    sequence is the sum of `logps` minus `log_ratios`, so that reference log-probs contain the
    rounding error of the policy's log-probs, as if both came from one implementation of the head.
    """
    if work == "SFT":
        return -logps.mean()
    if work == "DPO":
        sums = logps.sum(1)
        chosen, rejected = (sums - sums.detach() + batch.log_ratios).view(-1, 2).t()
        return -torch.nn.functional.logsigmoid(BETA * (chosen - rejected)).mean()
    ratio, advantages = (logps - logps.detach()).exp(), batch.advantages[:, None]
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def score(hidden: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """Return log-probs [L] of targets [L] by a float32 weight [V, H]."""
    log_p = (hidden.float() @ weight.t()).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0]


def exact(work: str, model: Any, batch: Batch) -> Tensor:
    """Return the loss of a float32 head on the model's hidden states, one sequence at a time."""
    weight = model.lm_head.weight.float()
    hidden = model.base_model(input_ids=batch.ids).last_hidden_state[:, :-1]
    pairs = zip(hidden, batch.labels[:, 1:], strict=True)
    logps = [checkpoint(score, *pair, weight, use_reentrant=False) for pair in pairs]
    return mean_loss(work, torch.stack(logps), batch)


def of_model(work: str, model: Any, batch: Batch) -> Tensor:
    """Return the model's own (possibly patched) loss for SFT, else a loss of float32 log-probs."""
    if work == "SFT":
        return model(input_ids=batch.ids, labels=batch.labels).loss
    logits = model(input_ids=batch.ids).logits[:, :-1]
    log_p = logits.log_softmax(-1, dtype=torch.float32)
    logps = log_p.gather(-1, batch.labels[:, 1:, None]).squeeze(-1)
    del logits, log_p
    return mean_loss(work, logps, batch)


def of_trl(work: str, model: Any, batch: Batch) -> Tensor:
    found = model(input_ids=batch.ids, labels=batch.labels, fused_lm_head=True)
    return found.loss if work == "SFT" else mean_loss(work, found.log_probs, batch)


@functools.cache
def liger_loss() -> Any:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    return LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="grpo")


def of_liger(work: str, model: Any, batch: Batch) -> Tensor:
    if work == "SFT":
        return of_model(work, model, batch)
    hidden = model.base_model(input_ids=batch.ids).last_hidden_state[:, :-1]
    targets = batch.labels[:, 1:]
    mask = torch.ones_like(targets)
    return liger_loss()(hidden, model.lm_head.weight, targets, mask, batch.advantages)[0]


def of_headloss(options: hl.Options) -> Callable[[str, Any, Batch], Tensor]:
    def loss(work: str, model: Any, batch: Batch) -> Tensor:
        if work == "SFT":
            return of_model(work, model, batch)
        fields: dict[str, Any] = {"advantages": batch.advantages, "old_logps": hl.CURRENT}
        objective = hl.grpo()
        if work == "DPO":
            fields, objective = {"ref_logps": batch.ref_logps}, hl.dpo(beta=BETA)
        scored = hl.Batch.from_labels(batch.labels, align="targets", **fields)
        hidden = model.base_model(input_ids=batch.ids).last_hidden_state
        return hl.head_loss(hidden, hl.Head.of_model(model), scored, objective, options).loss

    return loss


# ---------------------------------------------------------------------- contestants


@contextmanager
def with_trl(work: str, model: Any) -> Iterator[None]:
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model)
    try:
        yield
    finally:
        del model.forward


@contextmanager
def with_liger(work: str, model: Any) -> Iterator[None]:
    """Patch only the head with Liger, since all implementations are timed with the same
    backbone."""
    if work == "SFT":
        from liger_kernel.transformers import monkey_patch

        patch = getattr(monkey_patch, f"apply_liger_kernel_to_{model.config.model_type}")
        patch(rope=False, rms_norm=False, swiglu=False, model=model)
    try:
        yield
    finally:
        vars(model).pop("forward", None)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A function `loss(work, model, batch)`, called inside the context `patch(work, model)`.

    `lacks` maps each benchmarked loss that the implementation does not support to the reason.
    """

    loss: Callable[[str, Any, Batch], Tensor]
    patch: Callable[[str, Any], AbstractContextManager[Any]] = lambda work, model: nullcontext()
    tolerance: Tolerance = ROUNDED
    gpu: bool = False
    lacks: dict[str, str] = field(default_factory=dict)

    def unserved(self, work: str, device: torch.device) -> str:
        if self.gpu and device.type != "cuda":
            return "needs a GPU"
        return self.lacks.get(work, "")


def _headloss(**options: Any) -> Contestant:
    chosen = hl.Options(**options)

    def patch(work: str, model: Any) -> AbstractContextManager[Any]:
        return adapter.apply(model, options=chosen) if work == "SFT" else nullcontext()

    return Contestant(loss=of_headloss(chosen), patch=patch, tolerance=EXACT)


WORKS = ("SFT", "GRPO", "DPO")
NO_DPO = "its loss takes the hidden states and the head of a reference, not log-probs"
CONTESTANTS = {
    "Transformers": Contestant(loss=of_model),
    "Liger": Contestant(loss=of_liger, patch=with_liger, gpu=True, lacks={"DPO": NO_DPO}),
    "TRL": Contestant(loss=of_trl, patch=with_trl),
    "headloss": _headloss(),
    "headloss, 5 GiB": _headloss(memory_budget=5 << 30),
    "headloss, recompute": _headloss(schedule="recompute"),
}
