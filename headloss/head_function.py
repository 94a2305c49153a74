"""`head_function`: somebody else's loss function, in as few products as its structure allows.

N positions, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from .batch.batch import Batch
from .collectives import inside
from .engine.autograd import HeadLoss
from .engine.call import call_and_tensors
from .engine.checks import Arguments
from .head.head import Head, autocast_dtype
from .head_loss import eagerly
from .head_stats import head_stats
from .losses.scope import Scope
from .losses.term import Term
from .objective.external import external_loss, scalar
from .options import Options

SCOPES: dict[object, Scope] = {"token": "token", "sequence": "segment"}
TRAINED = frozenset({"logp", "entropy"})


@eagerly
def head_function(
    hidden: Tensor,  # [.., H]
    head: Head,
    batch: Batch,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    separable: Literal["token", "sequence"] | None = None,
    options: Options | None = None,
) -> Tensor:
    """A framework's own loss of log-probs and entropies, with its gradient, without the logits.

    Shapes: hidden [.., H], head.weight [V, H] and batch.targets [..]; loss_fn gets log-probs and
    entropies [..], and the loss is 0-dim.

    Args:
        hidden, head, batch, options: as of `head_loss`. `batch` says which positions are scored and
            (`segments`) which form a sequence; loss_fn brings everything else in its closure.
        loss_fn: `loss_fn(logps, entropies)` gets two float32 tensors (float64 for float64 inputs)
            in the targets' shape, 0 where nothing is scored, and returns a scalar.
        separable: what the loss is a sum over. Denominators must then be constants (a mask's sum).

            - None: anything. loss_fn is called once, on all positions, and the gradient comes back
              through `head_stats`: *held* (6NHV) where the softmax terms of all tokens fit
              `memory_budget`, else *recompute* (8NHV). Tensors in its closure get gradients too.
            - "token": loss_fn(logps, entropies) = sum_t f_t(logp_t, entropy_t).
            - "sequence": a sum over the segments of the batch of functions of each one's tokens.

            These two run in one pass (6NHV) in chunks: loss_fn is called for each chunk on tensors
            of the same full shape that hold 0 at all other positions, of which only the gradient at
            the chunk's own positions is taken, and once more on everything, for the value. It must
            be pure, and no tensor that it catches may require a gradient. In float16, where the
            largest slope of all tokens decides how they are scaled, they run as None does.

    Returns:
        The loss, 0-dim. Its gradient is given once.

    Raises:
        ValueError, TypeError: as `head_loss`; a loss that is no scalar, or a separable one that is
            detached or catches a tensor whose gradient would be lost.

    >>> import torch, headloss as hl
    >>> hidden, head = torch.zeros(2, 4, requires_grad=True), hl.Head(torch.zeros(10, 4))
    >>> def loss_fn(logps, entropies):
    ...     return -(logps + 0.5 * entropies).sum() / 2
    >>> batch = hl.Batch(torch.tensor([1, 2]))
    >>> print(f"{hl.head_function(hidden, head, batch, loss_fn, separable='token').item():.4f}")
    1.1513
    """
    if not (separable is None or (isinstance(separable, str) and separable in SCOPES)):
        raise ValueError(f'separable: got {separable!r}, want None, "token" or "sequence"')
    if not callable(loss_fn) or isinstance(loss_fn, Term | type):
        raise TypeError(f"loss_fn: got {type(loss_fn).__name__}, want a function")
    half = isinstance(hidden, Tensor) and torch.float16 in (autocast_dtype(hidden), hidden.dtype)
    if separable is None or half:
        logps, _, entropies = head_stats(hidden, head, batch, options, TRAINED)
        return scalar(loss_fn(logps, entropies))
    objective = external_loss(TRAINED, SCOPES[separable])
    arguments = Arguments.of_head("head_function", hidden, head, batch, objective, options, loss_fn)
    call, tensors = call_and_tensors(arguments)
    with inside(hidden.device.type, *call.groups):
        return HeadLoss.apply(call, *tensors)[0]  # type: ignore[no-any-return]
