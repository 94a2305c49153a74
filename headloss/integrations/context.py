"""Trainers of Transformers' kind under context parallelism: each rank of a group holds tokens of
the same rows, which accelerate's torch backend shards.

B rows of L positions, of which a rank holds L / cp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..batch.batch import Batch
from ..batch.reduction import Totals
from ..batch.segments import Segments


@dataclass(frozen=True)
class Shards:
    """Of a micro-batch what the loss reads, in the buffers that the framework shards in place: what
    lies beside the tokens is sharded as they are, by its own rule.

    Attributes:
        targets: shifted labels, [B, L], then [B, L / cp]; `ids` as they, the segment of each.
        fields: of the batch; those of each token as the targets.
        count: of segments, the same on all ranks of the group.
        totals: of the whole rows.
    """

    targets: Tensor
    ids: Tensor
    fields: dict[str, Any]
    count: int
    group: Any
    totals: Totals

    @classmethod
    def of(cls, batch: Batch, group: Any) -> Shards:
        """Of whole rows; ValueError where something of each token has no column to be cut along."""
        if batch.support is not None:
            raise ValueError(
                "support_ids: got them under context parallelism, want [B, L, K] ids that the call "
                "of each rank is given"
            )
        tensors = {n: x.clone() if isinstance(x, Tensor) else x for n, x in batch.fields.items()}
        fields, segments = {**tensors, "totals": batch.totals}, batch.segments
        ids = segments.ids.view_as(batch.targets).clone()
        totals = Totals.of(batch)
        return cls(batch.targets.clone(), ids, fields, segments.count, group, totals)

    @property
    def buffers(self) -> list[Tensor]:
        """Tensors beside the tokens, sharded along dimension 1."""
        shape = self.targets.shape
        beside = [x for x in self.fields.values() if isinstance(x, Tensor) and x.shape[:2] == shape]
        return [self.targets, self.ids, *beside]

    def batch(self, device: torch.device) -> Batch:
        """Of this rank's tokens, once they have been sharded."""
        moved: dict[str, Any] = {}
        for name, value in self.fields.items():
            moved[name] = value.to(device) if isinstance(value, Tensor) else value
        segments = Segments.from_ids(self.ids.to(device), self.count, self.group)
        return Batch(self.targets.to(device), segments, **moved)


def group_of(trainer: Any) -> Any:
    """The ranks that hold parts of the same rows; None: each rank has whole ones.

    Raises:
        ValueError: a framework shards rows that does not say how, nor among whom.
    """
    if trainer.get_sp_size() > 1:
        raise ValueError(
            "parallelism_config: got sequence parallelism, whose data loader shards rows before "
            "they can be counted; want context parallelism (cp_size, torch's backend), or "
            "transformers.Trainer, which serves means of tokens"
        )
    if trainer.get_cp_size() == 1:
        return None
    backend = trainer.accelerator.parallelism_config.cp_backend
    if backend != "torch":
        raise ValueError(f"parallelism_config: got cp_backend={backend!r}, want 'torch'")
    return trainer.accelerator.torch_device_mesh["cp"].get_group()
