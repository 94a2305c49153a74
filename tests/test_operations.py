"""Upper bounds for the number of PyTorch operations in a small training step, since a small step
takes as long as the CPU needs to launch its operations."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from operations import Operations
from torch import Tensor

import headloss as hl
from headloss.engine import plan

N, H, V, S = 64, 16, 97, 8
TARGETS, LABELS = torch.arange(N), torch.arange(N).view(4, -1).clone()
LABELS[:, :5] = -100  # prompts
SOME = TARGETS.masked_fill(TARGETS < 5, -100)
LENGTHS, ADVANTAGES = torch.full((S,), N // S), torch.linspace(-1, 1, S)
OLD_LOGPS = torch.full((N,), -5.0)


def segmented(targets: Tensor) -> hl.Batch:
    segments = hl.Segments.from_lengths(LENGTHS)
    return hl.Batch(targets, segments, advantages=ADVANTAGES, old_logps=OLD_LOGPS)


# The numbers are GPU operations by folder of the package. "autograd": 3 counts one multiplication
# by the upstream gradient, and two additions to accumulated gradients.
CE = {"autograd": 3, "engine": 1, "head_loss": 1, "losses": 1, "objective": 2, "statistics": 10}
GRPO = CE | {"losses": 16, "objective": 3, "statistics": 16}
STEPS: dict[str, tuple[Callable[[], hl.Batch], hl.Term, dict[str, int]]] = {
    "cross-entropy": (lambda: hl.Batch(TARGETS), hl.cross_entropy(), CE | {"batch": 6}),
    "prompts": (lambda: hl.Batch.from_labels(LABELS), hl.cross_entropy(), CE | {"batch": 14}),
    "GRPO": (lambda: segmented(TARGETS), hl.grpo(), GRPO | {"batch": 13}),
    "GRPO, some": (lambda: segmented(SOME), hl.grpo(), GRPO | {"batch": 20}),
}


@pytest.mark.parametrize("step", STEPS)
def test_operations_of_a_step(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward with accumulated gradients stay within the allowed number of operations.

    Kernels and large matmuls are not counted. The step reads `loss` of the returned `Output`, and
    no metrics.
    """
    (make, objective, most), generator = STEPS[step], torch.Generator().manual_seed(0)
    # Small calls on a CPU skip no rows without a gradient. Raise the threshold `CPU_SKIP_WORTH`, so
    # that the calls of this test count as small.
    monkeypatch.setattr(plan, "CPU_SKIP_WORTH", 1 << 24)
    shapes = (N, H), (V, H)
    hidden, weight = (torch.randn(s, generator=generator, requires_grad=True) for s in shapes)

    def run() -> None:
        batch = make()
        x = hidden.view(*batch.targets.shape, H)
        hl.head_loss(x, hl.Head(weight), batch, objective).loss.backward()

    run()  # a first call, in which each term is tried on made-up tokens
    with Operations() as found:
        run()
    assert not found.beyond(most), "\n" + found.beyond(most)


IDS = torch.arange(4).expand(N, 4).contiguous()
TOPK = {"teacher_topk_ids": IDS, "teacher_topk_logps": torch.full((N, 4), -3.0)}
CANDIDATES = {"candidate_ids": IDS, "candidate_probs": torch.full((N, 4), 0.1)}
OF_IDS = "_repeated clamp_min, _repeated ge, _extremes amax, _extremes mul, _extremes sort"
OF_IDS += ", _extremes masked_fill, "
OF_PROBS = "_bad lt, _bad masked_fill, _bad cat, _bad linalg_vector_norm, _bad gt"


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({}, ""),
        ({"candidate_ids": IDS}, OF_IDS + "_bad any"),
        (CANDIDATES, OF_IDS + OF_PROBS),
        (TOPK, OF_IDS + OF_PROBS + ", _bad exp"),
    ],
    ids=["none", "ids", "probabilities", "log-probs"],
)
def test_operations_of_stored_ids(fields: dict[str, Tensor], more: str) -> None:
    """Making a `Batch` costs seven more operations for a field of ids, eleven with
    probabilities, and twelve with log-probs of the ids."""

    def surveyed(**fields: Tensor) -> list[str]:
        with Operations() as found:
            hl.Batch(TARGETS, **fields)
        return sorted(re.sub(r"^\S+ ", "", o) for o in found.noted if "survey.py" in o)

    of_targets = ["__init__ cat", "__init__ ne", "__init__ sum", "_extremes aminmax"]
    of_targets += ["_extremes mul"]
    assert surveyed(**fields) == sorted(of_targets + more.split(", ") * bool(more))


# PyTorch operations of Transformers' own loss: matmul, shift, copy, log-softmax, loss and division
HEAD_OF_STOCK = 6
FORWARD = {"engine": 1, "head_loss": 1, "losses": 1, "objective": 3, "statistics": 11, "batch": 18}


def test_operations_of_apply() -> None:
    """A forward under `apply` has at most 29 operations more than the stock forward, without
    metrics.

    Prompts are masked, and `num_items_in_batch` is given.
    """
    pytest.importorskip("transformers")
    from test_head_models import tiny

    from headloss.integrations.transformers import apply

    model, ids, found = tiny("llama").train(), TARGETS.view(4, -1) % 20, list[Operations]()
    labels, count = ids.masked_fill(LABELS == -100, -100), torch.tensor(44)
    for applied in (False, True):
        if applied:
            apply(model)
        model(ids, labels=labels, num_items_in_batch=count)
        with Operations() as operations:
            model(ids, labels=labels, num_items_in_batch=count)
        found.append(operations)
    stock, ours = found
    most = FORWARD | {"integrations": len(stock.noted) - HEAD_OF_STOCK}
    assert not ours.beyond(most), "\n" + ours.beyond(most)
    assert len(ours.noted) <= len(stock.noted) + 29
