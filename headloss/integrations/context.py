"""Context parallelism of Transformers-style trainers.

Accelerate's torch backend shards every row over the ranks of a context-parallel group.

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
    """A micro-batch's tensors for the loss. The library accelerate shards the tensors in place over
    context-parallel ranks, as it shards the tokens.

    Attributes:
        targets: shifted labels, [B, L], later [B, L / cp].
        ids: segment of each token, in the shape of `targets`.
        fields: fields of the batch; a field per token is sharded like the targets.
        count: number of segments, equal on all ranks of the group.
        totals: totals of the whole rows.
    """

    targets: Tensor
    ids: Tensor
    fields: dict[str, Any]
    count: int
    group: Any
    totals: Totals

    @classmethod
    def of(cls, batch: Batch, group: Any) -> Shards:
        """Return the tensors of a micro-batch that are sharded; ValueError for `support_ids`, since
        a list of allowed ids cannot be sharded by sequence position."""
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
        """Tensors per token, to be sharded along dimension 1."""
        shape = self.targets.shape
        beside = [x for x in self.fields.values() if isinstance(x, Tensor) and x.shape[:2] == shape]
        return [self.targets, self.ids, *beside]

    def batch(self, device: torch.device) -> Batch:
        """Return the batch of this rank's tokens, after accelerate has sharded the buffers."""
        moved: dict[str, Any] = {}
        for name, value in self.fields.items():
            moved[name] = value.to(device) if isinstance(value, Tensor) else value
        segments = Segments.from_ids(self.ids.to(device), self.count, self.group)
        return Batch(self.targets.to(device), segments, **moved)


def group_of(trainer: Any) -> Any:
    """Return the context-parallel process group; None if each rank has whole rows.

    Raises:
        ValueError: sequences are sharded by another backend than accelerate's torch context
            parallelism.
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
