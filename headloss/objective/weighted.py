"""A sum of loss terms on one packed batch: the weight of each token in each term, and the gradient
of the loss as four coefficients c_target, c_prob, c_entropy and c_uniform per token.

T scored tokens, S segments, K terms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..batch.packing import PackedBatch, as_wide, missing
from ..batch.reduction import Number, Totals, prompt_mean
from ..batch.segments import Chunk
from ..batch.weights import token_weights
from ..losses.term import Objective, Term
from ..losses.trial import observed
from ..statistics.metrics import Metrics, Observed, fold_all
from ..statistics.softmax import (
    CANDIDATES,
    NOT_NEEDED,
    ByStatistic,
    Slope,
    SoftmaxCoefficients,
    Statistics,
    vjp,
)
from .reads import Kinds

K = TypeVar("K")
# Type of a function from a loss term's teacher (None without a teacher) to dz/draw, the derivative
# of the term's logits z with respect to the raw logits.
PerRaw = Callable[..., Number]
# Large batch fields that no term reads: `without_poison`, which replaces NaN at excluded tokens by
# 0, skips these fields.
UNREAD = ("teacher_logits", "teacher_hidden")


class WeightedTerm(NamedTuple):
    """A loss term, with weights for the tokens of a batch."""

    name: str
    coefficient: float
    term: Term
    weights: Tensor | float  # Weights [T] of the tokens, or a single weight for all tokens.

    def rows(self, rows: slice) -> WeightedTerm:
        """Return the weighted term restricted to the tokens `rows`."""
        weights = self.weights
        if isinstance(weights, Tensor) and weights.dim():
            return self._replace(weights=weights[rows])
        return self

    def included(self, batch: PackedBatch) -> Tensor | None:
        """[n] bool, True for tokens that `.where(field)` keeps; None for an unrestricted term."""
        return batch.get(self.term.kept_field or "")  # type: ignore[no-any-return]

    def losses(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        """[n] losses of the batch's tokens: 0 at tokens that `.where(field)` excludes."""
        included = self.included(batch)
        view = without_poison(batch, included)
        try:
            losses = self.term(stats, view.on(stats))
        except (AttributeError, TypeError) as error:
            # A likely cause of an AttributeError or TypeError is a statistic that is None, because
            # the term did not read the statistic when it was called once on a small sample batch.
            error.add_note(
                f"term {self.name}: was given {sorted(stats.tensors())}, "
                "as it read of a small sample"
            )
            raise
        return losses if included is None else torch.where(included, losses, 0)

    def share(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        """Return the weighted sum of the losses of the batch's tokens, [] float64: their
        contribution to the term's value."""
        losses = self.losses(stats, batch)
        if batch.live is not None:
            losses = torch.where(batch.live, losses, 0)
        if isinstance(self.weights, Tensor):
            return (self.weights * losses).sum(dtype=torch.float64)
        return losses.sum(dtype=torch.float64) * self.weights

    def slopes(self, batch: PackedBatch, upstream: float = 1.0) -> list[Slope]:
        """Return the term's derivatives with respect to statistics in closed form, times the
        upstream gradient."""
        view = without_poison(batch, self.included(batch))
        times = self.weights
        if (factor := self.coefficient * upstream) != 1:
            times = times * factor
        # Convert integer fields, because a Python number times an integer tensor has the default
        # dtype.
        for field in self.term.weight_fields:
            times = times * getattr(view, field).to(view._dtype)
        assert self.term.slopes is not None
        return [Slope(slope[0] * times, *slope[1:]) for slope in self.term.slopes(view)]

    def per_token(self, stats: Statistics, batch: PackedBatch) -> dict[str, Tensor]:
        """Return the term's [T] metrics per token by "term/metric", 0 at tokens that
        `.where(field)` excludes."""
        included = self.included(batch)
        values = dict[str, Tensor]()
        for name, o in observed(self.term, stats, batch).items():
            if o.per == "token":
                value = o.values if included is None else torch.where(included, o.values, 0)
                values[f"{self.name}/{name}"] = value
        return values

    def metrics(self, stats: Statistics, batch: PackedBatch, share: float) -> Metrics:
        """Return the metrics of the term and its modifiers, reduced over included tokens, or over
        segments with an included token. `share` multiplies sums over segments: 1 / R if R ranks
        report equal values of the segments (see `fold_all`)."""
        reports: dict[str, dict[str, Observed]] = {"token": {}, "segment": {}}
        for name, o in observed(self.term, stats, batch).items():
            reports[o.per][f"{self.name}/{name}"] = o
        live = batch.live
        included = self.included(batch)
        present = None
        if reports["segment"]:
            present = batch.segments.lengths > 0
            if live is not None:
                present[batch._count :] = False
            if included is not None:
                present = present & (batch.segments.sum(included.double()) > 0)
        if included is not None:
            live = included if live is None else included & live
        of_segments = fold_all(reports["segment"], present, share)
        return Metrics(fold_all(reports["token"], live) | of_segments)


class Coefficients(NamedTuple):
    """Gradient of the objective for some tokens, as the coefficients from which kernels compute the
    gradient of the logits."""

    softmax: SoftmaxCoefficients  # Shape [n].
    # Derivatives of the loss with respect to `Statistics.extras` (divergences, candidates), [n] or
    # [n, K + 1].
    extras: ByStatistic
    # Contribution of the tokens to the value of each of K terms, [K] float64.
    shares: Tensor = NOT_NEEDED

    def rows(self, rows: Tensor | slice) -> Coefficients:
        """Return the gradient coefficients of the tokens with indices `rows`."""
        return self.map(lambda t: t[rows])

    def map(self, function: Callable[[Tensor], Tensor]) -> Coefficients:
        """Apply `function` to every tensor, and return the results as `Coefficients`."""
        extras = {key: function(g) for key, g in self.extras.items()}
        return self._replace(softmax=self.softmax.map(function), extras=extras)

    def without(self, rows: Tensor) -> Coefficients:
        """Return the coefficients, set to 0 at tokens where the mask `rows` [n] is True."""
        return self.map(lambda t: t.masked_fill(as_wide(rows, t), 0))

    def live(self) -> Tensor:
        """[n] bool: True for tokens with a nonzero gradient."""
        tensors = [*self.softmax.tensors().values(), *self.extras.values()]
        alive = [t != 0 if t.dim() == 1 else (t != 0).any(1) for t in tensors]
        return functools.reduce(torch.logical_or, alive)


@dataclass(eq=False)
class WeightedObjective:
    """A sum of loss terms bound to a packed batch, with token weights from global totals."""

    parts: tuple[WeightedTerm, ...]
    vocabulary: int
    dtype: torch.dtype  # Dtype of the statistics.
    # True if all terms have derivatives in closed form, so that no gradient needs autograd.
    closed: bool = False
    # Scalar tensor: a power of two by which the coefficients are multiplied, against 16-bit
    # underflow.
    scale: Tensor | None = None
    upstream: float = 1.0  # The upstream gradient; 1 if unknown in advance.
    # True if the call's schedule accepts only a gradient with respect to `logp`.
    logp_only: bool = False

    def coefficients(
        self, stats: Statistics, batch: PackedBatch, chunk: Chunk | None, needed: bool = True
    ) -> Coefficients:
        """Evaluate every term on the tokens of a chunk (None: on all tokens), and return the
        gradient as gradient coefficients."""
        parts = self.parts
        if chunk is not None:
            batch = batch.slice(chunk)
            parts = tuple([p.rows(chunk.rows) for p in parts])
        slopes: ByStatistic = {}
        if needed and not self.closed:
            leaves = stats.map(lambda t: t.detach())
            inputs: ByStatistic = {**leaves.tensors(), **leaves.extras}
            inputs.pop("top1", None)
            for leaf in inputs.values():
                leaf.requires_grad_()
            with torch.enable_grad():
                shares = [part.share(leaves, batch) for part in parts]
                slopes = differentiate(self.total(shares), inputs)
            shares = [share.detach() for share in shares]
        else:
            shares = [part.share(stats, batch) for part in parts]
            if needed:
                slopes = in_closed_form([s for p in parts for s in p.slopes(batch)], stats.logp)
        if self.logp_only and slopes.keys() - {"logp", CANDIDATES}:
            raise ValueError(
                "objective: its terms have a gradient of more than logp for the values of this "
                'batch, which a frozen schedule cannot serve; want Options(schedule="recompute")'
            )
        # For the values of this batch, the loss has no gradient: return coefficients of 0.
        if needed and not slopes:
            slopes["logp"] = torch.zeros_like(stats.logp)
        if batch.live is not None:
            dead = ~batch.live
            slopes = {n: g.masked_fill(as_wide(dead, g), 0) for n, g in slopes.items()}
        if CANDIDATES in slopes:
            slopes[CANDIDATES] = without_constants(slopes[CANDIDATES], stats, batch)
        if self.scale is not None:
            slopes = {name: g * self.scale for name, g in slopes.items()}
        softmax = vjp(slopes, stats, self.vocabulary)
        extras = {key: slopes[key] for key in stats.extras if key in slopes}
        stacked = torch.stack(shares) if len(shares) > 1 else shares[0].view(1)
        coefficients = Coefficients(softmax, extras, stacked)
        if self.upstream == 1:
            return coefficients
        return coefficients.map(lambda t: t * self.upstream)

    @property
    def named(self) -> tuple[tuple[str, float], ...]:
        """Key and coefficient of each term."""
        return tuple((part.name, part.coefficient) for part in self.parts)

    def total(self, shares: Iterable[Tensor], stats: Statistics | None = None) -> Tensor:
        """Return the loss of all tokens, [], from the terms' contributions. The terms'
        contributions are added one by one, because copying a tensor of coefficients to the device
        would block the CPU."""
        pairs = zip(self.named, shares, strict=False)
        return functools.reduce(torch.add, [s if c == 1 else c * s for (_, c), s in pairs])

    def beforehand(
        self, batch: PackedBatch, needs: frozenset[str]
    ) -> tuple[Coefficients, Tensor | None]:
        """Return the parts of the gradient that are known before the softmax statistics: the
        gradient coefficients for an entropy of 0, and P closed-form derivatives of the loss as a
        tensor [P, 5, T], with the five fields of `Slope` for each of T tokens. Every term must have
        derivatives in closed form, as `has_slopes` checks."""
        zero = torch.zeros(len(batch), dtype=self.dtype, device=batch.targets.device)
        slopes = [slope for part in self.parts for slope in part.slopes(batch, self.upstream)]
        rates = in_closed_form([slope for slope in slopes if slope.constant], zero)
        zeros: dict[str, Any] = dict.fromkeys(needs, zero)
        softmax = vjp(rates, Statistics(**zeros), self.vocabulary)
        # Fill the tensor on the device, because a copy from the CPU would block.
        moving = [
            torch.stack([x if isinstance(x, Tensor) and x.dim() else zero + x for x in slope[:5]])
            for slope in slopes
            if not slope.constant
        ]
        return Coefficients(softmax, {}), torch.stack(moving).to(zero.dtype) if moving else None

    def scaled(self, device: torch.device, slope: PerRaw) -> WeightedObjective:
        """Return a copy of this objective whose gradients are multiplied by a power of two,
        `scale`. With the factor `scale`, the largest |weight * coefficient * upstream gradient *
        dz/draw| over all terms and tokens is between 1 and 2, where dz/draw is the derivative of a
        transformed logit with respect to the raw logit. The caller must multiply the gradients of
        hidden states and head weights by 1 / `scale` after the backward pass.

        After multiplication by `scale`, the gradient of the raw logits is within float16's range if
        the derivative |d term / dz| of a term with weight 1 is below 65504 / 2. The derivative |d
        term / dz| is at most 1 for cross-entropy and distillation, log(vocabulary size) for the
        entropy, 2 |log-sum-exp| for a z-loss, |advantage| times the policy ratio for a
        policy-gradient loss, and `beta` times the answer's length for a preference loss on summed
        log-probs. In float16, gradients far below 1 keep fewer digits.
        """
        # Fill the tensor on the device, because a copy from the CPU would block.
        one = torch.full((), self.upstream or 1.0, dtype=self.dtype, device=device)
        sizes = [one * p.weights * (p.coefficient * slope(p.term.teacher)) for p in self.parts]
        return replace(self, scale=power_of_two(sizes))


def in_closed_form(slopes: Iterable[Slope], logp: Tensor) -> ByStatistic:
    """Return, for each statistic, the sum [n] over all terms of the derivatives with respect to the
    statistic."""
    rates: ByStatistic = {}
    for slope in slopes:
        rate = slope.at(logp)
        rates[slope.of] = rates[slope.of] + rate if slope.of in rates else rate
    return rates


def power_of_two(coefficients: list[Tensor]) -> Tensor:
    """Return the power of two, at most 2^61 and of shape [], that scales the largest |coefficient|
    to a number between 1 and 2."""
    sizes = [torch.linalg.vector_norm(c, torch.inf) for c in coefficients if c.numel()]
    largest = torch.stack(sizes).max() if sizes else coefficients[0].new_zeros(())
    return (1 - largest.clamp_min(2**-61).frexp().exponent.clamp(max=127)).exp2()


def differentiate(total: Tensor, inputs: dict[K, Tensor]) -> dict[K, Tensor]:
    """Return the gradient of the scalar `total` with respect to each tensor in `inputs`, by the
    input's key. An input on which `total` does not depend is left out."""
    if not total.requires_grad:
        return {}
    gradients = torch.autograd.grad(total, list(inputs.values()), allow_unused=True)
    return {name: g for name, g in zip(inputs, gradients, strict=True) if g is not None}


def without_constants(slopes: Tensor, stats: Statistics, batch: PackedBatch) -> Tensor:
    """Return `slopes` [n, K + 1], the loss's derivatives with respect to the candidates' log-probs,
    with 0 at unused entries of `candidate_ids` and at columns with probability 0, where the
    log-prob is a constant."""
    constant = stats.extras[CANDIDATES].isneginf()
    return slopes.masked_fill(constant | pad(batch.candidate_ids < 0, (0, 1)), 0)


def without_poison(batch: PackedBatch, included: Tensor | None) -> PackedBatch:
    """Return the batch with 0 in place of non-finite field values at excluded tokens, where a field
    may hold any value."""
    if included is None:
        return batch
    fields = {}
    for name, field in {**batch._fields, **batch._read}.items():
        if name not in UNREAD and isinstance(field, Tensor) and field.is_floating_point():
            value = getattr(batch, name)
            fields[name] = torch.where(as_wide(included, value) | value.isfinite(), value, 0)
    return batch.replacing(fields)


def bind(
    objective: Objective,
    batch: PackedBatch,
    totals: Totals,
    vocabulary: int,
    dtype: torch.dtype,
    **more: Any,
) -> WeightedObjective:
    """Return the loss terms with a weight for every token, computed from `totals`, the totals over
    all batches and ranks. Call `check_weights` first. `more` are fields of `WeightedObjective`."""
    parts = []
    for name, coefficient, term in objective.named():
        assert term.reduction is not None
        weights = token_weights(batch, totals, dtype, term.reduction, term.kept_field)
        parts.append(WeightedTerm(name, coefficient, term, weights))
    return WeightedObjective(tuple(parts), vocabulary, dtype, **more)


def check_weights(objective: Objective, kinds: Kinds, totals: Totals | None) -> None:
    """Raise ValueError or TypeError for a term whose weights cannot be computed on this batch."""
    for name, _, term in objective.named():
        field = term.kept_field
        for one in {*term.weight_fields, field} & kinds.keys():
            if more := kinds[one][1]:
                raise ValueError(f"{one}: got {more} values at each token, want one for {name}")
        if term.reduction is None:
            raise ValueError(term.missing_reduction or f"term {name}: has no reduction, use .over")
        if term.reduction.weigh == prompt_mean.weigh:
            if "prompts" not in kinds:
                raise ValueError(f"term {name}: is averaged over {missing('prompts', kinds)}")
            if totals is not None and totals.prompts is None:
                raise ValueError(
                    f"totals: have no count of prompts, over which term {name} is averaged; make "
                    "them with headloss.Totals.of(batch)"
                )
        if field is None:
            continue
        if field not in kinds:
            raise ValueError(f"term {name}: is restricted to {missing(field, kinds)}")
        if kinds[field][0] != torch.bool:
            raise TypeError(f"{field}: want a boolean tensor, as term {name} is restricted to it")
        if totals is not None and field not in totals.kept:
            raise ValueError(
                f"totals: have no count for field {field!r} that term {name} is restricted to; "
                "make them with headloss.Totals.of(batch)"
            )
