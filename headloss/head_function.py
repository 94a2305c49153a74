"""`head_function`: a framework's own loss function, in one pass where the loss is separable.

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
    """Compute a framework's own loss of log-probs and entropies, with its gradient, without storing
    the logits.

    Shapes: hidden [.., H], head.weight [V, H] and batch.targets [..]; the function `loss_fn` gets
    log-probs and entropies, [..] each, and returns a 0-dim loss.

    Args:
        hidden, head, batch, options: as for `head_loss`. `batch` gives the scored positions and the
            sequences (`segments`); loss_fn reads all other data from its closure.
        loss_fn: `loss_fn(logps, entropies)` gets two float32 tensors (float64 for float64 inputs)
            in the targets' shape, 0 at unscored positions, and returns a scalar.
        separable: the unit ("token" or "sequence") over which the loss is a sum; None for any loss.
            If `separable` is set, loss_fn may divide only by constants, such as the sum of a mask.

            - `separable=None` works for every loss: loss_fn is called once, on all positions, and
              the gradient comes back through `head_stats`: schedule *held* (the work of three
              matmuls) if the softmax terms of all tokens fit `memory_budget`, else *recompute*
              (four matmuls). Tensors that loss_fn reads from its closure get gradients too.
            - "token": loss_fn(logps, entropies) = sum_t f_t(logp_t, entropy_t).
            - "sequence": a sum over segments; each summand is a function of one segment's tokens.

            With `separable` "token" or "sequence" the call runs in one pass (the work of three
            matmuls), in chunks. loss_fn is called once per chunk. Each call of loss_fn gets
            log-probs and entropies in the full shape [..], with 0 outside of the chunk, and
            headloss uses only the gradient at the chunk's positions. A final call of loss_fn on all
            positions gives the loss. loss_fn must be pure, and no tensor in loss_fn's closure may
            require a gradient. float16 inputs run as with separable=None, since the largest
            derivative over all tokens decides the gradients' scale.

    Returns:
        The loss, 0-dim, which supports one backward pass.

    Raises:
        ValueError, TypeError: as `head_loss`; also if loss_fn returns no scalar, or if `separable`
            is set and the result of loss_fn is detached or its closure has a tensor that requires a
            gradient.

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
