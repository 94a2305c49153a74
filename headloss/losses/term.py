"""Terms (losses per token or segment), objectives (weighted sums of terms), and `@term`.

T scored tokens, S segments. A term is a pure function of the statistics ([T] vectors) and of the
packed batch's vectors, and returns one value per token [T] or per segment [S]. The function of a
term never reads a logit, a mask or a padded position.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from ..arguments import as_float
from ..batch.reduction import REDUCTIONS, Reduction, as_reduction, sequence_mean, token_mean
from ..statistics.metrics import Observed
from ..statistics.softmax import Slope, Statistics
from .arguments import call_text, check_names, counts, naming, one_of
from .identity import Given, alike
from .modifiers import Modifier, corrected, off_policy_masked, top_entropy
from .rejection import rejected
from .scope import SCOPES, Per, Scope, wider
from .second_moment import second_moment_masked
from .teacher import BesideTeacher, Teacher

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch

LIBRARY = __name__.partition(".")[0]
Function = Callable[[Statistics, "PackedBatch"], Tensor]
Observer = Callable[[Statistics, "PackedBatch"], dict[str, Observed]]


class _Arithmetic:
    """Base of terms and objectives, with the operators `+` and `-`, and `*` and `/` by a number."""

    def _objective(self) -> Objective:
        raise NotImplementedError

    def __add__(self, other: Term | Objective) -> Objective:
        if not isinstance(other, _Arithmetic):
            return NotImplemented
        return Objective(self._objective().parts + other._objective().parts)

    def __radd__(self, other: object) -> Objective:
        """Return the objective itself for 0 + objective, so that `sum(terms)` works."""
        return self._objective() if other == 0 else NotImplemented

    def __neg__(self) -> Objective:
        return -1.0 * self

    def __sub__(self, other: Term | Objective) -> Objective:
        return self + (-other) if isinstance(other, _Arithmetic) else NotImplemented

    def __mul__(self, factor: float) -> Objective:
        if not isinstance(factor, Real):
            return NotImplemented
        number = as_float(factor)
        return Objective(tuple((number * c, term) for c, term in self._objective().parts))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Objective:
        if not isinstance(divisor, Real):
            return NotImplemented
        return self * (1 / divisor if divisor else math.inf)  # Objective refuses inf


@dataclass(frozen=True, kw_only=True, eq=False)
class Term(_Arithmetic):
    """Loss per token or per segment, made by the functions of `headloss` and by `@hl.term`.

    Attributes:
        name: key of the term in `out.terms` and `out.metrics`.
        function: maps (stats, batch) to a loss per token [T] or per segment [S].
        scope: smallest part of a batch that the function accepts.
        per: "token" if the function's result is [T], "segment" if [S].
        reduction: rule for each token's weight in the sum; None must be replaced by `.over(...)`.
        options: options of the call that made the term.
        observe: maps (stats, batch) to the metrics reported under "name/...".
        modifiers: factors per token, applied in order.
        weight_fields: batch fields that multiply the loss.
        kept_field: boolean batch field of the tokens or segments kept.
        segments_per_unit: number of consecutive segments that belong together (2 for pairs).
        teacher: teacher whose divergences the function reads.
        slopes: maps a batch to the gradient in closed form (`softmax.Slope`); None: autograd.
        own_scope: the scope before modifiers widened it; None if the term has no modifier.
        own_reduction: the reduction before `.over` changed it; None if `.over` did not.
    """

    name: str
    function: Function
    scope: Scope = "token"
    per: Per = "token"
    reduction: Reduction | None = None
    missing_reduction: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    observe: Observer | None = None
    modifiers: tuple[Modifier, ...] = ()
    weight_fields: tuple[str, ...] = ()
    kept_field: str | None = None
    segments_per_unit: int = 1
    teacher: Teacher | None = None
    slopes: Callable[[PackedBatch], tuple[Slope, ...]] | None = None
    own_scope: Scope | None = None
    own_reduction: Reduction | None = None

    @property
    def is_own(self) -> bool:
        """True if the term's function is defined in headloss, and so has no side effects."""
        function: Any = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return str(getattr(function, "__module__", "")).startswith(f"{LIBRARY}.")

    def __repr__(self) -> str:
        """Return the term as Python source code."""
        calls = [call_text(self.name, self.options), *map(repr, self.modifiers)]
        over, default = self.reduction, self.own_reduction
        if over is not None and (default is not None or self.missing_reduction):
            named = repr(over.name) if over.name in REDUCTIONS else over.name
            calls.append(f"over({named})")
        calls += [f"weighted({field!r})" for field in self.weight_fields]
        calls += [f"where({self.kept_field!r})"] * (self.kept_field is not None)
        return ".".join(calls)

    def __eq__(self, other: object) -> bool:
        return alike(self, other) if isinstance(other, Term) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.name, *(o for o in self.options if type(o[1]) in (float, int, str))))

    def _objective(self) -> Objective:
        return Objective(((1.0, self),))

    # ------------------------------------------------------------------ changed copies of a term

    def over(self, reduction: Reduction | str) -> Term:
        """Return the term with a reduction such as `headloss.fixed_length(n)` or "token_mean"."""
        new, first = as_reduction(reduction), self.own_reduction or self.reduction
        return replace(self, reduction=new, own_reduction=None if new == first else first)

    def weighted(self, field: str) -> Term:
        """Multiply the loss by a batch field per token or segment; the denominator is unchanged."""
        return replace(self, weight_fields=(*self.weight_fields, _field_name(field)))

    def where(self, field: str) -> Term:
        """Keep the tokens (or segments) where a boolean batch field is True; the denominator counts
        only the kept tokens."""
        if self.kept_field is not None:
            raise ValueError(
                f"where: {self.name} is already restricted to {self.kept_field!r}; combine the two "
                "in one boolean field"
            )
        return replace(self, kept_field=_field_name(field))

    def modified(self, modifier: Modifier) -> Term:
        """Multiply each token's loss by a factor without a gradient."""
        if not isinstance(modifier, Modifier):
            raise TypeError(f"modifier: got {type(modifier).__name__}, want a Modifier")
        own, scope = self.own_scope or self.scope, wider(self.scope, modifier.scope)
        modifiers = (*self.modifiers, modifier)
        return replace(self, modifiers=modifiers, scope=scope, own_scope=own)

    def corrected(
        self,
        mode: str,
        min: float | None = None,
        max: float | None = 3.0,
        *,
        live: bool = False,
        normalized: bool = False,
    ) -> Term:
        """Correct for the mismatch of sampler and trainer; see `modifiers.corrected`."""
        how = {"minimum": min, "maximum": max, "live": live, "normalized": normalized}
        return self.modified(corrected(mode, **how))

    def rejected(
        self,
        measure: str,
        level: str = "token",
        min: float | None = None,
        max: float | None = None,
        *,
        live: bool = False,
    ) -> Term:
        """Drop tokens or sequences of large trainer-sampler mismatch; see `rejection.rejected`."""
        return self.modified(rejected(measure, level=level, minimum=min, maximum=max, live=live))

    def off_policy_masked(self, threshold: float) -> Term:
        """Drop sequences whose policy moved too far; `modifiers.off_policy_masked` has the rule."""
        return self.modified(off_policy_masked(threshold))

    def top_entropy(
        self, quantile: float | None = None, threshold: float | None = None, group: Any = None
    ) -> Term:
        """Keep the tokens of highest entropy; see `modifiers.top_entropy`."""
        return self.modified(top_entropy(quantile=quantile, threshold=threshold, group=group))

    def second_moment_masked(self, threshold: float = 0.04, *, live: bool = False) -> Term:
        """Drop the most off-policy tokens; see `second_moment.second_moment_masked`."""
        return self.modified(second_moment_masked(threshold, live=live))

    # ------------------------------------------------------------------ calls of a term

    def __call__(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        """Return the loss of each token, [T]; each token of a segment gets the segment's value."""
        values = self.function(self.view(stats, batch), batch)
        self._check(values, batch)
        if self.per == "segment":
            values = batch.segments.expand(values)
        for modifier in self.modifiers:
            values = values * modifier.factor(stats, batch)
        for field in self.weight_fields:
            values = values * getattr(batch, field)
        return values

    def view(self, stats: Statistics, batch: PackedBatch) -> Any:
        """Return the statistics, with the divergences of the term's teacher if any."""
        return stats if self.teacher is None else BesideTeacher(stats, self.teacher, batch)

    def _check(self, values: object, batch: PackedBatch) -> None:
        want = (len(batch),) if self.per == "token" else (batch.segments.count,)
        if not isinstance(values, Tensor):
            raise TypeError(
                f"term {self.name}: returned {type(values).__name__}, want a tensor of shape {want}"
            )
        if values.shape != want:
            raise ValueError(
                f"term {self.name}: returned shape {tuple(values.shape)}, want {want} (one value "
                f'per {self.per}; declare per="token" or per="segment")'
            )


def _field_name(field: str) -> str:
    if not isinstance(field, str):
        raise TypeError(f"field: got {type(field).__name__}, want the name of a batch field")
    return field


@dataclass(frozen=True, eq=False)
class Objective(_Arithmetic):
    """Weighted sum of terms: `hl.gspo() + 1e-4 * hl.z_loss() - 1e-3 * hl.entropy()`."""

    parts: tuple[tuple[float, Term], ...]

    def __post_init__(self) -> None:
        for part in self.parts if isinstance(self.parts, tuple | list) else [self.parts]:
            pair = isinstance(part, tuple | list) and len(part) == 2
            if not (pair and isinstance(part[0], Real) and isinstance(part[1], Term)):
                raise TypeError(f"parts: got {part!r:.80}, want a tuple of (coefficient, term)")
            if not math.isfinite(as_float(part[0])):
                raise ValueError(f"{part[0]!r} * {part[1]!r}: want a finite coefficient")
        object.__setattr__(self, "parts", tuple(map(tuple, self.parts)))

    @classmethod
    def of(cls, value: Term | Objective) -> Objective:
        """Return an objective from a term or an objective."""
        if not isinstance(value, _Arithmetic):
            hint = ""
            if callable(value):
                hint = (
                    " (a term's function must be called: hl.grpo(), not hl.grpo; a function of "
                    "(stats, batch) becomes a term by hl.term(function)())"
                )
            raise TypeError(f"objective: got {type(value).__name__}, want terms{hint}")
        return value._objective()

    def _objective(self) -> Objective:
        return self

    def __eq__(self, other: object) -> bool:
        return self.parts == other.parts if isinstance(other, Objective) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.parts)

    def __repr__(self) -> str:
        return " + ".join(f"{c:g} * {term!r}" for c, term in self.parts)

    def named(self) -> Iterator[tuple[str, float, Term]]:
        """Yield (key, coefficient, term); the second term named "kl" has the key "kl_2"."""
        seen: dict[str, int] = {}
        for coefficient, term in self.parts:
            seen[term.name] = number = seen.get(term.name, 0) + 1
            yield (term.name if number == 1 else f"{term.name}_{number}"), coefficient, term

    @functools.cached_property
    def scope(self) -> Scope:
        return functools.reduce(wider, [term.scope for _, term in self.parts])

    @functools.cached_property
    def teachers(self) -> list[Teacher]:
        """Distinct teachers of the terms, in the order of first use."""
        return list(dict.fromkeys(term.teacher for _, term in self.parts if term.teacher))

    @functools.cached_property
    def segments_per_unit(self) -> int:
        return math.lcm(*(term.segments_per_unit for _, term in self.parts))


