"""The benchmarked losses (class `Work`), their settings and their inputs.

T tokens, H hidden width, V vocabulary, S segments. Each benchmarked loss is written twice: as a
headloss objective, and as a plain PyTorch function of per-token values (log-probs, entropies), for
other libraries and for the float64 oracle.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from draws import columns_of, group_advantages, nearly_certain
from plain import SCALING, adapted, plain_logits, restricted
from torch import Tensor

import headloss as hl
from headloss.testing import trained_looking

# ---------------------------------------------------------------------- inputs


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes and features of a call.

    Attributes:
        segments: the length of every segment, or a range of random lengths.
        quiet: every `quiet`-th segment has advantage 0; 0: no segment.
        trains: names of the tensors that need a gradient.
        given: the caller passes in logits, which the call may overwrite.
        certain: fraction of the tokens that are nearly certain, as in a trained model.
        candidates: number of columns per token whose log-probs the loss reads.
        support: number of columns per token that the softmax runs over; 0: the whole vocabulary.
        lora: rank of a LoRA adapter on the head; 0: no adapter.
        changing: each call has a different number of tokens.
    """

    tokens: int
    width: int
    vocabulary: int
    dtype: torch.dtype = torch.bfloat16
    segments: int | tuple[int, int] = 2048
    quiet: int = 0
    trains: tuple[str, ...] = ("hidden", "weight")
    given: bool = False
    teacher: bool = False
    certain: float = 0.0
    candidates: int = 0
    support: int = 0
    bias: bool = False
    lora: int = 0
    changing: bool = False

    @property
    def first(self) -> int:
        """Return the number of calls that compile code: 2 if the number of tokens changes, else
        1."""
        return 1 + self.changing

    @property
    def flops(self) -> int:
        """Return the FLOP of the necessary matrix products, without bias and adapter."""
        products = 1 + len({"hidden", "weight"} & {*self.trains}) + self.teacher
        return 2 * self.tokens * self.width * (self.support or self.vocabulary) * products

    def lengths(self) -> list[int]:
        """Return the number of tokens of each segment."""
        if isinstance(self.segments, int):
            full, rest = divmod(self.tokens, self.segments)
            return [self.segments] * full + [rest] * (rest > 0)
        draw, found = random.Random(0), []
        while (left := self.tokens - sum(found)) > 0:
            found.append(min(left, draw.randint(*self.segments)))
        return found


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A set of inputs; benchmarks alternate between several sets.

    Attributes:
        hidden, weight, bias: [T, H], [V, H] and [V].
        lora_a, lora_b: [r, H] and [V, r], for an adapter of rank r.
        targets: [T]; `ids` [T] holds each token's segment.
        lengths, advantages: [S].
        old, ref: [T] float32 log-probs of the old and the reference policy.
        candidates, support: [T, K] columns.
        logits: [T, V], overwritten by each run; `pristine` is a copy that stays unchanged.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    targets: Tensor
    ids: Tensor
    lengths: Tensor
    advantages: Tensor
    old: Tensor
    ref: Tensor
    teacher_hidden: Tensor | None = None
    teacher_weight: Tensor | None = None
    candidates: Tensor | None = None
    support: Tensor | None = None
    logits: Tensor | None = None
    pristine: Tensor | None = None

    def fresh(self) -> None:
        """Copy the unchanged logits back into `logits`, which a run overwrites."""
        if self.logits is not None:
            with torch.no_grad():
                self.logits.copy_(self.pristine)

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return the head's weight, bias and two LoRA factors, in the order of the arguments of
        `plain_logits`."""
        return self.weight, self.bias, self.lora_a, self.lora_b

    def head(self) -> hl.Head:
        """Return the head for headloss."""
        if self.lora_a is None or self.lora_b is None:
            return hl.Head(self.weight, self.bias)
        lora = hl.Lora(a=self.lora_a, b=self.lora_b, scaling=SCALING)
        return hl.Head(self.weight, self.bias, lora=(lora,))

    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors that need a gradient, by name."""
        named = dict(zip(LEAVES, (self.hidden, *self.parts), strict=True))
        if self.logits is not None:
            named["hidden"] = self.logits
        return {name: t for name, t in named.items() if t is not None and t.requires_grad}

    def cut(self, start: int, tokens: int) -> Inputs:
        """Return a copy of these inputs that has only the tokens from `start` to `start + tokens`,
        and shares the head's tensors."""
        rows = slice(start, start + tokens)
        own = {n: v[rows] for n in PER_TOKEN if (v := getattr(self, n)) is not None}
        segments = slice(int(own["ids"][0]), int(own["ids"][-1]) + 1)
        own["ids"] = own["ids"] - segments.start
        own |= {"lengths": own["ids"].bincount(), "advantages": self.advantages[segments]}
        hidden = self.hidden.detach()[rows].clone().requires_grad_(self.hidden.requires_grad)
        return replace(self, hidden=hidden, **{n: v.clone() for n, v in own.items()})

    def segment_mean(self, values: Tensor) -> Tensor:
        """Return the [S] segment means of [T] values."""
        sums = values.new_zeros(len(self.lengths)).index_add(0, self.ids, values)
        return sums / self.lengths.to(values.dtype)

    def batch(self, *fields: str) -> hl.Batch:
        """Return a `headloss.Batch` of these inputs: the targets, candidate ids and support ids if
        there are any, and the fields named in `fields`, computed by `FIELDS`."""
        given = {name: FIELDS[name](self) for name in fields}
        if self.candidates is not None:
            given["candidate_ids"] = self.candidates
        if self.support is not None:
            given["support_ids"] = self.support
        return hl.Batch(self.targets, **given)


