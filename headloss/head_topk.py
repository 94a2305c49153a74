"""`head_topk`: the k likeliest tokens of each position, without storing the logits."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels
from .engine.checks import check_eager, check_options, check_temperatures
from .engine.facts import shard_of_positions
from .engine.plan import make_plan
from .engine.plan_inputs import PlanInputs
from .head.dtensor import local_head
from .head.head import Head, autocast_dtype, check_head, transform_of
from .head.products import sum_dtype
from .logits.beside import NOTHING
from .logits.linear import LinearLogits, RowContext
from .logits.rows import steps
from .options import DEFAULT, Options
from .statistics.softmax import SoftmaxState, finish, merge


class HeadTopk(NamedTuple):
    """The k likeliest tokens: ids [.., k] int64 and their log-probs [.., k], best first."""

    ids: Tensor
    logps: Tensor


@torch.no_grad()
def head_topk(
    hidden: Tensor,  # [.., H]
    head: Head,
    k: int,
    options: Options | None = None,
) -> HeadTopk:
    """Return ids and log-probs of the k likeliest tokens at every position, without a gradient.

    Shapes: hidden [.., H] and head.weight [V, H]; ids and log-probs are [.., k].

    Log-probs are float32 (float64 for float64 inputs). Tokens with equal logits are returned in
    arbitrary order. If several tokens tie for the k-th place, the choice among the tied tokens is
    arbitrary.

    Args:
        hidden, head, options: as for `head_loss`.
        k: the number of tokens, in 1..V.

    Returns:
        `HeadTopk`: ids [.., k] int64 and log-probs [.., k], best first.

    Raises:
        ValueError: k outside 1..V, hidden states that do not fit the head, a temperature that is
            not a finite number > 0 (a temperature tensor is not checked with `static=True`),
            `sequence_parallel=True`.

    >>> import torch, headloss as hl
    >>> hl.head_topk(torch.ones(1, 2), hl.Head(torch.tensor([[0.0, 1], [5, 5], [2, 2]])), k=2).ids
    tensor([[1, 2]])
    """
    check_head(head)
    check_eager("head_topk", hidden, head.weight)
    check_options(options := DEFAULT if options is None else options)
    if options.sequence_parallel:
        raise ValueError("sequence_parallel: got True, want False: hidden holds all tokens")
    head = local_head(head)
    compute = autocast_dtype(hidden)

    def check() -> None:
        head.validate(hidden, compute_dtype=compute)
        if isinstance(t := head.temperature, Tensor) and not options.static:
            check_temperatures(t.reshape(-1), None)

    shard = shard_of_positions(head, hidden, check, k, options.check_ranks)
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= shard.vocabulary:
        raise ValueError(f"k: got {k!r}, want an integer in 1..{shard.vocabulary}")
    x = hidden.reshape(-1, hidden.shape[-1]).to(compute or hidden.dtype)
    transform = transform_of(head)
    if isinstance(t := transform.temperature, Tensor):
        rows = t.expand(hidden.shape[:-1]).flatten()
        transform = replace(transform, temperature=rows.to(sum_dtype(x.dtype)))
    nowhere = hidden.new_full((len(x),), -1, dtype=torch.int64)
    # Autocast would round the matrix products.
    with torch.autocast(hidden.device.type, enabled=False):
        factors = head.factors(x, shard.dropout)
        backend = kernels.choose(options.backend, x.device, x.dtype) if k == 1 else "reference"
        source = LinearLogits(
            [*(tensor for pair in factors for tensor in pair), head.bias],
            RowContext(kernels.load(backend), nowhere, transform, NOTHING, shard),
            compute_dtype=compute,
        )
        inputs = PlanInputs(
            tokens=len(x),
            vocabulary=shard.widest,
            # Bytes of a token's logits; torch.topk with k > 1 copies the logits, which doubles the
            # bytes.
            row_bytes=(1 + (k > 1)) * source.dtype.itemsize,
            on_gpu=x.is_cuda,
        )
        tile = make_plan(inputs, replace(options, schedule="auto"), "reference").tile
        ids, logps = (x.new_empty(len(x), k, dtype=d) for d in (torch.int64, source.dtype))
        for rows in steps(len(x), tile.rows):
            ids[rows], logps[rows] = _rows(source, rows, tile.columns, k)
    return HeadTopk(*(best.view(*hidden.shape[:-1], k) for best in (ids, logps)))


def _rows(source: LinearLogits, rows: slice, width: int, k: int) -> tuple[Tensor, Tensor]:
    """Return ids [n, k] and log-probs [n, k] of the k likeliest tokens of n hidden states. The
    logits are computed one tile of vocabulary columns at a time."""
    forward = source.context.forward(rows)
    shard = source.context.shard
    partials: SoftmaxState | None = None
    ids = source.context.targets[rows, None][:, :0]
    best = ids.to(source.dtype)
    for tile in steps(source.vocabulary, width):
        raw = source.raw(rows, tile)
        if k == 1:  # One read of the tile gives the maximum and the online-softmax state.
            state, columns = source.acts.best(raw, forward.transform)
            partials = state if partials is None else merge(partials, state)
            values = state.max_logit.unsqueeze(1)
            columns = columns.unsqueeze(1)
        else:
            partials = source.acts.partials(raw, forward, partials)
            # Apply scale, soft cap and temperature before top-k, because a negative logit scale
            # reverses the order of the raw logits.
            values, columns = forward.transform(raw).topk(min(k, raw.shape[1]))
        del raw  # Free the tile before the next tile is computed.
        best = torch.cat([best, values], 1)
        ids = torch.cat([ids, columns + tile.start], 1)
        best, order = best.topk(min(k, best.shape[1]))
        ids = ids.gather(1, order)
    assert partials is not None
    _, normalizer = finish(shard.merge(partials), source.vocabulary, NOTHING)
    best, ids = shard.topk(best, ids + shard.first, k)
    logps = (best - normalizer.max_logit.unsqueeze(1)) - normalizer.log_sum.unsqueeze(1)
    return ids, logps
