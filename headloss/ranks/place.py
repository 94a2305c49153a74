"""From a head that holds a slice of the vocabulary to a place in the whole of it.

The ranks of a vocabulary group compare what they were given, once per call, and learn each other's
sizes. H hidden width, V rows of the whole vocabulary.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import fields
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed

from ..batch.batch import IGNORE
from .agreement import Facts, agree
from .spread import Spread
from .vocabulary import WHOLE, Shard, Whole

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..batch.batch import Batch
    from ..batch.packing import Packing
    from ..head.head import Head
    from ..kernels.transform import Transform
    from ..losses.term import Objective
    from ..options import Options

R = TypeVar("R")


class Place(NamedTuple):
    """What a rank knows about the whole vocabulary and the other ranks' slices."""

    vocabulary: int  # V
    group: ProcessGroup | None = None
    sizes: tuple[int, ...] = ()  # scored rows of each rank; empty: no group
    tokens: tuple[int, ...] = ()  # rows of hidden states of each rank
    weight_gradient: bool | None = None  # whether any rank wants one
    memory: int | None = None  # bytes of the smallest GPU; None: no group

    @property
    def widest(self) -> int:
        """The most columns that any rank holds; all ranks plan for these."""
        return max(self.sizes, default=self.vocabulary)

    def slices(self, packed: Packing | None, device: torch.device) -> Whole:
        """This rank's slice; with `packed`, of tokens that are spread over the group. With static
        shapes the order of tokens is not known here: their hidden states are gathered at once."""
        if self.group is None:
            return WHOLE
        if packed is None:
            return Shard(self.group, self.sizes)
        if packed.live is not None:
            return Shard(self.group, self.sizes, tokens=self.tokens)
        return Shard(self.group, self.sizes, Spread(self.group, packed.index, self.tokens, device))

    def check_tokens(self, batch: Batch) -> None:
        """ValueError where the ranks' hidden states are not those of all positions."""
        if sum(self.tokens) != batch.targets.numel():
            raise ValueError(
                f"hidden: got {list(self.tokens)} tokens on the ranks of vocab_group, want "
                f"{batch.targets.numel()} in all, the targets'"
            )


# Nothing may be read while a CUDA graph is captured: sizes are those of the call that warmed up.
_KNOWN: weakref.WeakKeyDictionary[Any, dict[tuple, Place]] = weakref.WeakKeyDictionary()


def join(
    group: ProcessGroup | None,
    here: Callable[[], tuple[int, int]],
    check: Callable[[], R],
    describe: Callable[[R], Facts],
    vocab_size: int | None,
    options: Options | None,
) -> tuple[R, Place]:
    """Run `check` on every rank of a vocabulary group, and find this rank's place.

    Args:
        group: None: the whole vocabulary is here.
        here: columns of the vocabulary and rows of hidden states; known once `check` has run.
        describe: what must be the same; `own` holds "rows", "tokens", "weight_gradient",
            "teacher_columns" (-1: none) and "memory" of the GPU.
        options: with static shapes the place is kept for a capture.

    Raises:
        ValueError, TypeError: on all ranks, for what is wrong on any.
    """
    if group is None:
        return check(), Place(here()[0])
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        result, known = check(), _KNOWN.get(group, {}).get((*here(), vocab_size))
        if known is None:
            raise RuntimeError(
                "vocab_group: a CUDA graph is being captured, in which the ranks cannot compare "
                "their sizes, and no call of this size has run before it; run one with "
                "Options(static=True) first, as a warm-up"
            )
        return result, known
    result, own = agree("vocab_group", group, check, describe)
    rows, vocabulary = own["rows"], sum(own["rows"])
    if vocab_size is not None:
        if vocab_size > vocabulary:
            raise ValueError(
                f"vocab_size: got {vocab_size}, want at most {vocabulary}, the rows of all ranks"
            )
        vocabulary = vocab_size
    firsts = [sum(rows[:rank]) for rank in range(len(rows))]
    sizes = tuple(min(n, vocabulary - at) for n, at in zip(rows, firsts, strict=True))
    if min(sizes) < 1:
        raise ValueError(
            f"weight: got {rows} rows on the ranks of vocab_group, of which the first {vocabulary} "
            "are scored: want at least one on each rank"
        )
    for rank, theirs in enumerate(own["teacher_columns"]):
        if theirs not in (-1, sizes[rank]):
            raise ValueError(
                f"teacher: got {theirs} columns on rank {rank} of vocab_group, want the "
                f"student's {sizes[rank]} scored rows there"
            )
    wanted = any(own["weight_gradient"])
    place = Place(vocabulary, group, sizes, tuple(own["tokens"]), wanted, min(own["memory"]))
    if options is not None and options.static:
        _KNOWN.setdefault(group, {})[*here(), vocab_size] = place
    return result, place