FIELDS: dict[str, Callable[[Inputs], Any]] = {
    "segments": lambda i: hl.Segments.from_ids(i.ids, count=len(i.lengths)),
    "advantages": lambda i: i.advantages,
    "old_logps": lambda i: i.old,
    "ref_logps": lambda i: i.ref,
    "teacher_hidden": lambda i: i.teacher_hidden,
}
Z_WEIGHT = 1e-4
POLICY = ("segments", "advantages", "old_logps")
LEAVES = ("hidden", "weight", "bias", "lora_a", "lora_b")
PER_TOKEN = ("targets", "ids", "old", "ref", "teacher_hidden", "candidates", "support")


def make_sets(setting: Setting, device: torch.device, calls: int) -> list[Inputs]:
    """Make sets of inputs for `calls` timed calls: two sets in turn, or only one set if the caller
    passes in logits, since the logits of two sets exceed 80 GB.

    One set of logits is enough, since it is larger than every cache of the GPU, so that no call
    finds its logits in a cache. If `setting.changing` is true, there is one set of inputs for each
    call, and each set has one token fewer than the set before it; all sets share one head.
    """
    if not setting.changing:
        seeds = (0,) if setting.given else (0, 100)
        return [make_inputs(setting, device, seed) for seed in seeds[:calls]]
    n = setting.tokens
    whole = make_inputs(replace(setting, tokens=calls * n), device)
    return [whole.cut(call * n, n - call) for call in range(calls)]


