"""Float64 reference with materialised logits (oracle), allowed errors, and random test inputs.

The oracle, a reference computation in float64, materialises the logits, computes statistics and
divergences from the logits, and gets gradients by autograd. The reference computation in float64
shares with headloss only the terms' functions, the packing of tokens and the token weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch.batch import Batch
from ..batch.packing import PackedBatch, Packing, packing_of
from ..batch.reduction import Totals
from ..batch.segments import Segments
from ..head.head import Head
from ..losses.teacher import Teacher
from ..losses.term import Objective, Term
from ..objective.weighted import bind, check_weights
from ..statistics.divergence import LOG_ACCEPTANCE, Measure
from ..statistics.softmax import CANDIDATES, COLLISION, PEAK, ByStatistic, Statistics

__all__ = [
    "Mode",
    "Plain",
    "budget",
    "error",
    "parameters",
    "plain",
    "plain_divergence",
    "random_batch",
    "trained_looking",
    "within_budget",
]

Mode = Literal["float64", "float32", "input"]


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Results of plain PyTorch: values in the caller's shapes, and gradients."""

    loss: Tensor
    terms: dict[str, Tensor]
    logps: Tensor
    entropies: Tensor
    gradients: dict[str, Tensor]


def plain(
    hidden: Tensor,  # [.., H]
    head: Head,
    batch: Batch,
    objective: Term | Objective,
    mode: Mode = "float64",
    upstream: float = 1.0,
) -> Plain:
    """Return the objective and its gradients by autograd through materialised logits.

    The mode "float64" gives the results with which headloss's results are compared. The modes
    "float32" (logits in float32) and "input" (logits in the inputs' dtype) give the results of
    plain PyTorch. headloss's error compared with float64 may be 3 times plain PyTorch's error, plus
    1e-6.
    """
    objective = Objective.of(objective)
    dtype = {"float64": torch.float64, "float32": torch.float32, "input": hidden.dtype}[mode]
    leaves = {
        name: t.detach().to(dtype).requires_grad_(t.requires_grad)
        for name, t in parameters(hidden, head).items()
    }
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    packing = packing_of(batch, head.vocabulary)
    packed = packing.view(batch, wide)
    index = slice(None) if packing.index is None else packing.index
    with torch.enable_grad():
        x = leaves["hidden"].reshape(-1, hidden.shape[-1])[index]
        temperature = head.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature.reshape(-1)[index].to(wide).unsqueeze(1)
        capped = _logits(x, leaves, head, wide)
        stats = _statistics(capped / temperature, packing, packed.get("candidate_ids"))
        stats = replace(stats, extras=_Measured(capped, packed, stats.extras))
        check_weights(objective, packed.kinds(), batch.totals)
        totals = batch.totals if batch.totals is not None else Totals.of(batch)
        bound = bind(objective, packed, totals, head.vocabulary, wide)
        shares = [part.share(stats, packed) for part in bound.parts]
        loss = sum(p.coefficient * s for p, s in zip(bound.parts, shares, strict=True))
        assert isinstance(loss, Tensor)
    wanted = {name: t for name, t in leaves.items() if t.requires_grad}
    gradients: dict[str, Tensor] = {}
    if wanted and loss.requires_grad:
        values = torch.autograd.grad(upstream * loss, [*wanted.values()], materialize_grads=True)
        gradients = dict(zip(wanted, values, strict=True))
    return Plain(
        loss=loss.detach(),
        terms={p.name: s.detach() for p, s in zip(bound.parts, shares, strict=True)},
        logps=packing.scatter(stats.logp.detach()),
        entropies=packing.scatter(stats.entropy.detach()),
        gradients=gradients,
    )


def parameters(hidden: Tensor, head: Head) -> dict[str, Tensor]:
    """Return tensors that may require a gradient, by name: hidden, weight, bias, lora0.a, ..."""
    tensors = {"hidden": hidden, "weight": head.weight}
    if head.bias is not None:
        tensors["bias"] = head.bias
    for i, lora in enumerate(head.lora):
        tensors |= {f"lora{i}.a": lora.a, f"lora{i}.b": lora.b}
    return tensors


