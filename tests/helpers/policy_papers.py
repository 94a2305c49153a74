"""The formulas of the policy terms' papers, as plain loops over float64 scalars."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from losses_case import Sequence
from torch import Tensor

Loops = Callable[[list[Sequence]], Tensor]

# ---------------------------------------------------------------------- the papers


def ratios(s: Sequence) -> list[Tensor]:
    return [torch.exp(n - o) for n, o in zip(s.logp, s.old, strict=True)]


def average(values: list[Tensor]) -> Tensor:
    return sum(values, torch.zeros((), dtype=torch.float64)) / max(len(values), 1)


def clip(x: Tensor, low: float, high: float) -> Tensor:
    return x if low <= x <= high else torch.full_like(x, min(max(float(x.detach()), low), high))


def smaller(x: Tensor, y: Tensor) -> Tensor:
    return x if x <= y else y


def surrogate(r: Tensor, a: Tensor, low: float, high: float, delta: float = math.inf) -> Tensor:
    return -smaller(clip(r, -math.inf, delta) * a, clip(r, 1 - low, 1 + high) * a)


def token_losses(s: Sequence, low: float, high: float, **more: float) -> list[Tensor]:
    return [
        surrogate(r, a, low, high, **more) for r, a in zip(ratios(s), s.advantages, strict=True)
    ]


def sequence_ratio(s: Sequence) -> Tensor:
    return torch.exp(average([n - o for n, o in zip(s.logp, s.old, strict=True)]))


def over_tokens(batch: list[Sequence], per_token: Callable[[Sequence], list[Tensor]]) -> Tensor:
    return average([value for s in batch for value in per_token(s)])


def over_sequences(batch: list[Sequence], of: Callable[[Sequence], Tensor]) -> Tensor:
    return average([of(s) for s in batch])


def grpo_paper(batch, low=0.2, high=0.2, **more):
    return over_sequences(batch, lambda s: average(token_losses(s, low, high, **more)))


def gspo_loss(s: Sequence, low: float, high: float) -> Tensor:
    return surrogate(sequence_ratio(s), average(s.advantages), low, high)


def gspo_paper(batch, low=3e-4, high=4e-4):
    return over_sequences(batch, lambda s: gspo_loss(s, low, high))


def gspo_token_paper(batch, low=3e-4, high=4e-4):
    def of(s):
        fixed = sequence_ratio(s).detach()
        return average(
            [
                surrogate(fixed * n / n.detach(), a, low, high)
                for n, a in zip([x.exp() for x in s.logp], s.advantages, strict=True)
            ]
        )

    return over_sequences(batch, of)


def dapo_paper(batch, low=0.2, high=0.28):
    return over_tokens(batch, lambda s: token_losses(s, low, high))


def dr_grpo_paper(batch, length):
    losses = [x for s in batch for x in token_losses(s, 0.2, 0.2)]
    return average(losses) * len(losses) / (len(batch) * length)


def luspo_paper(batch):
    return over_sequences(batch, lambda s: len(s) * gspo_loss(s, 0.2, 0.2))


def ppo_dual_paper(batch, c):
    def of(s):
        inner = zip(token_losses(s, 0.2, 0.2), s.advantages, strict=True)
        return [smaller(x, -c * a) if a < 0 else x for x, a in inner]

    return over_tokens(batch, of)


def cispo_paper(batch, low=math.inf, high=0.28):
    def of(s):
        rows = zip(ratios(s), s.advantages, s.logp, strict=True)
        return [-clip(r, 1 - low, 1 + high).detach() * a * n for r, a, n in rows]

    return over_tokens(batch, of)


def cispo_sequence_paper(batch, high=0.28):
    def of(s):
        weight = clip(sequence_ratio(s), -math.inf, 1 + high).detach()
        return [-weight * a * n for a, n in zip(s.advantages, s.logp, strict=True)]

    return over_tokens(batch, of)


def reinforce_paper(batch):
    return over_tokens(batch, lambda s: [-a * n for a, n in zip(s.advantages, s.logp, strict=True)])


def sapo_gate(r: Tensor, a: Tensor) -> Tensor:
    tau = 1.0 if a > 0 else 1.05
    return -(4 / tau) / (1 + torch.exp(-tau * (r - 1))) * a


def sapo_paper(batch):
    def of(s):
        return average([sapo_gate(r, a) for r, a in zip(ratios(s), s.advantages, strict=True)])

    return over_sequences(batch, of)


def sapo_sequence_paper(batch):
    return over_sequences(batch, lambda s: sapo_gate(sequence_ratio(s), average(s.advantages)))


def gmpo_paper(batch, low=0.4, high=0.4):
    def of(s):
        a = average(s.advantages)
        product = torch.ones((), dtype=torch.float64)
        for r in ratios(s):
            bounded = clip(r, math.exp(-low), math.exp(high))
            product = product * (smaller(r, bounded) if a > 0 else -smaller(-r, -bounded))
        return -(product ** (1 / max(len(s), 1))) * a

    return over_sequences(batch, of)


def vespo_paper(batch, sampled=True):
    def of(s):
        log_w = sum((n - o for n, o in zip(s.logp, s.old, strict=True)), torch.zeros(()).double())
        if sampled:
            log_w = log_w + sum(o - q for o, q in zip(s.old, s.sampling, strict=True))
        w = torch.exp(log_w).clamp(1e-8, math.exp(20)).detach()
        found = []
        for a, n in zip(s.advantages, s.logp, strict=True):
            k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
            found.append(-math.exp(rate) * w**k * torch.exp(-rate * w) * a * n)
        return found

    return over_tokens(batch, of)


def kl_paper(batch, estimator, ratio=None):
    def one(n, q):
        d = q - n
        return {"k1": -d, "k2": d * d / 2, "k3": torch.exp(d) - d - 1}[estimator]

    def of(s):
        factors = ratio(s) if ratio else [1.0] * len(s)
        return [f * one(n, q) for f, n, q in zip(factors, s.logp, s.ref, strict=True)]

    return over_tokens(batch, of)


def repeated(s: Sequence) -> list[Tensor]:
    return [sequence_ratio(s)] * len(s)
