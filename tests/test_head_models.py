"""`Head.of_model` reads the logit formula of each Hugging Face model family."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headloss.head.head import Head
from headloss.head.reading import FAMILIES

transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "use_cache": False,
    # Logit soft caps and scales, which only some model families read; all change the logits a lot.
    "final_logit_softcapping": 2.0,
    "logits_soft_cap": 2.0,
    "logits_scaling": 3.0,
    "lm_head_multiplier": 0.3,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    # latent and linear attention
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LATENT = {"head_dim": 4}
SPARSE = {"head_dim": 4, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
PER_LAYER = {"vocab_size_per_layer_input": 37, "hidden_size_per_layer_input": 4}
# Config arguments that a single model family needs in addition; None removes an argument that the
# family does not accept.
SPECIAL: dict[str, dict] = {
    "deepseek_v3": LATENT,
    "deepseek_v32": SPARSE,
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 4},
    "gemma3n_text": {
        **PER_LAYER,
        "num_kv_shared_layers": 0,
        "laurel_rank": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma4_text": {**PER_LAYER, "global_head_dim": 8},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": SPARSE,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "llama4_text": {"intermediate_size_mlp": 16},
    "mimo_v2_flash": {"num_key_value_heads": 1},
    "minicpm3": {**LATENT, "logits_scaling": None, "dim_model_base": 8},
    "opt": {"ffn_dim": 16, "word_embed_proj_dim": 16},
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR,
    "xglm": {"ffn_dim": 16},
}
SOFT_CAPPED = "gemma2 gemma3_text gemma3n_text gemma4_text nanochat recurrent_gemma vaultgemma"
DIVIDED = "granite granite_swa granitemoe granitemoe_swa granitemoeshared"
TRANSFORMS = {  # (soft cap, logit scale)
    **dict.fromkeys(SOFT_CAPPED.split(), (2.0, 1.0)),
    **dict.fromkeys(["cohere", "cohere2", "cohere2_moe"], (None, 0.0625)),
    **dict.fromkeys(DIVIDED.split(), (None, 1 / 3)),
    "minicpm3": (None, 0.5),
    "hyperclovax": (None, 3.0),
    "falcon_h1": (None, 0.3),
}


def tiny(model_type: str, **changes) -> nn.Module:
    settings = {**TINY, **SPECIAL.get(model_type, {}), **changes}
    config = transformers.AutoConfig.for_model(
        model_type, **{name: value for name, value in settings.items() if value is not None}
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    head = model.get_output_embeddings()
    with torch.no_grad():  # logits of order 10 make a missing soft cap or scale visible
        head.weight.normal_()
        if head.bias is not None:
            head.bias.normal_()
    return model


@torch.no_grad()
def hidden_and_logits(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(2, 37, (1, 5), generator=torch.Generator().manual_seed(1))
    base = model.base_model if model.base_model is not model else model.model
    hidden = base(input_ids=ids, use_cache=False)[0]
    return hidden, model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_family(model_type):
    model = tiny(model_type)
    head = Head.of_model(model)
    hidden, logits = hidden_and_logits(model)
    assert head.weight is model.get_output_embeddings().weight
    softcap, scale = TRANSFORMS.get(model_type, (None, 1.0))
    assert head.softcap == softcap
    assert head.logit_scale == pytest.approx(scale)
    with torch.no_grad():
        torch.testing.assert_close(head.logits(hidden), logits, rtol=1e-5, atol=1e-5)


def test_no_soft_cap_in_the_config():
    head = Head.of_model(tiny("gemma3_text", final_logit_softcapping=None))
    assert head.softcap is None


def test_overrides_win():
    head = Head.of_model(tiny("gemma2"), softcap=7.0, temperature=0.5, vocab_size=30)
    assert (head.softcap, head.temperature, head.vocabulary) == (7.0, 0.5, 30)


def test_wrapped_models():
    model = tiny("llama")
    assert Head.of_model(torch.compile(model)).weight is model.lm_head.weight
    assert Head.of_model(nn.DataParallel(model)).weight is model.lm_head.weight


def test_peft_model():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(tiny("cohere", tie_word_embeddings=False), config)
    hidden, logits = hidden_and_logits(model.get_base_model())
    head = Head.of_model(model)
    assert len(head.lora) == 1 and head.logit_scale == 0.0625
    torch.testing.assert_close(head.logits(hidden), logits, rtol=1e-5, atol=1e-5)


def test_unknown_family():
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
    )
    with pytest.raises(ValueError, match=r"BertLMHeadModel of model_type 'bert'.*softcap=\.\.\."):
        Head.of_model(transformers.BertLMHeadModel(config))
    with pytest.raises(ValueError, match="got Linear of model_type None"):
        Head.of_model(nn.Linear(2, 2))


def test_model_without_a_head():
    with pytest.raises(ValueError, match="LlamaModel without output embeddings"):
        Head.of_model(tiny("llama").model)
