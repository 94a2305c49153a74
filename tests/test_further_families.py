"""Families of Transformers that are in no table: `apply` finds out what they do to their logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_head_models import TINY, tiny

from headloss.head.reading import FAMILIES
from headloss.integrations.families import learn

transformers = pytest.importorskip("transformers")
from headloss.integrations.transformers import apply  # noqa: E402

QUICK = ("jamba", "solar_open", "llava", "paligemma")
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
    parts = {part: TINY if "text" in part else EYES for part in kind.sub_configs}
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(kind(**parts)).eval().float()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
    return model


@pytest.mark.parametrize(
    "model_type",
    [
        f if f in QUICK else pytest.param(f, marks=pytest.mark.slow)
        for f in (CAUSAL + VISION).split()
    ],
)
def test_family(model_type: str) -> None:
    """Text alone: the model's own loss and gradients."""
    assert model_type not in FAMILIES
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("this release of Transformers does not have it yet")
    model = tiny(model_type) if model_type in CAUSAL.split() else tiny_with_eyes(model_type)
    softcap = 2.0 if model_type == "paligemma" else None
    assert learn(model, "head") == {"softcap": softcap, "logit_scale": 1.0}
    ids = torch.randint(2, 37, (2, 7), generator=torch.Generator().manual_seed(0))
    found = []
    for applied in (False, True):
        if applied:
            apply(model)
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=11).loss
        loss.backward()
        found.append((loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (want, wanted), (got, gradients) = found
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6)
    assert gradients.keys() == wanted.keys()
    scale = max(float(g.abs().max()) for g in wanted.values())
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=2e-5, atol=3e-6 * scale)
