"""Counts of collectives, checksums and device reads on every rank of a test world."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from parallel_verbs import Problem, T, close
from torch import Tensor, distributed

import headloss as hl
from headloss.parallel.agreement import checksum

GATHERS = ("all_gather_single", "all_gather_into_tensor")


def skipped_rows() -> None:
    """Check that ranks send equal shapes even if most rows have no gradient."""
    p = Problem()
    advantages = torch.zeros(T, dtype=torch.float64)
    advantages[5] = 1.0
    batch = hl.Batch(p.targets, advantages=advantages, old_logps=p.batch.old_logps)
    held = hl.Options(schedule="held", chunk_tokens=4)
    for options in (hl.Options(chunk_tokens=4), hl.Options(schedule="recompute"), held):
        want = hl.head_loss(p.hidden, hl.Head(p.weight), batch, hl.dapo(), options)
        got = hl.head_loss(p.hidden, p.sliced(), batch, hl.dapo(), options)
        (into_hidden,) = torch.autograd.grad(want.loss, p.hidden)
        close(torch.autograd.grad(got.loss, p.hidden)[0], into_hidden)


def collectives() -> None:
    """Check that every rank runs the same collectives with the same shapes, whatever data the rank
    holds."""
    p = Problem()
    seen: list[tuple[str, tuple[int, ...]]] = []
    names = [next(n for n in GATHERS if hasattr(distributed, n)), "all_reduce"]
    plain = {name: getattr(distributed, name) for name in names}

    def noted(name: str) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            own = args[0] if name == "all_reduce" else args[1]
            seen.append((name, tuple(own.shape)))
            return plain[name](*args, **options)

        return run

    # Rank 0 holds all tokens or no token; each of the ranks 1, 2, .. holds every third token.
    for holds in (torch.arange(T), torch.arange(0)):
        tokens = torch.arange(T)[p.rank :: p.world] if p.rank else holds
        batch = hl.Batch(
            p.targets[tokens],
            hl.Segments.from_ids(p.batch.segments.ids[tokens], count=5, group=p.group),
            advantages=p.batch.advantages,
            old_logps=p.batch.old_logps[tokens],
        )
        objective = p.objective + hl.grpo().corrected("sequence_mask")
        batch.fields["sampling_logps"] = batch.old_logps - 0.1
        seen.clear()
        for name in names:
            setattr(distributed, name, noted(name))
        hidden = p.hidden.detach()[tokens].requires_grad_()
        hl.head_loss(hidden, hl.Head(p.weight), batch, objective).loss.backward()
        for name in names:
            setattr(distributed, name, plain[name])
        found: list[Any] = [None] * p.world
        distributed.all_gather_object(found, list(seen))
        assert seen and all(other == seen for other in found), found


def checksums() -> None:
    """Check that checksums detect permuted values, such as swapped rewards or masks."""
    right, changed = ([1.0, -1.0, -1.0, 1.0], [-1.0, 1.0, 1.0, -1.0])
    assert checksum([torch.tensor(right)]) != checksum([torch.tensor(changed)])
    seen = {checksum([torch.tensor(bits)]) for bits in itertools.product((0, 1), repeat=10)}
    assert len(seen) == 1024


def reads() -> None:
    """Check that a call on vocabulary shards reads the device once, plus once per chunk to skip
    rows."""
    p = Problem()
    seen: list[str] = []
    names = ("tolist", "item", "cpu", "__int__", "__float__", "__bool__", "__index__", "nonzero")
    plain = {name: getattr(Tensor, name) for name in names}

    def noted(name: str) -> Any:
        def run(tensor: Tensor, *args: Any, **options: Any) -> Any:
            seen.append(name)
            return plain[name](tensor, *args, **options)

        return run

    for skip, want in ((False, 1), (True, 3)):
        options = hl.Options(metrics=False, skip_rows=skip, chunk_tokens=12)
        objective = hl.dapo() + 0.1 * hl.z_loss()
        hl.head_loss(p.hidden, p.sliced(), p.batch, objective, options)  # trial of the terms
        seen.clear()
        for name in names:
            setattr(Tensor, name, noted(name))
        try:
            hl.head_loss(p.hidden, p.sliced(), p.batch, objective, options).loss.backward()
        finally:
            for name in names:
                setattr(Tensor, name, plain[name])
        assert len(seen) == want, seen
