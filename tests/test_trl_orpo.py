"""TRL's experimental ORPO and CPO trainers and headloss agree step by step, in float32.

After two SGD steps at a learning rate of 0.5, logged numbers and weights of TRL and headloss differ
by at most 5e-6 (relative for numbers above 1, absolute for numbers below 1).
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from live_tensors import LiveTensors

pytest.importorskip("trl", reason="TRL is the trainer that headloss is put into")
import trl.experimental.cpo
import trl.experimental.orpo
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from test_trl_sft_dpo import settings, text
from transformers import AutoConfig, AutoModelForSeq2SeqLM
from trl_case import SIZES, TIMES, VOCABULARY, load, saved, tokenizer, train

import headloss as hl
from headloss.integrations import trl as ours
from headloss.integrations.trl.orpo import mean_logits

STOCK = {"ORPO": trl.experimental.orpo, "CPO": trl.experimental.cpo}
OURS = {"ORPO": ours.ORPOTrainer, "CPO": ours.CPOTrainer}
PAIRS = 12


def make(kind: type, family: str = "llama", peft: Any = None, model: Any = None, **options: Any):
    """Return a trainer on answers of 1 to 5 tokens after prompts of 2 to 4 tokens."""
    name = kind.__name__.removesuffix("Trainer")
    rows = {
        "prompt": [text(i, 2 + i % 3) for i in range(PAIRS)],
        "chosen": [" " + text(i + 3, 2 + i % 4) for i in range(PAIRS)],
        "rejected": [" " + text(i + 7, 1 + i % 3) for i in range(PAIRS)],
    }
    options = {"max_steps": 2, "beta": 0.4, **options}
    model = load(saved(family)) if model is None else model
    if family == "mixtral":
        model.config.update({"output_router_logits": True, "router_aux_loss_coef": 0.3})
    return kind(
        model=model,
        args=getattr(STOCK[name], f"{name}Config")(**settings(**options)),
        train_dataset=Dataset.from_dict(rows),
        eval_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
        peft_config=peft,
    )


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    return make(getattr(STOCK[name], f"{name}Trainer"), **options), make(OURS[name], **options)


def difference(want: Any, got: Any) -> float:
    """Return the largest difference of an element, relative for elements above 1."""
    a, b = torch.as_tensor(want, dtype=torch.float64), torch.as_tensor(got, dtype=torch.float64)
    return float(((a - b).abs() / a.abs().clamp(min=1)).max())


def numbers(log: dict[str, float]) -> dict[str, float]:
    times = (*TIMES, "per_second", "_runtime", "_time")
    return {name: value for name, value in log.items() if not name.endswith(times)}


def largest_difference(name: str, **options: Any) -> float:
    """Train TRL's trainer and headloss's for two SGD steps; return the largest difference of logged
    numbers and parameters."""
    theirs, mine = pair(name, **options)
    start = {n: p.detach().clone() for n, p in mine.model.named_parameters()}
    (want, weights), (got, moved) = train(theirs), train(mine)
    assert len(want) == len(got) == 2
    apart = []
    for a, b in zip(map(numbers, want), map(numbers, got), strict=True):
        assert a.keys() == b.keys() and {"loss", "grad_norm", "logits/chosen"} <= a.keys()
        apart += [difference(a[key], b[key]) for key in a]
    for key, weight in weights.items():
        apart.append(difference(weight, moved[key]))
    assert max(float((x - start[key]).abs().max()) for key, x in moved.items()) > 1e-3
    return max(apart)


LORA = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "orpo": ("ORPO", {}),
    "accumulation": ("ORPO", {"gradient_accumulation_steps": 2}),
    "checkpointing": ("ORPO", {"gradient_checkpointing": True}),
    "experts": ("ORPO", {"family": "mixtral"}),
    "scaled logits": ("ORPO", {"family": "granite"}),
    "sigmoid": ("CPO", {"label_smoothing": 0.1, "gradient_accumulation_steps": 2}),
    "hinge": ("CPO", {"loss_type": "hinge"}),
    "ipo": ("CPO", {"loss_type": "ipo"}),
    "simpo": ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.0}),
    "simpo, likelihood": ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.7}),
    "alphapo": ("CPO", {"loss_type": "alphapo", "alpha": 0.25}),
    "experts, sums": ("CPO", {"family": "mixtral"}),
    "adapter": ("ORPO", {"peft": LORA}),
    "adapter, simpo": ("CPO", {"peft": LORA, "loss_type": "simpo"}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_steps(case: str) -> None:
    """Loss, metrics and gradients agree with TRL's trainer on batches of different lengths."""
    name, options = CASES[case]
    found = largest_difference(name, **options)
    assert found < 1e-5


