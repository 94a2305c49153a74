"""Comparison of Megatron-Core's `GPTModel` with and without headloss's processor, run on every
rank.

The models' output layers are classes of Megatron-Bridge and Transformer Engine.
"""

from __future__ import annotations

import ast
import importlib
import sys
import typing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import megatron_mtp_ranks as mtp
import torch
from megatron_ranks import (
    V,
    config_of,
    gradients,
    inputs,
    mask_of,
    model_of,
    off,
    parallel,
    worst,
)
from parity import SOURCES
from torch import Tensor

H, RANK = 16, 4
DEV = SOURCES / "megatron-dev"


def bridge() -> Path | None:
    """Return the folder of Megatron-Bridge, None if it is not installed."""
    import megatron

    places = (Path(place) / "bridge" for place in megatron.__path__)
    return next((place for place in places if (place / "peft").is_dir()), None)


def of_bridge(place: str, name: str) -> Any:
    """Import a class of Megatron-Bridge without the package's imports of all models and of
    Transformer Engine, which needs a GPU."""
    package = sys.modules.setdefault("megatron.bridge", ModuleType("megatron.bridge"))
    package.__path__ = [str(bridge())]
    utils = importlib.import_module("megatron.bridge.peft.utils")  # checks for Transformer Engine
    assert utils is not None
    engine: Any = ModuleType("transformer_engine")
    engine.pytorch = SimpleNamespace(ops=SimpleNamespace(Sequential=object))
    added = {"transformer_engine": engine, "transformer_engine.pytorch": engine.pytorch}
    sys.modules.update(added)
    try:
        return getattr(importlib.import_module(f"megatron.bridge.{place}"), name)
    finally:
        for module in added:
            del sys.modules[module]


def of_source(place: str, *names: str) -> Any:
    """Execute only the definitions `names` from the source of a Megatron-Bridge file that cannot
    be imported, and return the last of them."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    file = Path(bridge() or "", *place.split(".")).with_suffix(".py")
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    space: dict[str, Any] = {
        "__name__": f"megatron.bridge.{place}", "torch": torch, "Optional": typing.Optional,
        "ColumnParallelLinear": ColumnParallelLinear,
    }  # fmt: skip
    exec(compile(tree, str(file), "exec"), space)
    return space[names[-1]]


def capped_by(model: Any, kind: tuple[str, ...]) -> None:
    """Add a soft cap to the output layer as Megatron-Bridge does: replace the layer's class by a
    subclass with a mixin and an equal class name."""
    mixin, before = of_source(*kind), type(model.output_layer)
    model.output_layer.__class__ = type(before.__name__, (mixin, before), {})


def with_lora(model: Any, config: Any, frozen: bool, **more: Any) -> None:
    """Put a LoRA of Megatron-Bridge on the output layer, with nonzero factors."""
    linear = model.output_layer
    torch.manual_seed(5)
    given = {
        "dim": RANK, "alpha": 8, "base_linear_name": "output_layer", "activation": "identity",
        "row_init_method": "normal", "disable_sequence_parallel_comm": not config.sequence_parallel,
    }  # fmt: skip
    adapter = of_bridge("peft.utils", "ParallelLinearAdapter")(
        H, linear.output_size, model_parallel_config=config, **{**given, **more}
    )
    model.output_layer = of_bridge("peft.lora_layers", "LoRALinear")(linear, adapter)
    linear.weight.requires_grad_(not frozen)


def both(model: Any) -> dict[str, float]:
    """Compare losses and gradients of a Megatron model with and without headloss's output
    processor."""
    from headloss.integrations.megatron import TokenLosses

    mask, found = mask_of(), []
    for processor in (None, TokenLosses()):
        losses = model(**inputs(), loss_mask=mask, output_processor=processor)
        (3 * (losses * mask).sum() / mask.sum()).backward()
        found.append((losses.detach() * mask, gradients(model)))
    return {"loss": off(found[1][0], found[0][0]), "gradient": worst(found[1][1], found[0][1])}


# ---------------------------------------------------------------------- further layer classes


def on_dev() -> None:
    """Use Megatron's dev branch in place of the installed release, in this process."""
    sys.path.insert(0, str(DEV))


def of_dev(size: int, spread: bool, tied: bool) -> dict[str, float]:
    """Compare Megatron with headloss on Megatron's dev branch, whose output layer computes the loss
    itself."""
    parallel(size)
    model = model_of(config_of(size, sequence_parallel=spread), tied)
    assert type(model.output_layer).__name__ == "LinearCrossEntropyModule"
    return both(model)


def of_another_class(spread: bool) -> dict[str, Any]:
    """Return, for each custom output layer, the loss difference between headloss and the model, or
    headloss's error text."""
    from headloss.integrations.megatron import TokenLosses

    parallel(2)
    config = config_of(2, sequence_parallel=spread)
    changes: dict[str, Any] = {
        "alike": lambda x: x,
        "scaled": lambda x: 0.9 * x,
        "capped": lambda x: 50 * (x / 50).tanh(),
        "none": lambda x: x.missing,
    }
    found: dict[str, Any] = {}
    for name, change in changes.items():
        model = model_of(config)
        layer = model.output_layer
        forward = type(layer).forward

        def changed(
            self: Any, x: Tensor, weight: Any = None, runtime_gather_output: Any = None,
            change: Any = change, forward: Any = forward,
        ) -> Any:  # fmt: skip
            logits, bias = forward(self, x, weight, runtime_gather_output)
            return change(logits), bias

        layer.__class__ = type("Fork", (type(layer),), {"forward": changed})
        try:
            model(**inputs(), output_processor=TokenLosses())
            found[name] = max(both(model).values())
        except TypeError as error:
            found[name] = str(error)
    return found


