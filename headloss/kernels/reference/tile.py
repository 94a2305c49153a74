"""Statistics and gradient of a tile of logits, in plain PyTorch: the oracle of every kernel.

`raw` [n, v] holds logits in float32 or float64, or 16-bit logits, which are converted to float32. A
target is a column of the whole vocabulary; only a target inside the tile counts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...statistics import softmax as stats
from ...statistics.softmax import FLOOR, SURE, Normalizer, SoftmaxCoefficients, SoftmaxState
from ..interface import Backward, Forward, Measured, partials_of
from ..transform import Transform

# Largest number of elements in a block of rows that is processed at once, which bounds the memory
# of temporaries.
BLOCK_ELEMENTS = 1 << 20


def blocks(n: int, width: int) -> list[slice]:
    """Return slices that cover n rows in blocks of limited size; at least one slice."""
    rows = max(1, BLOCK_ELEMENTS // max(1, width))
    return [slice(start, start + rows) for start in range(0, max(1, n), rows)]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tile of this dtype is computed: float32 for 16 bits."""
    return dtype if dtype.itemsize > 2 else torch.float32


def widened(tile: Tensor) -> Tensor:
    """Return `tile` in float32, or unchanged if it is in float32 or float64."""
    return tile if tile.dtype.itemsize > 2 else tile.float()


