"""Adapters that subclass or patch a framework's class check the signatures of its methods.

Stubs with real signatures stand for the frameworks; tests of framework code are in
tests/frameworks.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from framework_stubs import (
    new_argument,
    no_notice_yet,  # noqa: F401
    place,
    released,
    renamed_argument,
)

# ---------------------------------------------------------------------- adapters that subclass


def automodel_forward(
    self,
    hidden_states,
    labels,
    lm_weight,
    num_label_tokens=None,
    grad_reduce_group=None,
    loss_weights=None,
):
    raise AssertionError("stock")


def materialize(lm_weight, *, grad_reduce_group=None):
    return lm_weight


def torchtitan_call(self, pred, labels, global_valid_tokens=None, **loss_inputs):
    raise AssertionError("stock")


def megatron_forward(self, input_ids, *, output_processor=None, output_processor_context=None):
    raise AssertionError("stock")


def fake_automodel(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str, str]:
    home = "nemo_automodel.components.loss"
    place(
        monkeypatch,
        f"{home}.linear_ce_base",
        "LinearCrossEntropy",
        type("L", (torch.nn.Module,), {}),
    )
    at = f"{home}.linear_ce_base:LinearCrossEntropy"
    place(monkeypatch, at, "materialize_lm_weight", staticmethod(materialize))
    place(monkeypatch, f"{home}.linear_ce:FusedLinearCrossEntropy", "forward", automodel_forward)
    return lambda m: m.HeadLossCrossEntropy(), "nemo-automodel", "nemo_automodel"


def fake_megatron(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str, str]:
    at = "megatron.core.models.gpt.gpt_model:GPTModel"
    place(monkeypatch, at, "forward", megatron_forward)
    return lambda m: m.TokenLosses(), "megatron-core", "megatron"


def fake_torchtitan(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str, str]:
    from dataclasses import dataclass

    class CrossEntropyLoss:
        pass

    class ChunkedLossWrapper:
        @dataclass(kw_only=True, slots=True)
        class Config:
            num_chunks: int = 8

        def __init__(self, config: Any, *, compile_config: Any = None) -> None:
            self.loss_fn, self.lm_head = CrossEntropyLoss(), None

        def set_lm_head(self, lm_head: Any) -> None:
            self.lm_head = lm_head

        __call__ = torchtitan_call

    home = "torchtitan.components.loss"
    place(monkeypatch, home, "ChunkedLossWrapper", ChunkedLossWrapper)
    place(monkeypatch, home, "CrossEntropyLoss", CrossEntropyLoss)
    place(monkeypatch, "torchtitan.distributed.spmd_types", "spmd_mesh_size", lambda name: 1)
    return lambda m: m.HeadLossWrapper(m.HeadLossWrapper.Config()), "torchtitan", "torchtitan"


def fake_axolotl(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str, str]:
    class BasePlugin:
        def get_input_args(self) -> None: ...

        def post_model_load(self, cfg: Any, model: Any) -> None: ...

    place(monkeypatch, "axolotl.integrations.base", "BasePlugin", BasePlugin)

    def use(module: Any) -> None:
        monkeypatch.setattr(module, "apply", lambda model, terms: None)
        config = SimpleNamespace(headloss=True, headloss_label_smoothing=None, headloss_z_loss=None)
        module.HeadlossPlugin().post_model_load(config, None)

    return use, "axolotl", "axolotl"


FAKES = {f.__name__[5:]: f for f in (fake_automodel, fake_megatron, fake_torchtitan, fake_axolotl)}
BROKEN: dict[tuple[str, str], tuple[str, str, Any, str]] = {
    ("automodel", "a name"): (
        "nemo_automodel.components.loss.linear_ce:FusedLinearCrossEntropy",
        "forward",
        renamed_argument(automodel_forward, "lm_weight"),
        r"FusedLinearCrossEntropy.forward: takes \(.*lm_weight_of_another_name",
    ),
    ("automodel", "the gather"): (
        "nemo_automodel.components.loss.linear_ce_base:LinearCrossEntropy",
        "materialize_lm_weight",
        staticmethod(lambda lm_weight: lm_weight),
        "takes no grad_reduce_group",
    ),
    ("automodel", "one more"): (
        "nemo_automodel.components.loss.linear_ce:FusedLinearCrossEntropy",
        "forward",
        new_argument(automodel_forward, "wanted"),
        r"takes \(self, hidden_states, wanted",
    ),
    ("megatron", "no processor"): (
        "megatron.core.models.gpt.gpt_model:GPTModel",
        "forward",
        lambda self, input_ids: None,
        "GPTModel.forward: takes no output_processor, output_processor_context",
    ),
    ("torchtitan", "a name"): (
        "torchtitan.components.loss:ChunkedLossWrapper",
        "__call__",
        renamed_argument(torchtitan_call, "global_valid_tokens"),
        "ChunkedLossWrapper.__call__: takes no global_valid_tokens",
    ),
    ("torchtitan", "one more"): (
        "torchtitan.components.loss:ChunkedLossWrapper",
        "__call__",
        lambda self, pred, labels, wanted, global_valid_tokens=None, **loss_inputs: None,
        r"ChunkedLossWrapper.__call__: takes \(self, pred, labels, wanted",
    ),
    ("torchtitan", "the head"): (
        "torchtitan.components.loss:ChunkedLossWrapper",
        "set_lm_head",
        lambda self, module: None,
        "ChunkedLossWrapper.set_lm_head: takes no lm_head",
    ),
    ("axolotl", "moved"): (
        "axolotl.integrations.base:BasePlugin",
        "post_model_load",
        lambda self, model, cfg: None,
        r"BasePlugin.post_model_load: takes \(self, model, cfg\)",
    ),
}


def fresh(monkeypatch: pytest.MonkeyPatch, adapter: str) -> Any:
    """Import the adapter after the stubs are installed."""
    name = f"headloss.integrations.{adapter}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return module


@pytest.mark.parametrize("framework", FAKES)
def test_an_unknown_release_of_a_class(framework, monkeypatch) -> None:
    use, package, adapter = FAKES[framework](monkeypatch)
    released(monkeypatch, "99.0", package)
    module = fresh(monkeypatch, adapter)
    holds = re.escape(module.check())
    with pytest.warns(UserWarning, match=rf"{package} 99.0 was not tested.*{holds}"):
        use(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(module)
    if framework == "axolotl":  # axolotl before 0.21 has no plugin search
        assert "plugins: [headloss.integrations.axolotl.HeadlossPlugin] has to be" in module.check()
        base = sys.modules["axolotl.integrations.base"]
        monkeypatch.setattr(base, "PLUGIN_ENTRY_POINT_GROUP", "axolotl.plugins", raising=False)
        assert "plugins:" not in module.check()


@pytest.mark.parametrize(("framework", "how"), BROKEN)
def test_a_broken_seam_of_a_class(framework, how, monkeypatch) -> None:
    use, package, adapter = FAKES[framework](monkeypatch)
    at, name, value, match = BROKEN[framework, how]
    place(monkeypatch, at, name, value)
    released(monkeypatch, "99.0", package)
    module = fresh(monkeypatch, adapter)
    with pytest.raises(RuntimeError, match=rf"^{package} 99.0: .*{match}.*; install a release"):
        use(module)


@pytest.mark.parametrize("framework", ["automodel", "torchtitan", "axolotl"])
def test_a_missing_class_of_a_framework_is_named(framework, monkeypatch) -> None:
    _, package, adapter = FAKES[framework](monkeypatch)
    at, name = {
        "automodel": ("nemo_automodel.components.loss.linear_ce_base", "LinearCrossEntropy"),
        "torchtitan": ("torchtitan.components.loss", "ChunkedLossWrapper"),
        "axolotl": ("axolotl.integrations.base", "BasePlugin"),
    }[framework]
    delattr(sys.modules[at], name)
    released(monkeypatch, "99.0", package)
    with pytest.raises(RuntimeError, match=rf"^{package} 99.0: {at}: has no {name}; install"):
        fresh(monkeypatch, adapter)


def test_a_megatron_layer_without_gtp(monkeypatch) -> None:
    """A Megatron output layer without the attribute `gtp_remat_size`, as in Megatron-Core 0.18, is
    supported."""
    from headloss.integrations import megatron_heads

    tensors = "megatron.core.tensor_parallel"
    kind = type("ColumnParallelLinear", (torch.nn.Module,), {})
    place(monkeypatch, tensors, "ColumnParallelLinear", kind)
    linear: Any = kind()
    linear.weight, linear.bias = torch.nn.Parameter(torch.ones(3, 2)), None
    linear.tp_group, linear.sequence_parallel = None, False
    linear.disable_grad_reduce = False
    config = SimpleNamespace(defer_embedding_wgrad_compute=False)
    hidden = torch.ones(1, 1, 2)
    megatron_heads.check_layer(linear, None, config, hidden)
    linear.gtp_remat_size = 2
    with pytest.raises(ValueError, match="gtp_remat: is not supported here"):
        megatron_heads.check_layer(linear, None, config, hidden)