# ---------------------------------------------------------------------- Megatron-Bridge


def lora(size: int, spread: bool, frozen: bool) -> dict[str, float]:
    """Compare a model whose output layer has Megatron-Bridge's LoRA, with and without headloss."""
    parallel(size)
    config = config_of(size, sequence_parallel=spread)
    model = model_of(config)
    with_lora(model, config, frozen)
    names = [n for n, p in model.named_parameters() if p.requires_grad and "output_layer" in n]
    assert len(names) == 3 - frozen, names
    found = both(model)
    model.output_layer.disable_adapter_layers()
    return {**found, "disabled": of_losses(model)}


def of_losses(model: Any) -> float:
    """Return the difference between the model's token losses with and without headloss, in a
    forward pass without gradients."""
    from headloss.integrations.megatron import TokenLosses

    with torch.no_grad():
        want, got = (model(**inputs(), output_processor=p) for p in (None, TokenLosses()))
    return off(got, want)


def the_merged_weight_loses_a_gradient() -> bool:
    """Check that a backward pass through the LoRA layer's merged `weight` leaves LoRA factor A
    without a gradient, so that headloss cannot read the merged weight."""
    parallel(2)
    config = config_of(2)
    model = model_of(config)
    with_lora(model, config, frozen=True)
    layer = model.output_layer
    layer.weight.square().sum().backward()
    into, out = layer.adapter.linear_in.weight, layer.adapter.linear_out.weight
    return into.grad is None and out.grad is not None


def lora_and_depths() -> dict[str, float]:
    """Compare multi-token prediction with a LoRA on the output layer, with and without headloss."""
    parallel(2)
    config = mtp.mtp_config(2, sequence_parallel=True)
    model = mtp.model_of(config)
    with_lora(model, config, frozen=True)
    mask = mask_of()

    def forward(model: Any, processor: Any) -> Tensor:
        return model(**mtp.inputs(), loss_mask=mask) * mask / mask.sum()

    return mtp.both(model, forward)


def softcap(tied: bool, kind: tuple[str, ...]) -> dict[str, float]:
    """Compare a model whose output layer has a soft cap, with and without headloss."""
    parallel(2)
    config = config_of(2, init_method_std=0.5)
    config.final_logit_softcapping = 1.5
    model = model_of(config, tied)
    capped_by(model, kind)
    found = both(model)
    config.final_logit_softcapping = None
    return {**found, "no cap": of_losses(model)}


# ---------------------------------------------------------------------- Transformer Engine


def mxfp8_layer(main_grad: bool) -> dict[str, float]:
    """Compare the loss of Megatron's output layer with that of a stub that has the same weight and
    the attributes of Transformer Engine's layer."""
    from headloss.integrations.megatron import TokenLosses

    def forward(*args: Any) -> None:
        raise AssertionError("it is not called")

    name = "TELMHeadColumnParallelLinear"
    forward.__module__ = "megatron.core.extensions.transformer_engine"
    forward.__qualname__ = f"{name}.forward"
    parallel(2)
    model = model_of(config_of(2))
    mask, found, layer = mask_of(), [], model.output_layer
    for ours in (False, True):
        if ours:
            layer.__class__ = type(name, (type(layer),), {"forward": forward})
            del layer.gradient_accumulation_fusion, layer.bias
            layer.bias, layer.fuse_wgrad_accumulation = torch.empty(0), main_grad
            if main_grad:
                layer.weight.main_grad = torch.zeros(V // 2, H)
        losses = model(
            **inputs(), loss_mask=mask, output_processor=TokenLosses() if ours else None
        )
        (losses * mask).sum().backward()
        if ours and main_grad:
            assert layer.weight.grad is None
            layer.weight.grad = layer.weight.main_grad
        found.append((losses.detach() * mask, gradients(model)))
    return {"loss": off(found[1][0], found[0][0]), "gradient": worst(found[1][1], found[0][1])}


class Quantised(Tensor):
    """A tensor subclass defined outside of torch, like the quantised parameters of Transformer
    Engine."""


def refusals() -> dict[str, str]:
    """Return headloss's error text for each unsupported output layer."""
    from headloss.integrations.megatron import TokenLosses

    parallel(2)
    found: dict[str, str] = {}

    def said(name: str, change: Any) -> None:
        config = config_of(2)
        model = model_of(config)
        change(model, config)
        try:
            model(**inputs(), output_processor=TokenLosses())
            found[name] = "nothing"
        except (TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    def quantised(model: Any, config: Any) -> None:
        weight = model.output_layer.weight.data.as_subclass(Quantised)
        model.output_layer._parameters["weight"] = torch.nn.Parameter(weight)

    said("fp8", quantised)
    if bridge() is None:
        return found
    said("post", lambda m, c: with_lora(m, c, True, dropout=0.1, dropout_position="post"))
    said("activation", lambda m, c: with_lora(m, c, True, activation="relu"))

    def capped(model: Any, config: Any) -> None:
        config.final_logit_softcapping, config.use_mup = 2.0, True
        capped_by(model, CAPS[1])

    def other(model: Any, config: Any) -> None:
        with_lora(model, config, True)
        model.output_layer.adapter = torch.nn.Identity()

    said("mup", capped)
    said("adapter", other)
    return found


CAPS = [
    ("models.gemma.gemma2_provider", "logit_softcapping", "Gemma2OutputLayer"),
    ("models.gemma.modeling_gemma4", "_logit_softcapping", "Gemma4OutputLayer"),
]
