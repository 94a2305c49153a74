"""What the matrix, property and distillation tests share: objectives, inputs, cuts, comparisons.

T scored tokens, N positions, S segments, H hidden width, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import headloss as hl
from headloss.batch.batch import IGNORE
from headloss.testing import Mode, Plain, error, parameters, plain, random_batch, trained_looking

WIDTH = 8
LENGTHS = (5, 1, 7, 4, 0, 6, 3, 2)  # four pairs, an empty segment, a single token
TOKENS = sum(LENGTHS)

# ---------------------------------------------------------------------- objectives


@dataclass(frozen=True, kw_only=True)
class Case:
    """An objective, and what its batch must hold.

    Attributes:
        make: the objective, from the teacher's head where it has one.
        logp_only: no gradient but that of logp, so that a frozen head can serve it.
        teacher: "logits", "hidden" or "topk", and the temperature of what a top-k teacher stores;
            or "candidates", a teacher's log-probs at them.
        current: old_logps=hl.CURRENT.
        bounded: stays finite in 16 bits where a ratio is exp(20).
        tightest: the error allowed in float64.
    """

    make: Callable[[hl.Head | None], hl.Term | hl.Objective]
    logp_only: bool = False
    teacher: str | None = None
    temperature: float = 1.0
    current: bool = False
    bounded: bool = True
    tightest: float = 1e-10

    def objective(self, teacher: hl.Head | None = None) -> hl.Objective:
        return hl.Objective.of(self.make(teacher))


def _policy(make: Callable[[], hl.Term | hl.Objective], **options: Any) -> Case:
    return Case(make=lambda _: make(), logp_only=True, **options)


def _other(make: Callable[[], hl.Term | hl.Objective], **options: Any) -> Case:
    return Case(make=lambda _: make(), **options)


@hl.term(scope="batch")
def standardised(stats, batch):
    """A batch-scoped term of a user's own: log-probs against their mean and spread."""
    # With static shapes, unscored tokens are there and marked.
    live = torch.ones_like(stats.logp) if batch.live is None else batch.live.to(stats.logp.dtype)
    centred = stats.logp - (live * stats.logp).sum() / live.sum().clamp_min(1)
    spread = (live * centred.square()).sum().detach().sqrt()
    return centred / (spread + 1) * (1 + batch.advantages)


@hl.term(scope="segment", per="segment")
def segment_sigmoid(stats, batch):
    """A segment-scoped term of a user's own, of two statistics."""
    mean = batch.segments.mean
    return -torch.sigmoid(mean(stats.logp) + 0.1 * mean(stats.entropy)) * mean(batch.advantages)


def _read_only(stats, batch):
    observed = {"collision": stats.sum_p_squared, "least_logp": stats.candidate_logps.amin(1)}
    peak = hl.Observed(stats.peak, hl.Max)
    return {"peak": peak} | {n: hl.Observed(v) for n, v in observed.items()}


@hl.term(observe=_read_only)
def margin(stats, batch):
    """Candidates alone: the first one against the others, empty slots as they are."""
    first, others = stats.candidate_logps[:, 0], stats.candidate_logps[:, 1:]
    return (others.exp() * batch.teacher_logps[:, 1:].exp()).sum(1) - 0.3 * first


@hl.term(scope="segment", per="segment")
def reverse_kl_and_rest(stats, batch):
    """KL(p || q) over the candidates and the rest, which the teacher gives a twentieth."""
    given = batch.candidate_ids >= 0
    log_p, tail = stats.candidate_logps, stats.candidate_tail
    inside = torch.where(given, log_p.exp() * (log_p - batch.teacher_logps), 0).sum(1)
    return batch.segments.mean(inside + tail.exp() * (tail - math.log(0.05)))


