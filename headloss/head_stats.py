"""`head_stats`: log-prob, log-sum-exp and entropy for any other trainer's loss.

N positions, T of them scored, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .batch.batch import Batch
from .collectives import inside
from .engine.autograd import HeadStatistics
from .engine.call import call_and_tensors
from .engine.checks import Arguments, check_targets
from .engine.operator import in_graph
from .engine.plan import Plan
from .head.head import Head, check_head
from .losses.arguments import naming
from .losses.teacher import Teacher, measures_by_name
from .objective.external import CANDIDATE_STATISTICS, HEAD_STATISTICS, external_loss
from .options import DEFAULT, Options
from .statistics.divergence import Measure


@dataclass(eq=False)
class HeadStats:
    """Statistics of each position, in the targets' shape; 0 where unscored.

    It unpacks to three: `logp, lse, entropy = headloss.head_stats(...)`.

    Attributes:
        logp, lse, entropy: [..] float32 (float64 for float64 inputs).
        candidate_logps: [.., K] of a batch with `candidate_ids`, else None.
        candidate_tail: [..] the log of the other tokens' mass, where `gradients` names it.
        divergences: [..] of a teacher, by the names that were asked for.
        plan: what ran; None in a compiled graph.
    """

    logp: Tensor
    lse: Tensor
    entropy: Tensor
    candidate_logps: Tensor | None = None
    candidate_tail: Tensor | None = None
    plan: Plan | None = None
    divergences: dict[str, Tensor] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.logp, self.lse, self.entropy))

    def __len__(self) -> int:
        return len(HEAD_STATISTICS)

    def __getitem__(self, index: int) -> Tensor:
        return [*self][index]


torch.export.register_dataclass(HeadStats)  # for FSDP2 and DDP, as `Output`


def head_stats(
    hidden: Tensor,  # [.., H]
    head: Head,
    targets_or_batch: Tensor | Batch,  # [..] int64, already shifted; -100 is not scored
    options: Options | None = None,
    gradients: Collection[str] = HEAD_STATISTICS,
    teacher: Teacher | None = None,
    divergences: Collection[str] = (),
) -> HeadStats:
    """Log-prob of the target, log-sum-exp and entropy at each position, without the logits;
    log-probs of the candidates that a batch names; and divergences from a teacher.

    Shapes: hidden [.., H], head.weight [V, H] and targets [..]; each statistic is [..].

    For a loss that somebody else's code makes of them. float32 (float64 for float64 inputs).
    Unscored positions get 0 and give no gradient. A batch brings its packing, which other calls
    share, and may be of another shape than the hidden states (`Options(sequence_parallel=True)`).

    No schedule is one pass, as the loss needs all statistics. `auto` takes *frozen* (4NHV) for a
    head without gradient under `gradients=("logp",)`; *held* (6NHV) where the softmax terms (or
    logits) of all tokens fit `memory_budget`; else *recompute* (8NHV), as always in
    `torch.compile`, which sees a registered operator and need not break its graph.

    Args:
        options: see `Options`. `main_grad` is written in the backward pass. `upstream` is refused.
        gradients: which statistics will carry a gradient; the others are returned detached.
            "candidate_logps" and "candidate_tail" may be among them; the tail, which takes logits
            in float32, is there only if it is named. So may names of `divergences`.
        teacher: of `hl.teacher`, for the batch's `teacher_hidden` or `teacher_logits`.
        divergences: kinds as of `distillation` (mixtures at beta=0.5), or "log_acceptance".

    Returns:
        `HeadStats`, which unpacks to (logp, lse, entropy), each in the targets' shape.

    Raises:
        ValueError, TypeError: as `head_loss`.
        RuntimeError: a second backward pass under *held* or *frozen*, which use up what they keep.

    >>> import torch, headloss as hl
    >>> head = hl.Head(torch.zeros(10, 4))
    >>> logp, lse, entropy = hl.head_stats(torch.zeros(2, 4), head, torch.tensor([1, -100]))
    >>> [round(x, 4) for x in logp.tolist()]  # 0 where nothing is scored
    [-2.3026, 0.0]
    """
    check_head(head)
    options = DEFAULT if options is None else options
    measures = measures_by_name(teacher, divergences)
    candidates = isinstance(targets_or_batch, Batch) and "candidate_ids" in targets_or_batch.fields
    allowed = (*HEAD_STATISTICS, *CANDIDATE_STATISTICS) if candidates else HEAD_STATISTICS
    names = _checked(gradients, (*allowed, *measures))
    if torch.compiler.is_compiling():
        in_no_graph = head.vocab_group, head.vocab_mesh_dim, head.beside or None, teacher
        if in_no_graph == (None, None, None, None):
            outputs = in_graph(hidden, head, targets_or_batch, options, names)
            return _named(outputs, names, candidates, measures)
        # The ranks compare their calls, which no graph can hold; nor a teacher, nor features.
        run: Any = torch.compiler.disable(head_stats)
        of_all = hidden, head, targets_or_batch, options, names, teacher, divergences
        return run(*of_all)  # type: ignore[no-any-return]
    if not names:
        with torch.no_grad():
            of_all = hidden, head, targets_or_batch, options, HEAD_STATISTICS, teacher, divergences
            return head_stats(*of_all)
    batch: Any = targets_or_batch
    if not isinstance(batch, Batch):
        try:
            batch = check_targets(targets_or_batch, hidden, options)
        except Exception as error:  # to be raised on all ranks
            batch = error
    if teacher is not None and isinstance(batch, Batch):
        with naming("teacher"):
            if teacher.source(batch.fields) == "topk":
                want = "teacher_logits or teacher_hidden (candidate_ids have a stored token's)"
                raise ValueError(f"got teacher_topk_ids in the batch, want {want}")
    terms = external_loss(
        names, candidates=candidates, teacher=teacher, measures=frozenset(measures.values())
    )
    arguments = Arguments.of_head("head_stats", hidden, head, batch, terms, options)
    call, tensors = call_and_tensors(arguments)
    with inside(hidden.device.type, *call.groups):
        outputs = HeadStatistics.apply(call, *tensors)
    return _named(outputs, names, candidates, measures, call.plan)


def _named(
    outputs: Sequence[Tensor],
    names: frozenset[str],
    candidates: bool,
    measures: Mapping[str, Measure],
    plan: Plan | None = None,
) -> HeadStats:
    """The result from logp, lse and entropy, log-probs of candidates and the tail [.., K + 1], and
    measures in their own order."""
    logp, lse, entropy, *divergences = outputs
    stats = HeadStats(logp, lse, entropy, plan=plan)
    if candidates:
        of_candidates, *divergences = divergences
        logps = of_candidates[..., :-1]
        tail = of_candidates[..., -1]
        stats.candidate_logps = logps if CANDIDATE_STATISTICS[0] in names else logps.detach()
        stats.candidate_tail = tail if CANDIDATE_STATISTICS[1] in names else None
    by_measure = dict(zip(sorted(measures.values()), divergences, strict=True))
    stats.divergences = {name: by_measure[measure] for name, measure in measures.items()}
    return stats


def _checked(gradients: Collection[str], names: Collection[str]) -> frozenset[str]:
    """Some of these names of statistics; raises for others."""
    statistics: frozenset[Any]
    try:
        statistics = frozenset([None] if isinstance(gradients, str) else gradients)
    except TypeError:  # a number, or what no set holds
        statistics = frozenset([None])
    if None in statistics:
        raise TypeError(f"gradients: got {gradients!r}, want a tuple of names out of {names}")
    for name in statistics:
        if name not in names:
            want = (
                "a batch with candidate_ids"
                if name in CANDIDATE_STATISTICS
                else f"names out of {names}"
            )
            raise ValueError(f"gradients: got {name!r}, want {want}")
    return statistics
