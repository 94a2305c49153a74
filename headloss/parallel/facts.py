"""What the ranks of a call's groups say of it (`agreement.Facts`): all that decides which
collectives follow, and in which shapes; and on a group's first call what else has to be equal.

N positions, H hidden width, V rows of the whole vocabulary, S segments.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..batch.batch import IGNORE, MOST_IDS, Batch
from ..collectives import PROCESS_GROUP
from ..head.head import Head, autocast_dtype, transform_of
from ..kernels import memory, suits_product
from ..kernels.transform import Transform
from ..losses.identity import fingerprint
from .agreement import HIGHEST, MOST, Facts, OwnNumbers

if TYPE_CHECKING:
    from ..losses.term import Objective

# Fields of columns: a sharded teacher's are each rank's own, candidates are compared by their name.
APART = ("teacher_logits", "candidate_ids")
OWN = (PROCESS_GROUP, torch.device)  # of which each rank has its own


def of_vocabulary(arguments: Any, requirements: Any) -> Facts:
    """Of a call on hidden states, or (without a head) on logits. Every rank of the vocabulary's
    group is given the whole batch."""
    value, head, batch = arguments.values, arguments.head, arguments.batch
    transform, options, objective = arguments.transform, arguments.options, requirements.objective
    teacher = batch.fields.get("teacher_logits")
    spread = options.sequence_parallel
    numbers = {
        "rows": value.shape[-1] if head is None else head.weight.shape[0],
        "tokens": value.shape[:-1].numel() if spread else -1,
        "weight_gradient": requirements.needs_grad.any_weight,
        "memory": memory(value.device),
        "teacher_columns": teacher.shape[-1] if isinstance(teacher, Tensor) else -1,
    }
    same: dict[str, object] = {
        "dtype": value.dtype,
        "logits, contiguous along the vocabulary": value.stride(-1) == 1 or value.shape[-1] <= 1,
        "logits.requires_grad": value.requires_grad and torch.is_grad_enabled(),
    }
    if head is not None:
        same = _of_head(head, value)
    same |= _of_transform(transform) | _of_batch(batch)
    apart = ("static", "check_ranks")
    chosen = [o for o in vars(options).items() if not (o[0] in apart or isinstance(o[1], Tensor))]
    same |= {
        "objective": _names(objective),
        "options": chosen,
        "inplace": requirements.overwrites,
        "statistics": statistics_of(requirements),
    }

    def values(_: OwnNumbers) -> dict[str, Sequence[Tensor] | str]:
        temperature = transform.temperature
        return (
            _values_of_batch(batch)
            | _text_of(objective, batch)
            | {
                "hidden: differs": []
                if spread or head is None
                else [_sampled(value, batch.targets)],
                "temperature: differs": [temperature] if isinstance(temperature, Tensor) else [],
                "lora.a: differs": [] if head is None else [x.a for x in head.lora],
            }
        )

    facts = Facts(numbers=numbers, same=same, values=values, check=options.check_ranks)
    if options.static:
        return facts
    survey = batch._survey()
    return replace(facts, counts=survey.numbers[1], highest=survey.highest)


def of_positions(head: Head, hidden: Tensor, k: int, check: bool) -> Facts:
    """Of a verb on positions alone."""
    numbers = {"rows": head.weight.shape[0], "tokens": -1, "teacher_columns": -1}
    numbers |= {"weight_gradient": 0, "memory": 0}
    same = {"k": k, "hidden.shape": tuple(hidden.shape)} | _of_head(head, hidden)
    same |= _of_transform(transform_of(head))
    sample = {"hidden: differs": [_sampled(hidden)]}
    return Facts(numbers=numbers, same=same, values=lambda _: sample, check=check)


def of_segments(arguments: Any, plan: Any, requirements: Any) -> Facts:
    """Of a call whose segments run across ranks, each of which holds some of their tokens; with the
    forms that each field has there. Other choices (schedule, chunks) may differ."""
    batch, options, objective = arguments.batch, arguments.options, requirements.objective
    if len(batch.fields) > MOST:
        raise ValueError(f"fields: got {len(batch.fields)}, want at most {MOST} across ranks")
    names = sorted(batch.fields)
    # 1 for a field with the shape of values per token, 2 per segment, 3 for both.
    fits = zip(names, map(batch._fits, names), strict=True)
    forms = {name: as_token + 2 * as_segment for name, (as_token, as_segment) in fits}
    same = {
        "fields": " ".join(names),
        "segments.count": batch.segments.count,
        "a gradient is wanted": plan.schedule != "statistics",
        "objective": _names(objective),
        "metrics": options.metrics,
        "statistics": statistics_of(requirements),
    }

    def values(said: OwnNumbers) -> dict[str, Sequence[Tensor] | str]:
        differ = ": its values per segment differ"
        fields: Any = {name + differ: [batch.fields[name]] for name in per_segment(said)}
        return fields | _text_of(objective, batch)  # type: ignore[no-any-return]

    return Facts(numbers=forms, same=same, values=values, check=options.check_ranks)


def statistics_of(requirements: Any) -> list[str]:
    """All that is measured, by name."""
    measures = [str(tuple(measure)) for _, of in requirements.teachers for measure in of]
    return [*sorted(requirements.needs), *measures]


def per_segment(said: OwnNumbers) -> frozenset[str]:
    """The fields that are per segment, by the forms they have on each rank: those that are not per
    token on all. ValueError where there is no form for all."""
    forms = {name: forms for name, forms in said.items() if name != HIGHEST}
    names = frozenset(name for name, of in forms.items() if not all(form & 1 for form in of))
    for name in sorted(names):
        if not all(form & 2 for form in said[name]):
            raise ValueError(
                f"{name}: is per token on some ranks of segments.group and per segment on others, "
                "want the same on all"
            )
    return names


# ---------------------------------------------------------------------- known to the host


def _of_batch(batch: Batch) -> dict[str, object]:
    rank, totals, fields = batch.targets.dim(), batch.totals, []
    numbers = [] if totals is None else totals._numbers
    for name, value in sorted(batch.fields.items()):
        kind, most = "", rank if name in APART else None
        if isinstance(value, Tensor):
            kind = f"{value.dtype}{tuple(value.shape[:most])}"
        fields.append(f"{name}:{kind}")
    return {
        "targets.shape": f"{tuple(batch.targets.shape)} {tuple(batch.segments.ids.shape)}",
        "segments.count": batch.segments.count,
        "support_ids": batch.support is not None,
        "fields": " ".join(fields),
        "totals": [None if isinstance(t, Tensor) else float(t) for t in numbers],
    }


def _of_head(head: Head, hidden: Tensor) -> dict[str, object]:
    return {
        "hidden width": hidden.shape[-1],
        "dtype": f"{hidden.dtype} {head.weight.dtype} {autocast_dtype(hidden)}",
        # Ranks that differ here would plan differently.
        "layout of weight": not head.weight.is_cuda or suits_product(head.weight),
        "hidden.requires_grad": torch.is_grad_enabled() and hidden.requires_grad,
        "vocab_size": -1 if head.vocab_size is None else head.vocab_size,
        "lora": [(tuple(x.a.shape), x.scaling, x.dropout, x.a.requires_grad) for x in head.lora],
    }


def _of_transform(transform: Transform) -> dict[str, object]:
    at: Any = "per token" if isinstance(transform.temperature, Tensor) else transform.temperature
    return {"logit_scale, softcap, temperature": (transform.scale, transform.softcap, at)}


def _names(objective: Objective) -> list[tuple[Any, ...]]:
    """Of its terms, and what their teachers' adapters drop, which takes a collective."""
    heads = [term.teacher and term.teacher.head for _, term in objective.parts]
    drops = [head and [lora.dropout for lora in head.lora] for head in heads]
    return [(t.name, t.scope, d) for (_, t), d in zip(objective.parts, drops, strict=True)]


