"""Tiny random models of Transformers' families, each with a configuration of small sizes.

A model family is a name in `FAMILIES`. `SIZES` holds small values of configuration arguments for
all model families; `CHANGES` and `INPUTS` hold further arguments and inputs of some families.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any

import torch
import transformers
from test_head_models import SPECIAL, TINY
from torch import Tensor

AUTO = {
    "causal": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "masked": "AutoModelForMaskedLM",
    "vision": "AutoModelForImageTextToText",
    "speech": "AutoModelForSpeechSeq2Seq",
}
FAMILIES = {
    "causal": """
        afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam bert
        bert-generation big_bird bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom
        camembert codegen cohere cohere2 cohere2_moe cohere_compass_text cpmant ctrl cwm
        data2vec-text dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1
        electra emu3 ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba
        flex_olmo flint fuyu gemma gemma2 gemma3_text gemma3n_text gemma4 gemma4_text
        gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode
        gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe
        granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense
        hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_text inkling_text internlm3 jais2 jamba
        jetmoe kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm3 llama llama4_text longcat_flash
        mamba mamba2 marian mbart megatron-bert mellum mimo_v2_flash minicpm3 minimax minimax_m2
        minimax_m3_vl_text ministral ministral3 mistral mixtral mllama modernbert-decoder moshi
        moss_transcribe_diarize mpt mvp nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid
        olmoe openai-gpt opt pegasus persimmon phi phi3 phi4_multimodal phimoe plbart prophetnet
        qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma
        reformer rembert roberta roberta-prelayernorm roc_bert roformer rwkv seed_oss smollm3
        solar_open stablelm starcoder2 trocr vaultgemma whisper xglm xlm xlm-roberta
        xlm-roberta-xl xlnet xlstm xmod youtu
    """,
    "seq2seq": """
        audioflamingo3 bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt
        glmasr granite_speech granite_speech_plus led longt5 m2m_100 marian mbart mt5
        musicflamingo mvp nllb-moe pegasus pegasus_x plbart prophetnet qwen2_audio qwen3_asr
        seamless_m4t seamless_m4t_v2 switch_transformers t5 t5gemma t5gemma2 umt5 voxtral
    """,
    "masked": """
        albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert
        electra ernie esm esmc eurobert flaubert fnet funnel gte ibert jina_embeddings_v3 layoutlm
        longformer luke megatron-bert mobilebert modernbert modernvbert mpnet mra neomme
        nomic_bert nystromformer reformer rembert roberta roberta-prelayernorm roc_bert roformer
        squeezebert tapas ultrabert ultravbert xlm-roberta xlm-roberta-xl xmod yoso
    """,
    "vision": """
        aria aya_vision blip-2 chameleon cohere2_vision cohere_compass cosmos3_omni deepseek_vl
        exaone4_5 florence2 gemma3 glm46v glm4v glm4v_moe glm_ocr got_ocr2 granite_docling
        hyperclovax_vision_v2 idefics2 idefics3 instructblip internvl kimi_k25 kosmos-2 kosmos-2.5
        lfm2_vl lfm3_vl lighton_ocr llama4 llava llava_next llava_next_video llava_onevision
        minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 mistral4 mistral_large4 mllama
        ovis2 paddleocr_vl paligemma qianfan_ocr qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_5
        qwen3_5_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe smolvlm step3p7 udop
        video_llama_3 video_llava vipllava
    """,
    "speech": """
        canary cohere_asr moonshine pop2piano speech_to_text whisper
    """,
}
# Model families that Transformers 5.23 has in the auto classes of `FAMILIES`, but that are not
# tested, each with the reason.
MISSING = {
    "blip perceiver pi0": "no output embeddings: apply() refuses the model",
    "idefics": "two weights in one head: apply() refuses the model",
    "fast_vlm gemma3n perception_lm": "needs timm",
    "inkling_mm_model": "needs scipy",
    "gpt-sw3 iquestcoder pp_chart2table shieldgemma2 glmga": "the class of another family",
    "vision-encoder-decoder speech-encoder-decoder": "composed of two families of the list",
    "evolla": "no class for its configuration in the auto class",
    "zamba zamba2": "weights tied by layer, which two layers do not have",
    "blt deepseek_vl_hybrid dia dots3_note_text gemma4_unified janus muse_glimmer pix2struct "
    "pp_formulanet unlimited_ocr vibevoice vibevoice_asr": "large with `SIZES` alone",
    "cosmos3_edge deepseek_ocr2 diffusion_gemma dots3_note ernie4_5_vl_moe fun_asr_nano "
    "gemma4_assistant gemma4_unified_assistant glm5_next granite4_vision hunyuan_vl inkling2 "
    "instructblipvideo kyutai_speech_to_text molmo2 moonshine_streaming muse_spark musicgen "
    "musicgen_melody nemo_speechlm nemotron_h_omni qwen4_exp qwen4_exp_text speecht5 "
    "voxtral_realtime zaya": "sizes that depend on each other, or inputs of its own",
}
NAMES = {
    37: "src_vocab_size tgt_vocab_size entity_vocab_size",
    32: "n_positions max_target_positions max_source_positions n_ctx max_seq_len",
    16: """
        d_model n_embd dim hidden_dim embed_dim embedding_size ffn_dim encoder_ffn_dim
        decoder_ffn_dim d_ff n_inner ffn_hidden_size d_inner expert_ffn_hidden_size dff
        decoder_hidden_size encoder_hidden_size out_hidden_size word_embed_proj_dim output_dim
        emb_dim projection_dim image_size intermediate_size_mlp entity_emb_size
        dense_intermediate_size shared_intermediate_size
    """,
    8: """
        d_kv patch_size global_head_dim attention_head_dim expert_intermediate_size
        moe_ffn_hidden_size swa_head_dim linear_head_dim mamba_head_dim chunk_size attention_window
    """,
    4: """
        hidden_size_per_layer_input laurel_rank num_routed_experts index_head_dim index_topk
        mamba_d_state state_size ssm_state_size mamba_num_heads
    """,
    2: """
        n_layer n_layers num_layers encoder_layers decoder_layers depth num_decoder_layers
        num_encoder_layers n_head n_heads num_heads encoder_attention_heads
        decoder_attention_heads top_k moe_top_k num_attn_heads encoder_num_attention_heads
        decoder_num_attention_heads encoder_num_hidden_layers decoder_num_hidden_layers
        num_global_key_value_heads linear_num_heads
    """,
    1: "num_shared_experts moe_num_shared_experts",
    0: "num_kv_shared_layers",
}
SIZES = {name: size for size, names in NAMES.items() for name in names.split()}
SIZES |= {**TINY, "vocab_size_per_layer_input": 37}

LATENT = {"head_dim": 4}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_expand": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
ROPES = {**ROPE, "mrope_section": [1, 1, 2]}
MROPE = {"text_config": {"rope_parameters": ROPES}}
BY_TYPE = {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}
WITH_MROPE = "glm46v glm4v glm4v_moe glm_ocr paddleocr_vl qwen2_5_omni_thinker qwen2_5_vl qwen2_vl"
SEES = {"image_token_id": 36, "image_token_index": 36}
STAGES = {
    "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1], "depths": [1, 1],
    "patch_prenorm": [False, True], "embed_dim": [16, 16], "num_heads": [2, 2],
    "num_groups": [2, 2],
}  # fmt: skip
PROJECTED = dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 16)
CODES = {"base_channels": 32, "resolution": 16, "num_embeddings": 8}
CERTAIN = {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}
# Arguments of a family's configuration in addition to `SIZES`; None leaves an argument out.
CHANGES: dict[str, dict[str, Any]] = {
    **SPECIAL,
    **dict.fromkeys(WITH_MROPE.split(), MROPE),
    "axk1": LATENT,
    "bamba": MAMBA,
    "chameleon": {"vocabulary_map": {"<image>": 5}, "vq_config": CODES},
    "codegen": {"n_head": 4, "rotary_dim": 4},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "florence2": {"vision_config": STAGES, "image_token_id": 36},
    "cohere_compass": {"text_config": BY_TYPE},
    "cohere_compass_text": BY_TYPE,
    "granitemoehybrid": MAMBA,
    "inkling2_text": {"unpadded_vocab_size": 36},  # of 37 columns
    "jamba": {"layer_types": None},
    "kimi_k25": {"text_config": LATENT},
    "kosmos-2": {"latent_query_num": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4": {"vision_config": PROJECTED, "text_config": {"intermediate_size_mlp": 16}},
    "longcat_flash": LATENT,
    "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1, "expand": 2},
    "nemotron_h": {"n_groups": 1},
    "neomme": BY_TYPE,
    "recurrent_gemma": {"layer_types": None},
    # Reformer's layers draw their own seeds, so that dropout would differ between two models.
    "reformer": {"is_decoder": True, "attn_layers": ["local"], "axial_pos_embds": False, **CERTAIN},
    "roc_bert": {"pronunciation_vocab_size": 8, "shape_vocab_size": 8},
    "step3p7": {"text_config": {"sliding_window": 4}},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "youtu": LATENT,
}
PIXELS = {"pixel_values": (2, 3, 16, 16)}
TILES = {"pixel_values": (2, 1, 3, 16, 16)}
SIZED = {**PIXELS, "image_sizes": torch.full((2, 2), 16)}
GRID = {"pixel_values": (8, 3 * 2 * 8 * 8), "image_grid_thw": torch.tensor([[1, 2, 2]] * 2)}
# Families by kind of image input. An image is one token, or four tokens in the families `FOUR`.
SEEING = {
    "aya_vision blip-2 cohere2_vision git got_ocr2 internvl qianfan_ocr step3p7": PIXELS,
    "deepseek_vl llava ovis2 paligemma": PIXELS,
    "idefics3 smolvlm": TILES,
    "lighton_ocr mistral3 mistral_large4": SIZED,
    "exaone4_5 hyperclovax_vision_v2 lfm3_vl minimax_m3_vl qwen2_5_omni_thinker qwen2_5_vl": GRID,
}
# Model families that represent an image by four tokens.
FOUR = {"deepseek_vl", "llava", "ovis2", "paligemma"}
# Model inputs in addition to token ids, by model family: tensors, or shapes of random tensors.
INPUTS: dict[str, dict[str, Any]] = {
    **{name: inputs for names, inputs in SEEING.items() for name in names.split()},
    "canary": {"input_features": (2, 64, 80)},
    "cohere_asr": {"input_features": (2, 64, 80)},
    "instructblip": {**PIXELS, "qformer_input_ids": torch.ones(2, 3, dtype=torch.int64)},
    "kosmos-2": {**PIXELS, "image_embeds_position_mask": torch.arange(7).expand(2, 7) == 1},
    "moonshine": {"input_values": (2, 4000)},
    "speech_to_text": {"input_features": (2, 32, 80)},
    "udop": {"bbox": (2, 7, 4)},
    "whisper": {"input_features": (2, 80, 64)},
}


def config_of(kind: Any, changes: dict[str, Any]) -> Any:
    """Return a configuration of the class `kind`, with the small values in `SIZES` for all
    arguments that `kind` accepts."""
    default: Any = None
    try:
        default = kind()
        names = set(default.to_dict())
    except Exception:  # no default
        names = set()
    names |= set(inspect.signature(kind.__init__).parameters)
    if dataclasses.is_dataclass(kind):
        names |= {field.name for field in dataclasses.fields(kind)}
    aliases = getattr(kind, "attribute_map", None) or {}
    names |= set(aliases)
    settings = {name: size for name, size in SIZES.items() if name in names}
    for alias, name in aliases.items():
        if name in settings:
            settings.pop(alias, None)
    types = list(dict.fromkeys(getattr(default, "layer_types", None) or []))
    if len(types) == 2:
        settings["layer_types"] = types
    if getattr(default, "is_encoder_decoder", False):
        settings["decoder_start_token_id"] = 0
    parts = getattr(kind, "sub_configs", None) or {}
    for part, of_part in parts.items():
        held = getattr(default, part, None)
        of_part = of_part if held is None else type(held)
        if of_part.__name__ != "AutoConfig":
            settings[part] = config_of(of_part, changes.get(part, {})).to_dict()
    settings |= {name: value for name, value in changes.items() if name not in parts}
    return kind(**{name: value for name, value in settings.items() if value is not None})


def tiny_of(auto: str, family: str) -> Any:
    """Return a model in training mode, with logits of order 10."""
    changes = copy.deepcopy(CHANGES.get(family, {}))  # configurations write into dictionaries
    if auto == "masked":
        changes.pop("is_decoder", None)
    if "pixel_values" in INPUTS.get(family, ()):
        changes |= SEES
    config = config_of(transformers.CONFIG_MAPPING[family], changes)
    torch.manual_seed(0)
    model = getattr(transformers, AUTO[auto]).from_config(config).train().float()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
        for name, parameter in model.named_parameters():
            # Models initialise learned query embeddings (`query_tokens`) with 0, where a
            # normalisation layer has a huge gradient.
            if name.endswith("query_tokens"):
                parameter.normal_()
    return model


def inputs_of(model: Any, family: str, index: int) -> dict[str, Tensor]:
    """Return the inputs of a training step: labels with a prompt, and an image in its tokens."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(2, 36, (2, 7), generator=generator)
    labels = ids.masked_fill(torch.arange(7) < torch.tensor([[3], [0]]), -100)
    inputs = dict(INPUTS.get(family, {}))
    if "pixel_values" in inputs and family != "git":
        ids[:, 1 : 5 if family in FOUR else 2] = 36
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            inputs[name] = torch.randn(value, generator=generator)
    call = {"input_ids": ids, "labels": labels, **inputs}
    if "input_ids" not in inspect.signature(model.forward).parameters:
        del call["input_ids"]
    return call
