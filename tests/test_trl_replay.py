"""TRL trainers replay the ids that a top-p or top-k sampler kept, and log the ratio to the sampler.

Transformers generates; the sampling distribution is recomputed from the model's logits.
"""

from __future__ import annotations

import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is the trainer that headloss is put into")
import trl
from accelerate.utils import send_to_device
from datasets import Dataset
from peft import LoraConfig
from test_rl import ALGORITHMS, settings
from test_trl_support import support_of
from torch import Tensor
from transformers import LogitsProcessor
from trl.trainer import grpo_trainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict
from trl_case import PROMPTS, llama, load, prompts, reward, tokenizer

from headloss import rl
from headloss.integrations.transformers import SupportRecorder
from headloss.integrations.trl import GRPOTrainer
from headloss.integrations.trl.common import append_logged
from headloss.integrations.trl.support import Drawn, drawn_logps, pairs, rows_drawn

FILTERS: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
RATIOS = tuple(f"headloss/sampling/ratio_{name}" for name in ("min", "mean", "max"))


def make(kind: type = rl.GRPO, model: Any = None, more: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    config = trl.GRPOConfig if kind in (GRPOTrainer, trl.GRPOTrainer) else kind.config  # type: ignore[attr-defined]
    return kind(
        model=load(llama()) if model is None else model,
        reward_funcs=reward,
        args=config(**{**settings(), **FILTERS, **options}),
        train_dataset=prompts(),
        processing_class=tokenizer(),
        **(more or {}),
    )


def generated(trainer: Any) -> dict[str, Any]:
    return trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))


