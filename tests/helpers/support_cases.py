"""Shared by tests of `support_ids`: a head, a batch with allowed ids per token, and an objective.

N positions, T of them scored, H hidden width, V vocabulary, K largest number of ids of a position.
"""

from __future__ import annotations

import torch
from matrix import Inputs, make_head
from torch import Tensor

import headloss as hl
from headloss.testing import random_batch, trained_looking

LENGTHS = (5, 1, 7, 4, 0, 6)
TOKENS, WIDTH, VOCABULARY, MOST = sum(LENGTHS), 8, 97, 9
UNSCORED = (3, 11)
BEYOND = 1 << 40


def supports(targets: Tensor, vocabulary: int, kind: str, most: int = MOST, seed: int = 0):
    """Make distinct `support_ids` for each position, always with the target.

    With "mixed" in `kind`, two of five positions have no ids, so all tokens are allowed. Unscored
    positions have arbitrary ids. If `kind` contains "flat", ids are returned as a flat tensor with
    the offset of each position, else as rows padded with -1.
    """
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = []
    for position, target in enumerate(targets.reshape(-1).tolist()):
        count = 1 + int(torch.randint(most, (), generator=generator))
        ids = torch.randperm(vocabulary, generator=generator)[:count].tolist()
        if target < 0:
            ids = [BEYOND] * count
        elif "mixed" in kind and position % 5 in (0, 3):
            ids = []
        elif target not in ids:
            ids[count // 2] = target
        rows.append(ids)
    if "flat" in kind:
        offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
        return torch.tensor([i for ids in rows for i in ids]), offsets
    padded = torch.full((len(rows), most), -1)
    # Put the ids into random columns; columns without an id keep -1.
    for row, ids in zip(padded, rows, strict=True):
        row[torch.randperm(most, generator=generator)[: len(ids)]] = torch.tensor(ids).long()
    return padded.view(*targets.shape, most)


def candidates(targets: Tensor, support_ids: Tensor, vocabulary: int) -> Tensor:
    """Make candidates [N, 4]: up to two `support_ids` other than the target, one id outside of
    `support_ids`, and unused entries (-1)."""
    found = torch.full((len(targets), 4), -1)
    for row, target, ids in zip(found, targets.tolist(), support_ids.tolist(), strict=True):
        inside = [i for i in ids if i not in (-1, target, BEYOND)][:2]
        outside = next(i for i in range(vocabulary) if i not in ids and i != target)
        row[1 : 2 + len(inside)] = torch.tensor([*inside, outside])
    return found


@hl.term
def of_candidates(stats, batch):
    """A term that reads all statistics of candidates: their log-probs (some -inf), the log of the
    probability outside the candidates, the sum of p^2, and the largest logit."""
    logps = stats.candidate_logps
    inside = torch.where(logps > -torch.inf, logps, 0)
    scores = torch.arange(1, 1 + logps.shape[1], device=logps.device) * 0.1
    value = (scores * (logps.exp() + 0.5 * inside)).sum(1)
    return value + 0.3 * stats.candidate_tail + stats.sum_p_squared + 0.01 * stats.peak


def objective() -> hl.Objective:
    """Return an objective that reads all statistics, and combines per-segment with per-token terms
    and their reductions."""
    return (
        hl.gspo()
        + 0.3 * hl.cross_entropy(label_smoothing=0.1)
        - 0.05 * hl.entropy()
        + 0.01 * hl.z_loss()
    )


def inputs(
    kind: str = "padded",
    head: str = "plain",
    dtype: torch.dtype = torch.float32,
    train: bool = True,
    terms: hl.Term | hl.Objective | None = None,
    beside: bool = False,
) -> Inputs:
    """Make a call with `support_ids` for all or some ("mixed") tokens; with `beside` the batch and
    the objective also have candidates."""
    padding = 7 if head in ("padded_vocabulary", "everything") else 0
    hidden, weight, targets = trained_looking(TOKENS, WIDTH, VOCABULARY, dtype)
    made = make_head(head, torch.cat([weight, 3 * weight[:padding]]), "packed", train=train)
    random = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(5))
    if isinstance(made.temperature, Tensor):
        made = hl.Head(**{**vars(made), "temperature": 0.6 + random[0]})
    segments = hl.Segments.from_lengths(LENGTHS)
    batch = random_batch(targets, segments, -random[1])
    targets = targets.clone()
    targets[list(UNSCORED)] = hl.batch.batch.IGNORE
    fields = {**batch.fields, "support_ids": supports(targets, VOCABULARY, kind)}
    terms = objective() if terms is None else terms
    if beside:
        support_ids = supports(targets, VOCABULARY, kind.replace(" flat", "").replace("flat", ""))
        fields["candidate_ids"] = candidates(targets, support_ids, VOCABULARY)
        terms = hl.Objective.of(terms) + of_candidates()
    return Inputs(
        hidden=hidden.requires_grad_(),
        head=made,
        batch=hl.Batch(targets, segments, **fields),
        objective=hl.Objective.of(terms),
    )
