"""A rank fails in the middle of a call: the error, and the time until it is raised, on each of two
ranks."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

import headloss as hl

SECONDS = 3.0  # Collectives that take longer fail.
T, H, V = 6, 4, 10
# If the field `armed` of the batch contains this value, the loss term fails; when headloss tries a
# new term on made-up tokens, `armed` has other values.
ARMED = 100.0


class Met(NamedTuple):
    """The exception that ended a rank's call, and the call's duration in seconds."""

    kind: str
    message: str
    notes: list[str]
    seconds: float


@hl.term
def fragile(stats: Any, batch: Any, how: str = "raises") -> Tensor:
    """A term that fails on rank 1 if the field `armed` contains the value `ARMED`."""
    if distributed.get_rank() == 1 and bool((batch.armed == ARMED).any()):
        if how == "raises":
            raise KeyError("a bug of the user's")
        os.kill(os.getpid(), signal.SIGKILL)
    return -stats.logp


def loss(group: Any, over: str, how: str = "raises", armed: bool = False) -> Tensor:
    """Return the loss of a call on two ranks, which share the vocabulary, the segments or, with
    sequence parallelism, the tokens, as `over` says."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    hidden, weight = torch.randn(T, H), torch.randn(V, H)
    segments = hl.Segments.from_lengths([4, 2])
    options, head = hl.Options(), {}
    if over == "segments":
        segments = hl.Segments.from_ids(segments.ids, count=2, group=group)
    else:
        weight, head = weight.chunk(2)[rank], {"vocab_group": group}
        options = hl.Options(chunk_tokens=2, sequence_parallel=over == "spread")
    if over == "spread":
        hidden = hidden.chunk(2)[rank]
    batch = hl.Batch(torch.arange(T), segments, armed=torch.full((T,), ARMED if armed else 0.0))
    batch.fields |= {"advantages": torch.ones(2), "old_logps": torch.full((T,), -2.0)}
    objective = fragile(how=how) + (hl.gspo() if over == "segments" else hl.z_loss())
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    return hl.head_loss(leaves[0], hl.Head(leaves[1], **head), batch, objective, options).loss


def meet(run: Any) -> Met:
    begun = time.perf_counter()
    try:
        run()
    except Exception as error:
        notes = list(getattr(error, "__notes__", []))
        return Met(type(error).__name__, str(error), notes, time.perf_counter() - begun)
    return Met("", "nothing was raised", [], time.perf_counter() - begun)


def fails(over: str, how: str) -> list[Met]:
    """Let rank 1 fail in a term, catch the error, and continue with a further call."""
    patient = distributed.new_group([0, 1])
    # run a correct call first, so that all modules are imported before the timeout counts
    loss(patient, over, how).backward()
    group = distributed.new_group([0, 1], timeout=timedelta(seconds=SECONDS))
    distributed.barrier(patient)
    first = meet(lambda: loss(group, over, how, armed=True))
    return [first, meet(lambda: loss(group, over))]


def fails_before_backward() -> list[Met]:
    """Let rank 1 raise between forward and backward of a call under the `recompute` schedule."""
    patient = distributed.new_group([0, 1])
    group = distributed.new_group([0, 1], timeout=timedelta(seconds=SECONDS))
    rank = distributed.get_rank()
    torch.manual_seed(0)
    weight = torch.randn(V, H).chunk(2)[rank].clone().requires_grad_()
    hidden = torch.randn(T, H).requires_grad_()
    out = hl.head_loss(
        hidden,
        hl.Head(weight, vocab_group=group),
        hl.Batch(torch.arange(T)),
        hl.cross_entropy(),
        hl.Options(schedule="recompute"),
    )
    distributed.barrier(patient)
    if rank == 1:
        return [Met("", "raised by the training loop", [], 0.0)]
    return [meet(out.loss.backward)]