def join_positions(
    head: Head, hidden: Tensor, check: Callable[[], None], targets: Tensor | None = None, k: int = 0
) -> Place:
    """`join` for the verbs on positions alone."""

    def describe(_: None) -> Facts:
        same: dict[str, Any] = {} if targets is None else {"targets": [targets]}
        same |= of_head(head, hidden, targets)
        same |= {"hidden.shape": str(tuple(hidden.shape)), "k": k}
        own = {"rows": head.weight.shape[0], "tokens": 0, "weight_gradient": 0, "memory": 0}
        return Facts(same, {**own, "teacher_columns": -1})

    def joined() -> Place:
        return join(
            head.vocab_group, lambda: (head.vocabulary, 0), check, describe, head.vocab_size, None
        )[1]

    if head.vocab_group is not None and torch.compiler.is_compiling():
        return torch.compiler.disable(joined)()  # type: ignore[no-any-return]
    return joined()


# ---------------------------------------------------------------------- what must be the same


def of_batch(batch: Batch) -> dict[str, Any]:
    """Facts about a batch, which every rank of a vocabulary group is given whole."""
    ordered = sorted(batch.fields.items())
    tensors = [t for _, t in ordered if isinstance(t, Tensor) and t.dim() <= batch.targets.dim()]
    totals: list[Any] = []
    if batch.totals is not None:
        totals = [batch.totals.tokens, batch.totals.segments]
        for _, pair in sorted(batch.totals.kept.items()):
            totals += pair
    on_device = [t.to(batch.targets.device) for t in totals if isinstance(t, Tensor)]
    candidates = batch.fields.get("candidate_ids")
    return {
        "targets": [batch.targets],
        "targets.shape": f"{tuple(batch.targets.shape)} {tuple(batch.segments.ids.shape)}",
        "segments.count": batch.segments.count,
        "segments": [batch.segments.ids],
        "candidate_ids": [candidates] if isinstance(candidates, Tensor) else [],
        "support_ids": [] if batch.support is None else list(batch.support.tensors),
        "fields": " ".join(f"{n}:{_kind(t, batch.targets.dim())}" for n, t in ordered),
        "values of fields": tensors,
        "totals": str([None if isinstance(t, Tensor) else float(t) for t in totals]),
        "values of totals": on_device,
    }


def _kind(value: Any, rank: int) -> str:
    """A field's dtype and shape; a sharded teacher's last dimension is each rank's own."""
    return f"{value.dtype}{tuple(value.shape[:rank])}" if isinstance(value, Tensor) else ""


def of_head(head: Head, hidden: Tensor, targets: Tensor | None = None) -> dict[str, Any]:
    """Facts about a head and its hidden states; with targets, about the scored ones."""
    temperature = head.temperature
    per_token = isinstance(temperature, Tensor)
    enabled = torch.is_grad_enabled()
    return {
        "hidden width": hidden.shape[-1],
        "dtype": f"{hidden.dtype} {head.weight.dtype}",
        "layout of weight": _suits(head.weight),
        "hidden.requires_grad": enabled and hidden.requires_grad,
        "vocab_size": -1 if head.vocab_size is None else head.vocab_size,
        "logit_scale, softcap, temperature": str(
            (head.logit_scale, head.softcap, None if per_token else temperature)
        ),
        "temperature": [temperature] if per_token else [],
        "lora": str(
            [(tuple(x.a.shape), x.scaling, x.dropout, x.a.requires_grad) for x in head.lora]
        ),
        "lora.a": [x.a for x in head.lora],
        "hidden": [_sampled(hidden, targets)],
    }


def _sampled(hidden: Tensor, targets: Tensor | None) -> Tensor:
    """[N] one value of each scored row, else 0: to compare all values would take too long."""
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    at = torch.arange(len(rows), device=rows.device)
    found = rows[at, at % rows.shape[1]]
    return found if targets is None else found.masked_fill(targets.reshape(-1) == IGNORE, 0)


