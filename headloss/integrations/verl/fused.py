"""Replacement of verl's fused heads by headloss: log-probs and entropies, or a one-pass loss.

B sequences, L positions, N packed positions, H hidden width, V vocabulary.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from verl.models.transformers import monkey_patch
from verl.utils.experimental import torch_functional

from ...batch.batch import Batch
from ...head.head import Head
from ...head.reading import FAMILIES, unwrap
from ...head_stats import head_stats
from ...options import Options
from ..sharding import inside, whole

BACKEND = "_verl_fused_kernels_backend"  # Name of verl's attribute for a model's backend.
# Model families for which verl has a forward of its own, and whose head is a plain linear layer.
PLAIN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "qwen3_5", "qwen3_5_moe")
linear_of_verl = torch_functional.FusedLinearForPPO
_patch = monkey_patch.patch_forward_with_backends


class Fused:
    """A replacement of `FusedLinearForPPO` that computes float32 log-probs and entropies by
    headloss.

    Attributes:
        model: the model whose head is read, with bias, soft cap, scale and adapters; with None, the
            head is the weight passed to `forward`.
        temperature: a tensor in the shape of the labels that overrides `forward`'s number.
        request: the loss that `forward` computes in place of the log-probs of all positions, or
            None.
        support: `support_ids` of the labels' positions; None: every label has the whole vocabulary.
        options: options of `head_stats` and `head_loss`.
    """

    def __init__(self, model: Any = None) -> None:
        self.model, self.options = model, Options()
        self.temperature: Tensor | None = None
        self.request: Any = None
        self.support: Any = None

    def head(self, weight: Tensor, temperature: float | Tensor, dtype: torch.dtype) -> Head:
        if self.model is None:
            return Head(weight, temperature=temperature)
        kind = self.model.config.model_type
        read = self.model.lm_head if kind in PLAIN and kind not in FAMILIES else None
        found = Head.of_model(self.model) if read is None else Head.of(read)
        found = whole(found, self.model, dtype)
        return Head(**{**vars(found), "temperature": temperature})

    def forward(
        self,
        hidden_states: Tensor,  # The hidden states [.., H].
        vocab_weights: Tensor,  # The head's weight [V, H].
        input_ids: Tensor,  # The labels [..], already shifted.
        temperature: float | Tensor = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies [..], each with a gradient."""
        scale = temperature if self.temperature is None else self.temperature

        def act(hidden: Tensor) -> tuple[Tensor, ...]:
            head = self.head(vocab_weights, scale, hidden.dtype)
            if self.request is not None:
                return self.request.run(hidden, head, input_ids, self.options)
            targets: Any = input_ids.to(torch.int64)
            if self.support is not None:
                targets = Batch(targets, support_ids=self.support)
            stats = head_stats(hidden, head, targets, self.options)
            return stats.logp, stats.entropy

        # FSDP2 shards an untied head as a separate unit, so the weight is whole only inside the
        # head's forward.
        module = None if self.model is None else self.model.get_output_embeddings()
        alone = isinstance(module, FSDPModule)
        found = inside(module, act, hidden_states) if alone else act(hidden_states)
        return found[0], found[1]

    __call__ = forward


def fused_linear(chunk_size: int = 512, impl_backend: Any = "torch") -> Any:
    """Return the fused head that replaces `FusedLinearForPPO`.

    verl passes the model's backend attribute as `impl_backend`: a `Fused`, or a backend's name.
    """
    if isinstance(impl_backend, Fused):
        return impl_backend
    return Fused() if impl_backend == "headloss" else linear_of_verl(chunk_size, impl_backend)


def patch_forward(
    model: Any, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
) -> None:
    """Give a model verl's fused forward with headloss, in place of
    `patch_forward_with_backends`."""
    if not use_fused_kernels or fused_kernels_backend != "headloss":
        _patch(model, use_fused_kernels, fused_kernels_backend)  # type: ignore[arg-type]
        return
    fused = Fused(model)
    # Read the head now, so that an unsupported head raises before the first step.
    fused.head(model.get_output_embeddings().weight, 1.0, model.dtype)
    kind: Any = type(model)
    own = kind.forward
    # verl's `_patch` replaces `forward` on the model's class, which would change every model of the
    # class: move the new `forward` to this model alone, and restore the class's own `forward`.
    _patch(model, True, "torch")
    function, kind.forward = model.forward.__func__, own
    setattr(model, BACKEND, fused)

    @functools.wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A copy of the model has its own `Fused` object, so read the object from `self`, not
        # `model`.
        output, request = function(self, *args, **kwargs), getattr(self, BACKEND).request
        return output if request is None else request.put(output)

    model.forward = types.MethodType(forward, model)


def fused_of(module: Any) -> Fused:
    """Return the `Fused` that replaces `FusedLinearForPPO` in a model, also under FSDP or PEFT.

    Raises:
        ValueError: verl has not replaced the model's forward by a fused forward.
    """
    module = unwrap(module)
    module = unwrap(module.get_base_model()) if hasattr(module, "get_base_model") else module
    found = getattr(module, BACKEND, None)
    if not isinstance(found, Fused):
        raise ValueError(
            f"impl_backend: verl has no fused forward for {type(module).__name__}; "
            "set use_fused_kernels=False"
        )
    return found