def make_inputs(setting: Setting, device: torch.device, seed: int = 0) -> Inputs:
    """Make inputs like a trained model's: mean p(target) near one half, a policy near the old
    policy."""
    sizes = (setting.tokens, setting.width, setting.vocabulary)
    hidden, weight, targets = trained_looking(*sizes, setting.dtype, device, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    bias = lora_a = lora_b = None
    if setting.bias:
        bias = (0.1 * noise(setting.vocabulary)).to(setting.dtype)
    if setting.lora:
        lora_a = (setting.width**-0.5 * noise(setting.lora, setting.width)).to(setting.dtype)
        lora_b = (0.05 * noise(setting.vocabulary, setting.lora)).to(setting.dtype)
    if setting.certain:
        hidden = nearly_certain(hidden, weight, targets, setting.certain, generator)
    lengths = torch.tensor(setting.lengths(), device=device)
    ids = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    advantages = noise(len(lengths))
    if setting.quiet:
        advantages[setting.quiet - 1 :: setting.quiet] = 0
    if setting.certain:
        advantages = group_advantages(len(lengths)).to(advantages)
    columns = [
        columns_of(targets, setting.vocabulary, k, generator) if k else None
        for k in (setting.candidates, setting.support)
    ]
    parts = {"weight": weight, "bias": bias, "lora_a": lora_a, "lora_b": lora_b}
    for name, part in parts.items():
        if part is not None:
            part.requires_grad_(name in setting.trains)
    found = Inputs(
        hidden=hidden.requires_grad_("hidden" in setting.trains and not setting.given),
        **parts,
        targets=targets,
        ids=ids,
        lengths=lengths,
        advantages=advantages,
        old=targets.new_zeros(len(targets), dtype=torch.float32),
        ref=targets.new_zeros(len(targets), dtype=torch.float32),
        candidates=columns[0],
        support=columns[1],
    )
    logps = _logps(found)
    # The noise on the old log-probs has nearly zero mean in each segment, so that the number of
    # clipped sequences, and with it the time of a call, does not depend on the seed.
    drift = 0.1 * noise(len(targets))
    drift = drift - found.segment_mean(drift)[ids] + 1e-4 * noise(len(lengths))[ids]
    found = replace(found, old=logps + drift, ref=logps + 0.2 * noise(len(targets)))
    if setting.teacher:
        near = (hidden.detach() + 0.3 * noise(*hidden.shape)).to(setting.dtype)
        other = weight.detach() + 0.1 * setting.width**-0.5 * noise(*weight.shape)
        found = replace(found, teacher_hidden=near, teacher_weight=other.to(setting.dtype))
    if setting.given:
        with torch.no_grad():
            pristine = hidden @ weight.t()
        leaf = torch.empty_like(pristine).requires_grad_()
        found = replace(found, pristine=pristine, logits=leaf)
    return found


@torch.no_grad()
def _logps(inputs: Inputs) -> Tensor:
    found = []
    for rows in torch.arange(len(inputs.targets), device=inputs.targets.device).split(1024):
        z = _float32_logits(inputs.hidden[rows], *inputs.parts)
        if inputs.support is not None:
            z = restricted(z, inputs.support[rows])
        target = inputs.targets[rows].unsqueeze(1)
        found.append(z.gather(1, target).squeeze(1) - z.logsumexp(1))
    return torch.cat(found)


def _float32_logits(x: Tensor, weight: Tensor, *rest: Tensor | None) -> Tensor:
    """Return float32 logits: the rounding of 16-bit logits would exceed GSPO's clip bounds in the
    mean log-prob of a short sequence."""
    bias, a, b = (None if t is None else t.float() for t in rest)
    if not (x.is_cuda and x.dtype.itemsize == 2):
        return plain_logits(x.float(), weight.float(), bias, a, b)
    z = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return adapted(z if bias is None else z + bias, x.float(), a, b)


# ---------------------------------------------------------------------- works


class Values(NamedTuple):
    """The [T] vectors that a benchmarked loss reads; None for vectors that an implementation does
    not compute."""

    logp: Tensor
    lse: Tensor | None = None
    entropy: Tensor | None = None
    divergence: Tensor | None = None
    candidates: Tensor | None = None  # [T, K + 1] log-probs; the last is for all other columns.


@dataclass(frozen=True, kw_only=True)
class Work:
    """A benchmarked loss, for headloss and for all other implementations.

    Attributes:
        fields: names of the batch fields that the objective reads.
        reads: fields of `Values` in addition to logp.
    """

    name: str
    objective: Callable[[Inputs], hl.Term | hl.Objective]
    loss: Callable[[Values, Inputs], Tensor]
    fields: tuple[str, ...] = ()
    reads: frozenset[str] = frozenset()

    def batch(self, inputs: Inputs) -> hl.Batch:
        """Return the batch for headloss."""
        return inputs.batch(*self.fields)


def _surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def _ce(values: Values, inputs: Inputs) -> Tensor:
    return -values.logp.mean()


def _grpo(values: Values, inputs: Inputs) -> Tensor:
    ratio = (values.logp - inputs.old).clamp(-20, 20).exp()
    tokens = _surrogate(ratio, inputs.advantages.to(ratio.dtype)[inputs.ids], 0.2, 0.2)
    return inputs.segment_mean(tokens).mean()


def _several(values: Values, inputs: Inputs) -> Tensor:
    ratio = (values.logp - inputs.old).clamp(-20, 20).exp()
    tokens = _surrogate(ratio, inputs.advantages.to(ratio.dtype)[inputs.ids], 0.2, 0.2)
    assert values.lse is not None
    return (tokens - values.logp + Z_WEIGHT * values.lse**2).mean()


def _gspo(values: Values, inputs: Inputs, low: float = 3e-4, high: float = 4e-4) -> Tensor:
    ratio = inputs.segment_mean((values.logp - inputs.old).clamp(-20, 20)).exp()
    return _surrogate(ratio, inputs.advantages.to(ratio.dtype), low, high).mean()


def _dpo(values: Values, inputs: Inputs) -> Tensor:
    sums = inputs.segment_mean(values.logp - inputs.ref) * inputs.lengths
    return -torch.nn.functional.logsigmoid(0.1 * (sums[::2] - sums[1::2])).mean()


def _extras(values: Values, inputs: Inputs) -> Tensor:
    d = (inputs.ref - values.logp).clamp(-20, 20)
    assert values.entropy is not None and values.lse is not None
    return (0.1 * (d.exp() - d - 1) - 0.01 * values.entropy + 1e-4 * values.lse**2).mean()


@cache
def _reverse_kl(package: ModuleType) -> Callable[..., hl.Term]:
    """Return the reverse KL to a uniform distribution over the candidates, as a term that the
    imported headloss `package` (old or new version) can use."""

    def reverse_kl(stats, batch, rest=False):
        return to_uniform(stats.candidate_logps, stats.candidate_tail if rest else None)

    return package.term(reverse_kl)  # type: ignore[no-any-return]


def reverse_kl(rest: bool) -> hl.Term:
    return _reverse_kl(hl)(rest=rest)


@cache
def _collision(package: ModuleType) -> hl.Term:
    """Return a term with value 0 that reports sum p^2 as a metric."""

    def collision(stats, batch):
        return 0.0 * stats.logp

    def observe(stats, batch):
        return {"collision": package.Observed(stats.sum_p_squared)}

    return package.term(collision, observe=observe)()  # type: ignore[no-any-return]


def to_uniform(log_p: Tensor, rest: Tensor | None = None) -> Tensor:
    """Return KL(p || q) [T] to a uniform q, over candidates with log-probs [T, K] and optionally
    all other columns together."""
    outcomes = log_p.shape[1] + 1
    if rest is not None:
        log_p = torch.cat([log_p, rest.unsqueeze(1)], 1)
    return (log_p.exp() * (log_p + math.log(outcomes))).sum(1)


def _grpo_and_candidates(values: Values, inputs: Inputs, rest: bool = False) -> Tensor:
    assert values.candidates is not None
    log_p, other = values.candidates[:, :-1], values.candidates[:, -1]
    return _grpo(values, inputs) + 0.1 * to_uniform(log_p, other if rest else None).mean()


def _extra_terms() -> hl.Objective:
    return 0.1 * hl.kl(estimator="k3") - 0.01 * hl.entropy() + 1e-4 * hl.z_loss()


def _teacher(inputs: Inputs) -> hl.Head:
    assert inputs.teacher_weight is not None
    return hl.Head(inputs.teacher_weight)


MORE = frozenset({"lse", "entropy"})
CHOSEN = frozenset({"candidates"})
WORKS: dict[str, Work] = {
    work.name: work
    for work in (
        Work(name="ce", objective=lambda _: hl.cross_entropy(), loss=_ce),
        Work(name="grpo", objective=lambda _: hl.grpo(), loss=_grpo, fields=POLICY),
        Work(name="gspo", objective=lambda _: hl.gspo(), loss=_gspo, fields=POLICY),
        # The clip bounds are so wide that the rounding of logits does not change which sequences
        # are clipped.
        Work(
            name="gspo, wide clip",
            objective=lambda _: hl.gspo(epsilon_low=0.1, epsilon_high=0.1),
            loss=partial(_gspo, low=0.1, high=0.1),
            fields=POLICY,
        ),
        Work(
            name="dpo",
            objective=lambda _: hl.dpo(),
            loss=_dpo,
            fields=("segments", "ref_logps"),
        ),
        Work(
            name="gspo+kl+entropy+z",
            objective=lambda _: hl.gspo() + _extra_terms(),
            loss=lambda values, inputs: _gspo(values, inputs) + _extras(values, inputs),
            fields=(*POLICY, "ref_logps"),
            reads=MORE,
        ),
        Work(
            name="five terms",
            objective=lambda _: hl.grpo() + _extra_terms() + 0.1 * hl.cross_entropy(),
            loss=lambda values, inputs: (
                _grpo(values, inputs) + _extras(values, inputs) + 0.1 * _ce(values, inputs)
            ),
            fields=(*POLICY, "ref_logps"),
            reads=MORE,
        ),
        Work(
            name="ce+z+grpo",
            objective=lambda _: (
                hl.cross_entropy() + Z_WEIGHT * hl.z_loss() + hl.grpo().over("token_mean")
            ),
            loss=_several,
            fields=POLICY,
            reads=frozenset({"lse"}),
        ),
        Work(
            name="grpo+candidates",
            objective=lambda _: hl.grpo() + 0.1 * reverse_kl(rest=False),
            loss=_grpo_and_candidates,
            fields=POLICY,
            reads=CHOSEN,
        ),
        Work(
            name="grpo+candidates+rest",
            objective=lambda _: hl.grpo() + 0.1 * reverse_kl(rest=True),
            loss=partial(_grpo_and_candidates, rest=True),
            fields=POLICY,
            reads=CHOSEN,
        ),
        Work(
            name="grpo+collision",
            objective=lambda _: hl.grpo() + _collision(hl),
            loss=_grpo,
            fields=POLICY,
        ),
        Work(
            name="scores",  # log-probs and entropies, without a gradient
            objective=lambda _: hl.entropy(),
            loss=lambda values, _: values.entropy.mean(),  # type: ignore[union-attr]
            reads=frozenset({"entropy"}),
        ),
        Work(
            name="distillation",
            objective=lambda i: hl.distillation(teacher_head=_teacher(i)),
            loss=lambda values, _: values.divergence.mean(),  # type: ignore[union-attr]
            fields=("teacher_hidden",),
            reads=frozenset({"divergence"}),
        ),
    )
}
