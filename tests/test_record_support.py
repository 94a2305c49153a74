"""The ids and log-probs that `record_support` records agree with the scores of Transformers'
generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("trl", reason="its tests have the tiny model")
from peft import LoraConfig, get_peft_model
from transformers import LogitsProcessorList
from trl_case import VOCABULARY, llama, load, saved

import headloss as hl
from headloss.integrations.transformers import SupportRecorder, record_support

PROMPTS = torch.tensor([[0, 0, 7, 9], [5, 6, 8, 4], [0, 3, 3, 90]])
FILTERED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}


def generate(model: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    return model.generate(
        input_ids=PROMPTS,
        attention_mask=(PROMPTS != 0).long(),
        max_new_tokens=9,
        return_dict_in_generate=True,
        output_scores=True,
        **{"eos_token_id": [1, 40, 41, 42, 43], "pad_token_id": 0, **options},
    )


def check(drawn: Any, output: Any, greedy: bool = False) -> Tensor:
    """Check that recorded `support_ids` and log-probs agree with the scores of `generate`, also at
    positions after the end of a row; return the generated tokens."""
    tokens = output.sequences[:, PROMPTS.shape[1] :]
    scores = torch.stack(output.scores, 1)
    if greedy:
        best = scores.argmax(-1, keepdim=True)
        scores = torch.full_like(scores, -torch.inf).scatter(-1, best, 0)
    assert torch.equal(drawn.support_ids, hl.support_from_scores(scores))
    want = scores.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    got = drawn.logps(tokens)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    return tokens


CALLS: dict[str, dict[str, Any]] = {
    "all filters": FILTERED,
    "top_k": {"do_sample": True, "top_k": 5, "top_p": 1.0},
    "top_p": {"do_sample": True, "top_k": 0, "top_p": 0.5},
    "min_p": {"do_sample": True, "top_k": 0, "min_p": 0.2},
    "nothing": {"do_sample": True, "top_k": 0},
    "some rows lose nothing": {"do_sample": True, "top_k": 0, "begin_suppress_tokens": [7, 8]},
    "typical_p": {"do_sample": True, "top_k": 0, "typical_p": 0.6},
    "suppressed": {"do_sample": True, "top_k": 0, "suppress_tokens": [3, 4, 50]},
    "penalty": {**FILTERED, "repetition_penalty": 1.3},
    "several": {**FILTERED, "num_return_sequences": 2},
    "without a cache": {**FILTERED, "use_cache": False},
    "one token": {**FILTERED, "max_new_tokens": 1},
}


@pytest.mark.parametrize("name", CALLS)
def test_sets_and_log_probs_are_those_of_the_scores(name: str) -> None:
    model, options = load(llama()), dict(CALLS[name])
    if "max_new_tokens" in options:
        output_of = lambda: model.generate(  # noqa: E731
            input_ids=PROMPTS, return_dict_in_generate=True, output_scores=True, **options
        )
    else:
        output_of = lambda: generate(model, **options)  # noqa: E731
    torch.manual_seed(3)
    want = output_of().sequences
    torch.manual_seed(3)
    with record_support(model) as drawn:
        output = output_of()
    assert torch.equal(output.sequences, want)  # recording changes no draw
    check(drawn, output)
    if name == "nothing":
        assert (drawn.support_ids == -1).all() and drawn.support_ids.shape[2] == 1


def test_greedy_decoding_records_one_id_per_token() -> None:
    model = load(llama())
    with record_support(model) as drawn:
        output = generate(model, do_sample=False)
    tokens = check(drawn, output, greedy=True)
    assert drawn.support_ids.shape[2] == 1
    assert not drawn.logps(tokens)[:, 0].any()


def test_filters_of_the_model_and_of_the_call_are_recorded() -> None:
    model = load(llama())
    model.generation_config.epsilon_cutoff = 0.05

    def no_forty(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor([40]), -torch.inf)

    with record_support(model) as drawn:
        output = generate(
            model, do_sample=True, top_k=0, logits_processor=LogitsProcessorList([no_forty])
        )
    check(drawn, output)
    kept = drawn.support_ids
    assert (kept != 40).all() and ((kept >= 0).sum(-1) < 30).all()


@pytest.mark.parametrize("wrap", ["lora", "parallel"])
def test_wrapped_models(wrap: str) -> None:
    model: Any = load(llama())
    if wrap == "lora":
        config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        model = get_peft_model(model, config)
    else:
        model = nn.DataParallel(model)  # a module wrapper
    with record_support(model) as drawn:
        output = generate(model if wrap == "lora" else model.module, **FILTERED)
    check(drawn, output)


def test_the_last_generate_counts_and_none_after() -> None:
    model = load(llama())
    own = dict(vars(model))
    with record_support(model) as drawn:
        with pytest.raises(RuntimeError, match="no generate has ended inside"):
            _ = drawn.support_ids
        generate(model, do_sample=True, top_k=3)
        with record_support(model) as inner:
            second = generate(model, do_sample=True, top_k=4)
        check(drawn, second)
        check(inner, second)
        last = generate(model, **FILTERED)
    check(inner, second)
    generate(model, do_sample=True, top_k=2)
    check(drawn, last)
    assert vars(model).keys() == own.keys()


def test_log_probs_are_those_of_the_batch() -> None:
    """Log-probs recorded while sampling equal `head_stats` over the recorded `support_ids`."""
    model = load(saved("cohere"))
    with record_support(model) as drawn:
        tokens = generate(model, **FILTERED).sequences
    mask = torch.cat([PROMPTS != 0, torch.ones_like(tokens[:, 4:]).bool()], 1).long()
    position = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        hidden = model.model(tokens, attention_mask=mask, position_ids=position).last_hidden_state
    drawn_logps = drawn.logps(tokens[:, 4:])
    targets = tokens[:, 4:].masked_fill(drawn_logps == -torch.inf, -100)  # padding
    head = hl.Head(model.lm_head.weight, logit_scale=model.logit_scale, temperature=0.8)
    batch = hl.Batch(targets, support_ids=drawn.support_ids)
    got = hl.head_stats(hidden[:, 3:-1], head, batch).logp
    scored = targets != -100
    torch.testing.assert_close(got[scored], drawn_logps[scored], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_beams": 2}, "beam_search .*num_beams=2"),
        ({"num_beams": 2, "do_sample": True}, "num_beams=2"),
        ({"prompt_lookup_num_tokens": 2}, "assisted_generation .*prompt_lookup=2"),
    ],
)
def test_decoding_that_samples_no_softmax_is_refused(options: dict[str, Any], match: str) -> None:
    model = load(llama())
    with record_support(model) as drawn, pytest.raises(ValueError, match=match):
        generate(model, **options)
    with pytest.raises(RuntimeError, match="no generate"):
        drawn.logps(torch.zeros(1, 1).long())


def test_an_assistant_is_refused() -> None:
    model = load(llama())
    with record_support(model), pytest.raises(ValueError, match="assisted_generation"):
        model.generate(input_ids=PROMPTS[1:2], assistant_model=load(llama()), max_new_tokens=3)


def test_continuous_batching_is_refused() -> None:
    model = load(llama())
    with record_support(model), pytest.raises(ValueError, match="generate_batch"):
        model._get_logits_processor(model.generation_config)


def test_wrong_tokens_and_models_are_named() -> None:
    model = load(llama())
    with record_support(model) as drawn:
        tokens = generate(model, **FILTERED).sequences[:, 4:]
    with pytest.raises(ValueError, match=r"tokens: got shape \(3, 8\), want \(3, 9\)"):
        drawn.logps(tokens[:, 1:])
    with pytest.raises(TypeError, match=r"tokens: got torch.float32, want integers"):
        drawn.logps(tokens.float())
    other = tokens.clone()
    other[1, 2] += 1
    with pytest.raises(ValueError, match=r"tokens: got \d+ at row 1, column 2, where \d+ was"):
        drawn.logps(other)
    with pytest.raises(TypeError, match="model: got Linear"), record_support(nn.Linear(2, 2)):
        pass


def test_it_keeps_pairs_and_the_scores_of_one_step() -> None:
    """`SupportRecorder` stores the ids that the sampler kept, and the scores of one step only.

    If the sampler keeps many ids for one token, the recorder still stores no tensor that is padded
    to this number of ids for all tokens.
    """
    rows, columns, vocabulary = 64, 400, 2001
    recorder = SupportRecorder()
    tokens = torch.zeros(rows, 1 + columns, dtype=torch.int64)
    largest = 0
    for step in range(columns):
        scores = torch.full((rows, vocabulary), -torch.inf)
        scores[:, torch.randperm(vocabulary - 1)[:7]] = 0.0
        scores[:, 0] = 0
        if step == 5:
            scores[9, 1:] = 0
            scores[9, 3] = -torch.inf
        recorder(tokens[:, : 1 + step], scores)
        del scores
        alive = {t.untyped_storage().data_ptr(): t.nbytes for t in tensors_of(recorder)}
        largest = max(largest, sum(alive.values()))
    recorder._end(tokens)
    assert recorder.sets is not None
    held = recorder.sets.ids.nbytes + recorder.sets.counts.nbytes
    pairs = rows * columns * 8 + vocabulary
    assert held < 4 * (pairs + rows * columns) + 1 and recorder.sets.ids.dtype == torch.int32
    assert largest < held + 4 * rows * columns + 3 * 4 * rows * vocabulary
    assert recorder.support_ids.shape == (rows, columns, 2000)


def tensors_of(recorder: Any) -> list[Tensor]:
    steps = [t for step in recorder._steps for t in step]
    return [*steps, *recorder._step_logps, recorder._scores]


def test_the_tiny_model_has_the_expected_vocabulary() -> None:
    assert load(llama()).config.vocab_size == VOCABULARY
