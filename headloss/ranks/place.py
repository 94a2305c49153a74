"""From a head that holds a slice of the vocabulary to a place in the whole of it.

The ranks of a vocabulary group compare what they were given, once per call, and learn each other's
sizes. H hidden width, V rows of the whole vocabulary.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, distributed

from ..batch.batch import IGNORE, MOST_IDS, Batch
from ..head.head import GATHER, Head, autocast_dtype
from ..kernels import suits_product
from .agreement import Own, agree_early
from .vocabulary import WHOLE, Shard, Spread, Whole

if TYPE_CHECKING:
    from ..batch.packing import Packing
    from ..losses.term import Objective
    from ..options import Options


def local_head(head: Head) -> Head:
    """A head of DTensors as this rank's rows and their group, any other head as it is; raises for
    placements other than rows sharded over one mesh dimension."""
    if not hasattr(head.weight, "device_mesh"):
        if head.vocab_mesh_dim is not None:
            raise ValueError(
                f"vocab_mesh_dim: got {head.vocab_mesh_dim!r} with a plain weight, want a DTensor; "
                "a plain slice of the vocabulary goes with vocab_group"
            )
        return head
    weight: Any = head.weight
    mesh, name = weight.device_mesh, head.vocab_mesh_dim or "tp"
    if head.vocab_group is not None or name not in (mesh.mesh_dim_names or ()):
        raise _placed("weight", weight)
    dim = mesh.mesh_dim_names.index(name)

    def local(what: str, value: Any, sharded: bool) -> Any:
        if not is_dtensor(value):
            if sharded:
                raise TypeError(
                    f"{what}: got a plain tensor beside a DTensor weight, want a DTensor that is "
                    "sharded alike"
                )
            return value
        for i, placement in enumerate(value.placements):
            fits = placement.is_shard(0) if sharded else placement.is_replicate()
            # Over a mesh dimension of one rank every placement is the same.
            if not (fits if i == dim else mesh.size(i) == 1):
                raise _placed(what, value)
        return value.to_local()

    return replace(
        head,
        weight=local("weight", weight, True),
        bias=None if head.bias is None else local("bias", head.bias, True),
        lora=tuple(
            replace(x, a=local("lora.a", x.a, False), b=local("lora.b", x.b, True))
            for x in head.lora
        ),
        vocab_group=mesh.get_group(dim),
        vocab_mesh_dim=None,
    )


def is_dtensor(value: object) -> bool:
    """Whether a tensor is spread over a device mesh."""
    return hasattr(value, "device_mesh") and hasattr(value, "placements")


def _placed(name: str, value: Any) -> TypeError:
    return TypeError(
        f"{name}: got a DTensor placed {tuple(value.placements)} on a mesh with dimensions "
        f"{value.device_mesh.mesh_dim_names}, want a plain tensor, or rows sharded over the mesh "
        f'dimension "tp" (or vocab_mesh_dim) alone; {GATHER}'
    )


class Place(NamedTuple):
    """What a rank knows about the whole vocabulary and the other ranks' slices."""

    vocabulary: int  # V
    group: distributed.ProcessGroup | None = None
    sizes: tuple[int, ...] = ()  # scored rows of each rank; empty: no group
    tokens: tuple[int, ...] = ()  # rows of hidden states of each rank, where they are spread
    weight_gradient: bool | None = None  # whether any rank wants one
    memory: int | None = None  # bytes of the smallest GPU; None: no group

    @classmethod
    def of(cls, group: distributed.ProcessGroup, own: Own, vocab_size: int | None = None) -> Place:
        """From what each rank says of its `own_facts`; ValueError where they do not fit."""
        rows, vocabulary = own["rows"], sum(own["rows"])
        if vocab_size is not None:
            if vocab_size > vocabulary:
                raise ValueError(
                    f"vocab_size: got {vocab_size}, want at most {vocabulary}, the rows of all "
                    "ranks"
                )
            vocabulary = vocab_size
        firsts = itertools.accumulate(rows, initial=0)
        sizes = tuple(min(n, vocabulary - at) for n, at in zip(rows, firsts, strict=False))
        if min(sizes) < 1:
            raise ValueError(
                f"weight: got {rows} rows on the ranks of vocab_group, of which the first "
                f"{vocabulary} are scored: want at least one on each rank"
            )
        for rank, theirs in enumerate(own["teacher_columns"]):
            if theirs not in (-1, sizes[rank]):
                raise ValueError(
                    f"teacher: got {theirs} columns on rank {rank} of vocab_group, want the "
                    f"student's {sizes[rank]} scored rows there"
                )
        wanted, tokens = any(own["weight_gradient"]), tuple(own["tokens"])
        return cls(vocabulary, group, sizes, tokens, wanted, min(own["memory"]))

    @property
    def widest(self) -> int:
        """The most columns that any rank holds; all ranks plan for these."""
        return max(self.sizes, default=self.vocabulary)

    def slices(
        self, packed: Packing | None, device: torch.device, confirm: Callable[[], object] = bool
    ) -> Whole:
        """This rank's slice; with `packed`, of tokens that are spread over the group. With static
        shapes the order of tokens is not known here: their hidden states are gathered at once."""
        if self.group is None:
            return WHOLE
        if packed is None:
            return Shard(self.group, self.sizes, confirm=confirm)
        if packed.live is not None:
            return Shard(self.group, self.sizes, tokens=self.tokens)
        return Spread(self.group, self.sizes, packed.index, self.tokens, device)

    def check_tokens(self, batch: Batch) -> None:
        """ValueError where the ranks' hidden states are not those of all positions."""
        if sum(self.tokens) != batch.targets.numel():
            raise ValueError(
                f"hidden: got {list(self.tokens)} tokens on the ranks of vocab_group, want "
                f"{batch.targets.numel()} in all, the targets'"
            )


