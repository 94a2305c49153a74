"""What a head is made of: adapters, and what these and its tensors must be.

V vocabulary rows, H hidden width, r the rank of an adapter; T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from ..arguments import check_dense
from ..softmax.products import Fixed, WideLinear

Dropout = Callable[[Tensor, float], Tensor]
GATHER = (
    "call inside the forward of the module that FSDP2 wraps, where the weight is whole, or gather "
    'it with full_tensor(grad_placements=[Partial("avg")] * device_mesh.ndim), whose backward '
    "averages the ranks' gradients as FSDP2 does; that of a plain full_tensor() drops those of "
    "the other ranks"
)


def describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    plain = value is None or isinstance(value, int | float | str)
    return f"{value!r}" if plain else type(value).__name__


def check_number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}: got {describe(value)}, want a number; it is a constant")
    if not -math.inf < value < math.inf:  # what a compiled graph can ask of a number that changes
        raise ValueError(f"{name}: got {value}, want a finite number")
    return value


def check_matrix(name: str, value: object, shape: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {describe(value)}, want a tensor {shape}")
    check_dense(name, value)
    # Quantised weights are integers, or classes of their own that pose as a floating dtype.
    own = type(value) in (Tensor, nn.Parameter) or type(value).__module__.startswith("torch.")
    if not value.is_floating_point() or not own:
        raise TypeError(
            f"{name}: got {value.dtype} in a {type(value).__module__}.{type(value).__name__}, want "
            "a plain floating tensor; a quantised head has to be dequantised first"
        )
    if value.element_size() < 2:
        raise TypeError(f"{name}: got {value.dtype}, want float16, bfloat16, float32 or float64")
    if value.dim() != 2 or value.shape[1] == 0:
        sharded = "; ZeRO-3 holds it: read the head inside deepspeed.zero.GatheredParameters"
        hint = sharded if hasattr(value, "ds_id") else ""
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, want {shape}{hint}")


@dataclass(frozen=True, eq=False, kw_only=True)
class Lora:
    """A low-rank adapter on the head: raw += scaling * dropout(hidden) @ a.T @ b.T.

    Hu et al. 2021, https://arxiv.org/abs/2106.09685. Gradients reach `a` and `b`; the merged weight
    is never built.

    Attributes:
        a: [r, H], the down projection; what it gives is not rounded to its dtype.
        b: [V, r], the up projection.
        scaling: alpha / r, or alpha / sqrt(r) for rank-stabilised adapters.
        dropout: probability in [0, 1) of dropping an input feature. It is applied in every call:
            `Head.of` sets it to 0 for a module in eval mode.
    """

    a: Tensor
    b: Tensor
    scaling: float
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_matrix("lora.a", self.a, "[r, H]")
        check_matrix("lora.b", self.b, "[V, r]")
        if self.b.shape[1] != self.a.shape[0]:
            raise ValueError(
                f"lora.b: got shape {tuple(self.b.shape)}, want [V, {self.a.shape[0]}] for a of "
                f"shape {tuple(self.a.shape)}"
            )
        if self.b.dtype != self.a.dtype:
            raise ValueError(f"lora.b: got {self.b.dtype}, want the dtype of a, {self.a.dtype}")
        check_number("lora.scaling", self.scaling)
        if not 0 <= check_number("lora.dropout", self.dropout) < 1:
            raise ValueError(f"lora.dropout: got {self.dropout}, want 0 <= dropout < 1")

    def features(
        self, hidden: Tensor, dropout: Dropout = F.dropout, fixed: Fixed | None = None
    ) -> Tensor:
        """[T, H] to [T, r]: scaling * dropout(hidden) @ a.T, in float32 or float64."""
        if self.dropout:
            hidden = dropout(hidden, self.dropout)
        return self.scaling * WideLinear.apply(hidden, self.a, fixed)