def _suits(weight: Tensor) -> bool:
    """Whether memory suits a GPU's product: ranks that differ here would plan differently."""
    if not weight.is_cuda:
        return True
    rows = weight.stride(1) == 1 and weight.stride(0) * weight.element_size() % 16 == 0
    return rows and weight.data_ptr() % 16 == 0


def of_objective(
    objective: Objective, options: Options, device: torch.device
) -> dict[str, Any]:
    """Facts that decide which collectives an objective runs, and in which order."""
    tensors: list[Tensor] = []
    parts = [
        (
            *(c, t.name, _spelt(t.options, tensors), t.scope, t.reduction and t.reduction.name),
            *(t.kept_field, t.weight_fields),
            [(m.name, _spelt(m.factor, tensors)) for m in t.modifiers],
            t.teacher and t.teacher.head and [x.dropout for x in t.teacher.head.lora],
        )
        for c, t in objective.parts
    ]
    chosen = [
        (f.name, value)
        for f in fields(options)
        if not isinstance(value := getattr(options, f.name), Tensor)
    ]
    return {
        "objective": str(parts),
        "options": str(chosen),
        "values of options": [t.to(device) for t in (torch.zeros(0), *tensors)],
    }


def _spelt(value: Any, tensors: list[Tensor]) -> str:
    """What says the same of equal values on all ranks: `repr` leaves values of a tensor out, and
    shows where in memory a function lies. Tensors are added to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return f"{value.dtype}{tuple(value.shape)}"
    if isinstance(value, functools.partial):
        return _spelt((value.func, value.args, value.keywords), tensors)
    if isinstance(value, MethodType):
        return _spelt((value.__func__, value.__self__), tensors)
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, tuple | list):
        return f"({', '.join(_spelt(x, tensors) for x in value)})"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value).__repr__ is object.__repr__ or isinstance(value, distributed.ProcessGroup):
        return type(value).__qualname__
    return repr(value)


def linear_facts(
    hidden: Tensor, head: Head, batch: Batch, objective: Objective, options: Options, memory: int
) -> Facts:
    enabled, spread = torch.is_grad_enabled(), options.sequence_parallel
    trained = any(t.requires_grad for name, t in head._tensors() if not name.endswith(".a"))
    own = {
        "rows": head.weight.shape[0],
        "tokens": hidden.shape[:-1].numel(),
        "weight_gradient": enabled and trained,
        "teacher_columns": _teacher_columns(batch),
        "memory": memory,
    }
    # What is scored first: it decides which hidden states are compared.
    same = {**of_batch(batch), **of_head(head, hidden, batch.targets if not spread else None)}
    if spread:  # each rank has its own
        del same["hidden"]
    same |= of_objective(objective, options, batch.targets.device)
    return Facts(same, own)


def given_facts(
    logits: Tensor,
    transform: Transform,
    batch: Batch,
    objective: Objective,
    options: Options,
    inplace: bool,
    memory: int,
) -> Facts:
    temperature = transform.temperature
    per_token = isinstance(temperature, Tensor)
    same = {
        "dtype": f"{logits.dtype} {inplace}",
        "logits, contiguous along the vocabulary": has_unit_stride(logits),
        "logits.requires_grad": logits.requires_grad and torch.is_grad_enabled(),
        "logit_scale, softcap, temperature": str(
            (transform.scale, transform.softcap, None if per_token else temperature)
        ),
        "temperature": [temperature] if per_token else [],
        **of_batch(batch),
        **of_objective(objective, options, batch.targets.device),
    }
    own = {
        "rows": logits.shape[-1],
        "tokens": logits.shape[:-1].numel(),
        "weight_gradient": False,
        "teacher_columns": _teacher_columns(batch),
        "memory": memory,
    }
    return Facts(same, own)


def has_unit_stride(logits: Tensor) -> bool:
    """Whether each row of the logits is contiguous."""
    return logits.stride(-1) == 1 or logits.shape[-1] <= 1


def _teacher_columns(batch: Batch) -> int:
    given = batch.fields.get("teacher_logits")
    return given.shape[-1] if isinstance(given, Tensor) else -1
