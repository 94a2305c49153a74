"""Losses of draft models for each row, computed from hidden states. The draft model's heads return
the hidden states in place of logits.

n rows of a loss, H hidden width, r rank of a Markov head, V draft vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..batch.batch import Batch
from ..batch.reduction import Totals, token_mean
from ..head.head import Head
from ..head_loss import Output, head_loss
from ..head_topk import HeadTopk, head_topk
from ..losses.teacher import teacher
from ..losses.term import Term
from ..options import Options
from ..statistics.metrics import Observed


def _lk_hybrid(stats: Any) -> Tensor:
    share = (-3.0 * stats.acceptance.detach()).exp()  # Speculators' eta is 3.
    forward, distance = stats.divergence("forward_kl"), stats.divergence("total_variation")
    return share * forward + (1 - share) * distance


# Losses [T] by speculators' names; headloss's "nla" does not clamp the acceptance at 1e-5.
VALUES: dict[str, Callable[[Any], Tensor]] = {
    "kl_div": lambda stats: stats.divergence("forward_kl"),
    "rkl": lambda stats: stats.divergence("reverse_kl"),
    "jsd": lambda stats: stats.divergence("js"),
    "tv": lambda stats: stats.divergence("total_variation"),
    "ce": lambda stats: -stats.logp,
    "nla": lambda stats: -stats.log_acceptance,
    "lk_hybrid": _lk_hybrid,
}


class DraftHeads:
    """The heads of a draft model and of its verifier, read while their parameters are gathered."""

    def __init__(self, draft: Any, verifier: Any, markov: Any = None) -> None:
        self.draft, self.verifier = draft, verifier  # Modules, or heads.
        self.markov: nn.Linear | None = markov  # Maps features [.., r] to a bias [.., V].
        self._heads = tuple(h if isinstance(h, Head) else Head.of(h) for h in (draft, verifier))

    @property
    def width(self) -> int:
        return self._heads[0].weight.shape[1]

    @property
    def rank(self) -> int:
        return 0 if self.markov is None else self.markov.in_features

    def heads(self, dtype: torch.dtype) -> tuple[Head, Head]:
        """Return the heads of draft and verifier, cast to the dtype of the hidden states."""
        draft, verifier = (replace(h, weight=h.weight.to(dtype)) for h in self._heads)
        return draft, verifier

    def beside(self, states: Tensor) -> tuple[Tensor, Head]:
        """Split states [h | u] into hidden states [.., H] and a draft head with the features u [..,
        r]."""
        draft, _ = self.heads(states.dtype)
        if self.markov is None:
            return states, draft
        features = (states[..., self.width :], self.markov.weight.to(states.dtype))
        return states[..., : self.width], replace(draft, beside=(features,))

    def likeliest(self, states: Tensor) -> HeadTopk:
        """Return the verifier's likeliest token for the verifier's hidden states [.., H]."""
        return head_topk(states, self.heads(states.dtype)[1], 1)

    @contextmanager
    def returning_states(self) -> Iterator[None]:
        """Make the heads return their inputs in place of logits, until the `with` block ends.

        The draft's head maps h [.., H] to [h | 0], and a Markov head maps u [.., r] to [0 | u],
        both [.., H + r], so that the framework's sum of the two outputs is [h | u]. The verifier's
        head returns hidden states [.., H] unchanged. If draft and verifier share one head, the head
        appends r zeros to hidden states [.., H], where r is the rank of the Markov head.
        """
        replaced: dict[Any, Any] = {self.verifier: padded(0, 0)}
        replaced[self.draft] = padded(0, self.rank)
        if self.markov is not None:
            replaced[self.markov] = padded(self.width, 0)
        with returning(replaced):
            yield

    def losses(
        self,
        states: Tensor,  # [.., H + r]: hidden states, then the r inputs of the Markov head.
        targets: Tensor,  # Shape [..]; -100 in rows that no loss and no metric reads.
        slopes: dict[str, Tensor],  # The weight [..] of each row's loss, by the name of the loss.
        # The verifier's hidden states: [.., H], or [M, H] if `teacher_index` names one of M rows.
        verifier: Tensor | None = None,
        acceptance: bool = False,
        **fields: Any,
    ) -> Output:
        """Return the weighted sum of all losses over all rows; `slopes` are the weights.

        The output's `per_token` has "top1" and, for each loss, its value, for example "ce/value".
        With `acceptance=True`, `per_token` also has the acceptance probability of each row, under
        the name of the first loss, for example "ce/acceptance".
        """
        fields |= {f"slopes_{name}": slope.float() for name, slope in slopes.items()}
        if verifier is not None:
            fields["teacher_hidden"] = verifier
        batch = Batch(targets, totals=Totals(1, 1), **fields)
        hidden, draft = self.beside(states)
        _, of_verifier = self.heads(states.dtype)
        first, *_ = slopes
        objective: Any = sum(
            _term(name, of_verifier, acceptance and name == first) for name in slopes
        )
        observed = [f"{name}/value" for name in slopes] + [f"{first}/acceptance"] * acceptance
        options = Options(per_token=(*observed, "top1"))
        return head_loss(hidden, draft, batch, objective, options)


@functools.cache
def padded(before: int, after: int) -> Callable[[Tensor], Tensor]:
    """Return a forward that pads its input with zeros, in the dtype of a linear head's matrix
    product.

    Calls with equal `before` and `after` return the same function, so that torch.compile does not
    recompile.
    """

    def forward(states: Tensor) -> Tensor:
        device = states.device.type
        if torch.is_autocast_enabled(device):
            states = states.to(torch.get_autocast_dtype(device))
        return F.pad(states, (before, after)) if before + after else states

    return forward


@contextmanager
def returning(replaced: dict[Any, Any]) -> Iterator[None]:
    """Replace the forwards of the modules in `replaced`, until the `with` block ends."""
    try:
        for module, function in replaced.items():
            module.forward = function
        yield
    finally:
        for module in replaced:
            vars(module).pop("forward", None)


def bound_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of the call `function(*args, **kwargs)` by name, with defaults."""
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