def logits_of(trainer: Any, inputs: dict[str, Any], temperature: float = 0.8) -> Tensor:
    """Return the model's logits [B, C, V]."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    columns = inputs["completion_ids"].shape[1]
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, attention_mask=mask).logits
    return logits[:, -columns - 1 : -1].float() / temperature


def masked_logps(trainer: Any, inputs: dict[str, Any]) -> Tensor:
    """Return [B, C] log-probs from logits masked to the recorded `support_ids`."""
    z, support = logits_of(trainer, inputs), support_of(inputs)
    inside = torch.zeros_like(z).scatter_add_(2, support.clamp_min(0), (support >= 0).float()) > 0
    inside |= (support < 0).all(2, keepdim=True)
    z = z.masked_fill(~inside, -torch.inf)
    return z.log_softmax(2).gather(2, inputs["completion_ids"].unsqueeze(2)).squeeze(2)


def scored_of(inputs: dict[str, Any]) -> Tensor:
    return (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()


def first_step(trainer: Any) -> dict[str, float]:
    trainer.train()
    return next(row for row in trainer.state.log_history if "loss" in row)


def measured(trainer: Any, inputs: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of one micro-batch."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer._compute_loss(trainer.model, inputs)
    append_logged(trainer)
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


def check_first_step(trainer: Any) -> None:
    """Check that all ratios of a first step, and their extremes over micro-batches, are 1 within
    1e-5."""
    log = first_step(trainer)
    for name in RATIOS:
        assert log[name] == pytest.approx(1, abs=1e-5), name
    assert abs(log["headloss/sampling/kl"]) < 1e-9
    most = 20 if trainer.top_k else tokenizer().vocab_size
    assert 1 <= log["headloss/sampling/kept"] <= log["headloss/sampling/kept_max"] <= most


def test_a_plain_configuration_replays() -> None:
    """With default settings headloss normalises over the ids that the sampler kept, so that the
    probability ratio to the sampler is 1; the ratio in stock TRL is below 0.75."""
    trainer = make(GRPOTrainer, beta=0.1, num_iterations=2)
    inputs = generated(trainer)
    scored = scored_of(inputs)
    drawn = inputs["sampling_per_token_logps"]
    assert drawn.shape == inputs["completion_ids"].shape
    want = masked_logps(trainer, inputs)[scored]
    for name in ("sampling_per_token_logps", "old_per_token_logps", "ref_per_token_logps"):
        torch.testing.assert_close(inputs[name][scored], want, rtol=1e-5, atol=1e-5, msg=name)
    whole = logits_of(trainer, inputs).log_softmax(2)
    whole = whole.gather(2, inputs["completion_ids"].unsqueeze(2)).squeeze(2)
    assert float((whole - drawn)[scored].exp().mean()) < 0.75
    check_first_step(make(GRPOTrainer))


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_every_trainer_replays(kind: type) -> None:
    assert kind.config(**settings()).sampling_support is None  # type: ignore[attr-defined]
    check_first_step(make(kind))


CASES: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "several iterations": {"num_iterations": 2, "gradient_accumulation_steps": 2},
    "micro-batches": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "top_k": {"top_p": 1.0},
    "top_p": {"top_k": 0},
    "min_p": {"top_k": 0, "top_p": 1.0, "min_p": 0.1},
    "generation_kwargs win": {"top_k": 0, "top_p": 1.0, "generation_kwargs": {"top_k": 7}},
    "the reference": {"beta": 0.1},
    "a sequence's ratio": {"importance_sampling_level": "sequence"},
    "truncated ones masked": {"mask_truncated_completions": True},
    "top entropy": {"top_entropy_quantile": 0.5, "entropy_coef": 0.01},
    "padded to a multiple": {"pad_to_multiple_of": 4},
    "asked for": {"sampling_support": True},
}


@pytest.mark.parametrize("name", CASES)
def test_ratios_are_one_on_the_first_step(name: str) -> None:
    check_first_step(make(GRPOTrainer if name != "asked for" else rl.GRPO, **CASES[name]))


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]])
def test_lora(targets: list[str]) -> None:
    config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    trainer = make(more={"peft_config": config}, beta=0.1)
    check_first_step(trainer)
    inputs = generated(trainer)
    scored, support = scored_of(inputs), support_of(inputs)
    assert (support == inputs["completion_ids"].unsqueeze(2)).any(2)[scored].all()


def test_losses_are_those_of_masked_logits() -> None:
    """Losses equal those of logits that are masked to the recorded ids. After a weight update,
    losses still use the recorded ids and the recorded old and reference log-probs."""
    trainer = make(beta=0.3, num_iterations=2, use_bias_correction_kl=False)
    inputs = generated(trainer)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    scored, new = scored_of(inputs), masked_logps(trainer, inputs)
    old, ref = inputs["old_per_token_logps"], inputs["ref_per_token_logps"]
    ratio, advantages = (new - old).exp(), inputs["advantages"].unsqueeze(1)
    policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = (ref - new).exp() - (ref - new) - 1
    loss = torch.where(scored, policy + 0.3 * kl, 0.0).sum(1) / scored.sum(1)
    trainer.current_gradient_accumulation_steps = 1
    got = trainer._compute_loss(trainer.model, inputs)
    torch.testing.assert_close(got, loss.mean(), rtol=1e-5, atol=1e-6)
    metrics = measured(trainer, inputs)
    d = (new - inputs["sampling_per_token_logps"])[scored].double()
    counts = (support_of(inputs) >= 0).sum(2)[scored]
    want = {
        "kl": (d.expm1() - d).mean(),
        "ratio_min": d.exp().min(),
        "ratio_mean": d.exp().mean(),
        "ratio_max": d.exp().max(),
        "kept": counts.double().mean(),
        "kept_max": counts.max(),
    }
    for name, value in want.items():
        got = metrics[f"headloss/sampling/{name}"]
        assert got == pytest.approx(float(value), rel=1e-4, abs=1e-6), name


def test_sampled_log_probs_that_are_missing_are_left_out() -> None:
    trainer = make()
    inputs = generated(trainer)
    inputs["sampling_per_token_logps"][0, 0] = torch.nan
    got = measured(trainer, inputs)["headloss/sampling/ratio_max"]
    assert got == pytest.approx(1, abs=1e-5)


# ---------------------------------------------------------------------- switching replay on and off


def test_off_is_trl() -> None:
    """With `sampling_support=False` no kept ids and no sampler log-probs are stored, and losses
    equal stock TRL's."""
    trainer = make(rl.GRPO, sampling_support=False)
    inputs = generated(trainer)
    assert "support_ids" not in inputs and "sampling_per_token_logps" not in inputs
    want = make(trl.GRPOTrainer, loss_type="grpo")
    theirs, ours = first_step(want), first_step(make(rl.GRPO, sampling_support=False))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
    assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=1e-4)
    assert not any(name.startswith("headloss/sampling") for name in ours)


