"""Scored positions of a micro-batch on this rank, and the ids that the sampler kept for each token.

B sequences of at most R response tokens, N flattened positions of this rank, T of them scored, P
(token, id) pairs of all tokens.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from ...batch.support_forms import support_from_lists

Pairs = tuple[Tensor, Tensor]  # Ids [P] and offsets, the form of `support_ids` in a `Batch`.


class Scored:
    """The scored positions of a micro-batch, packed or in rows.

    Args:
        shape: shape of this sequence-parallel rank's tensor of token positions.

    Attributes:
        mask: [B, R] bool, verl's `response_mask`.
        here: [B, R] bool, the scored tokens that this rank predicts.
        rows: [B, R] index of each token's sequence.
        at: [T] indices of the predicting positions, in this rank's flattened positions.
        group: process group of sequence parallelism, or None.
    """

    def __init__(self, engine: Any, data: Any, shape: torch.Size, packed: bool) -> None:
        offsets = data["input_ids"].offsets()
        places = no_padding_2_padding(torch.arange(int(offsets[-1]), device=offsets.device), data)
        self.rows = torch.arange(len(places), device=places.device).unsqueeze(1).expand_as(places)
        if not packed:
            places = places + self.rows * shape[1] - offsets[:-1].unsqueeze(1)
        self.mask = data.select("response_mask").to_padded_tensor()["response_mask"].to(bool)
        self.group = engine.ulysses_parallel_group if engine.use_ulysses_sp else None
        rank = 0 if self.group is None else torch.distributed.get_rank(self.group)
        first = rank * shape.numel()
        self.here = self.mask & (places >= first) & (places < first + shape.numel())
        self.at = places[self.here] - first
        self.positions = shape.numel()

    def support(self, data: Any) -> Pairs | None:
        """Return the ids that the sampler kept for the T scored tokens, in order of position; None
        for a batch without such ids.

        The batch's `support_ids` holds one list per response token, with the ids that the sampler
        kept. An empty list means that the sampler kept the whole vocabulary.

        Raises:
            ValueError: `support_ids` has no list for a scored token.
        """
        lists = tu.get(data, "support_ids")
        if lists is None or all(row is None for row in lists):
            return None
        columns = self.mask.shape[1]
        for b, c in self.mask.nonzero().tolist():
            row = lists[b]
            if row is None or c >= len(row) or row[c] is None:
                raise ValueError(
                    f"support_ids: sequence {b} has no set at token {c} of its response, which is "
                    "scored; a loop of several turns has to join the sets of all of them"
                )
        ids, offsets = support_from_lists(lists, columns)
        counts, chosen = offsets.diff(), self.here.flatten().cpu()
        ids = ids[chosen.repeat_interleave(counts)]
        return ids.to(self.at.device), _offsets(counts[chosen]).to(self.at.device)

    def everywhere(self, data: Any) -> Pairs | None:
        """Return the ids that the sampler kept for all N positions; none at unscored positions."""
        if (pairs := self.support(data)) is None:
            return None
        counts = pairs[1].new_zeros(self.positions)
        return pairs[0], _offsets(counts.index_copy_(0, self.at, pairs[1].diff()))


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
