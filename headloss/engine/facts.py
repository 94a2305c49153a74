"""Facts of a call that the ranks of a group exchange (`agreement.Facts`): all values that decide
the number and the shapes of collectives, and tensors that must be equal on all ranks.

N positions, H hidden width, V rows of the whole vocabulary, S segments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..arguments import IGNORE
from ..batch.batch import MOST_IDS, Batch
from ..collectives import PROCESS_GROUP
from ..head.head import Head, autocast_dtype, transform_of
from ..kernels import memory, suits_product
from ..kernels.transform import Transform
from ..losses.identity import fingerprint
from ..losses.term import Objective
from ..parallel.agreement import HIGHEST, MOST_NUMBERS, Facts, OwnNumbers, Tensors, agree
from ..parallel.vocabulary import VocabShard, WholeVocabulary
from .checks import Arguments
from .plan import Plan
from .requirements import Requirements

# Batch fields that ranks do not compare together with all other fields: the logits of a sharded
# teacher differ between ranks, and candidates have a comparison of their own.
APART = ("teacher_logits", "candidate_ids")
OWN = (PROCESS_GROUP, torch.device)  # Option types whose values may differ between ranks.
NO_CALL = {"tokens": -1, "weight_gradient": 0, "memory": 0, "teacher_columns": -1}


def of_vocabulary(a: Arguments, required: Requirements) -> Facts:
    """Return the `Facts` that ranks with vocabulary shards compare before a call on hidden states,
    or (without a head) on logits. Every rank has the whole batch."""
    tensor = a.tensor
    head = a.head
    batch = a.batch
    options = a.options
    spread = options.sequence_parallel
    temperature = a.transform.temperature
    teacher = batch.fields.get("teacher_logits")
    numbers = {
        "rows": tensor.shape[-1] if head is None else head.weight.shape[0],
        "tokens": tensor.shape[:-1].numel() if spread else -1,
        "weight_gradient": required.needs_grad.any_weight,
        "memory": memory(tensor.device),
        "teacher_columns": teacher.shape[-1] if isinstance(teacher, Tensor) else -1,
    }
    plain = {name: o for name, o in vars(options).items() if not isinstance(o, Tensor)}
    same = (
        _of_head(head, tensor)
        if head is not None
        else {
            "dtype": tensor.dtype,
            "logits, contiguous along the vocabulary": tensor.stride(-1) == 1
            or tensor.shape[-1] <= 1,
            "logits.requires_grad": tensor.requires_grad and torch.is_grad_enabled(),
        }
    )
    same |= _of_transform(a.transform) | _of_batch(batch)
    same |= {
        "objective": _names(required.objective),
        "options": plain | {"static": None, "check_ranks": None},
        "inplace": required.overwrites,
        "statistics": statistics_of(required),
    }

    def tensors(_: OwnNumbers) -> Tensors:
        of_call = _tensors_of_batch(batch) | _text_of(required.objective, batch)
        if head is not None:
            of_call["lora.a: differs"] = [x.a for x in head.lora]
            of_call["hidden: differs"] = [] if spread else [_sampled(tensor, batch.targets)]
        if isinstance(temperature, Tensor):
            of_call["temperature: differs"] = [temperature]
        return of_call

    facts = Facts(numbers=numbers, same=same, tensors=tensors, check=options.check_ranks)
    if options.static:
        return facts
    survey = batch._survey()
    return replace(facts, counts=survey.numbers[1], highest=survey.highest)


def shard_of_positions(
    head: Head, hidden: Tensor, check: Callable[[], None], k: int, check_ranks: bool
) -> WholeVocabulary:
    """Return this rank's vocabulary shard for a function that needs hidden states and no batch; an
    error of `check` is raised on all ranks."""
    if head.vocab_group is None:
        check()
        return WholeVocabulary(head.vocabulary)
    if torch.compiler.is_compiling():
        run: Any = torch.compiler.disable(shard_of_positions)
        return run(head, hidden, check, k, check_ranks)  # type: ignore[no-any-return]

    def prepare() -> tuple[Facts, None]:
        check()
        same = {"k": k, "hidden.shape": tuple(hidden.shape)} | _of_head(head, hidden)
        return Facts(
            numbers={"rows": head.weight.shape[0], **NO_CALL},
            same=same | _of_transform(transform_of(head)),
            tensors=lambda _: {"hidden: differs": [_sampled(hidden)]},
            check=check_ranks,
        ), None

    _, numbers = agree("vocab_group", head.vocab_group, prepare)
    return VocabShard(head.vocab_group, numbers, head.vocab_size)


def of_segments(a: Arguments, required: Requirements, plan: Plan) -> Facts:
    """Return the `Facts` (numbers, values and tensors) that ranks compare before a call in which
    the tokens of a segment are spread over several ranks. The `Facts` include, for each batch
    field, whether the field's shape fits one value per token, one value per segment, or both.
    Schedule and chunks may differ between ranks."""
    batch = a.batch
    if (count := len(batch.fields)) > MOST_NUMBERS:
        raise ValueError(f"fields: got {count}, want at most {MOST_NUMBERS} across ranks")
    forms = {}
    for name in sorted(batch.fields):
        as_token, as_segment = batch._fits(name)
        forms[name] = as_token + 2 * as_segment
    same = {
        "fields": " ".join(forms),
        "segments.count": batch.segments.count,
        "a gradient is wanted": plan.schedule != "statistics",
        "objective": _names(required.objective),
        "metrics": a.options.metrics,
        "statistics": statistics_of(required),
    }

    def tensors(numbers: OwnNumbers) -> Tensors:
        of_call = _text_of(required.objective, batch)
        for name in per_segment(numbers):
            value = batch.fields[name]
            assert isinstance(value, Tensor)
            of_call[f"{name}: its values per segment differ"] = [value]
        return of_call

    return Facts(numbers=forms, same=same, tensors=tensors, check=a.options.check_ranks)


def statistics_of(required: Requirements) -> list[str]:
    """Return the names of all statistics and measures that the call computes."""
    measures = [str(tuple(measure)) for _, of in required.teachers for measure in of]
    return [*sorted(required.needs), *measures]


def per_segment(numbers: OwnNumbers) -> frozenset[str]:
    """Return the names of the fields that hold one value per segment: those whose shape does not
    fit one value per token on all ranks. Raise ValueError if the shape of a field fits one value
    per token on some ranks, and on other ranks only one value per segment."""
    forms = {name: of_ranks for name, of_ranks in numbers.items() if name != HIGHEST}
    names = frozenset(n for n, of_ranks in forms.items() if not all(form & 1 for form in of_ranks))
    for name in sorted(names):
        if not all(form & 2 for form in forms[name]):
            raise ValueError(
                f"{name}: is per token on some ranks of segments.group and per segment on others, "
                "want the same on all"
            )
    return names


# ---------------------------------------------------------------------- known to the host


def _numbers_of(batch: Batch) -> list[float | Tensor]:
    return [] if batch.totals is None else batch.totals._numbers


def _of_batch(batch: Batch) -> dict[str, object]:
    totals = _numbers_of(batch)
    fields = []
    for name, value in sorted(batch.fields.items()):
        kind = ""
        if isinstance(value, Tensor):
            shape = value.shape[: batch.targets.dim() if name in APART else None]
            kind = f"{value.dtype}{tuple(shape)}"
        fields.append(f"{name}:{kind}")
    return {
        "targets.shape": f"{tuple(batch.targets.shape)} {tuple(batch.segments.ids.shape)}",
        "segments.count": batch.segments.count,
        "support_ids": batch.support is not None,
        "fields": " ".join(fields),
        "totals": [None if isinstance(t, Tensor) else float(t) for t in totals],
    }


def _of_head(head: Head, hidden: Tensor) -> dict[str, object]:
    return {
        "hidden width": hidden.shape[-1],
        "dtype": f"{hidden.dtype} {head.weight.dtype} {autocast_dtype(hidden)}",
        # A rank whose weight had a different layout would choose a different plan than the other
        # ranks.
        "layout of weight": not head.weight.is_cuda or suits_product(head.weight),
        "hidden.requires_grad": torch.is_grad_enabled() and hidden.requires_grad,
        "vocab_size": -1 if head.vocab_size is None else head.vocab_size,
        "lora": [(tuple(x.a.shape), x.scaling, x.dropout, x.a.requires_grad) for x in head.lora],
        "beside": [(tuple(x.shape), x.requires_grad) for x, _ in head.beside],
    }


def _of_transform(transform: Transform) -> dict[str, object]:
    temperature = transform.temperature
    at = "per token" if isinstance(temperature, Tensor) else temperature
    return {"logit_scale, softcap, temperature": (transform.scale, transform.softcap, at)}


def _names(objective: Objective) -> list[tuple[object, ...]]:
    """Return the names and scopes of the terms, and the dropout of the LoRA adapters of teachers'
    heads. Ranks must agree on the dropout, because a LoRA dropout runs a collective of all
    ranks."""
    heads = [term.teacher and term.teacher.head for _, term in objective.parts]
    drops = [head and [lora.dropout for lora in head.lora] for head in heads]
    return [(t.name, t.scope, d) for (_, t), d in zip(objective.parts, drops, strict=True)]


# ---------------------------------------------------------------------- compared at first


def _tensors_of_batch(batch: Batch) -> dict[str, list[Tensor]]:
    targets = batch.targets
    fields = []
    for name, value in sorted(batch.fields.items()):
        if isinstance(value, Tensor) and name not in APART:
            wide = value.dim() == targets.dim() + 1 and value.shape[-1] > MOST_IDS
            fields.append(_sampled(value, targets) if wide else value)
    totals = _numbers_of(batch)
    candidates = batch.fields.get("candidate_ids")
    return {
        "targets: differs": [targets],
        "segments: differs": [batch.segments.ids],
        "candidate_ids: differs": [candidates] if isinstance(candidates, Tensor) else [],
        "support_ids: differs": [] if batch.support is None else list(batch.support.tensors),
        "values of fields: differs": fields,
        "totals: differs": [t.to(targets.device) for t in totals if isinstance(t, Tensor)],
    }


def _sampled(hidden: Tensor, targets: Tensor | None = None) -> Tensor:
    """Return one element of each row of hidden states, [N], with 0 at unscored targets. Ranks
    compare one element of each row, because comparing whole rows of hidden states would cost too
    much time."""
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    at = torch.arange(len(rows), device=rows.device)
    sample = rows[at, at % rows.shape[1]]
    # Several positions may share a row of `teacher_hidden`.
    if targets is None or targets.numel() != len(sample):
        return sample
    return sample.masked_fill(targets.reshape(-1) == IGNORE, 0)


def _text_of(objective: Objective, batch: Batch) -> dict[str, list[Tensor]]:
    """Return tensors that ranks compare: the bytes of a text that describes the loss terms, and the
    tensors among the terms' options."""
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
    text = bytearray(_spelt(fingerprint(parts, tensors)).encode())
    return {
        "objective: differs": [torch.frombuffer(text, dtype=torch.uint8)],
        "values of options: differs": [tensor.to(batch.targets.device) for tensor in tensors],
    }


def _spelt(value: Any) -> str:
    """Return a text for `value`, a description of a call's objective. Ranks with equal objectives
    get equal texts; `repr` would show a function's address and a rank's device, which differ."""
    if isinstance(value, weakref.ref):
        value = value()
    if isinstance(value, tuple):
        return f"({', '.join(map(_spelt, value))})"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value).__repr__ is object.__repr__ or isinstance(value, OWN):
        return type(value).__qualname__
    return repr(value)