def _logits(x: Tensor, leaves: dict[str, Tensor], head: Head, wide: torch.dtype) -> Tensor:
    """Return logits [T, V] before the temperature, cast to the dtype `wide` after matmuls in the
    input's dtype."""
    scored = slice(head.vocabulary)
    z = F.linear(x, leaves["weight"][scored]).to(wide)
    for i, lora in enumerate(head.lora):
        narrow = F.linear(x, leaves[f"lora{i}.a"])
        z = z + lora.scaling * F.linear(narrow, leaves[f"lora{i}.b"][scored]).to(wide)
    if head.bias is not None:
        z = z + leaves["bias"][scored].to(wide)
    z = z * head.logit_scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    return z


def _statistics(z: Tensor, packing: Packing, candidate_ids: Tensor | None) -> Statistics:
    # [T, V], True for the vocabulary ids that a token's softmax runs over
    supported = torch.zeros_like(z, dtype=torch.bool)
    if (pairs := packing.support) is not None:
        present = pairs.ids >= 0
        rows = torch.arange(len(z), device=z.device).repeat_interleave(pairs.offsets.diff())
        supported[rows[present], pairs.ids[present]] = True
    supported |= ~supported.any(1, keepdim=True)
    mean = torch.where(supported, z, 0).sum(-1) / supported.sum(-1)
    z = z.masked_fill(~supported, -math.inf)
    log_p = z.log_softmax(-1)
    target = packing.targets.unsqueeze(1)
    extras: ByStatistic = {COLLISION: log_p.exp().square().sum(-1).detach()}
    extras[PEAK] = peak = z.detach().amax(-1)
    if candidate_ids is not None:
        extras[CANDIDATES] = _candidates(log_p, candidate_ids)
    return Statistics(
        logp=log_p.gather(1, target).squeeze(1),
        lse=z.logsumexp(-1),
        entropy=-(log_p.exp() * log_p.clamp_min(-1e30)).sum(-1),
        mean_logit=mean,
        top1=(z.gather(1, target).squeeze(1) >= peak).to(z.dtype),
        extras=extras,
    )


def _candidates(log_p: Tensor, ids: Tensor) -> Tensor:
    """Return log-probs [T, K + 1]: of the K ids in each row of `ids` (0 where an id is negative),
    and in the last column of all remaining ids together."""
    empty = ids < 0
    chosen = log_p.gather(1, ids.clamp_min(0)).masked_fill(empty, 0)
    others = log_p.new_zeros(len(log_p), log_p.shape[1] + 1)  # last: of empty slots
    others = others.scatter(1, torch.where(empty, log_p.shape[1], ids), -math.inf)[:, :-1]
    return torch.cat([chosen, (log_p + others).logsumexp(-1, keepdim=True)], 1)


class _Measured(dict[object, Tensor]):
    """Extra statistics for the float64 reference results; a teacher's divergence is computed from
    soft-capped logits when first read."""

    def __init__(self, student: Tensor, batch: PackedBatch, extras: ByStatistic) -> None:
        super().__init__(extras)
        self.student = student
        self.batch = batch

    def __missing__(self, key: Any) -> Tensor:
        teacher, measure = key
        with torch.enable_grad():
            value = plain_divergence(self.student, teacher, measure, self.batch)
        return self.setdefault(key, value)


