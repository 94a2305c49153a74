"""Calls with `support_ids`, split over ranks and run on every rank of a test world."""

from __future__ import annotations

from typing import Any

import parallel_cases
import pytest
import support_cases
import torch
from parallel_cases import Cut, groups, part_of
from torch import distributed

import headloss as hl

OPTIONS = {
    "one_pass": hl.Options(),
    "small_chunks": hl.Options(chunk_tokens=4),
    "recompute": hl.Options(schedule="recompute"),
    "slabs": hl.Options(schedule="recompute", chunk_tokens=3),
    "held": hl.Options(schedule="held"),
    "static": hl.Options(static=True),
}
Call = tuple[str, str, str, Cut]  # kind, head, options, cut


def inputs_of(call: Call) -> Any:
    dtype = torch.float64 if call[3].seed % 2 else torch.float32
    return support_cases.inputs(call[0], call[1], dtype, beside=call[3].seed % 4 > 1)


def run_all(calls: list[Call]) -> list[dict[str, Any]]:
    return [parallel_cases.run_inputs(inputs_of(call), OPTIONS[call[2]], call[3]) for call in calls]


def other_supports() -> None:
    """Check that all ranks of a vocabulary group raise if their `support_ids` differ."""
    cut = Cut(vocabulary=2)
    inputs, rank = support_cases.inputs("padded"), distributed.get_rank()
    mine = part_of(inputs, cut, rank, *groups(1, 2))
    ids = mine.batch.support_ids.clone()
    ids[0] = ids[0].roll(rank)
    batch = mine.batch.with_fields(support_ids=ids)
    options = hl.Options(check_ranks=True)
    with pytest.raises(ValueError, match="support_ids"):
        hl.head_loss(mine.hidden, mine.head, batch, inputs.objective, options)
