"""Checks of arguments that all public functions share."""

from __future__ import annotations

import difflib
import functools
import math
import sys
from collections.abc import Callable, Collection
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")
INT64 = 1 << 63  # One more than the largest integer that an int64 tensor can hold.
LARGEST = sys.float_info.max
IGNORE = -100  # the target of an unscored position, as in torch.nn.functional.cross_entropy


def as_float(number: Any) -> float:
    """Return a real number as a float; inf for a number larger than every float."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def check_dense(name: str, value: Tensor) -> None:
    """Raise TypeError for a quantised tensor, and for a tensor without strides (sparse, mkldnn,
    nested), which no kernel can read."""
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        kind = "nested" if value.is_nested else str(value.layout)
        kind = str(value.dtype) if value.is_quantized else f"layout {kind}"
        raise TypeError(f"{name}: got a tensor of {kind}, want a dense one, torch.strided")


def check_own_places(name: str, value: Tensor, what: str = "memory") -> None:
    """Raise ValueError for an output tensor whose elements may share memory. Elements are distinct
    if, in some order of the dimensions, each stride exceeds the largest offset of the inner
    dimensions."""
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride <= reach:
            got = f"expanded {what}, or others whose elements share memory: {value.stride()}"
            raise ValueError(f"{name}: got {got} for {tuple(value.shape)}, want a clone")
        reach += stride * (size - 1)


def check_device(name: str, value: Tensor, other: Tensor, whose: str = "the targets'") -> None:
    """Raise ValueError if a tensor is not on the device of the tensor `other`."""
    if value.device != other.device:
        raise ValueError(f"{name}: got device {value.device}, want {whose} {other.device}")


def is_dtensor(value: object) -> bool:
    """True for a DTensor, a tensor that is spread over a device mesh."""
    return hasattr(value, "device_mesh") and hasattr(value, "placements")


def is_integers(value: object) -> bool:
    """True for a tensor of integers; False for booleans."""
    if not isinstance(value, Tensor) or value.dtype == torch.bool:
        return False
    return not (value.is_floating_point() or value.is_complex())


def check_integers(name: str, value: object, want: str = "integers") -> Tensor:
    """Return the argument `value` as a tensor; TypeError unless it is a dense integer tensor."""
    if not isinstance(value, Tensor) or not is_integers(value):
        raise TypeError(f"{name}: got {getattr(value, 'dtype', type(value).__name__)}, want {want}")
    check_dense(name, value)
    return value


def check_number(
    name: str,
    value: Any,
    kind: str,
    want: str,
    accept: Callable[[float], bool] = lambda x: True,
    of: type = Real,
) -> None:
    """Raise TypeError, naming `kind`, for a value that is not of type `of`; raise ValueError,
    naming `want`, for a number that is not finite or not accepted."""
    if isinstance(value, bool) or not isinstance(value, of):
        raise TypeError(f"{name}: got {value!r}, want {kind}")
    number = as_float(value)
    if not (math.isfinite(number) and accept(number)):
        raise ValueError(f"{name}: got {value!r}, want {want}")


def plain_number(value: Any) -> Any:
    """Return a real number of any type as Python's int or float, because a tensor cannot be
    multiplied by a fraction, a NumPy number or an integer of more than 64 bits. A value that is not
    a real number is returned unchanged, and a later check raises an error."""
    if value is None or type(value) is float or not isinstance(value, Real):
        return value
    number: Any = value
    if isinstance(value, Integral) and -INT64 < number < INT64:
        return value if isinstance(value, int) else int(value)
    try:
        return float(value)
    except OverflowError:
        return value


def plain_numbers(record: object, *names: str) -> None:
    """Replace the numbers in a frozen dataclass with Python's int or float."""
    for name in names:
        object.__setattr__(record, name, plain_number(getattr(record, name)))


# ---------------------------------------------------------------------- texts


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Return a suggestion of the nearest name; without a near name, list all names."""
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}?" if near else f"want one of {', '.join(names)}"


def with_nearest_name(record: type[R]) -> type[R]:
    """Return the dataclass with an initializer whose TypeError for an unknown argument suggests the
    nearest field name."""
    names = [f.name for f in fields(record)]  # type: ignore[arg-type]
    make = record.__init__  # type: ignore[arg-type]

    @functools.wraps(make)
    def initialize(self: R, *args: object, **options: object) -> None:
        for name in options:
            if name not in names:
                want = did_you_mean(name, names)
                raise TypeError(f"{name}: is no argument of {record.__name__}, {want}")
        make(self, *args, **options)

    record.__init__ = initialize  # type: ignore[method-assign]
    return record


def brief(value: object) -> str:
    """Return the shape and dtype of a tensor, for the repr of an object that holds the tensor;
    return the repr of any other value."""
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
