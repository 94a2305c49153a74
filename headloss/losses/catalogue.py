"""Generator of the tables in docs/terms.md, from the terms' signatures, docstrings and traces."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import losses
from ..batch.batch import Batch
from ..batch.packing import MissingField, PackedBatch, pack
from ..batch.segments import Segments
from ..statistics.softmax import CANDIDATES, COLLISION, STATISTICS, Statistics
from .modifiers import Modifier, corrected, off_policy_masked, top_entropy
from .rejection import rejected
from .second_moment import second_moment_masked
from .teacher import INPUTS as TEACHER_INPUTS
from .teacher import SampleExtras
from .term import Term
from .trial import trace

# Names exported by `losses` that are not factories of a term.
_OTHERS = {"Term", "Objective", "Modifier", "term", "teacher", "draft_weights", "kl_shaped"}
_OTHERS |= {"rlsd_shaped", "rejection_mask", "second_moment_mask"}
_OTHERS |= {"value_loss", "bradley_terry", "classification"}
TERMS: tuple[Callable[..., Term], ...] = tuple(
    getattr(losses, name) for name in losses.__all__ if name not in _OTHERS
)
MODIFIERS: tuple[Callable[..., Modifier], ...] = (
    corrected,
    rejected,
    second_moment_masked,
    off_policy_masked,
    top_entropy,
)


def table() -> str:
    """Return a Markdown table with one row per term: name, equation, options, inputs, reduction."""
    rows = [
        (
            f"`{f.__name__}`",
            _equation(f),
            _options(f),
            _inputs_of_term(f),
            _reduction(f),
            ", ".join(f"{framework} `{name}`" for framework, name in also_called(f)),
        )
        for f in TERMS
    ]
    head = ("term", "loss", "options", "inputs", "default reduction", "also called")
    return markdown(head, rows)


def modifier_table() -> str:
    """Return a Markdown table with one row per modifier, a method of `Term` such as `.corrected`:
    the method's name, the formula of the factor on the loss, the options, the batch fields read."""
    rows = [
        (
            f"`.{f.__name__}`",
            _equation(f),
            _options(getattr(Term, f.__name__), keyword=False),
            _fields(lambda f=f: _modified(f), {}),
            _options(getattr(Term, f.__name__), keyword=True),
        )
        for f in MODIFIERS
    ]
    return markdown(("modifier", "factor", "options", "inputs", "by keyword alone"), rows)


def also_called(function: Callable[..., Any]) -> list[tuple[str, str]]:
    """Return (framework, name in the framework) for each entry that a term's docstring lists, as
    [("verl", "vanilla"), ("TRL", "dapo")] for "Also called: verl vanilla, TRL dapo."
    """
    listed = _listed(function, "Also called: ")
    pairs = (pair.partition(" ") for pair in listed.split(", ") if listed)
    return [(framework, name) for framework, _, name in pairs]


def _listed(function: Callable[..., Any], head: str) -> str:
    """Return the text of `function`'s docstring after the words `head` (such as "Also called: "),
    up to a full stop at the end of a line."""
    _, _, rest = (inspect.getdoc(function) or "").partition(head)
    return " ".join(rest.partition(".\n")[0].split()).rstrip(".")


def markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table; `head` names the columns, each of `rows` holds one row's cells."""
    lines = [head, tuple("---" for _ in head), *rows]
    # Escape a vertical bar in a cell's text, because Markdown ends a table cell at a vertical bar.
    return "\n".join(f"| {' | '.join(c.replace('|', chr(92) + '|') for c in r)} |" for r in lines)