def plain_divergence(
    student: Tensor, teacher: Teacher, measure: Measure, batch: PackedBatch
) -> Tensor:
    """Return each token's divergence [T] between student and teacher; `student` has soft-capped
    logits [T, V] before the temperature.

    The field `tail` of the teacher names the treatment of the mass outside its stored top-k ids:
    "bucket", "truncated", "generalized" or "sampled".
    """
    log_p = (student / teacher.temperature).log_softmax(-1)
    log_of_target = log_p.gather(1, batch.targets.unsqueeze(1)).squeeze(1)
    form = teacher.source(batch)
    if form == "topk":
        ids = batch.teacher_topk_ids
        empty = ids < 0
        log_p = log_p.gather(1, ids.clamp_min(0)).masked_fill(empty, -math.inf)
        log_q = batch.teacher_topk_logps.to(log_p.dtype).masked_fill(empty, -math.inf)
        if teacher.tail == "bucket":
            tails = (torch.log1p(-x.exp().sum(-1, keepdim=True)) for x in (log_p, log_q))
            log_p, log_q = (torch.cat(pair, 1) for pair in zip((log_p, log_q), tails, strict=True))
    else:
        if form == "logits":
            raw = batch.teacher_logits
        else:
            assert teacher.head is not None
            raw = replace(teacher.head, temperature=1.0).logits(batch.teacher_hidden)
        log_q = (raw.to(log_p.dtype) / teacher.temperature).log_softmax(-1)
    p = log_p.exp()
    q = log_q.exp()
    kind, beta = measure

    def kl(a: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
        return torch.where(a > 0, a * (log_a - log_b), 0).sum(-1)

    log_m = (beta * q + (1 - beta) * p).log()
    q_to_m = kl(q, log_q, log_m)
    p_to_m = kl(p, log_p, log_m)
    value = {
        "forward_kl": kl(q, log_q, log_p),
        "reverse_kl": kl(p, log_p, log_q),
        "total_variation": (p - q).abs().sum(-1) / 2,
        "skew_forward_kl": q_to_m,
        "skew_reverse_kl": p_to_m,
        "js": beta * q_to_m + (1 - beta) * p_to_m,
        LOG_ACCEPTANCE: torch.minimum(log_p, log_q).logsumexp(-1),
    }[kind]
    if form == "topk" and teacher.tail == "generalized":
        value = value + {"reverse_kl": 1, "forward_kl": -1}.get(kind, 0) * (q - p).sum(-1)
    if form == "topk" and teacher.tail == "sampled":
        pull = (1 + log_of_target - batch.teacher_logps).detach()
        outside = (batch.teacher_topk_ids != batch.targets.unsqueeze(1)).all(1)
        value = value + torch.where(outside, pull * log_of_target, 0)
    return value


def error(value: Tensor, oracle: Tensor) -> float:
    """Return the norm of `value - oracle`, divided by the norm of `oracle` unless that norm is
    0."""
    value = value.detach().double().cpu()
    oracle = oracle.detach().double().cpu()
    if value.shape != oracle.shape:
        raise ValueError(f"value: got shape {tuple(value.shape)}, want {tuple(oracle.shape)}")
    difference = float((value - oracle).norm())
    norm = float(oracle.norm())
    return difference / norm if norm else difference


def budget(yardstick: Tensor, oracle: Tensor) -> float:
    """Return the error budget: 3 times the error of `yardstick` compared with `oracle`, plus
    1e-6."""
    return 3 * error(yardstick, oracle) + 1e-6


def within_budget(value: Tensor, oracle: Tensor, yardstick: Tensor) -> bool:
    """Return True if the error of `value` compared with `oracle` is at most `budget(yardstick,
    oracle)`, and False if the error is larger or NaN."""
    return error(value, oracle) <= budget(yardstick, oracle)


def trained_looking(
    tokens: int,
    width: int,
    vocabulary: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden [T, H], weight [V, H], and targets [T] whose probability is 1/2 on average."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    weight = normal(vocabulary, width) * width**-0.5
    targets = torch.randint(vocabulary, (tokens,), generator=generator, device=device)
    strength = 24 * torch.rand(tokens, 1, generator=generator, device=device)
    hidden = 0.8 * normal(tokens, width) + weight[targets] * strength
    return hidden.to(dtype), weight.to(dtype), targets


def random_batch(
    targets: Tensor,  # [T]
    segments: Segments,
    logps: Tensor,  # [T]; old, reference and sampler log-probs are `logps` plus noise.
    seed: int = 0,
    **fields: Tensor,
) -> Batch:
    """Return a batch with every field that the shipped terms read."""
    generator = torch.Generator(device=logps.device).manual_seed(seed)

    def near(scale: float) -> Tensor:
        noise = torch.randn(logps.shape, generator=generator, device=logps.device)
        return (logps.detach().float() + scale * noise).clamp_max(0)

    advantages = torch.randn(segments.count, generator=generator, device=logps.device)
    named = {
        "advantages": advantages,
        "old_logps": near(0.2),
        "ref_logps": near(0.3),
        "sampling_logps": near(0.1),
        "desirable": advantages > 0,
        "reference_kl": torch.full_like(advantages, 0.1),
        "teacher_logps": near(0.4),
        **fields,
    }
    return Batch(targets, segments, **named)  # type: ignore[arg-type]