def outside(targets: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Return a mask [n, 1] that is True for targets outside of the tile, and indices [n, 1] of
    columns in the tile: the target's column for a target inside, any column for a target
    outside."""
    column = (targets - first if first else targets).unsqueeze(1)
    near = column.clamp(0, width - 1)
    return near != column, near


def partials(
    raw: Tensor, forward: Forward, onto: SoftmaxState | None = None, without: Tensor | None = None
) -> SoftmaxState:
    targets, first, transform, needs = forward
    if targets is None:
        targets = torch.full((len(raw),), first - 1, device=raw.device)
    parts, scratch = [], []
    for rows in blocks(*raw.shape):
        z = transform.rows(rows).read(widened(raw[rows]))
        if without is not None:
            z = with_columns(z, without[rows], -math.inf)
        parts.append(_block(z, targets[rows], first, needs, scratch))
    if len(parts) > 1:
        names = parts[0].tensors()
        fields = {n: torch.cat([getattr(part, n) for part in parts]) for n in names}
        parts = [SoftmaxState(**fields)]
    return parts[0] if onto is None else stats.merge(onto, parts[0])


def best(raw: Tensor, transform: Transform) -> tuple[SoftmaxState, Tensor]:
    state = partials(raw, Forward(None, 0, transform, frozenset()))
    places = [transform.rows(r).read(widened(raw[r])).argmax(1) for r in blocks(*raw.shape)]
    return state, torch.cat(places)


def finish(slices: Tensor, needs: frozenset[str], vocabulary: int) -> Measured:
    merged = stats.merge_all(partials_of(slices.unbind(1), needs))
    return Measured(*stats.finish(merged, vocabulary, needs))


def with_columns(tile: Tensor, columns: Tensor, values: Tensor | float) -> Tensor:
    """Return the tile [n, v] with `values` at `columns` [n, K], without effect at columns outside
    of the tile."""
    n, v = tile.shape
    # Values for columns outside of the tile go to an extra column, which is cut off.
    wider = torch.cat([tile, tile.new_empty(n, 1)], 1)
    place = torch.where((columns >= 0) & (columns < v), columns, v)
    return wider.scatter_(1, place, values)[:, :v]  # type: ignore[arg-type]


def _block(
    z: Tensor, targets: Tensor, first: int, needs: frozenset[str], scratch: list
) -> SoftmaxState:
    max_logit, likeliest = z.max(1, keepdim=True)
    memory = [tile[: len(z)] for tile in scratch] if scratch else (None, None)
    elsewhere, column = outside(targets, first, z.shape[1])
    target = z.gather(1, column).masked_fill_(elsewhere, -math.inf)
    shift = max_logit.clamp_min(torch.finfo(z.dtype).min)
    shifted = torch.sub(z, shift, out=memory[0]).clamp_min_(FLOOR)
    e = torch.exp(shifted, out=memory[1]).scatter_(1, likeliest, 0.0)
    # Reuse the memory of the temporaries for the next block, because small vectors allocated
    # between large tiles would grow the heap.
    scratch[:] = scratch or (shifted, e)
    max_logit, sumexp_m1 = max_logit.view(-1), e.sum(1)
    # For a row of only -inf, the sum of exponentials is 0, and `sumexp_m1` (the sum minus 1) is -1.
    sumexp_m1.add_(max_logit == -math.inf, alpha=-1)
    logit_sum = z.sum(1) if "mean_logit" in needs else None
    entropy_sum = e.mul_(shifted).sum(1) if "entropy" in needs else None
    return SoftmaxState(max_logit, sumexp_m1, target.view(-1), entropy_sum, logit_sum)


def log_softmax(z: Tensor, normalizer: Normalizer) -> Tensor:
    """Return log p [n, v] from the logits z, clamped to at least FLOOR (-1e4). A row's largest
    logit, recomputed in the backward pass, may be rounded differently from the forward pass's
    largest logit in `normalizer`. Where a row's largest probability p is near 1, the recomputed
    largest logit replaces the forward pass's largest logit, so that 1 - p is exact."""
    max_logit, log_sum = normalizer
    if z.shape[1]:
        top = z.amax(1)
        max_logit = torch.where((top - max_logit) - log_sum > SURE, top, max_logit)
    return (z - max_logit.unsqueeze(1)).sub_(log_sum.unsqueeze(1)).clamp_min_(FLOOR)


def gradient_from_logp(log_p: Tensor, slope: Tensor | None, c: SoftmaxCoefficients) -> Tensor:
    """Return the gradient dL/dz at the target or at chosen columns, computed from the log-probs of
    these columns. At a column whose probability p is near 1, dL/dz is computed from 1 - p =
    -expm1(log p), which keeps all digits where `slope` = dL/dlogp and the gradient coefficient
    c_prob cancel; at all other columns, dL/dz is computed from p = exp(log p). Every element of
    `log_p` is at most 0; the gradient coefficients in `c` have as many dimensions as `log_p`."""
    prob, slope = (torch.zeros_like(log_p) if t is None else t for t in (c.prob, slope))
    g = torch.where(log_p > SURE, prob + slope + prob * log_p.expm1(), slope + prob * log_p.exp())
    if c.entropy is not None:
        log_p = log_p.clamp_min(FLOOR)
        g += c.entropy * log_p.exp() * log_p
    if c.uniform is not None:
        g += c.uniform
    return g


def put_(tile: Tensor, backward: Backward, values: Tensor) -> None:
    """Set the element of each token's target to values [n], where the target lies in the tile [n,
    v]."""
    values, column = values.unsqueeze(1), backward.targets.unsqueeze(1)
    values = values if values.dtype == tile.dtype else values.to(tile.dtype)
    if not backward.all_columns:
        elsewhere, column = outside(backward.targets, backward.first, tile.shape[1])
        values = torch.where(elsewhere, tile.gather(1, column), values)
    tile.scatter_(1, column, values)


def grad_z(log_p: Tensor, c: SoftmaxCoefficients, out: Tensor) -> Tensor:
    """Write p (c_prob + c_entropy log p) + c_uniform [n, v] to `out`, with gradient coefficients
    [n, 1], and return `out`. The output is the gradient dL/dz without the coefficient `c_target`,
    which the caller adds at each token's target. The tensor `log_p` is overwritten."""
    g = torch.exp(log_p, out=out)
    if c.entropy is not None:
        assert c.prob is not None
        g.mul_(log_p.mul_(c.entropy).add_(c.prob))
    elif c.prob is not None:
        g.mul_(c.prob)
    else:
        g.zero_()
    if c.uniform is not None:
        g.add_(c.uniform)
    return g


def logit_gradient_(raw: Tensor, backward: Backward) -> Tensor:
    for rows in blocks(*raw.shape):
        tile, inputs = raw[rows], backward.rows(rows)
        c, z = inputs.coefficients, inputs.transform.read(widened(tile))
        g = tile if tile.dtype == z.dtype and inputs.transform.softcap is None else z
        if inputs.all_columns and c.prob is not None and c.entropy is c.uniform is None:
            # The gradient's term c_prob p (a number c_prob per token times the softmax probability
            # p) is computed as c_prob exp(z - max_logit) / sum exp(z - max_logit), which loses
            # digits only where p is small.
            max_logit, log_sum = inputs.normalizer
            torch.sub(z, max_logit.unsqueeze(1), out=g).exp_()
            g.mul_((c.prob / log_sum.exp()).unsqueeze(1))
        else:
            grad_z(log_softmax(z, inputs.normalizer), c.map(lambda t: t.unsqueeze(1)), g)
        if inputs.logps is not None:
            put_(g, inputs, gradient_from_logp(inputs.logps, c.target, c))
        inputs.transform.vjp_(g, tile)
        if g is not tile:
            tile.copy_(g)
    return raw if backward.dtype is None else raw.to(backward.dtype)
