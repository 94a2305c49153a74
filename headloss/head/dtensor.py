"""Conversion of a head of DTensors to this rank's rows and their process group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..arguments import is_dtensor
from .head import GATHER, Head


def local_head(head: Head) -> Head:
    """Return a head of DTensors as this rank's rows with a process group; return any other head
    unchanged. TypeError for placements other than rows sharded over one mesh dimension."""
    if not is_dtensor(head.weight):
        if head.vocab_mesh_dim is not None:
            raise ValueError(
                f"vocab_mesh_dim: got {head.vocab_mesh_dim!r} with a plain weight, want a DTensor; "
                "a plain slice of the vocabulary goes with vocab_group"
            )
        return head
    weight: Any = head.weight
    mesh = weight.device_mesh
    name = head.vocab_mesh_dim or "tp"
    if head.vocab_group is not None or name not in (mesh.mesh_dim_names or ()):
        raise _placed("weight", weight)
    dim = mesh.mesh_dim_names.index(name)

    def local(what: str, value: Any, sharded: bool) -> Any:
        if not is_dtensor(value):
            if sharded and value is not None:
                raise TypeError(
                    f"{what}: got a plain tensor beside a DTensor weight, want a DTensor that is "
                    "sharded alike"
                )
            return value
        for i, placement in enumerate(value.placements):
            fits = placement.is_shard(0) if sharded else placement.is_replicate()
            # Over a mesh dimension of a single rank, all placements are equivalent.
            if not (fits if i == dim else mesh.size(i) == 1):
                raise _placed(what, value)
        return value.to_local()

    return replace(
        head,
        weight=local("weight", weight, True),
        bias=local("bias", head.bias, True),
        lora=tuple(
            replace(x, a=local("lora.a", x.a, False), b=local("lora.b", x.b, True))
            for x in head.lora
        ),
        vocab_group=mesh.get_group(dim),
        vocab_mesh_dim=None,
    )


def _placed(name: str, value: Any) -> TypeError:
    return TypeError(
        f"{name}: got a DTensor placed {tuple(value.placements)} on a mesh with dimensions "
        f"{value.device_mesh.mesh_dim_names}, want a plain tensor, or rows sharded over the mesh "
        f'dimension "tp" (or vocab_mesh_dim) alone; {GATHER}'
    )
