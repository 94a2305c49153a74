"""What a call's signature is made of (law 4b): all that kernels, plans and checks depend on but for
values, addresses and the number of tokens."""

from __future__ import annotations

import functools
import weakref
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..batch.batch import Batch
from ..head.head import Head
from ..losses.term import Objective
from ..options import DEFAULT, Options


def of_linear(
    hidden: Tensor, head: Head, batch: Batch, objective: Objective, options: Options
) -> tuple | None:
    """All that the checks of `head_loss` and what is prepared depend on but for the shape of the
    positions; None for arguments of another kind, without values, or under transforms."""
    if not (
        isinstance(hidden, Tensor) and isinstance(batch, Batch) and isinstance(options, Options)
    ):
        return None
    strange = hidden.is_meta or hidden.layout != torch.strided or hidden.is_nested
    if strange or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return None
    device, shape, temperature, adapters = hidden.device, hidden.shape, head.temperature, head.lora
    return (
        shape[-1:],
        len(shape) > 1 and shape[:-1] == batch.targets.shape,
        of_tensor(hidden),
        head.weight.shape,
        of_tensor(head.weight),
        head.bias is None or of_tensor(head.bias),
        adapters and tuple([(*map(of_tensor, (x.a, x.b)), x.a.shape, x.b.shape) for x in adapters]),
        head.softcap is None,
        isinstance(temperature, Tensor) and of_tensor(temperature),
        head.vocab_size,
        head.vocab_group is None,
        of_batch(batch),
        of_objective(objective),
        of_options(options),
        of_mode(device),
    )


def of_tensor(tensor: Tensor) -> tuple:
    """What a kernel's choice depends on: not the address, but how it is aligned."""
    return (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tuple(map(_aligned, tensor.stride())),
        tensor.is_meta or tensor.data_ptr() % 16 == 0,
    )


@functools.lru_cache(maxsize=1024)
def _aligned(stride: int) -> int:
    """What counts of it: a stride of 1 is none of the others that 8 divides or not."""
    return stride if stride == 1 else 8 * (stride % 8 == 0)


def of_mode(device: torch.device) -> tuple:
    kind = device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype(kind) if autocast else None,
        torch._C._get_deterministic_algorithms(),
    )


def of_batch(batch: Batch) -> tuple:
    targets, totals = batch.targets, batch.totals
    rank = targets.dim()
    return (
        rank,
        targets.device,
        batch.segments.group is None,
        *[
            (n, v.dtype, v.shape[rank:], batch.per_token(n)) if isinstance(v, Tensor) else n
            for n, v in sorted(batch.fields.items())
        ],
        batch.support is None,
        None if totals is None else tuple(totals.kept),
    )


def of_objective(objective: Objective) -> tuple:
    return tuple([weakref.ref(term) for _, term in objective.parts])


def of_options(options: Options) -> tuple:
    if options is DEFAULT:  # to hash them all takes its time
        return ()
    main_grad = options.main_grad
    if main_grad is None:
        return options, None
    return replace(options, main_grad=None), (main_grad.shape, of_tensor(main_grad))