@pytest.mark.parametrize("name", OURS)
def test_evaluation(name: str) -> None:
    want, got = (numbers(trainer.evaluate()) for trainer in pair(name, family="tied"))
    assert want.keys() == got.keys() and "eval_logits/rejected" in want
    assert max(difference(want[key], got[key]) for key in want) < 1e-5


@pytest.mark.parametrize("name", OURS)
def test_soft_cap(name: str) -> None:
    """All values with a soft cap agree except the mean logits, which headloss computes before the
    cap."""
    theirs, mine = pair(name, family="gemma2")
    want, got = numbers(theirs.evaluate()), numbers(mine.evaluate())
    apart = {key for key in want if difference(want[key], got[key]) > 1e-5}
    assert apart == {"eval_logits/chosen", "eval_logits/rejected"}
    theirs.model.config.final_logit_softcapping = None
    before = numbers(theirs.evaluate())
    for key in apart:
        assert got[key] == pytest.approx(before[key], rel=1e-5)


def test_mean_logits() -> None:
    """Mean logits are correct for a padded head with a bias, a scale and two bfloat16 adapters."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    a, b = drawn(2, 8).bfloat16(), drawn(40, 2).bfloat16()
    adapters = hl.Lora(a=a, b=b, scaling=0.5), hl.Lora(a=-a, b=b.flip(0), scaling=0.3)
    head = hl.Head(drawn(40, 8), drawn(40), logit_scale=0.7, vocab_size=37, lora=adapters)
    hidden = drawn(3, 5, 8)
    want = head.logits(hidden.flatten(0, 1)).view(3, -1).mean(1)
    torch.testing.assert_close(mean_logits(hidden, head), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OURS)
def test_without_the_logits(name: str) -> None:
    """TRL makes logits [2 B, L, V]; in headloss no tensor is larger than the head's weight [V,
    H]."""
    trainers, largest = pair(name, max_steps=1), []
    for trainer in trainers:
        trainer.options = hl.Options(chunk_tokens=2, schedule="recompute")
        with LiveTensors() as live:
            trainer.train()
        largest.append(live.largest)
    theirs, mine = largest
    assert mine <= SIZES["hidden_size"] * VOCABULARY < 6 * 8 * VOCABULARY <= theirs


@pytest.mark.parametrize("name", OURS)
def test_refusals(name: str) -> None:
    refused = f"is not supported by headloss's {name}Trainer; use trl.experimental.{name.lower()}"
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match=f"prompt_learning: {refused}"):
        make(OURS[name], peft=prompt)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = AutoConfig.for_model("t5", vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes)
    with pytest.raises(ValueError, match=f"is_encoder_decoder: {refused}"):
        make(OURS[name], model=AutoModelForSeq2SeqLM.from_config(config))


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("hook", ["concatenated_forward", "concatenated_inputs"])
def test_a_hook_that_trl_has_renamed(name: str, hook: str, monkeypatch) -> None:
    monkeypatch.delattr(getattr(STOCK[name], f"{name}Trainer"), hook)
    with pytest.raises(RuntimeError, match=f"{name}Trainer.{hook}: is not in the installed TRL"):
        OURS[name](model=None)


def test_without_experimental_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TRL's experimental modules, only the ORPO and CPO trainers raise, with the missing
    module's name."""
    monkeypatch.delitem(sys.modules, "headloss.integrations.trl.orpo")
    monkeypatch.delattr(ours, "orpo")
    monkeypatch.setitem(sys.modules, "trl.experimental.orpo", None)
    assert ours.DPOTrainer.__name__ == "DPOTrainer"
    with pytest.raises(ImportError, match="trl.experimental.orpo"):
        _ = ours.CPOTrainer
    with pytest.raises(AttributeError, match="has no attribute 'GKDTrainer'"):
        _ = ours.GKDTrainer
