"""`head_stats`: log-prob, log-sum-exp and entropy for the loss function of any other trainer.

N positions, T scored positions, H hidden width, V vocabulary.
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
    """Statistics of each position, in the targets' shape; 0 at unscored positions.

    Unpacks to three tensors: `logp, lse, entropy = headloss.head_stats(...)`.

    Attributes:
        logp, lse, entropy: [..] float32 (float64 for float64 inputs).
        candidate_logps: [.., K] log-probs of a batch's `candidate_ids`; None without
            `candidate_ids`.
        candidate_tail: [..] the log of the probability of all tokens but the candidates; None
            unless `gradients` names "candidate_tail".
        divergences: [..] divergences from a teacher, by the names in the argument `divergences`.
        plan: the `Plan` that ran; None in a compiled graph.
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


# FSDP2 and DDP find output tensors in pytree nodes only.
torch.export.register_dataclass(HeadStats)


def head_stats(
    hidden: Tensor,  # [.., H]
    head: Head,
    targets_or_batch: Tensor | Batch,  # [..] int64, already shifted; -100 is not scored
    options: Options | None = None,
    gradients: Collection[str] = HEAD_STATISTICS,
    teacher: Teacher | None = None,
    divergences: Collection[str] = (),
) -> HeadStats:
    """Compute the target's log-prob, the log-sum-exp and the entropy at each position, without
    storing the logits. On request, also compute log-probs of a batch's candidates and divergences
    from a teacher.

    Shapes: hidden [.., H], head.weight [V, H] and targets [..]; each statistic is [..].

    Use `head_stats` for a loss function outside of headloss. Statistics are float32 (float64 for
    float64 inputs). Unscored positions get 0 and give no gradient. Calls with the same `Batch`
    object share the batch's packing. A batch may have another shape than the hidden states under
    `Options(sequence_parallel=True)`.

    The `one_pass` schedule is not available, because the loss outside of `head_stats` reads the
    statistics of all tokens before any gradient is computed. Schedule "auto" chooses *frozen* (the
    work of two matmuls) for a head without gradient under `gradients=("logp",)`, *held* (three
    matmuls) if the softmax terms (or logits) of all tokens fit `memory_budget`, else *recompute*
    (four matmuls). `torch.compile` always runs *recompute*, as a registered operator without a
    graph break; a teacher, extra low-rank columns (`Head(beside=..)`) and a vocabulary group cause
    a graph break.

    Args:
        options: see `Options`. If the option `main_grad` is a tensor, the backward pass adds the
            weight gradient to this tensor. The option `upstream` raises an error.
        gradients: names of the statistics with a gradient; all other statistics are returned
            detached. "candidate_logps", "candidate_tail" and names of `divergences` may be among
            the names. "candidate_tail", the log-probability of all tokens outside the candidates,
            needs logits in float32 and is computed only if `gradients` names "candidate_tail".
        teacher: the result of `hl.teacher`, for the batch's `teacher_hidden` or `teacher_logits`.
        divergences: kinds as for `distillation` (mixtures at beta=0.5), or "log_acceptance".

    Returns:
        `HeadStats`, which unpacks to (logp, lse, entropy), each in the targets' shape.

    Raises:
        ValueError, TypeError: as `head_loss`.
        RuntimeError: a second backward pass under the schedule "held" or "frozen", because the
            first backward pass overwrites its saved tensors.

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
        # A compiled graph cannot contain a teacher, extra low-rank columns of the head (`beside`),
        # or collectives in which ranks compare their calls.
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
        except Exception as error:
            # Raise the error about bad targets later, when the ranks compare their arguments, so
            # that every rank raises.
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
    """Return `HeadStats` from the list `outputs` of an autograd function: logp, lse, entropy; with
    candidates a tensor [.., K + 1] of log-probs and tail; one divergence for each of the sorted
    `measures`."""
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
    """Return `gradients` as a set; TypeError or ValueError for anything but a collection of
    `names`."""
    statistics: frozenset[Any]
    try:
        statistics = frozenset([None] if isinstance(gradients, str) else gradients)
    except TypeError:  # `gradients` is no collection, or has an element that cannot be hashed.
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