NO_MORE = dict.fromkeys(("tokens", "weight_gradient", "memory"), 0)  # of `own_facts`


def join_positions(head: Head, hidden: Tensor, check: Callable[[], None], k: int) -> Place:
    """A rank's place for a verb on positions alone, which `check` refuses on all ranks."""
    group = head.vocab_group
    if group is None:
        check()
        return Place(head.vocabulary)

    def same(_: None) -> dict[str, Any]:
        more = {"hidden": [_sampled(hidden)], "hidden.shape": str(tuple(hidden.shape)), "k": k}
        return of_head(head, hidden) | more

    def joined() -> Place:
        own = {"rows": head.weight.shape[0], "teacher_columns": -1, **NO_MORE}
        _, said = agree_early("vocab_group", group, check, lambda _: own, same, wait=True)
        return Place.of(group, said, head.vocab_size)

    if torch.compiler.is_compiling():
        return torch.compiler.disable(joined)()  # type: ignore[no-any-return]
    return joined()


def own_facts(
    value: Tensor, head: Head | None, batch: Batch, options: Options, ready: tuple[Any, Objective]
) -> dict[str, int]:
    """What may differ between the ranks, and decides what all of them plan; the number of tokens
    where they are spread; and `static`, since a capture goes by a call with static shapes alone."""
    given, prepared = batch.fields.get("teacher_logits"), ready[0]
    return {
        "rows": value.shape[-1] if head is None else head.weight.shape[0],
        "tokens": value.shape[:-1].numel() if options.sequence_parallel else 0,
        "weight_gradient": prepared.wants.any_weight,
        "memory": prepared.problem.memory,
        "teacher_columns": given.shape[-1] if isinstance(given, Tensor) else -1,
        "static": options.static,
    }


# ---------------------------------------------------------------------- what must be the same

# Fields of columns: a sharded teacher's are each rank's own, candidates are compared by their name.
APART = ("teacher_logits", "candidate_ids")