# ---------------------------------------------------------------------- compared at first


def _values_of_batch(batch: Batch) -> dict[str, Sequence[Tensor] | str]:
    ordered, rank = sorted(batch.fields.items()), batch.targets.dim()
    shared = [t for n, t in ordered if isinstance(t, Tensor) and n not in APART]
    wide = [t.dim() == rank + 1 and t.shape[-1] > MOST_IDS for t in shared]
    fields = [_sampled(t, batch.targets) if w else t for t, w in zip(shared, wide, strict=True)]
    totals: list[Any] = [] if batch.totals is None else batch.totals._numbers
    candidates = batch.fields.get("candidate_ids")
    return {
        "targets: differs": [batch.targets],
        "segments: differs": [batch.segments.ids],
        "candidate_ids: differs": [candidates] if isinstance(candidates, Tensor) else [],
        "support_ids: differs": [] if batch.support is None else list(batch.support.tensors),
        "values of fields: differs": fields,
        "totals: differs": [t.to(batch.targets.device) for t in totals if isinstance(t, Tensor)],
    }


def _sampled(hidden: Tensor, targets: Tensor | None = None) -> Tensor:
    """[N] one value of each row, 0 where targets are not scored: to compare all values would take
    too long."""
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    at = torch.arange(len(rows), device=rows.device)
    sample = rows[at, at % rows.shape[1]]
    return sample if targets is None else sample.masked_fill(targets.reshape(-1) == IGNORE, 0)


def _text_of(objective: Objective, batch: Batch) -> dict[str, Sequence[Tensor] | str]:
    """Text that says the same of equal objectives on all ranks, and the tensors among their
    options."""
    tensors: list[Tensor] = []
    parts = [
        (
            c,
            t.name,
            t.options,
            t.scope,
            t.reduction and t.reduction.name,
            t.kept_field,
            t.weight_fields,
            [(m.name, m.factor) for m in t.modifiers],
        )
        for c, t in objective.parts
    ]
    text = _spelt(fingerprint(parts, tensors))
    values = [tensor.to(batch.targets.device) for tensor in tensors]
    return {"objective: differs": text, "values of options: differs": values}


def _spelt(value: Any) -> str:
    """What says the same of equal fingerprints on all ranks: `repr` shows where in memory a
    function lies, and which device is a rank's own."""
    if isinstance(value, weakref.ref):
        value = value()
    if isinstance(value, tuple):
        return f"({', '.join(map(_spelt, value))})"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value).__repr__ is object.__repr__ or isinstance(value, OWN):
        return type(value).__qualname__
    return repr(value)