def test_without_a_filter_replay_is_off_unless_requested() -> None:
    plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    inputs = generated(make(**plain))
    assert "support_ids" not in inputs and "sampling_per_token_logps" not in inputs
    trainer = make(sampling_support=True, **plain)
    inputs = generated(trainer)
    assert (support_of(inputs) == -1).all()
    want = logits_of(trainer, inputs).log_softmax(2)
    want = want.gather(2, inputs["completion_ids"].unsqueeze(2)).squeeze(2)
    scored = scored_of(inputs)
    torch.testing.assert_close(inputs["sampling_per_token_logps"][scored], want[scored])


@pytest.mark.parametrize(
    "own", [{"epsilon_cutoff": 0.02}, {"suppress_tokens": [3, 4, 5]}, {"typical_p": 0.6}]
)
def test_filters_of_the_model_count(own: dict[str, Any]) -> None:
    """Token filters of the model's generation config are replayed even if the trainer's own
    arguments truncate nothing."""
    model = load(llama())
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    trainer = make(model=model, top_k=0, top_p=1.0)
    inputs = generated(trainer)
    assert (support_of(inputs) >= 0).any(2)[scored_of(inputs)].all()
    log = first_step(make(model=model, top_k=0, top_p=1.0))
    assert log["headloss/sampling/ratio_max"] == pytest.approx(1, abs=1e-5)


OFF: dict[str, dict[str, Any]] = {  # named option: configuration
    "temperature": {"generation_kwargs": {"temperature": 0.5}},
    "top_k": {"top_k": 1},
    "do_sample": {"generation_kwargs": {"do_sample": False}},
    "use_transformers_continuous_batching": {"use_transformers_continuous_batching": True},
    "use_fused_loss": {"use_fused_loss": False},
    "use_fused_linear_logprobs": {"use_fused_linear_logprobs": False},
    "num_beams": {"generation_kwargs": {"num_beams": 2}},
}
ON: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "sequence_bias": {"generation_kwargs": {"sequence_bias": [[[5], 2.0]]}},
    "exponential_decay_length_penalty": {
        "generation_kwargs": {"exponential_decay_length_penalty": (1, 1.2)}
    },
}


@pytest.mark.parametrize("option", [*OFF, *ON])
def test_true_refuses_by_name(option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option}: .*sampling_support"):
        make(sampling_support=True, **{**OFF, **ON}[option])


@pytest.mark.parametrize("option", [*OFF, *ON])
def test_none_warns_once_by_name(option: str) -> None:
    options = {**OFF, **ON}[option]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make(**options)
        if option != "use_transformers_continuous_batching":  # needs a GPU
            inputs = generated(trainer)
            generated(trainer)
            assert ("support_ids" in inputs) is (option in ON)
            assert ("sampling_per_token_logps" in inputs) is (option in ON)
    ours = [str(w.message) for w in caught if str(w.message).startswith("sampling_support")]
    assert len(ours) == 1 and ours[0].startswith(f"sampling_support: {option}: "), ours


def test_other_numbers_than_those_of_trl_are_announced_once(caplog: Any) -> None:
    """With sampling_support=None, a trainer computes log-probs over the ids that the sampler kept,
    and logs once that its numbers differ from TRL's and how to avoid this; with
    sampling_support=True or False the trainer logs nothing."""
    for choice, lines in ((None, 1), (True, 0), (False, 0)):
        caplog.clear()
        trainer = make(rl.GRPO, sampling_support=choice)
        generated(trainer)
        generated(trainer)
        said = [r.getMessage() for r in caplog.records if r.name == "headloss"]
        assert len(said) == lines, choice
        assert all("sampling_support=False takes TRL's" in text for text in said)