def of_batch(batch: Batch) -> dict[str, Any]:
    """Facts about a batch, which every rank of a vocabulary group is given whole."""
    ordered, rank = sorted(batch.fields.items()), batch.targets.dim()
    shared = [t for n, t in ordered if isinstance(t, Tensor) and n not in APART]
    wide = [t.dim() == rank + 1 and t.shape[-1] > MOST_IDS for t in shared]
    values = [_sampled(t, batch.targets) if w else t for t, w in zip(shared, wide, strict=True)]
    totals: list[Any] = [] if batch.totals is None else batch.totals._numbers
    on_device = [t.to(batch.targets.device) for t in totals if isinstance(t, Tensor)]
    return {
        "targets": [batch.targets],
        "targets.shape": f"{tuple(batch.targets.shape)} {tuple(batch.segments.ids.shape)}",
        "segments.count": batch.segments.count,
        "segments": [batch.segments.ids],
        "candidate_ids": [ids for name, ids in ordered if name == "candidate_ids"],
        "support_ids": [] if batch.support is None else list(batch.support.tensors),
        "fields": " ".join(f"{n}:{_kind(t, rank if n in APART else None)}" for n, t in ordered),
        "values of fields": values,
        "totals": str([None if isinstance(t, Tensor) else float(t) for t in totals]),
        "values of totals": on_device,
    }


def _kind(value: Any, rank: int | None) -> str:
    """A field's dtype and the first dimensions of its shape; None: all."""
    return f"{value.dtype}{tuple(value.shape[:rank])}" if isinstance(value, Tensor) else ""


def of_head(head: Head, hidden: Tensor) -> dict[str, Any]:
    """Facts about a head and its hidden states, but for their values."""
    return {
        "hidden width": hidden.shape[-1],
        "dtype": f"{hidden.dtype} {head.weight.dtype} {autocast_dtype(hidden)}",
        # Ranks that differ here would plan differently.
        "layout of weight": not head.weight.is_cuda or suits_product(head.weight),
        "hidden.requires_grad": torch.is_grad_enabled() and hidden.requires_grad,
        "vocab_size": -1 if head.vocab_size is None else head.vocab_size,
        **_of_transform(head.logit_scale, head.softcap, head.temperature),
        "lora": str(
            [(tuple(x.a.shape), x.scaling, x.dropout, x.a.requires_grad) for x in head.lora]
        ),
        "lora.a": [x.a for x in head.lora],
    }


def _of_transform(scale: float, softcap: float | None, temperature: Any) -> dict[str, Any]:
    per_token = isinstance(temperature, Tensor)
    return {
        "logit_scale, softcap, temperature": str((scale, softcap, per_token or temperature)),
        "temperature": [temperature] if per_token else [],
    }


def _sampled(hidden: Tensor, targets: Tensor | None = None) -> Tensor:
    """[N] one value of each row, 0 where targets are not scored: to compare all values would take
    too long."""
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    at = torch.arange(len(rows), device=rows.device)
    found = rows[at, at % rows.shape[1]]
    return found if targets is None else found.masked_fill(targets.reshape(-1) == IGNORE, 0)


def of_objective(objective: Objective, options: Options, device: torch.device) -> dict[str, Any]:
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
    chosen = [(n, value) for n, value in vars(options).items() if not isinstance(value, Tensor)]
    return {
        "objective": str(parts),
        "options": str(chosen),
        "values of options": [t.to(device) for t in tensors],
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


def of_linear(given: Any, objective: Objective) -> dict[str, Any]:
    """Facts about a call on hidden states; where these are spread, each rank has its own."""
    hidden, head, batch, _, options, _ = given
    return {
        **of_batch(batch),  # first: what is scored decides which hidden states are compared
        **of_head(head, hidden),
        "hidden": [] if options.sequence_parallel else [_sampled(hidden, batch.targets)],
        **of_objective(objective, options, batch.targets.device),
    }


def of_given(given: Any, objective: Objective) -> dict[str, Any]:
    """Facts about a call on given logits."""
    logits, batch, _, transform, _, inplace, options = given
    return {
        "dtype": f"{logits.dtype} {inplace}",
        "logits, contiguous along the vocabulary": logits.stride(-1) == 1 or logits.shape[-1] <= 1,
        "logits.requires_grad": logits.requires_grad and torch.is_grad_enabled(),
        **_of_transform(transform.scale, transform.softcap, transform.temperature),
        **of_batch(batch),
        **of_objective(objective, options, batch.targets.device),
    }
