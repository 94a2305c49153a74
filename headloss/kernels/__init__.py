"""Choice of a kernel backend (triton or reference). A backend is a package with the functions of
`interface.Acts`; the triton backend also has the functions of `interface.Kernels`. No backend
imports another backend."""

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch

from ..private import find_triton_driver
from .interface import Kernels

SWEPT_COLUMNS = 1 << 19


def choose(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the backend's name; ValueError if an explicit backend cannot serve this device and
    dtype."""
    if backend == "auto":
        usable = device.type == "cuda" and dtype != torch.float64 and _failure() is None
        # `_failure` warns of the fallback to the reference backend on a GPU.
        return "triton" if usable else "reference"
    if backend == "triton":
        if reason := _failure():
            raise ValueError(f'backend: got "triton", but triton cannot be imported here: {reason}')
        from .triton.versions import INTERPRETED

        if device.type != "cuda" and not INTERPRETED.value:
            raise ValueError(f'backend: got "triton", which needs a GPU, for tensors on {device}')
        if dtype == torch.float64:
            raise ValueError('backend: got "triton", which does not serve torch.float64')
    return backend


@functools.cache
def load(backend: str) -> Kernels:
    """Return the module of a backend. The reference backend implements only the functions of
    `interface.Acts`, and a plan for the reference backend calls no kernel function outside of
    `interface.Acts`."""
    if backend == "reference":
        from . import reference

        return reference  # type: ignore[return-value]
    from . import triton

    return triton


def can_write_exp(backend: str, dtype: torch.dtype, weight: torch.Tensor) -> bool:
    """Return True if the matmul for the logits of a bfloat16 head can write exp(z - shift) in place
    of the logits z."""
    if backend != "triton" or dtype != torch.bfloat16 or not weight.is_cuda:
        return False
    if weight.dtype != dtype:  # Autocast makes a contiguous copy of the weight.
        return weight.shape[1] % 8 == 0
    return load(backend).can_fuse(weight, weight)


def can_sweep(
    backend: str, dtype: torch.dtype, weight: torch.Tensor, columns: int
) -> tuple[bool, bool]:
    """Return two flags for kernels that keep tiles of logits on the chip: the first is True if
    these kernels accept the head's weight, and the second if they are also faster than matmuls that
    write logits to memory. Kernels that keep tiles of logits on the chip are faster only with a
    16-bit dtype and at least SWEPT_COLUMNS columns (see the timings in benchmarks/NOTES.md)."""
    able = backend == "triton" and load(backend).can_sweep(weight)
    return able, able and weight.is_cuda and dtype.itemsize == 2 and columns >= SWEPT_COLUMNS


def suits_product(x: torch.Tensor) -> bool:
    """Return True if the rows of a 16-bit matrix x begin at multiples of 16 bytes, as the kernels
    that fuse a matmul with an epilogue require."""
    *rows, inner = x.stride()
    return inner == 1 and all(s % 8 == 0 for s in rows) and x.data_ptr() % 16 == 0


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 0 for any other device."""
    cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if cuda else 0


@functools.cache
def memory(device: torch.device) -> int:
    """Return the bytes of a GPU's memory, in use or not; 0 for any other device."""
    cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).total_memory if cuda else 0


@functools.cache
def _failure() -> str | None:
    """Return the reason why Triton's kernels cannot run on this machine, or None. Triton is tried
    once per process; if Triton fails on a machine with a GPU, `_failure` also issues a
    `RuntimeWarning`."""
    try:
        if importlib.util.find_spec("triton") is None:
            raise ImportError("triton is not installed")
        load("triton")
        if torch.cuda.is_available():
            find_triton_driver()
        return None
    except Exception as error:  # A broken installation may raise any exception.
        reason = f"{type(error).__name__}: {error}"
    if torch.cuda.is_available():
        warnings.warn(
            f"headloss: the triton backend cannot be used, and the reference serves ({reason})",
            RuntimeWarning,
            stacklevel=2,
        )
    return reason
