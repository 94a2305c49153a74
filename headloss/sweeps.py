"""Law 4: schedules that sweep over tiles of the logits twice; once where nothing needs a gradient.

T scored tokens, V vocabulary, n tokens and v columns of a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .held import hold, rows_left, slab_gradient, terms_statistics
from .kernels.interface import Measured
from .logits import ALL, LinearGradients, LinearLogits
from .objective import Gradient
from .schedules import Call, Gradients, Outcome, PullBack, Source, join, live_rows
from .stats import Normalizer, Partials, Statistics

TERMS_ROWS = 16384  # tokens per product that writes statistics alone


def recompute(call: Call, source: Source) -> tuple[Outcome, PullBack]:
    """A sweep for the statistics, the coefficients, a sweep for the gradients (8NHV), which runs in
    the backward pass, with the upstream gradient in its coefficients."""
    stats, normalizer = sweep(call, source)
    gradient = call.pull_back(stats)
    # Of tokens that are spread over ranks, a chunk at a time is here.
    again = chunk_gradient if call.slices.is_spread else sweep_gradient

    def pull(upstream: Tensor, source: Source | None) -> Gradients:
        assert source is not None
        factor = call.owed(upstream)
        if factor is None or call.bound.scale is not None:
            return again(call, source, stats, normalizer, gradient, factor)
        owed = gradient.map(lambda t: t * factor.to(t.dtype))
        return again(call, source, stats, normalizer, owed)

    return Outcome(stats, gradient.values), pull


def sweep(call: Call, source: Source) -> tuple[Statistics, Normalizer]:
    """Statistics of all tokens, from tiles; no logits are kept."""
    found, normalizers, tile = [], [], call.plan.tile
    step = TERMS_ROWS if call.plan.terms and not call.slices.is_spread else tile.rows
    for rows in _steps(len(call.packed), step):
        stats, normalizer, _ = _sweep_statistics(call, source, rows)
        tiles = [
            (columns, lambda columns=columns, rows=rows: source.raw(rows, columns))
            for columns in _steps(source.vocabulary, tile.columns)
        ]
        for divergence in call.divergences:
            stats.divergences[divergence.key] = divergence.measure(rows, tiles, normalizer)
        found.append(stats)
        normalizers.append(normalizer)
    stats = join(found, call, source)
    return stats, _join_normalizers(normalizers, call, source)


def _sweep_statistics(call: Call, source: Source, rows: slice) -> Measured:
    if call.plan.terms:
        assert isinstance(source, LinearLogits)
        return terms_statistics(call, source.features[0][rows], source.weights[0], rows)
    partials: Partials | None = None
    for columns in _steps(source.vocabulary, call.plan.tile.columns):
        partials = call.partials(source.raw(rows, columns), rows, columns, partials)
    assert partials is not None
    return call.slices.measured(call.kernels, partials, call.needs, call.vocabulary)


def sweep_gradient(
    call: Call,
    source: Source,
    stats: Statistics,
    normalizer: Normalizer,
    gradient: Gradient,
    factor: Tensor | None = None,
) -> Gradients:
    """Gradients in slabs of columns, times `factor`: each slab of the weight gradient is written
    once."""
    logps = stats.logp
    assert logps is not None
    mask = live_rows(call, gradient)
    live = None if mask is None else rows_left(mask)
    kept = source
    if live is not None:
        normalizer, gradient, logps = normalizer.rows(live), gradient.rows(live), logps[live]
        if call.slices.size is None and isinstance(source, LinearLogits):
            kept = source.rows(live)  # once, and not for each slab
    gradients = call.gradients(kept, by_slab=True)
    count = len(logps)
    at_once = count <= call.plan.tile.rows and factor is None
    for columns in _steps(source.vocabulary, call.plan.tile.columns):
        slab = None
        if isinstance(gradients, LinearGradients):
            slab = gradients.slab(columns, at_once)
        for steps in _steps(count, call.plan.tile.rows):
            rows = steps if live is None else live[steps]
            place = rows if kept is source else steps
            of_steps = (normalizer.rows(steps), gradient.rows(steps), logps[steps])
            found = slab_gradient(call, kept, rows, place, columns, *of_steps)
            gradients.add(found, columns)
            if slab is not None:
                if steps.stop == count and columns.stop == source.vocabulary:
                    slab.gradients.features_are_done()
                slab.add(found)
            del found  # before the next one is made
        if slab is not None:
            slab.write(factor)
    result = call.finish(gradients, factor)
    if isinstance(kept, LinearLogits) and live is not None and kept is not source:
        for i in range(len(kept.features)):
            part = result[2 * i]
            if part is not None:
                full = part.new_zeros(len(call.packed), part.shape[1])
                result[2 * i] = full.index_copy_(0, live, part)
    return result


def chunk_gradient(
    call: Call,
    source: Source,
    _: Statistics,  # of logits that another product made: where p is near 1, 1 - p needs its own
    __: Normalizer,
    gradient: Gradient,
    factor: Tensor | None = None,
) -> Gradients:
    """Gradients in chunks of tokens, times `factor`: the logits of each are made once more."""
    gradients = call.gradients(source)
    for rows in (piece.rows for piece in call.plan.chunks):
        held, part = hold(call, source, rows), gradient.rows(rows)
        normalizer = held.measured().normalizer
        gradients.add(held.gradient(normalizer, part, live_rows(call, part)))
        del held  # before the next one is made
    return call.finish(gradients, factor)


# ---------------------------------------------------------------------- statistics alone


def statistics(call: Call, source: Source) -> tuple[Outcome, None]:
    """No gradient: one sweep."""
    stats, _ = sweep(call, source)
    gradient = call.bound.gradient(stats, call.packed.batch, ALL, needed=False)
    return Outcome(stats, gradient.values), None


def _steps(total: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def _join_normalizers(found: list[Normalizer], call: Call, source: Source) -> Normalizer:
    if not found:
        empty = torch.empty(0, dtype=source.dtype, device=call.packed.batch.targets.device)
        return Normalizer(empty, empty)
    return Normalizer(*(torch.cat(parts) for parts in zip(*found, strict=True)))
