"""Helpers of several adapters: refused options, modules that hold a function, and denominators."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..batch.batch import IGNORE, Batch
from ..batch.reduction import Reduction, StandardWeight, Totals, token_mean
from ..losses import Objective, Term, cispo


def refuse(instead: str, **asked: bool) -> None:
    """Raise ValueError if a keyword argument is True: keywords name unsupported options, and True
    says that the user set the option. The error message contains the text `instead`, which says
    what supports the option."""
    for name, on in asked.items():
        if on:
            raise ValueError(f"{name}: is not supported here, only by {instead}")


def holders(value: Any) -> list[tuple[str, str]]:
    """Return (module name, variable name) of every global variable of an imported module that is
    `value`."""
    return [
        (place, name)
        for place, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        for name, held in list(vars(module).items())
        if held is value
    ]


def per(denominator: float | Tensor) -> Reduction:
    """Return a sum over tokens divided by a number that a framework has counted."""
    wide = denominator.double() if isinstance(denominator, Tensor) else denominator
    return Reduction("per_count", StandardWeight("none", length=wide))


def raw_cispo(cap: float, level: Any = "token") -> Term:
    """Return CISPO as in TRL and Liger: `epsilon_high` is the cap of the ratio, and may be below
    1."""
    term: Any = cispo(importance_sampling_level=level)
    clip = {"clip": (-math.inf, cap)}
    weight = partial(term.function.keywords["weight"], **clip)
    return replace(
        term, function=partial(term.function, weight=weight), observe=partial(term.observe, **clip)
    )


def needs_segments(objective: Objective) -> bool:
    """Return whether a term of `objective` has a scope other than "token" or a reduction other than
    the token mean, and so needs segments."""
    return any(
        term.scope != "token" or term.reduction is not token_mean for _, term in objective.parts
    )


def over_count(
    objective: Objective,
    count: float | Tensor | None,
    batch: Batch,
    *,
    name: str,
    instead: str,
) -> Objective:
    """Return `objective` with means of all scored tokens divided by `count`, the tokens of a step.

    A `count` of 0, or of None (unknown number of tokens), is treated as 1. If the batch is the
    whole step (has `count` scored tokens), reductions other than the mean of all tokens get their
    weights from the batch. `count` replaces neither the constant denominator of a reduction nor the
    totals of a batch (`Batch.totals`).

    Args:
        name: name of the argument that gave `count`, used in the error message.
        instead: advice to the user, used in the error message.

    Raises:
        ValueError: the denominator of a term depends on more than the optimizer step's number of
            tokens, for example on the step's number of sequences.
    """
    if batch.totals is not None:
        return objective
    if count is not None and all(_is_token_mean(term) for _, term in objective.parts):
        # Token means divide by the number of tokens in `batch.totals`.
        batch.totals = Totals(count, batch.segments.count)
        return objective
    others = [term for _, term in objective.parts if not _is_token_mean(term)]
    if count is not None and others:
        tokens = int((batch.targets != IGNORE).sum())
        if tokens == count:
            return objective
        for term in others:
            reduction = term.reduction
            if reduction and _reads_totals(reduction, tokens, batch.targets.device):
                where = f", where {term.kept_field}" if term.kept_field else ""
                raise ValueError(
                    f"{name}: got {float(count):.12g} tokens of the step, of which this call has "
                    f"{tokens}; {term.name} over {reduction.name}{where} has a denominator that no "
                    f"count of tokens tells: {instead}"
                )
    if isinstance(count, Tensor) and not count.is_floating_point():
        over = per(count.clamp_min(1))
    else:
        over = per(1 if count is None else count + (count == 0))
    return Objective(
        tuple((c, term.over(over) if _is_token_mean(term) else term) for c, term in objective.parts)
    )


def _is_token_mean(term: Term) -> bool:
    return term.reduction == token_mean and term.kept_field is None


def _reads_totals(reduction: Reduction, tokens: int, device: torch.device) -> bool:
    """Return whether a reduction's weights depend on totals; a user's reduction is run with several
    totals."""
    if isinstance(reduction.weigh, StandardWeight):
        return reduction.weigh.of != "none"
    lengths = torch.ones(tokens, dtype=torch.float64, device=device)
    few, many = lengths.new_full((), 3.0), lengths.new_full((), 2.0**40)
    weights = [
        torch.as_tensor(reduction.weigh(lengths, *totals), device=device)
        for totals in ((few, few), (many, few), (few, many))
    ]
    return not all(torch.equal(weights[0], other) for other in weights[1:])
