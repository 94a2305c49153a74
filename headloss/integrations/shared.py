"""What several adapters need: versions that are known, and a framework's own denominators."""

from __future__ import annotations

import importlib.metadata
import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..batch.reduction import Reduction, token_mean
from ..losses import Objective, Term, cispo
from .documents import as_documents as as_documents


def require_version(package: str, *known: str) -> None:
    """RuntimeError where the installed release is of none of the `known` series."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = "nothing"
    if not any(found == series or found.startswith(f"{series}.") for series in known):
        raise RuntimeError(
            f"{package}: got version {found}, want one that headloss's adapter was tested with: "
            + ", ".join(f"{series}.*" for series in known)
        )


def refuse(instead: str, **asked: bool) -> None:
    """ValueError that names what is on in `asked`, and what computes it `instead`."""
    for name, on in asked.items():
        if on:
            raise ValueError(f"{name}: is not supported here, only by {instead}")


def per(denominator: float | Tensor) -> Reduction:
    """A sum over tokens divided by a number that a framework has counted."""

    def weigh(lengths: Tensor, tokens: Tensor, segments: Tensor) -> Tensor:
        count = torch.as_tensor(denominator, dtype=torch.float64, device=lengths.device)
        return (1 / count).to(lengths.dtype).expand_as(lengths)

    return Reduction("per_count", weigh)


def raw_cispo(cap: float, level: Any = "token") -> Term:
    """CISPO as TRL and Liger have it: `epsilon_high` is the cap itself, and may lie below 1."""
    term: Any = cispo(importance_sampling_level=level)
    clip = {"clip": (-math.inf, cap)}
    weight = partial(term.function.keywords["weight"], **clip)
    return replace(
        term, function=partial(term.function, weight=weight), observe=partial(term.observe, **clip)
    )


def needs_segments(objective: Objective) -> bool:
    """Whether some term is of segments, or its mean over them."""
    return any(
        term.scope != "token" or term.reduction is not token_mean for _, term in objective.parts
    )


def over_count(objective: Objective, count: float | Tensor) -> Objective:
    """Terms over the mean of tokens are divided by `count` tokens in place of this batch's; a count
    of 0 acts as 1."""
    over = per(count + (count == 0))
    return Objective(
        tuple(
            (c, term.over(over) if term.reduction is token_mean else term)
            for c, term in objective.parts
        )
    )
