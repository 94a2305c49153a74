"""head_stats, head_topk, logits_loss, DTensor, DDP and FSDP2 on several ranks agree with one
rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import parallel_counts
import parallel_verbs
import parallel_wrappers
import pytest
from worlds import World, world_of

PARTS = {
    parallel_verbs: (
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
        "static_spread",
        "layouts",
        "dtensors",
    ),
    parallel_counts: ("skipped_rows", "collectives", "reads", "checksums"),
    parallel_wrappers: ("metrics_merge", "ddp", "fsdp"),
}
CHECKS = [getattr(module, name) for module, names in PARTS.items() for name in names]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of(3) as made:
        yield made


@pytest.mark.parametrize("check", CHECKS)
def test_against_one_rank(world: World, check: Callable[[], None]) -> None:
    world.run(check)