def test_without_a_filter_nothing_is_said(caplog: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make(top_k=0, top_p=1.0, generation_kwargs={"temperature": 0.5})
        assert "support_ids" not in generated(trainer)
    assert not [w for w in caught if "sampling_support" in str(w.message)]
    assert not [r for r in caplog.records if r.name == "headloss"]


def test_a_penalty_of_the_model_itself_is_named() -> None:
    model = load(llama())
    model.generation_config.encoder_repetition_penalty = 1.0
    model.generation_config.exponential_decay_length_penalty = (1, 1.2)
    with pytest.warns(UserWarning, match="sampling_support: exponential_decay_length_penalty"):
        assert "support_ids" in generated(make(model=model))
    with pytest.raises(ValueError, match="exponential_decay_length_penalty"):
        generated(make(model=model, sampling_support=True))


class Louder(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return 2 * scores


def test_beams_of_the_model_itself_are_named() -> None:
    model = load(llama())
    model.generation_config.num_beams = 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert "support_ids" not in generated(make(model=model))
    (message,) = [str(w.message) for w in caught if "sampling_support" in str(w.message)]
    assert message.startswith("sampling_support: num_beams: ")
    with pytest.raises(ValueError, match="num_beams"):
        generated(make(model=model, sampling_support=True))


def test_an_unknown_processor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make()
    build = type(trainer.model)._get_logits_processor

    def with_louder(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = build(self, *args, **kwargs)
        made.insert(0, Louder())
        return made

    monkeypatch.setattr(type(trainer.model), "_get_logits_processor", with_louder)
    with pytest.warns(UserWarning, match="sampling_support: Louder: "):
        generated(trainer)


def test_a_rollout_function_without_sets_warns() -> None:
    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
        made = [[7, 8, 1] for _ in prompts]
        return {"prompt_ids": ids, "completion_ids": made, "logprobs": [[-0.5] * 3 for _ in ids]}

    trainer = make(more={"rollout_func": rollout})
    with pytest.warns(UserWarning, match="sampling_support: rollout_func: "):
        inputs = generated(trainer)
    assert "support_ids" not in inputs

    def with_sets(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {**rollout(prompts, trainer), "support_ids": [[[7, 9], None, [1]]] * len(prompts)}

    assert "support_ids" in generated(make(more={"rollout_func": with_sets}))
    off = make(more={"rollout_func": with_sets}, sampling_support=False)
    assert "support_ids" not in generated(off)


def test_an_overridden_generation_warns_or_raises() -> None:
    class Own(rl.GRPO):
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            return [[7, 8, 1] for _ in prompt_ids], None

    with pytest.warns(UserWarning, match="sampling_support: _generate_single_turn: "):
        assert "support_ids" not in generated(make(Own))
    with pytest.raises(ValueError, match="_generate_single_turn: .*sampling_support=True"):
        generated(make(Own, sampling_support=True))


def test_a_token_whose_set_is_missing_is_an_error_that_names_the_sequence() -> None:
    class Loses(rl.GRPO):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            ids, logprobs = super()._generate_single_turn(*args, **kwargs)
            logprobs[2][1] = float(logprobs[2][1])
            return ids, logprobs

    with pytest.raises(ValueError, match="support_ids: sequence 2 has no set at its token 1"):
        generated(make(Loses))


# ---------------------------------------------------------------------- tools


def test_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tool calls, each generated token has its recorded ids, tool tokens have none, and ratios
    to the sampler are 1."""

    def parse(tokenizer: Any, ids: list[int], prefix: list[int], tools: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": "x"}
        call = {"type": "function", "function": {"name": "seven", "arguments": {}}}
        return {**message, "tool_calls": [call]} if sum(ids) % 2 and len(prefix) < 20 else message

    def seven() -> str:
        """Seven."""
        return "7"

    monkeypatch.setattr(grpo_trainer, "parse_response", parse)
    trainer = make(max_completion_length=16, generation_kwargs={"max_new_tokens": 5})
    trainer.tools = trainer._standalone_tools = [seven]
    monkeypatch.setattr(trainer._tokenizer, "response_template", "x", raising=False)
    trainer._get_tool_suffix_ids = lambda messages: [50, 51, 52]
    trainer._tokenize_prompts = lambda prompts: (
        [tokenizer()(p[0]["content"])["input_ids"] for p in prompts],
        None,
        {},
    )
    trainer.train_dataset = Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": text}] for text in PROMPTS]}
    )
    inputs = generated(trainer)
    mask, scored, support = inputs["tool_mask"], scored_of(inputs), support_of(inputs)
    tool = (mask == 0) & inputs["completion_mask"].bool()
    turns = (mask.diff(dim=1) == 1).sum(1)
    assert tool.any() and int(turns.max()) >= 2  # at least one row calls tools twice
    assert (support[tool] == -1).all()
    hit = (support == inputs["completion_ids"].unsqueeze(2)).any(2)
    assert hit[scored].all()
    want = masked_logps(trainer, inputs)[scored]
    torch.testing.assert_close(
        inputs["sampling_per_token_logps"][scored], want, rtol=1e-5, atol=1e-5
    )
    metrics = measured(trainer, inputs)
    for name in RATIOS:
        assert metrics[name] == pytest.approx(1, abs=1e-5)


# ---------------------------------------------------------------------- memory


def test_wide_sets_cost_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded ids need memory for their number, not for padding: 64 x 4096 tokens with 8 ids each
    and one token with 2000 ids stay below 16 MB."""
    rows, columns, device = 64, 4096, torch.device("cpu")
    recorder = SupportRecorder()
    counts = torch.full((rows,), 8, dtype=torch.int32)
    recorder._steps = [
        (torch.arange(8 * rows, dtype=torch.int32), counts.clone()) for _ in range(columns)
    ]
    wide = counts.clone()
    wide[5] = 2000
    recorder._steps[100] = (torch.arange(8 * rows + 1992, dtype=torch.int32), wide)
    recorder._step_logps = [torch.zeros(rows)] * columns
    held = sum(ids.nbytes + counts.nbytes for ids, counts in recorder._steps)
    assert held < 16e6
    recorder._first = 3
    recorder._end(torch.zeros(rows, 3 + columns, dtype=torch.int64))
    sets = recorder.sets
    assert sets is not None and sets.ids.nbytes + sets.counts.nbytes < 16e6
    lengths = [columns - b for b in range(rows)]  # rows of different lengths
    logps = drawn_logps(sets, recorder.drawn_logps, [[0] * n for n in lengths])
    entries = rows_drawn(logps, None, device)
    del logps
    assert size_of(entries) < 16e6
    batch = {"completion_ids": torch.arange(rows), "support_ids": entries}
    shuffled = shuffle_sequence_dict(batch)
    assert size_of(shuffled["support_ids"]) < 16e6
    for at, entry in zip(shuffled["completion_ids"].tolist(), shuffled["support_ids"], strict=True):  # type: ignore[union-attr]
        assert entry is entries[at] and len(entry[1]) == lengths[at]
    parts = split_tensor_dict(shuffled, 4)  # type: ignore[arg-type]
    assert sum(size_of(part["support_ids"]) for part in parts) < 16e6
    moved = send_to_device(parts[0], torch.device("meta"))
    assert all(t.device.type == "meta" for row in moved["support_ids"] for t in row)
    assert len(pickle.dumps(parts)) < 16e6
    ids, offsets = pairs(entries, columns)
    assert ids.nbytes + offsets.nbytes < 16e6
    assert int(offsets.diff().max()) == 2000 and len(ids) == 8 * sum(lengths) + 1992


def size_of(entries: Any) -> int:
    """Return the bytes of all tensors, counting shared memory once."""
    storages = {t.untyped_storage() for row in entries for t in row}
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}.values())


def test_a_recorded_log_prob_is_a_float() -> None:
    sets: Any = SimpleNamespace()
    x = Drawn(-0.5, sets, 3)
    assert x == -0.5 and x.sets is sets and x.at == 3 and torch.tensor([x, 0.0])[0] == -0.5
