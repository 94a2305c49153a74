"""Private interfaces of PyTorch and Triton that have no public equivalent, each with its reason.

Outside of this module, headloss uses only the private interfaces `Tensor._version`,
`torch._assert_async` and `torch.cuda._sleep`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad


def in_function_transform() -> bool:
    """True inside a transform of torch.func (grad, vmap, jvp, ...), in which headloss's operations
    would silently give wrong numbers."""
    return torch._C._are_functorch_transforms_active()


def in_forward_mode() -> bool:
    """True if forward-mode differentiation is active. PyTorch has no public function that tells
    whether forward-mode differentiation is active, and `unpack_dual` raises an error while
    forward-mode differentiation is inactive."""
    return forward_ad._current_level >= 0


def break_graph(verb: Callable[..., object], message: str) -> None:
    """Make the compiler leave a function out of its graph, with `message` as the reason under
    fullgraph=True. torch.compiler.disable would import the compiler together with the package."""
    verb.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=message)


def refuse_to_be_written(placeholder: Tensor) -> None:
    """Make a tensor without memory raise an error when C code asks for the address to write to. A
    write to the address 0 would end the process."""
    torch._C._set_throw_on_mutable_data_ptr(placeholder)


def find_triton_driver() -> None:
    """Make Triton compile the helpers of its driver, so that a machine without a C compiler raises
    an error at once and not in the middle of a call."""
    from triton.runtime import driver

    driver.active.get_current_target()
