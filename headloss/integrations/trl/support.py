"""The ids that a sampler kept for each token, passed from generation to the batch of the loss.

B rows, C completion columns, K the largest number of ids kept for a token, P (token, id) pairs of
all tokens. In TRL's batch the ids that the sampler kept are a list with one entry per row, so TRL
shuffles and splits the list with the rows. Each list entry has two int32 tensors: the ids [P] that
the sampler kept for a row's tokens, one token after another, and the number of ids per token [C].
If the sampler kept no ids for a token, the token's log-prob is over the whole vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...arguments import is_integers
from ...batch.support_forms import support_from_lists
from ...statistics.metrics import Max, Mean, Metrics, Min
from ..seams import part
from ..transformers.recorder import SampledSets

Row = tuple[Tensor, Tensor]
ENGINE = "trl.generation.vllm_generation"


class Drawn(float):
    """The log-prob of a sampled token, as a float that also refers to the ids that the sampler kept
    for the token.

    TRL slices and concatenates lists of log-probs, with 0.0 for a tool's tokens. A `Drawn` object
    is a float, so TRL's lists of log-probs accept it. `Drawn.at` is the token's index in
    `Drawn.sets`, the record of the ids from which each token was drawn.
    """

    __slots__ = ("at", "sets")

    def __new__(cls, logp: float, sets: SampledSets, at: int) -> Drawn:
        drawn = super().__new__(cls, logp)
        drawn.sets, drawn.at = sets, at
        return drawn


def drawn_logps(
    sets: SampledSets, logps: Tensor, completion_ids: Sequence[Sequence[int]]
) -> list[list[Drawn]]:
    """Return the recorded log-probs of the completions' tokens as `Drawn` objects (`float` with an
    index into `sets`)."""
    columns = logps.shape[1]
    return [
        [Drawn(x, sets, b * columns + c) for c, x in enumerate(row[: len(ids)])]
        for b, (row, ids) in enumerate(zip(logps.tolist(), completion_ids, strict=True))
    ]


def rows_drawn(
    logps: Sequence[Sequence[float]],
    tool_mask: Sequence[Sequence[int]] | None,
    device: torch.device,
) -> list[Row]:
    """Return the ids that the sampler kept for the tokens of `Drawn` log-probs.

    Raises:
        ValueError: the sampler's ids of a generated token are missing.
    """
    rows: list[Row] = []
    for b, row in enumerate(logps):
        generated = [1] * len(row) if tool_mask is None else tool_mask[b]
        for c, (x, mask) in enumerate(zip(row, generated, strict=True)):
            if mask and not isinstance(x, Drawn):
                raise ValueError(
                    f"support_ids: sequence {b} has no set at its token {c}, which was sampled "
                    "while a filter was on; set sampling_support=False to do without sets"
                )
        runs = [_nothing(0)]
        for sets, run in groupby(row, key=lambda x: getattr(x, "sets", None)):
            tokens: list[Any] = list(run)
            count = len(tokens)
            runs.append(_nothing(count) if sets is None else sets.tokens(tokens[0].at, count))
        ids, counts = (torch.cat([t.to(device) for t in ts]) for ts in zip(*runs, strict=True))
        rows.append((ids, counts))
    return rows


def _nothing(tokens: int) -> Row:
    empty = torch.zeros(tokens, dtype=torch.int32, device="cpu")
    return empty[:0], empty


# The ids that the sampler kept, per completion: [C, K] integers, or a list of ids for each token.
Given = Sequence[Any] | Tensor


def rows_given(
    given: Given, completion_ids: Sequence[Sequence[int]], device: torch.device
) -> list[Row]:
    """Return a `Row` for each completion: the ids that the sampler kept and each token's number of
    ids.

    Raises:
        ValueError: the number of entries differs from the number of completions.
        TypeError: ids are not integers, or a completion's ids are not a [C, K] tensor or a list.
    """
    if len(given) != len(completion_ids):
        raise ValueError(
            f"support_ids: got {len(given)} entries, want one for each of {len(completion_ids)} "
            "completions"
        )
    rows = [_row(row, len(ids)) for row, ids in zip(given, completion_ids, strict=True)]
    return [(ids.to(device), counts.to(device)) for ids, counts in rows]


def _row(given: Any, columns: int) -> Row:
    if isinstance(given, Tensor):
        sets = list(_integers(given, 2)[:columns])
    elif isinstance(given, Iterable | None):
        tokens = islice(() if given is None else given, columns)
        sets = [_integers([] if ids is None else ids, 1) for ids in tokens]
    else:
        raise TypeError(f"support_ids: got {given!r} for a completion, want ids for each token")
    sets = [ids[ids >= 0].int() for ids in sets]
    counts = torch.zeros(columns, dtype=torch.int32, device="cpu")
    counts[: len(sets)] = torch.tensor([len(ids) for ids in sets], dtype=torch.int32, device="cpu")
    return torch.cat([_nothing(0)[0], *sets]), counts


def _integers(ids: Any, dimensions: int) -> Tensor:
    integers = torch.as_tensor(ids, device="cpu")
    if integers.dim() != dimensions or (integers.numel() and not is_integers(integers)):
        raise TypeError(
            f"support_ids: got {integers.dtype} of shape {tuple(integers.shape)}, want integers, "
            "[C, K] of a completion or [K] of a token"
        )
    return integers


def pairs(rows: Sequence[Row], columns: int) -> tuple[Tensor, Tensor]:
    """Return ids [P] and offsets [B C + 1] of rows with at most C tokens, for a batch [B, C]."""
    counts = counts_of(rows, columns).flatten()
    offsets = counts.new_zeros(len(counts) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=offsets[1:])
    return torch.cat([ids for ids, _ in rows]), offsets


def counts_of(rows: Sequence[Row], columns: int) -> Tensor:
    """Return the number of ids of each token, [B, C]."""
    return torch.stack([F.pad(counts, (0, columns - len(counts))) for _, counts in rows])


def sampling_metrics(new_logps: Tensor, scored: Tensor, inputs: dict[str, Any]) -> Metrics:
    """Return how far the trainer's log-probs [B, C] are from the sampler's, and the numbers of
    ids that the sampler kept.

    For d = (trainer's log-prob) - (sampler's log-prob), the metrics are the mean of exp(d) - 1 - d,
    and minimum, maximum and mean of exp(d).
    """
    metrics = Metrics()
    sampling = inputs.get("sampling_per_token_logps")
    if sampling is not None:
        d = (new_logps.detach() - sampling)[scored].double()
        d = d[~d.isnan()]
        ratio, count = d.exp(), d.new_tensor(len(d))
        ends = d.new_tensor([math.inf]), d.new_tensor([-math.inf])
        metrics |= {
            "sampling/kl": Mean((d.expm1() - d).sum(), count),
            "sampling/ratio_mean": Mean(ratio.sum(), count),
            "sampling/ratio_min": Min(torch.cat([ratio, ends[0]]).amin()),
            "sampling/ratio_max": Max(torch.cat([ratio, ends[1]]).amax()),
        }
    if "support_ids" in inputs:
        counts = counts_of(inputs["support_ids"], scored.shape[1])[scored].double()
        metrics |= {
            "sampling/kept": Mean(counts.sum(), (counts > 0).sum()),
            "sampling/kept_max": Max(torch.cat([counts, counts.new_zeros(1)]).amax()),
        }
    return metrics


# ---------------------------------------------------------------------- vLLM in this process


@contextlib.contextmanager
def sets_of_outputs() -> Iterator[None]:
    """While the `with` block runs, TRL's `extract_logprobs` also attaches to each log-prob of
    vLLM's outputs the ids that the sampler kept."""
    theirs = part("trl", ENGINE, "extract_logprobs")

    def extract_logprobs(all_outputs: Any) -> Any:
        logprobs, token_ids = theirs(all_outputs)
        if logprobs is not None:
            _attach(logprobs, [one for outputs in all_outputs for one in outputs.outputs])
        return logprobs, token_ids

    module = part("trl", ENGINE)
    module.extract_logprobs = extract_logprobs
    try:
        yield
    finally:
        module.extract_logprobs = theirs


def _attach(logprobs: list[list[list[float | None]]], completions: list[Any]) -> None:
    """Replace log-probs in place by `Drawn` numbers, which also hold the sampler's ids; a log-prob
    of a token without such ids stays."""
    masks = [getattr(one, "sampling_mask", None) for one in completions]
    lists = [getattr(mask, "token_ids", None) for mask in masks]
    columns = max((len(row) for row in logprobs), default=0)
    ids, offsets = support_from_lists(lists, columns)
    counts = offsets.diff().view(len(lists), columns)
    sets = SampledSets(ids.int(), counts.int())
    for b, (row, sizes) in enumerate(zip(logprobs, counts.tolist(), strict=True)):
        for c, (likely, size) in enumerate(zip(row, sizes, strict=False)):
            if size:
                logp = math.nan if likely[0] is None else likely[0]
                likely[0] = Drawn(logp, sets, b * columns + c)
