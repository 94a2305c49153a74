"""headloss in place of verl's fused heads: log-probs and entropies, or the loss of one pass.

B sequences, L positions, N packed ones, H hidden width, V vocabulary.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
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

BACKEND = "_verl_fused_kernels_backend"  # where verl keeps a model's backend
# Families whose forward verl brings, with a plain head.
PLAIN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "qwen3_5", "qwen3_5_moe")
linear_of_verl = torch_functional.FusedLinearForPPO
_patch = monkey_patch.patch_forward_with_backends


class Fused:
    """A `FusedLinearForPPO` whose log-probs and entropies, in float32, come from headloss.

    Attributes:
        model: whose head it reads, with bias, soft cap, scale and adapters; None: as it is given.
        temperature: in place of the given number: a tensor in the shape of the labels.
        request: what the engine wants in place of the log-probs of all positions.
        support: `support_ids` of the labels' positions; None: all have the whole vocabulary.
        options: of `head_stats` and `head_loss`.
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
        hidden_states: Tensor,  # [.., H]
        vocab_weights: Tensor,  # [V, H]
        input_ids: Tensor,  # [..], shifted
        temperature: float | Tensor = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """[..]: log-probs and entropies; both carry a gradient."""
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

        # FSDP2 shards a head that is not tied by itself.
        module = None if self.model is None else self.model.get_output_embeddings()
        alone = isinstance(module, FSDPModule)
        found = inside(module, act, hidden_states) if alone else act(hidden_states)
        return found[0], found[1]

    __call__ = forward


def fused_linear(chunk_size: int = 512, impl_backend: Any = "torch") -> Any:
    """In place of `FusedLinearForPPO`, to which verl hands what a model has as its backend."""
    if isinstance(impl_backend, Fused):
        return impl_backend
    return Fused() if impl_backend == "headloss" else linear_of_verl(chunk_size, impl_backend)


def patch_forward(
    model: Any, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
) -> None:
    """In place of `patch_forward_with_backends`."""
    if not use_fused_kernels or fused_kernels_backend != "headloss":
        _patch(model, use_fused_kernels, fused_kernels_backend)  # type: ignore[arg-type]
        return
    fused = Fused(model)
    fused.head(model.get_output_embeddings().weight, 1.0, model.dtype)  # one that cannot be read
    kind: Any = type(model)
    own = kind.forward
    _patch(model, True, "torch")  # the forward of the model's family, for all models of the class
    original, kind.forward = model.forward, own
    setattr(model, BACKEND, fused)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        return output if fused.request is None else fused.request.put(output)

    model.forward = forward


def fused_of(module: Any) -> Fused:
    """Of a model that FSDP or PEFT have wrapped.

    Raises:
        ValueError: verl has not given it a fused forward.
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
