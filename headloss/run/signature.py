"""What a call's signature is made of (law 4b): all that kernels, plans and checks depend on but for
values, addresses and the number of tokens."""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
from torch import Tensor

from ..batch.batch import Batch
from ..head.head import Head
from ..losses.term import Objective
from ..options import Options


def of_tensor(tensor: Tensor) -> tuple:
    """What a kernel's choice depends on: not the address, but how it is aligned."""
    aligned = tensor.is_meta or tensor.data_ptr() % 16 == 0
    strides = tuple(1 if s == 1 else s % 8 == 0 for s in tensor.stride())
    return (type(tensor), tensor.dtype, tensor.device, tensor.requires_grad, strides, aligned)


def of_mode(device: torch.device) -> tuple:
    kind = device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype(kind) if autocast else None,
        torch.are_deterministic_algorithms_enabled(),
    )


def of_head(head: Head) -> tuple:
    temperature = head.temperature
    return (
        head.weight.shape,
        of_tensor(head.weight),
        None if head.bias is None else of_tensor(head.bias),
        tuple((x.a.shape, x.b.shape, of_tensor(x.a), of_tensor(x.b)) for x in head.lora),
        head.softcap is None,
        of_tensor(temperature) if isinstance(temperature, Tensor) else None,
        head.vocab_size,
        head.vocab_group is None,
    )


def of_batch(batch: Batch) -> tuple:
    fields = tuple(
        (name, v.dtype, v.shape[batch.targets.dim() :], batch.per_token(name))
        if isinstance(v, Tensor)
        else name
        for name, v in sorted(batch.fields.items())
    )
    totals = batch.totals
    return (
        batch.targets.dim(),
        batch.targets.device,
        batch.segments.group is None,
        fields,
        batch.support is None,
        None if totals is None else tuple(totals.kept),
    )


def of_objective(objective: Objective) -> tuple:
    return tuple(weakref.ref(term) for _, term in objective.parts)


def of_options(options: Options) -> tuple:
    main_grad = options.main_grad
    if main_grad is None:
        return options, None
    return replace(options, main_grad=None), (main_grad.shape, of_tensor(main_grad))