SUPERVISED = {
    "cross_entropy": _policy(hl.cross_entropy),
    "cross_entropy_smoothed": _other(lambda: hl.cross_entropy(label_smoothing=0.1)),
    "z_loss": _other(hl.z_loss),
    "entropy": _other(hl.entropy),
    # Where p is 1 but for 1e-13, the oracle keeps no more digits of 1 - p than that.
    "unlikelihood": _policy(hl.unlikelihood, tightest=1e-4),
    "dft": _policy(hl.dft),
    "chord_phi": _policy(hl.chord_phi),
    "eaft": _other(hl.eaft),
    "focal": _policy(hl.focal),
}
POLICY = {
    "grpo": _policy(hl.grpo),
    "grpo_delta": _policy(lambda: hl.grpo(delta=1.5)),
    "grpo_sequence": _policy(lambda: hl.grpo(importance_sampling_level="sequence")),
    "grpo_sequence_token": _policy(
        lambda: hl.grpo(importance_sampling_level="sequence_token"), bounded=False
    ),
    "gspo": _policy(hl.gspo),
    "gspo_token": _policy(hl.gspo_token, bounded=False),
    "dapo": _policy(hl.dapo),
    "bnpo": _policy(hl.bnpo),
    "dr_grpo": _policy(lambda: hl.dr_grpo(max_completion_length=16)),
    "luspo": _policy(hl.luspo),
    "ppo": _policy(hl.ppo),
    "ppo_dual_clip": _policy(lambda: hl.ppo(dual_clip=1.5)),
    "cispo": _policy(hl.cispo),
    "cispo_sequence": _policy(
        lambda: hl.cispo(epsilon_low=0.1, importance_sampling_level="sequence")
    ),
    "reinforce": _policy(hl.reinforce),
    "sapo": _policy(hl.sapo),
    "sapo_sequence": _policy(lambda: hl.sapo(importance_sampling_level="sequence")),
    "gmpo": _policy(hl.gmpo),
    "vespo": _policy(hl.vespo),
    "kl_k1": _policy(hl.kl),
    "kl_k2": _policy(lambda: hl.kl(estimator="k2")),
    "kl_k3": _policy(lambda: hl.kl(estimator="k3")),
    "kl_corrected": _policy(lambda: hl.kl(estimator="k3", bias_corrected=True), bounded=False),
    "kl_corrected_sequence": _policy(
        lambda: hl.kl(estimator="k2", bias_corrected=True, importance_sampling_level="sequence"),
        bounded=False,
    ),
    "current": _policy(hl.grpo, current=True),
    "regions": _policy(
        lambda: (
            hl.dppo(delta_low=0.05)
            + hl.icepop()
            + hl.vaco(delta=0.1)
            + hl.ce_gppo()
            + hl.aspo()
            + hl.clip_cov(share=0.1, low=-1.0)
        )
    ),
    "topr": _policy(lambda: hl.topr() + hl.topr(importance_sampling_level="token")),
    "fipo": _policy(lambda: hl.fipo(delta=1.3, half_life=2.0, safety=1.1, high_only=False)),
    "real": _policy(lambda: hl.real(tau=0.3) + hl.real().over("prompt_mean").where("kept")),
    "penalties": _policy(
        lambda: hl.dro() + hl.kl_cov(share=0.2) + 0.1 * hl.kl(straight_through=True), current=True
    ),
}
PREFERENCE = {
    "dpo": _policy(hl.dpo),
    "dpo_smoothed": _policy(lambda: hl.dpo(beta=0.3, label_smoothing=0.1)),
    "ipo": _policy(hl.ipo),
    "simpo": _policy(lambda: hl.simpo(beta=2.0, gamma=0.5)),
    "cpo": _policy(hl.cpo),
    "orpo": _policy(lambda: hl.orpo(rejected=3)),
    "aot": _policy(hl.aot),
    "dpo_weighted": _policy(lambda: hl.dpo(use_weighting=True, rejected=3)),
    "kto": _policy(hl.kto),
    "a2po": _policy(lambda: hl.a2po(beta=0.5)),
}
MODIFIED = {
    **{
        mode: _policy(lambda mode=mode: hl.grpo().corrected(mode, min=0.9, max=1.1))
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "rejected": _policy(
        lambda: (
            hl.grpo().rejected("k3", "sequence_mean", max=0.02)
            + hl.gspo().rejected("tv", max=0.05, live=True).rejected("kl", "sequence_max", max=0.1)
            + hl.dapo().corrected("sequence_mask", min=0.5, live=True, normalized=True)
        )
    ),
    "rejected_by_each_ratio": _policy(
        lambda: (
            hl.grpo().rejected("ratio", "sequence_max", min=0.75, max=1.3)
            + hl.gspo().rejected("ratio", "sequence_max", max=1.5, live=True)
        )
    ),
    "off_policy_masked": _policy(lambda: hl.grpo().off_policy_masked(0.02)),
    "second_moment_masked": _policy(
        lambda: (
            hl.grpo().second_moment_masked(0.02)
            + hl.cispo(epsilon_high=50.0).second_moment_masked(live=True)
        )
    ),
    "top_entropy_quantile": _policy(lambda: hl.dapo().top_entropy(quantile=0.4)),
    "top_entropy_threshold": _policy(lambda: hl.dapo().top_entropy(threshold=0.5)),
    "weighted": _policy(lambda: hl.cross_entropy().weighted("weight")),
    "weighted_per_segment": _policy(lambda: hl.gspo().weighted("segment_weight")),
    "where": _policy(lambda: hl.grpo().where("kept")),
    "where_per_segment": _policy(lambda: hl.grpo().where("segment_kept")),
    "where_segment_scope": _policy(lambda: hl.gspo().where("kept")),
    "over_sequence_sum": _other(lambda: hl.entropy().over("sequence_sum")),
    "over_fixed_length": _policy(lambda: hl.gspo().over(hl.fixed_length(16))),
    "rlsd_shaped": _policy(lambda: hl.rlsd_shaped(hl.grpo()) + hl.rlsd_shaped(hl.gspo(), mix=1.0)),
    "over_prompt_mean": _policy(
        lambda: (
            hl.gspo().over("prompt_mean")
            + hl.dapo().over("prompt_mean").where("kept")
            + hl.reinforce().over("prompt_mean").where("segment_kept")
        )
    ),
    "standardised": _policy(standardised),
    "segment_sigmoid": _other(segment_sigmoid),
}
DISTILLATION = {
    f"distillation_{teacher}_{kind}": Case(
        make=lambda head, kind=kind, t=t, teacher=teacher: hl.distillation(
            divergence=kind,
            beta=0.3,
            temperature=t,
            teacher_head=head if teacher == "hidden" else None,
        ),
        teacher=teacher,
        temperature=t,
    )
    for teacher, t in (("logits", 1.0), ("hidden", 2.0), ("topk", 0.8))
    for kind in ("forward_kl", "reverse_kl", "js", *(("skew_reverse_kl",) if t == 1 else ()))
}
DISTILLATION |= {
    f"distillation_generalized_{kind}": Case(
        make=lambda _, kind=kind: hl.distillation(
            divergence=kind, temperature=0.8, tail="generalized"
        ),
        teacher="topk",
        temperature=0.8,
    )
    for kind in ("forward_kl", "reverse_kl")
}
DISTILLATION["distillation_sampled"] = Case(
    make=lambda _: hl.distillation(divergence="reverse_kl", temperature=0.8, tail="sampled"),
    teacher="topk",
    temperature=0.8,
)
DRAFT = {
    "draft_logits": Case(
        make=lambda _: hl.nla() + 0.3 * hl.lk_hybrid() + hl.cross_entropy(), teacher="logits"
    ),
    "draft_hidden": Case(
        make=lambda head: (
            hl.lk_alpha(teacher_head=head)
            + hl.dspark(teacher_head=head, gamma=None)
            + hl.distillation(divergence="js", beta=0.3, teacher_head=head)
        ),
        teacher="hidden",
    ),
    "draft_blocks": Case(
        make=lambda _: (
            hl.lk_hybrid(per="step", temperature=0.8)
            + hl.cross_entropy().modified(hl.draft_weights("d_pace"))
        ),
        teacher="topk",
        temperature=0.8,
    ),
}
CANDIDATES = {
    "several_targets": Case(
        make=lambda _: hl.soft_cross_entropy() + 0.5 * hl.any_of(), teacher="candidates"
    ),
    "margin": _policy(margin, teacher="candidates"),
    "score_centering": _policy(
        lambda: (
            hl.reinforce().corrected("token_truncate", min=0.7, max=1.4, live=True)
            + hl.score_centering(mode="token_truncate", min=0.7, max=1.4)
            + 0.3 * hl.score_centering()
        ),
        teacher="candidates",
    ),
    "reverse_kl_and_rest": Case(make=lambda _: reverse_kl_and_rest(), teacher="candidates"),
}
MIXES = {
    "mix_candidates": Case(
        make=lambda _: hl.grpo() + margin() + 0.2 * reverse_kl_and_rest() - 0.1 * hl.entropy(),
        teacher="candidates",
    ),
    "mix": _other(
        lambda: hl.gspo() + 1e-4 * hl.z_loss() - 1e-3 * hl.entropy() + 0.1 * hl.kl(),
    ),
    "mix_preference": _other(
        lambda: hl.dpo() + 0.2 * hl.cross_entropy(label_smoothing=0.05) - 0.01 * hl.entropy()
    ),
    "mix_restricted": _other(
        lambda: hl.dapo().where("kept") + hl.dapo().where("segment_kept") - 0.1 * hl.entropy()
    ),
    "on_policy_distillation": _policy(hl.on_policy_distillation),
    "sdar": _policy(lambda: hl.reinforce() + 0.1 * hl.sdar()),
    "mix_distillation": Case(
        make=lambda _: hl.gspo() + 0.5 * hl.distillation(temperature=1.5) - 0.01 * hl.entropy(),
        teacher="logits",
    ),
    "mix_teachers": Case(
        make=lambda _: hl.distillation() + 0.3 * hl.distillation(divergence="js", temperature=2.0),
        teacher="logits",
    ),
}
CASES: dict[str, Case] = {
    **SUPERVISED,
    **POLICY,
    **PREFERENCE,
    **MODIFIED,
    **DISTILLATION,
    **DRAFT,
    **CANDIDATES,
    **MIXES,
}

# ---------------------------------------------------------------------- axes

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
SCHEDULES = {
    "one_pass": hl.Options(schedule="one_pass"),
    "small_chunks": hl.Options(chunk_tokens=4),
    "unmeasured": hl.Options(chunk_tokens=9, metrics=False),
    "recompute": hl.Options(schedule="recompute", chunk_tokens=2),  # tiles a few columns wide
    "recompute_rows": hl.Options(schedule="recompute", memory_budget=4000),  # a few rows tall
    "frozen": hl.Options(schedule="frozen", chunk_tokens=5),
    "held": hl.Options(schedule="held", chunk_tokens=5),
    "static": hl.Options(static=True),
    "static_recompute": hl.Options(static=True, schedule="recompute", chunk_tokens=3),
}
HEADS = {  # rows of the weight
    "plain": 97,
    "bias": 33,
    "lora": 131,
    "capped": 61,
    "temperature": 64,
    "temperature_per_token": 50,
    "padded_vocabulary": 104,
    "everything": 101,
}
AXES: dict[str, Sequence[str]] = {
    "case": tuple(CASES),
    "layout": ("padded", "packed"),
    "schedule": tuple(SCHEDULES),
    "dtype": tuple(DTYPES),
    "head": tuple(HEADS),
    "storage": ("plain", "hidden_view", "weight_view", "targets_view"),
    "data": ("near", "far"),
}
Row = tuple[str, ...]  # a value of each axis


def applies(row: Mapping[str, str]) -> bool:
    """Whether these values can occur together."""
    return row.get("schedule") != "frozen" or "case" not in row or CASES[row["case"]].logp_only


def pairwise(axes: Mapping[str, Sequence[str]] = AXES) -> list[Row]:
    """Rows in which each pair of values of two axes that can occur together does so.

    Greedy and deterministic: each row starts from the first pair that is not covered yet, and takes
    on every other axis the value that covers the most further pairs.
    """
    names = list(axes)
    pending: dict[frozenset, None] = {
        frozenset(pair): None
        for a, b in itertools.combinations(names, 2)
        for pair in itertools.product(((a, x) for x in axes[a]), ((b, y) for y in axes[b]))
        if applies(dict(pair))
    }
    rows = []
    while pending:
        row = dict(next(iter(pending)))
        for turn, name in enumerate(n for n in names if n not in row):
            candidates = [v for v in axes[name] if applies({**row, name: v})]
            shift = (len(rows) + turn) % len(candidates)  # ties go round in turn
            candidates = candidates[shift:] + candidates[:shift]
            taken = list(row.items())
            row[name] = max(
                candidates,
                key=lambda v: sum(frozenset([(name, v), other]) in pending for other in taken),
            )
        for pair in itertools.combinations(row.items(), 2):
            pending.pop(frozenset(pair), None)
        rows.append(tuple(row[name] for name in names))
    return rows


# ---------------------------------------------------------------------- inputs


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that `head_loss` and the oracle take."""

    hidden: Tensor
    head: hl.Head
    batch: hl.Batch
    objective: hl.Objective
    tightest: float = 1e-10  # error, in float64

    def plain(self, mode: Mode = "float64", upstream: float = 1.0) -> Plain:
        if mode == "input":  # float32 and float64 are modes of their own
            mode = {torch.float32: "float32", torch.float64: "float64"}.get(self.hidden.dtype, mode)
        return self._plain(mode, upstream)

    @functools.cache  # noqa: B019 (inputs live as long as their test)
    def _plain(self, mode: Mode, upstream: float) -> Plain:
        return plain(self.hidden, self.head, self.batch, self.objective, mode, upstream)

    def leaves(self) -> dict[str, Tensor]:
        return {n: t for n, t in parameters(self.hidden, self.head).items() if t.requires_grad}

    def run(
        self, options: hl.Options, upstream: float = 1.0
    ) -> tuple[hl.Output, dict[str, Tensor]]:
        """The output, and the gradient of everything that requires one."""
        out = hl.head_loss(self.hidden, self.head, self.batch, self.objective, options)
        leaves = self.leaves()
        found = torch.autograd.grad(upstream * out.loss, list(leaves.values()))
        return out, dict(zip(leaves, found, strict=True))


def transposed(weight: Tensor) -> Tensor:
    """The same values in memory laid out the other way round."""
    return weight.t().contiguous().t()


def strided(values: Tensor) -> Tensor:
    """The same values as every second one of a larger tensor."""
    return torch.stack([values, torch.zeros_like(values)], -1).flatten(-2)[..., ::2]


def positions(layout: str) -> tuple[Tensor, torch.Size, hl.Segments]:
    """Where each scored token lies, the shape of all positions, and their segments.

    "padded": rows of [S, 11] with prompts of several lengths, a gap after two tokens and padding;
    "packed": nothing but the scored tokens.
    """
    if layout == "packed":
        cu_seqlens = torch.tensor((0, *LENGTHS)).cumsum(0)
        return torch.arange(TOKENS), torch.Size([TOKENS]), hl.Segments.from_cu_seqlens(cu_seqlens)
    width = 11
    where = [
        row * width + row % 3 + t + (t >= 2)
        for row, length in enumerate(LENGTHS)
        for t in range(length)
    ]
    shape = torch.Size([len(LENGTHS), width])
    return torch.tensor(where), shape, hl.Segments.rows(*shape)


def lay(values: Tensor, layout: str, fill: float = 0.0) -> Tensor:
    """[T, ...] to the layout's [.., ...]; `fill` (noise, if it is 0) where nothing is scored."""
    index, shape, _ = positions(layout)
    full = values.new_full((shape.numel(), *values.shape[1:]), fill)
    full[index] = values
    return full.view(*shape, *values.shape[1:])


def make_head(kind: str, weight: Tensor, layout: str, train: bool = True) -> hl.Head:
    """A head around `weight` [V, H]; `train`: whether its own parameters require a gradient."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return (0.3 * torch.randn(*shape, generator=generator)).to(weight.dtype)

    rows, everything = weight.shape[0], kind == "everything"
    weight.requires_grad_(train and kind != "lora")
    options = {}
    if kind == "bias" or everything:
        options["bias"] = normal(rows).requires_grad_(train)
    if kind == "lora" or everything:
        a, b = normal(2, weight.shape[1]).requires_grad_(), normal(rows, 2).requires_grad_(train)
        options["lora"] = (hl.Lora(a=a, b=b, scaling=0.5),)
    if kind == "capped" or everything:
        options |= {"softcap": 15.0, "logit_scale": 0.8}
    if kind == "temperature":
        options["temperature"] = 0.7
    if kind == "temperature_per_token" or everything:
        options["temperature"] = lay(0.6 + torch.rand(TOKENS, generator=generator), layout, 1.0)
    if kind == "padded_vocabulary" or everything:
        options["vocab_size"] = rows - 7
    return hl.Head(weight, **options)


def make_inputs(row: Row) -> Inputs:
    """The inputs of a row of the matrix; the schedule only says whether the head is frozen."""
    named = dict(zip(AXES, row, strict=True))
    frozen = named.pop("schedule") == "frozen"
    return _make_inputs(**named, frozen=frozen)


@functools.lru_cache(maxsize=4)
def _make_inputs(
    *, case: str, layout: str, dtype: str, head: str, storage: str, data: str, frozen: bool
) -> Inputs:
    chosen, dtype_ = CASES[case], DTYPES[dtype]
    padding = 7 if head in ("padded_vocabulary", "everything") else 0
    vocabulary = HEADS[head] - padding
    hidden, weight, targets = trained_looking(TOKENS, WIDTH, vocabulary, dtype_)
    weight = torch.cat([weight, 3 * weight[:padding]])
    if storage == "weight_view":
        weight = transposed(weight)
    made = make_head(head, weight, layout, train=not frozen)
    log_p = replace(made, temperature=1.0).logits(hidden).detach().log_softmax(-1)
    logps = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    index, shape, segments = positions(layout)
    generator = torch.Generator().manual_seed(4)
    # Finite where nothing is scored: the oracle multiplies it by 0.
    unscored = torch.randn(*shape, WIDTH, generator=generator).to(dtype_)
    full = unscored.view(-1, WIDTH).index_copy(0, index, hidden).view(*shape, WIDTH)
    if storage == "hidden_view":
        full = strided(full)
    ids = lay(targets, layout, IGNORE)
    if storage == "targets_view":
        ids = strided(ids)
    fields = _fields(chosen, data, targets, logps, vocabulary, dtype_)
    fields = {
        name: lay(value, layout) if value.shape[:1] == (TOKENS,) else value
        for name, value in fields.items()
    }
    if chosen.current:
        fields["old_logps"] = hl.CURRENT  # type: ignore[assignment]
    teacher = None
    if chosen.teacher == "hidden":
        other = torch.randn(vocabulary, 5, generator=generator).to(dtype_)
        teacher = hl.Head(other, softcap=20.0, logit_scale=1.5)
    return Inputs(
        hidden=full.detach().requires_grad_(),
        head=made,
        batch=hl.Batch(ids, segments, **fields),
        objective=chosen.objective(teacher),
        tightest=chosen.tightest,
    )


def _fields(
    case: Case, data: str, targets: Tensor, logps: Tensor, vocabulary: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Every field that a case may read, [T, ...] or [S].

    "far": ratios well outside the clips, one of them infinite where the clip holds it, advantages
    per token with zeros, a sampler without a log-prob for one token.
    """
    generator = torch.Generator().manual_seed(1)
    segments = hl.Segments.from_lengths(LENGTHS)
    batch = random_batch(targets, segments, logps)
    fields = {name: t for name, t in batch.fields.items() if isinstance(t, Tensor)}
    if data == "far":
        advantages = torch.randn(TOKENS, generator=generator)
        advantages[segments.ids == 3] = 0
        advantages[::5] = 0
        old = fields["old_logps"] + 0.7 * torch.randn(TOKENS, generator=generator)
        if case.bounded:
            old[7], advantages[7] = -math.inf, 1.0
        fields["sampling_logps"][9] = math.nan
        fields |= {"advantages": advantages, "old_logps": old}
    fields["weight"] = torch.rand(TOKENS, generator=generator)
    fields["segment_weight"] = torch.rand(len(LENGTHS), generator=generator)
    fields["kept"] = torch.rand(TOKENS, generator=generator) > 0.4
    fields["segment_kept"] = torch.arange(len(LENGTHS)) % 3 != 1
    fields |= others(TOKENS, len(LENGTHS))
    if case.teacher == "candidates":  # which has its own, of each
        del fields["teacher_logps"]
    return fields | teacher_fields(case, targets, vocabulary, dtype)


def others(tokens: int, segments: int) -> dict[str, Tensor]:
    """Fields of a term or two each: labels of answers, a KL of their batch, log-probs, draws,
    prompts."""
    generator = torch.Generator().manual_seed(4)
    return {
        "desirable": torch.arange(segments) % 3 != 1,
        "reference_kl": torch.full((segments,), 0.2),
        "teacher_logps": -torch.rand(tokens, generator=generator),
        "draws": torch.rand(tokens, generator=generator),
        # Each four segments hold two prompts, in turn.
        "prompts": 5 - 3 * (torch.arange(segments) // 4 * 2 + torch.arange(segments) % 2),
    }


def teacher_fields(
    case: Case, targets: Tensor, vocabulary: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The inputs of a teacher of the case's kind, [T, ...]."""
    generator, tokens = torch.Generator().manual_seed(2), len(targets)
    logits = 2 * torch.randn(tokens, vocabulary, generator=generator)
    if case.teacher == "logits":
        return {"teacher_logits": logits.to(dtype)}
    if case.teacher == "hidden":
        return {"teacher_hidden": torch.randn(tokens, 5, generator=generator).to(dtype)}
    if case.teacher == "topk":
        # The student's tail stays away from 0, where 1 - sum has no digits in the yardstick.
        logits = logits.scatter(1, targets.unsqueeze(1), -4.0)
        logps, ids = (logits / case.temperature).log_softmax(-1).topk(6)
        ids[::3, 4] = -1  # an empty slot, whatever it holds
        return {"teacher_topk_ids": ids, "teacher_topk_logps": logps}
    if case.teacher == "candidates":
        ids = logits.topk(6).indices
        ids = torch.where(ids == targets.unsqueeze(1), -1, ids)  # which is the first of some tokens
        ids[:, 0] = torch.where(torch.arange(tokens) % 2 == 0, targets, ids[:, 0])
        ids[4:5] = -3  # no candidate at all
        log_q = logits.log_softmax(-1).gather(1, ids.clamp_min(0)).masked_fill(ids < 0, -20.0)
        fields = {"candidate_ids": ids, "teacher_logps": log_q, "candidate_probs": log_q.exp()}
        return fields | {"candidate_sampling_logps": log_q}
    return {}


# ---------------------------------------------------------------------- comparisons


def check(inputs: Inputs, options: hl.Options, upstream: float = 1.0) -> hl.Output:
    """Run and hold everything that comes back to the budget."""
    out, gradients = inputs.run(options, upstream)
    oracle, coarse = inputs.plain("float64", upstream), inputs.plain("input", upstream)
    exact = oracle if inputs.hidden.dtype == torch.float64 else inputs.plain("float32", upstream)
    for name in ("logps", "entropies"):
        value = getattr(out, name)
        if value is not None:
            within(name, value, getattr(oracle, name), getattr(exact, name), inputs.tightest)
    scalars = {"loss": (out.loss, oracle.loss, exact.loss)}
    scalars |= {n: (v, oracle.terms[n], exact.terms[n]) for n, v in out.terms.items()}
    for name, (value, want, theirs) in scalars.items():
        # A mean of both signs may cancel: its error counts against no less than a half.
        tolerance = inputs.tightest if value.dtype == torch.float64 else 1e-6
        budget = 3 * (theirs - want).abs() + tolerance * want.abs().clamp_min(0.5)
        assert (value - want).abs() <= budget, (name, value, want)
    assert gradients.keys() == oracle.gradients.keys()
    for name, value in gradients.items():
        assert value.dtype == inputs.leaves()[name].dtype
        want, theirs = oracle.gradients[name], coarse.gradients[name]
        within(f"{name}.grad", value, want, theirs, inputs.tightest)
    return out


def within(
    name: str,
    value: Tensor,
    oracle: Tensor,
    yardstick: Tensor,
    tightest: float = 1e-10,
) -> None:
    """err <= 3 err(yardstick) + 1e-6; `tightest` where the value itself is float64."""
    found, theirs = error(value, oracle), error(yardstick, oracle)
    budget = tightest if value.dtype == torch.float64 else 3 * theirs + 1e-6
    assert found <= budget, f"{name}: error {found:.3g}, want at most {budget:.3g}"


def same_metrics(got: hl.Metrics, want: hl.Metrics, tolerance: float) -> None:
    """Every metric of one is every metric of the other."""
    assert got.keys() == want.keys()
    a, b = got.compute(), want.compute()
    for name in a:
        assert (
            a[name] == b[name]
            or math.isclose(a[name], b[name], rel_tol=tolerance, abs_tol=tolerance)
            or (math.isnan(a[name]) and math.isnan(b[name]))
        ), (name, a[name], b[name])


def product(axes: Mapping[str, Sequence[str]], fixed: Sequence[str]) -> Iterator[Row]:
    """Every row over the axes in `fixed`; the others go round in turn, so that they vary too."""
    free = [name for name in axes if name not in fixed]
    turns = [itertools.cycle(axes[name]) for name in free]
    for values in itertools.product(*(axes[name] for name in fixed)):
        row = dict(zip(fixed, values, strict=True))
        if applies(row):
            row |= {name: next(turn) for name, turn in zip(free, turns, strict=True)}
            yield tuple(row[name] for name in axes)
