"""Checks of what a head is made of."""

from __future__ import annotations

import math

from torch import Tensor

from ..arguments import check_dense

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
    foreign = type(value).__module__.partition(".")[0] != "torch"
    if not value.is_floating_point() or foreign:
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


def check_plain(name: str, value: Tensor) -> None:
    if type(value).__name__ == "DTensor":
        raise TypeError(
            f"{name}: got a DTensor placed {getattr(value, 'placements', ())}, want a plain "
            f"tensor; {GATHER}; or pass this rank's rows with vocab_group"
        )
