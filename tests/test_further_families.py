"""Further Transformers model families work with three calls each, including encoder-decoders and
vision models."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from test_head_models import TINY, tiny

import headloss as hl
from headloss.head.reading import FAMILIES

transformers = pytest.importorskip("transformers")
from headloss.integrations.transformers import apply  # noqa: E402

QUICK = ("jamba", "llava", "paligemma", "t5", "bart", "bert")
CAUSAL = """
    deepseek_v4 exaone_moe hy_v3 hy_v4 jamba kimi_linear laguna nemotron_h solar_open
"""
VISION = """
    aya_vision cohere2_vision gemma3 got_ocr2 idefics3 internvl llava mistral3 paligemma qwen3_vl
    smolvlm
"""
EYES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8, "depth": 2, "embed_dim": 16, "num_heads": 2,
    "out_hidden_size": 16,
}  # fmt: skip


def tiny_with_eyes(model_type: str) -> Any:
    kind = transformers.CONFIG_MAPPING[model_type]
    parts = {part: {**(TINY if "text" in part else EYES)} for part in kind.sub_configs}
    ids = {} if model_type != "llava" else {"image_token_id": 36, "image_token_index": 36}
    torch.manual_seed(0)
    config = kind(**parts, **ids)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval().float()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
    return model


SEQ2SEQ = """
    bart bigbird_pegasus blenderbot blenderbot-small led longt5 m2m_100 marian mbart mt5 mvp
    nllb-moe pegasus pegasus_x plbart switch_transformers t5 umt5
"""
MASKED = "bert distilbert electra roberta"
LAYERS = ("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers")
HEADS = ("encoder_attention_heads", "decoder_attention_heads", "num_heads")
WIDTHS = ("d_model", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff")
TWO_STACKS = {
    **TINY, **dict.fromkeys(LAYERS, 1), **dict.fromkeys(HEADS, 2), **dict.fromkeys(WIDTHS, 16),
    "d_kv": 8, "decoder_start_token_id": 0,
}  # fmt: skip


def made(model_type: str) -> Any:
    if model_type in CAUSAL.split():
        return tiny(model_type)
    if model_type in VISION.split():
        return tiny_with_eyes(model_type)
    config = transformers.CONFIG_MAPPING[model_type](**TWO_STACKS)
    kind = transformers.AutoModelForMaskedLM
    if model_type in SEQ2SEQ.split():
        kind = transformers.AutoModelForSeq2SeqLM
    torch.manual_seed(0)
    model = kind.from_config(config).eval().float()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
    return model


def steps(model: Any, **inputs: Any) -> list[tuple[Any, ...]]:
    """Return loss, logits and gradients of three steps, the last with a token count."""
    optimizer, outcomes = torch.optim.SGD(model.parameters(), 1e-3), []
    kinds = {p.kind for p in inspect.signature(model.forward).parameters.values()}
    counts = inspect.Parameter.VAR_KEYWORD in kinds
    for index in range(3):
        ids = torch.randint(2, 36, (2, 7), generator=torch.Generator().manual_seed(index))
        labels = ids.masked_fill(torch.arange(7) < torch.tensor([[3], [0]]), -100)
        call = {"input_ids": ids, "labels": labels, **inputs}
        if index == 2 and counts:
            call["num_items_in_batch"] = torch.tensor(11)
        optimizer.zero_grad()
        out = model(**call)
        out.loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        outcomes.append((out.loss.detach(), out.logits.detach() + 0, gradients))
        optimizer.step()
    return outcomes


def assert_same_steps(model: Any, monkeypatch: Any, fused: bool = True, **inputs: Any) -> None:
    twin, losses = copy.deepcopy(model), []
    head_loss = hl.head_loss
    seam = "headloss.integrations.transformers.call.head_loss"
    monkeypatch.setattr(seam, lambda *args: losses.append(1) or head_loss(*args))
    want = steps(model, **inputs)
    with apply(twin):
        got = steps(twin, **inputs)
    assert len(losses) == 3 * fused
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine[:2], theirs[:2], rtol=1e-4, atol=1e-5)
        assert mine[2].keys() == theirs[2].keys()
        scale = max(float(g.abs().max()) for g in theirs[2].values())
        for name, gradient in theirs[2].items():
            torch.testing.assert_close(mine[2][name], gradient, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize(
    "model_type",
    [
        f if f in QUICK else pytest.param(f, marks=pytest.mark.slow)
        for f in (CAUSAL + VISION + SEQ2SEQ + MASKED).split()
    ],
)
def test_family(model_type: str, monkeypatch: Any) -> None:
    assert model_type not in FAMILIES
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("this release of Transformers does not have it yet")
    assert_same_steps(made(model_type), monkeypatch)


def test_images(monkeypatch: Any) -> None:
    model = made("llava")
    ids = torch.arange(7).expand(2, -1).clone() + 2
    ids[:, 1:5] = model.config.image_token_id
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    embeddings = model.get_input_embeddings().weight
    assert model.config.image_token_id < len(embeddings)
    assert_same_steps(model, monkeypatch, input_ids=ids, pixel_values=pixels)


def test_z_loss_of_its_own(monkeypatch: Any) -> None:
    settings = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4}
    model = tiny("bamba", z_loss_coefficient=0.1, mamba_expand=2, **settings)
    assert_same_steps(model.train(), monkeypatch)


def test_terms_of_an_encoder_decoder() -> None:
    """Terms of an encoder-decoder use unshifted labels, independent of the encoder's mask."""
    model = made("t5")
    ids = torch.randint(2, 36, (2, 7), generator=torch.Generator().manual_seed(0))
    labels, mask = ids[:, :5].masked_fill(ids[:, :5] > 30, -100), torch.ones_like(ids)
    out = model(input_ids=ids, labels=labels, attention_mask=mask)
    logps = -torch.nn.functional.cross_entropy(
        out.logits.transpose(1, 2), labels, reduction="none", label_smoothing=0.2
    )
    want = -(logps.sum(1) / (labels != -100).sum(1)).mean()
    terms = hl.cross_entropy(label_smoothing=0.2).over("sequence_mean")
    with apply(model, terms) as applied:
        got = model(input_ids=ids, labels=labels, attention_mask=mask)
        counted = applied.batch_of({"labels": labels, "attention_mask": mask}, labels.device)
    torch.testing.assert_close(got.loss, want)
    assert torch.equal(counted.targets, labels)