_signature = functools.cache(inspect.signature)


class Parts(torch.autograd.Function):
    """Return copies of the tensors `values`; gradients of the copies flow to the scalar `total`
    alone, not to `values`.

    The scalar `total` is the sum of `values` weighted by the numbers `shares`, and its gradient
    comes from one headloss pass over the head. The gradients of a framework's loss with respect to
    the copies must be one common factor times the numbers `shares`. The backward pass multiplies
    the gradient of `total` by the common factor, without a second pass over the head.

    Raises:
        RuntimeError: in the backward pass, if the gradients of the copies are not one common
            factor times the numbers `shares`.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, total: Tensor, shares: tuple[float, ...], whose: str, *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.shares, ctx.whose, ctx.dtype = shares, whose, total.dtype
        return tuple(value.detach().clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        got = torch.stack([gradient.double() for gradient in gradients])
        shares = got.new_tensor(ctx.shares)
        scale = got @ shares / (shares @ shares).clamp_min(1e-30)
        if ((got - scale * shares).abs() > 1e-4 * got.abs().max()).any():
            want = f"multiples of {ctx.shares}"
            raise RuntimeError(f"{ctx.whose}: got gradients {got.tolist()}, want {want}")
        return scale.to(ctx.dtype), None, None, *([None] * len(got))


# ---------------------------------------------------------------------- term of a single loss


def _weighted(stats: Any, batch: Any, *, name: str) -> Tensor:
    return VALUES[name](stats) * getattr(batch, f"slopes_{name}")


def _observed(stats: Any, batch: Any, *, name: str, acceptance: bool) -> dict[str, Observed]:
    value = {"value": Observed(VALUES[name](stats))}
    return value | ({"acceptance": Observed(stats.acceptance)} if acceptance else {})


def _term(name: str, verifier: Head, acceptance: bool) -> Term:
    return Term(
        name=name,
        function=functools.partial(_weighted, name=name),
        reduction=token_mean,
        observe=functools.partial(_observed, name=name, acceptance=acceptance),
        teacher=teacher(verifier) if acceptance or name != "ce" else None,
    )