@overload
def term(function: Callable[..., Tensor], **options: Any) -> Callable[..., Term]: ...
@overload
def term(**options: Any) -> Callable[[Callable[..., Tensor]], Callable[..., Term]]: ...
def term(  # pyright: ignore[reportInconsistentOverload]
    function: Callable[..., Tensor] | None = None,
    *,
    scope: Scope = "token",
    per: Per = "token",
    reduction: Reduction | str | None = None,
    observe: Callable[..., dict[str, Observed]] | None = None,
    name: str | None = None,
    segments_per_unit: int = 1,
    slopes: Callable[..., tuple[Slope, ...]] | None = None,
    teacher: Teacher | None = None,
) -> Any:
    """Make a term factory from a pure function `f(stats, batch, **options)`.

    Args:
        scope: part of a batch that f accepts: "token" (any part), "segment" (whole segments) or
            "batch" (the whole batch).
        per: "token" if f returns [T], "segment" if f returns [S].
        reduction: defaults to token_mean, and to sequence_mean for scope="segment".
        observe: g(stats, batch, **options) to a dict of `metrics.Observed`, reported as "name/...".
        name: defaults to the name of f.
        segments_per_unit: consecutive segments that may not be separated, e.g. 2 for pairs.
        slopes: h(batch, **options) returns the gradient in closed form, a tuple of `softmax.Slope`.
        teacher: result of `hl.teacher`; f can then read `stats.divergence(kind, beta=0.5)`,
            `stats.acceptance` and `stats.log_acceptance`, [T] each.

    >>> import torch
    >>> @term
    ... def soft_policy_gradient(stats, batch, tau=1.0):
    ...     ratio = (stats.logp - batch.old_logps).exp()
    ...     return -torch.sigmoid(tau * (ratio - 1)) * batch.advantages
    >>> soft_policy_gradient(tau=2.0)
    soft_policy_gradient(tau=2.0)
    """
    one_of(SCOPES, scope=scope)
    one_of(("token", "segment"), per=per)
    counts(segments_per_unit=segments_per_unit)
    if per == "segment" and scope == "token":
        raise ValueError('scope: got "token" with per="segment", want "segment" or "batch"')
    functions = {"function": function, "observe": observe, "slopes": slopes}
    for given, value in functions.items():
        if value is not None and (not callable(value) or isinstance(value, Term)):
            raise TypeError(f"{given}: got {type(value).__name__}, want a function")
    if not isinstance(name, str | None):
        raise TypeError(f"name: got {type(name).__name__}, want a string")
    if not isinstance(teacher, Teacher | None):
        raise TypeError(f"teacher: got {type(teacher).__name__}, want hl.teacher(...)")
    default = sequence_mean if scope == "segment" else token_mean
    over = default if reduction is None else as_reduction(reduction)

    def decorate(f: Callable[..., Tensor]) -> Callable[..., Term]:
        signature, named = inspect.signature(f), name or getattr(f, "__name__", type(f).__name__)
        taken = list(signature.parameters.values())[2:]
        try:
            signature.bind_partial(None, None)
        except TypeError:
            want = "a function of (stats, batch) and options"
            raise TypeError(f"function: got {named}{signature}, want {want}") from None

        @functools.wraps(f)
        def factory(*args: Any, **options: Any) -> Term:
            with naming(named):
                check_names(taken, args, options)
                signature.bind(None, None, **options)  # raises TypeError for a missing option
            return Term(
                name=named,
                function=Given(f, **options),
                scope=scope,
                per=per,
                reduction=over,
                options=tuple(options.items()),
                observe=None if observe is None else functools.partial(observe, **options),
                segments_per_unit=segments_per_unit,
                slopes=None if slopes is None else functools.partial(slopes, **options),
                teacher=teacher,
            )

        # `inspect.signature` of the decorated f shows only options, without `stats` and `batch`.
        factory.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[
                p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
                for p in taken
                if p.kind is not inspect.Parameter.VAR_KEYWORD
            ],
            return_annotation=Term,
        )
        return factory

    return decorate if function is None else decorate(function)