def _equation(function: Callable[..., Any]) -> str:
    """Return the equation of a docstring: the paragraph below the summary line."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    if len(paragraphs) < 2:
        raise ValueError(f"{function.__name__}: its docstring has no equation below the summary")
    return f"`{' '.join(paragraphs[1].split())}`"


def _parameters(function: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return (p for p in parameters if p.name != "self")


def _options(function: Callable[..., Any], keyword: bool | None = None) -> str:
    """Return the options of `function` as text: all (`keyword=None`), only the keyword-only options
    (`keyword=True`) or only the positional options (`keyword=False`)."""
    shown = (
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in _parameters(function)
        if keyword in (None, p.kind is p.KEYWORD_ONLY)
    )
    return ", ".join(f"`{option}`" for option in shown)


def _reduction(function: Callable[..., Term]) -> str:
    reduction = function().reduction
    if reduction is not None:
        return reduction.name
    # A term whose default reduction depends on an option names the reduction in its docstring.
    return _listed(function, "Default reduction: ")


# --------------------------------------------------------------------- inputs of a term


def _inputs_of_term(function: Callable[..., Term]) -> str:
    """Return the batch fields that a term reads, including the fields read only if a boolean option
    is True."""
    shown = _fields(function, {})
    if function().teacher is not None:
        of_teacher = " or ".join(_names(names) for names in TEACHER_INPUTS.values())
        shown = f"{of_teacher}; {shown}" if shown else of_teacher
    for option in _parameters(function):
        if option.default is False:
            switched = {option.name: True}
            more = [name for name in _reads(function, switched) if name not in shown]
            shown += f"; {_names(more)} when `{option.name}`" if more else ""
    if function().segments_per_unit == 2:
        shown = "; ".join(filter(None, [shown, "segments in pairs"]))
    return shown


def _fields(function: Callable[..., Term], options: dict[str, Any]) -> str:
    shown = []
    for name, instead in _reads(function, options).items():
        note = "" if instead is None else f" or {_names(instead)}" if instead else " (optional)"
        shown.append(f"`{name}`{note}")
    return ", ".join(shown)


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _reads(function: Callable[..., Term], options: dict[str, Any]) -> dict[str, list[str] | None]:
    """Map each batch field that a term reads to the fields that can replace it; None if the term
    raises without the field."""
    stats, batch = sample()
    term = function(**options)
    fields = {name: getattr(batch, name) for name in batch.kinds()}
    read = _read(term, stats, batch, fields)
    found: dict[str, list[str] | None] = {}
    for name in read:
        others = {key: value for key, value in fields.items() if key != name}
        try:
            found[name] = [n for n in _read(term, stats, batch, others) if n not in read]
        except MissingField:
            found[name] = None
    return found


def _read(term: Term, stats: Statistics, batch: PackedBatch, fields: dict[str, Any]) -> list[str]:
    given = PackedBatch(batch.targets, batch.segments, fields)
    seen = trace(term, stats, given, observe=False).fields
    return [name for name in fields if name in seen]


def _modified(modifier: Callable[..., Modifier]) -> Term:
    """Return a `z_loss` term with `modifier` applied. `z_loss` itself reads no batch field, so that
    the returned term reads exactly the batch fields that `modifier` reads."""
    required = {
        "corrected": {},
        "second_moment_masked": {},
        "rejected": {"measure": "k3", "maximum": 1.0},
        "off_policy_masked": {"threshold": 0.0},
        "top_entropy": {"quantile": 0.5},
    }
    return losses.z_loss().modified(modifier(**required[modifier.__name__]))


def sample() -> tuple[Statistics, PackedBatch]:
    """Return four made-up tokens in two segments, with every field that a library term reads."""

    def vector(start: float) -> Tensor:
        return torch.linspace(start, start - 0.3, 4)

    names = ("advantages", "old_logps", "ref_logps", "sampling_logps", "teacher_logps", "draws")
    fields: dict[str, Any] = {name: vector(-1 - i / 10) for i, name in enumerate(names)}
    fields |= {"desirable": torch.tensor([True, True, False, False]), "reference_kl": vector(0.5)}
    fields["prompts"] = torch.zeros(2, dtype=torch.int64)
    one = torch.zeros(4, 1)
    fields |= {"candidate_ids": one.long(), "candidate_probs": one}
    fields |= {"candidate_sampling_logps": one - 1, "teacher_logits": one}
    fields["slots"] = torch.arange(4)
    batch = Batch(torch.zeros(4, dtype=torch.int64), Segments.from_lengths([2, 2]), **fields)
    vectors: dict[str, Any] = {name: vector(0.8).requires_grad_() for name in STATISTICS}
    vectors["logp"] = vector(-1.0).requires_grad_()
    beside = SampleExtras(lambda value: vector(value).requires_grad_())
    beside[COLLISION] = vector(0.8)
    beside[CANDIDATES] = torch.full((4, 2), -1.0, requires_grad=True)
    packed = pack(batch, vocabulary=1, dtype=torch.float32)
    return Statistics(**vectors, extras=beside), packed
