"""head_stats, head_topk, logits_loss, DTensor, DDP and FSDP2 on several ranks, against one."""

from __future__ import annotations

from collections.abc import Iterator

import parallel_verbs
import pytest
from worlds import World, world_of

VERBS = [
    "head_stats",
    "float16",
    "external_loss",
    "head_topk",
    "logits_loss",
    "lora_dropout",
    "teacher_dropout",
    "teacher_heads",
    "top_entropy",
    "doubtful_fields",
    "skipped_rows",
    "collectives",
    "static_spread",
    "reads",
    "checksums",
    "layouts",
    "metrics_merge",
    "dtensors",
    "ddp",
    "fsdp",
]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of(3) as made:
        yield made


@pytest.mark.parametrize("name", VERBS)
def test_against_one_rank(world: World, name: str) -> None:
    world.run(getattr(parallel_verbs, name))
