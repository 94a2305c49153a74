"""Readers of a head from modules of torch.nn, PEFT and Hugging Face.

`read_module` and `read_model` return arguments of `Head`, with arguments of `Lora` for each
adapter. The arguments are read from a module only if the module's forward is known to compute the
formula of `Head`; any other module raises an error with the module's name. PEFT and transformers
are not imported: layers are recognized by the name of the layer's forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

Fields = dict[str, Any]  # Arguments of `Head` or of `Lora`.

# Wrappers whose output equals the wrapped module's, and the name of the attribute that holds the
# wrapped module.
WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside DDP, FSDP, DeepSpeed, `torch.compile` and checkpointing wrappers."""
    while (inner := WRAPPERS.get(type(module).__name__)) is not None:
        module = getattr(module, inner)
    return module


def causal_of(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers and inside a PEFT model."""
    model = unwrap(model)
    return unwrap(model.get_base_model()) if hasattr(model, "get_base_model") else model  # type: ignore[operator]


# ---------------------------------------------------------------------- modules


def read_module(module: nn.Module) -> Fields:
    """Return weight, bias and adapters of a module that maps hidden states to raw logits."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: got {type(module).__name__}, want an nn.Module")
    module = unwrap(module)
    if hasattr(module, "get_output_embeddings"):
        raise _unknown(module, "headloss.Head.of_model reads the head of a language model")
    if "modules_to_save" in module._modules and "original_module" in module._modules:
        return read_module(_saved_module(module))
    if "token_adapter" in module._modules:
        raise _unknown(module, "trainable tokens replace rows of the weight; merge them first")
    _check_unpatched(module)
    if "base_layer" in module._modules:
        return _read_tuner(module)
    weight = getattr(module, "weight", None)
    flattened = weight is not None and weight.dim() == 1 and not hasattr(weight, "ds_id")
    if isinstance(module, nn.Embedding | nn.Linear) and flattened:
        raise ValueError(
            f"weight: got shape {tuple(module.weight.shape)}, a piece of what FSDP1 "
            "(FullyShardedDataParallel) has flattened, want [V, H]: leave the head in the unit of "
            "the root, whose forward has it whole, or shard with FSDP2 (fully_shard)"
        )
    if isinstance(module, nn.Embedding):
        return {"weight": module.weight}
    # A subclass may override forward, for example with a quantised product.
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return {"weight": module.weight, "bias": module.bias}
    raise _unknown(module)


def _unknown(module: nn.Module, why: str = "") -> TypeError:
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    return TypeError(
        f"module: got {name}, want nn.Linear, nn.Embedding or LoRA over one of them"
        + (f": {why}" if why else "; where its logits are linear, pass headloss.Head(weight, bias)")
    )


def _check_unpatched(module: nn.Module) -> None:
    """TypeError for hooks and patches, which may change the module's output in unknown ways."""
    if parametrize.is_parametrized(module):
        names = ", ".join(module.parametrizations.keys())  # type: ignore[union-attr]
        raise _unknown(
            module, f"torch.nn.utils.parametrize computes its {names}; remove the parametrization"
        )
    # accelerate's dispatch replaces `forward` by a function that only moves inputs to the device of
    # the layer's weight.
    replaced = vars(module).get("forward")
    if "tensor_parallel" in str(getattr(replaced, "__module__", "")):
        raise _unknown(
            module,
            "transformers' tensor parallelism (tp_plan) has replaced its forward; pass this rank's "
            "rows, headloss.Head(module.weight.to_local(), vocab_group=mesh.get_group())",
        )
    if replaced is not None and not hasattr(module, "_hf_hook"):
        raise _unknown(module, "its forward has been replaced on the instance")
    if hasattr(module, "_hf_hook") and getattr(module.weight, "is_meta", False):
        raise _unknown(module, "accelerate's offload holds its weight; leave the head on a device")
    if isinstance(module, nn.Embedding):
        return  # Hooks of an embedding's lookup do not affect the head's matmul.
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    hooks += [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]
    for hook in hooks:
        home = getattr(hook, "__module__", None) or type(hook).__module__
        # Ignore hooks that shard the weight (FSDP, DeepSpeed): a sharded weight is detected
        # elsewhere, as a DTensor or a ZeRO-3 parameter.
        if not home.startswith(("torch.distributed.", "deepspeed.")):
            name = f"{home}.{getattr(hook, '__qualname__', type(hook).__name__)}"
            raise _unknown(module, f"its backward or forward hook {name} would not run; remove it")


# ---------------------------------------------------------------------- PEFT


def _saved_module(wrapper: Any) -> nn.Module:
    """Return the active adapter's copy of a module in `modules_to_save`; return the original module
    if adapters are disabled or have no copy."""
    saved = wrapper.modules_to_save
    active = wrapper.active_adapters
    if wrapper.disable_adapters or not active or any(name not in saved for name in active):
        return wrapper.original_module
    return saved[active[0]]


