"""The float64 oracle, and the correctness gate that compares each implementation with the oracle.

T tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from contestants import Found
from plain import SCALING, restricted, with_the_rest
from torch import Tensor
from works import LEAVES, Inputs, Setting, Values, Work

# ---------------------------------------------------------------------- the oracle

SAMPLES = 128  # The number of rows of dX, and of dW, that are compared.
BLOCK = 1 << 28  # Number of logits that the oracle computes at once: 2 GiB in float64.


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """Float64 reference values, and reference gradients: of sampled tokens, of sampled columns of
    the logits, and of the whole down projection of an adapter."""

    values: dict[str, Tensor]  # Float64 loss, nll, logps and entropies, by name.
    rows: Tensor  # Indices of the compared tokens.
    # Indices of the compared rows of the weight, the bias and an adapter's up projection.
    columns: Tensor
    gradients: dict[str, Tensor]

    def places(self, name: str) -> Tensor | slice:
        """Return the indices of the rows in which the gradient `name` is compared with float64."""
        return {"hidden": self.rows, "lora_a": slice(None)}.get(name, self.columns)


def make_oracle(work: Work, inputs: Inputs, setting: Setting) -> Oracle:
    """Compute the oracle in two passes over blocks of float64 logits: values, then gradients.

    Autograd gives the gradients. Gradients are compared on samples of the rows of `hidden` and
    `weight`; half of the sampled rows of `weight` are targets of the sampled tokens.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = len(inputs.targets)
    count = min(SAMPLES, tokens)
    rows = torch.randperm(tokens, generator=generator)[:count].to(inputs.targets.device)
    anywhere = torch.randint(setting.vocabulary, (count // 2,), generator=generator)
    columns = torch.cat([inputs.targets[rows[: count // 2]], anywhere.to(rows.device)])
    sources = _sources(inputs)
    blocks = torch.arange(tokens, device=rows.device).split(
        max(1, BLOCK // setting.vocabulary)
    )
    with torch.no_grad():
        found = [_values(*_block(sources, b), inputs, b) for b in blocks]
    whole = [
        torch.cat(v).requires_grad_() if v[0] is not None else None
        for v in zip(*found, strict=True)
    ]
    values = Values(*whole)
    loss = work.loss(values, inputs)
    leaves = [v for v in values if v is not None]
    slopes = torch.autograd.grad(loss, leaves, allow_unused=True) if setting.trains else ()
    oracle = Oracle(
        values={
            "loss": loss.detach(),
            "nll": -values.logp.mean().detach(),
            "logps": values.logp.detach(),
            "entropies": values.entropy.detach(),
        },
        rows=rows,
        columns=columns,
        gradients={},
    )
    if setting.trains:
        oracle.gradients.update(_sampled(inputs, sources, slopes, blocks, oracle))
    return oracle


@dataclass(frozen=True)
class _Sources:
    """Float64 copies of the weights, with adapters merged into the weight."""

    inputs: Inputs
    weight: Tensor
    bias: Tensor | None
    factors: tuple[Tensor, Tensor] | None
    teacher: Tensor | None


def _sources(inputs: Inputs) -> _Sources:
    parts = (None if t is None else t.detach().double() for t in inputs.parts)
    weight, bias, a, b = parts
    assert weight is not None
    factors = None
    if a is not None and b is not None:
        weight, factors = weight.addmm(b, a, alpha=SCALING), (a, b)
    other = inputs.teacher_weight
    return _Sources(inputs, weight, bias, factors, None if other is None else other.double())


def _block(sources: _Sources, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the logits of the tokens `rows`, and the teacher's logits or None."""
    inputs = sources.inputs
    if inputs.pristine is not None:
        return inputs.pristine[rows].double(), None
    z = inputs.hidden.detach()[rows].double() @ sources.weight.t()
    z = z if sources.bias is None else z + sources.bias
    if sources.teacher is None:
        return z, None
    assert inputs.teacher_hidden is not None
    return z, inputs.teacher_hidden[rows].double() @ sources.teacher.t()


def _values(z: Tensor, teacher: Tensor | None, inputs: Inputs, rows: Tensor) -> Values:
    if inputs.support is not None:
        z = restricted(z, inputs.support[rows])
    log_p = z.log_softmax(-1)
    divergence = chosen = None
    if inputs.candidates is not None:
        chosen = with_the_rest(log_p, inputs.candidates[rows])
    if teacher is not None:
        log_q = teacher.log_softmax(-1)
        divergence = (log_q.exp() * (log_q - log_p)).sum(-1)
    return Values(
        logp=log_p.gather(1, inputs.targets[rows].unsqueeze(1)).squeeze(1),
        lse=z.logsumexp(-1),
        entropy=-(log_p.exp() * log_p).sum(-1),
        divergence=divergence,
        candidates=chosen,
    )


def _sampled(
    inputs: Inputs,
    sources: _Sources,
    slopes: Iterable[Tensor | None],
    blocks: Iterable[Tensor],
    oracle: Oracle,
) -> dict[str, Tensor]:
    """Return the gradients of the hidden states (or of logits passed in by the caller) of the
    tokens `rows`, of weight and bias rows `columns`, and of adapter factors."""
    into_rows: list[Tensor] = []
    order: list[Tensor] = []
    weight, factors = sources.weight, sources.factors
    into_columns = weight.new_zeros(len(oracle.columns), weight.shape[1])
    into_bias = weight.new_zeros(len(oracle.columns))
    into_a = None if factors is None else torch.zeros_like(factors[0])
    for block in blocks:
        z, teacher = _block(sources, block)
        z.requires_grad_()
        values = [v for v in _values(z, teacher, inputs, block) if v is not None]
        read = [(v, s) for v, s in zip(values, slopes, strict=True) if s is not None]
        (g,) = torch.autograd.grad(torch.stack([(v * s[block]).sum() for v, s in read]).sum(), z)
        places = ((oracle.rows >= block[0]) & (oracle.rows <= block[-1])).nonzero().squeeze(1)
        inside = g[oracle.rows[places] - block[0]]
        into_rows.append(inside if inputs.pristine is not None else inside @ weight)
        order.append(places)
        x = inputs.hidden.detach()[block].double()
        into_columns += g[:, oracle.columns].t() @ x
        into_bias += g[:, oracle.columns].sum(0)
        if factors is not None and into_a is not None:
            into_a += SCALING * (g @ factors[1]).t() @ x
        del z, teacher, values, read, g
    hidden = torch.cat(into_rows)[torch.cat(order).argsort()]
    found = {"hidden": hidden, "weight": into_columns, "bias": into_bias}
    if factors is not None and into_a is not None:
        found |= {"lora_a": into_a, "lora_b": SCALING * into_columns @ factors[0].t()}
    return found


# ---------------------------------------------------------------------- the gate


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The largest allowed errors of an implementation: absolute for values, and in norm relative to
    the norm for gradients."""

    name: str
    values: float
    entropies: float
    gradients: float

    def of(self, quantity: str) -> float:
        if quantity in LEAVES:
            return self.gradients
        return self.entropies if quantity == "entropies" else self.values


EXACT = Tolerance(name="exact", values=1e-4, entropies=1e-3, gradients=1e-2)
ROUNDED = Tolerance(name="rounded", values=1e-1, entropies=1e-1, gradients=1e-1)


def errors(found: Found, oracle: Oracle) -> dict[str, float]:
    """Return errors by quantity: the largest absolute error of a value, the relative norm of a
    gradient's error."""
    result = {}
    for name, value in found.values.items():
        if name in LEAVES:
            true = oracle.gradients[name]
            off = value.detach()[oracle.places(name)].double() * found.factor - true
            result[name] = float(off.norm() / true.norm().clamp_min(1e-300))
        else:
            result[name] = float((value.double() - oracle.values[name]).abs().max())
    return result


def misses(measured: dict[str, float], tolerance: Tolerance) -> list[str]:
    """Describe the errors out of tolerance; NaN is always out of tolerance."""
    return [
        f"{name} {error:.1e} > {tolerance.of(name):.0e}"
        for name, error in measured.items()
        if not error <= tolerance.of(name)
    ]
