"""Private interfaces of PyTorch and Triton that have no public equivalent, each with its reason.

No other private interface is used, but `Tensor._version`, `torch._assert_async` and
`torch.cuda._sleep`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad


def in_function_transform() -> bool:
    """True inside a transform of torch.func (grad, vmap, jvp, ...), in which the verbs' operations
    would give wrong numbers without a word."""
    return torch._C._are_functorch_transforms_active()


def in_forward_mode() -> bool:
    """True if a level of forward mode is open, without which `unpack_dual` raises: nothing public
    says so."""
    return forward_ad._current_level >= 0


def break_graph(verb: Callable[..., object], message: str) -> None:
    """Make the compiler leave a function out, and say why with fullgraph=True. The public decorator
    imports the compiler with the package."""
    verb.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=message)


def refuse_to_be_written(placeholder: Tensor) -> None:
    """A tensor without memory raises where C code would take the address to write to, which is 0:
    what fails would end the process."""
    torch._C._set_throw_on_mutable_data_ptr(placeholder)


def find_triton_driver() -> None:
    """Make Triton compile the helpers of its driver, as on first use: without a compiler on the
    machine this raises here, and not in the middle of a call."""
    from triton.runtime import driver

    driver.active.get_current_target()