def _read_tuner(layer: Any) -> Fields:
    """Return the fields of a PEFT layer: the base layer's, and a low-rank part for each active
    adapter."""
    if layer.disable_adapters and layer.merged:
        raise ValueError(
            f"module: got a {type(layer).__qualname__} whose merged adapters are disabled, want "
            "them unmerged; call unmerge_adapter() first"
        )
    if layer.disable_adapters or layer.merged:
        return read_module(layer.base_layer)
    forward = type(layer).forward
    reader = LORA_KINDS.get(f"{forward.__module__}.{forward.__qualname__}")
    if reader is None:
        raise _unknown(layer, "this adapter is not a plain LoRA; merge or disable it")
    factors, read = reader
    adapters = [name for name in layer.active_adapters if name in getattr(layer, factors)]
    for name in adapters:
        if name in layer.lora_variant:
            variant = type(layer.lora_variant[name]).__name__
            raise _unknown(layer, f"adapter {name!r} is a {variant} (DoRA and its like); merge it")
    return read_module(layer.base_layer) | {"lora": tuple(read(layer, n) for n in adapters)}


def _read_lora(layer: Any, name: str) -> Fields:
    if layer.fan_in_fan_out:
        raise _unknown(layer, "fan_in_fan_out: its weight is stored as [H, V]")
    up = read_module(layer.lora_B[name])
    if up["bias"] is not None:
        raise _unknown(layer, f"adapter {name!r} has a bias (lora_bias=True); merge it")
    dropout = layer.lora_dropout[name]
    if not isinstance(dropout, nn.Dropout | nn.Identity):
        raise _unknown(layer, f"adapter {name!r} has a {type(dropout).__name__} for dropout")
    p = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
    a = read_module(layer.lora_A[name])["weight"]
    return {"a": a, "b": up["weight"], "scaling": layer.scaling[name], "dropout": p}


def _read_embedding_lora(layer: Any, name: str) -> Fields:
    """Return the fields of an embedding's adapter: row v of the embedding gains scaling * A[:, v] @
    B.T, with A [r, V] and B [H, r]."""
    a = layer.lora_embedding_B[name].T
    b = layer.lora_embedding_A[name].T
    return {"a": a, "b": b, "scaling": layer.scaling[name]}


# Supported PEFT layers: the key is the qualified name of a layer's forward, and the value is the
# attribute that holds the layer's adapters, with the function that reads one adapter.
LORA_KINDS = {
    "peft.tuners.lora.layer.Linear.forward": ("lora_A", _read_lora),
    "peft.tuners.lora.layer.Embedding.forward": ("lora_embedding_A", _read_embedding_lora),
}


# ---------------------------------------------------------------------- Hugging Face models

PLAIN = """
    afmoe apertus arcee bitnet bloom cwm deepseek_v2 deepseek_v3 deepseek_v32 diffllama doge dots1
    ernie4_5 ernie4_5_moe exaone4 falcon falcon_mamba flex_olmo gemma glm glm4 glm4_moe
    glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj helium
    hunyuan_v1_dense hunyuan_v1_moe jetmoe lfm2 llama llama4_text mamba mimo_v2_flash minimax
    minimax_m2 ministral ministral3 mistral mixtral mpt nemotron olmo olmo2 olmo3 olmo_hybrid olmoe
    opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe
    qwen3_next rwkv seed_oss smollm3 stablelm starcoder2 xglm
"""
SOFT_CAPPED = "gemma2 gemma3_text gemma3n_text gemma4_text nanochat vaultgemma"
SCALED = "cohere cohere2 cohere2_moe"
DIVIDED = "granite granite_swa granitemoe granitemoe_swa granitemoeshared minicpm3"

# model_type -> transform of the model's raw logits, read from the model's config.
FAMILIES: dict[str, Callable[[Any], Fields]] = {
    name: read
    for names, read in (
        (PLAIN, lambda config: {}),
        (SOFT_CAPPED, lambda config: {"softcap": config.final_logit_softcapping}),
        ("recurrent_gemma", lambda config: {"softcap": config.logits_soft_cap}),
        (SCALED, lambda config: {"logit_scale": config.logit_scale}),
        (DIVIDED, lambda config: {"logit_scale": 1 / config.logits_scaling}),
        ("hyperclovax", lambda config: {"logit_scale": config.logits_scaling}),
        ("falcon_h1", lambda config: {"logit_scale": config.lm_head_multiplier}),
    )
    for name in names.split()
}


def read_model(model: nn.Module, told: bool = False) -> Fields:
    """Return the fields of a `Head` for a causal language model's output embeddings. If `told` is
    True, the caller has passed a soft cap and a logit scale, and the returned fields leave out the
    model's soft cap and logit scale."""
    model = causal_of(model)
    config = getattr(model, "config", None)
    model_type: Any = getattr(config, "model_type", None)
    name = type(model).__name__
    if not told and model_type not in FAMILIES:
        raise ValueError(
            f"model: got {name} of model_type {model_type!r}, which is in no table; say "
            "softcap=... and logit_scale=..., as its forward makes logits of the head's"
        )
    embeddings = getattr(model, "get_output_embeddings", lambda: None)()
    if embeddings is None:
        raise ValueError(f"model: got {name} without output embeddings, want a causal model")
    return {**read_module(embeddings), **({} if told else FAMILIES[model_type](config))}
