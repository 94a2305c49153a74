"""Helpers of the matrix, property and distillation tests: objectives, inputs, and comparisons with
float64.

T scored tokens, N positions, S segments, H hidden width, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from matrix_cases import CASES, DISTILLATION, LENGTHS, TOKENS, WIDTH, Case, others
from torch import Tensor

import headloss as hl
from headloss.batch.batch import IGNORE
from headloss.testing import Mode, Plain, error, parameters, plain, random_batch, trained_looking

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
    # Logit tiles have few columns if the chunk size is only 2 tokens.
    "recompute": hl.Options(schedule="recompute", chunk_tokens=2),
    # With a memory budget of 4000 bytes, a logit tile holds only a few tokens.
    "recompute_rows": hl.Options(schedule="recompute", memory_budget=4000),
    "frozen": hl.Options(schedule="frozen", chunk_tokens=5),
    "held": hl.Options(schedule="held", chunk_tokens=5),
    "static": hl.Options(static=True),
    "static_recompute": hl.Options(static=True, schedule="recompute", chunk_tokens=3),
}
HEADS = {  # number of weight rows
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
Row = tuple[str, ...]  # the chosen value of each axis, in the order of `AXES`


def applies(row: Mapping[str, str]) -> bool:
    """Return True if the axis values in `row` (objective, schedule, ...) can be combined: the
    `frozen` schedule needs an objective of log-probs alone."""
    return row.get("schedule") != "frozen" or "case" not in row or CASES[row["case"]].logp_only


def pairwise(axes: Mapping[str, Sequence[str]] = AXES) -> list[Row]:
    """Return rows (one value of each axis) that together contain every possible pair of values of
    two axes.

    Rows are built greedily and without randomness: each row starts from a pair of values that no
    earlier row contains, and gets, for each further axis, the value that forms the most pairs
    missing from earlier rows.
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
            shift = (len(rows) + turn) % len(candidates)  # rotates ties
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
    """All inputs of `head_loss` and of the float64 reference computation."""

    hidden: Tensor
    head: hl.Head
    batch: hl.Batch
    objective: hl.Objective
    tightest: float = 1e-10  # allowed error in float64

    def plain(self, mode: Mode = "float64", upstream: float = 1.0) -> Plain:
        if mode == "input":  # use mode "float32" or "float64" if `hidden` has this dtype
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
        """Return the output, and the gradients of all tensors that require one."""
        out = hl.head_loss(self.hidden, self.head, self.batch, self.objective, options)
        leaves = self.leaves()
        found = torch.autograd.grad(upstream * out.loss, list(leaves.values()))
        return out, dict(zip(leaves, found, strict=True))


def transposed(weight: Tensor) -> Tensor:
    """Return equal values with transposed memory layout."""
    return weight.t().contiguous().t()


def strided(values: Tensor) -> Tensor:
    """Return equal values, stored as every second element of a larger tensor."""
    return torch.stack([values, torch.zeros_like(values)], -1).flatten(-2)[..., ::2]


def positions(layout: str) -> tuple[Tensor, torch.Size, hl.Segments]:
    """Return the index of each scored token, the shape of all positions, and the segments.

    "padded": rows of [S, 11] with prompts of several lengths, a gap after two tokens and padding;
    "packed": only the scored tokens.
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
    """Expand [T, ...] to the layout's [.., ...], with `fill` (noise if `fill` is 0) at unscored
    positions."""
    index, shape, _ = positions(layout)
    full = values.new_full((shape.numel(), *values.shape[1:]), fill)
    full[index] = values
    return full.view(*shape, *values.shape[1:])


def make_head(kind: str, weight: Tensor, layout: str, train: bool = True) -> hl.Head:
    """Make a head around `weight` [V, H]; with `train` its parameters require gradients."""
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
    """Make the inputs of the test case `row`, which has one value for each of `AXES`. Of the axis
    "schedule", only the value "frozen" changes the inputs: it freezes the head."""
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
    # Unscored hidden states are finite, since the float64 reference multiplies their loss by 0,
    # which would turn infinity into NaN.
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
    """Make every batch field that an objective in `CASES` may read, [T, ...] or [S].

    If `data` is "far", policy ratios lie far outside the clip range (one is infinite if the loss
    is bounded), `advantages` has one value per token, some of them 0, and one sampler log-prob is
    NaN.
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
    # A teacher of candidates passes log-probs of all candidates in place of log-probs of the
    # targets.
    if case.teacher == "candidates":
        del fields["teacher_logps"]
    return fields | teacher_fields(case, targets, vocabulary, dtype)


def teacher_fields(
    case: Case, targets: Tensor, vocabulary: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Make the teacher's batch fields [T, ...] for a case with teacher logits, hidden states, top k
    or candidates."""
    generator, tokens = torch.Generator().manual_seed(2), len(targets)
    logits = 2 * torch.randn(tokens, vocabulary, generator=generator)
    if case.teacher == "logits":
        return {"teacher_logits": logits.to(dtype)}
    if case.teacher == "hidden":
        return {"teacher_hidden": torch.randn(tokens, 5, generator=generator).to(dtype)}
    if case.teacher == "topk":
        # Keep the student's probability outside the top k far from 0; otherwise the float32
        # reference, which computes it as 1 - sum, has no correct digits.
        logits = logits.scatter(1, targets.unsqueeze(1), -4.0)
        logps, ids = (logits / case.temperature).log_softmax(-1).topk(6)
        ids[::3, 4] = -1  # an unused entry (id -1), whose log-prob is arbitrary
        return {"teacher_topk_ids": ids, "teacher_topk_logps": logps}
    if case.teacher == "candidates":
        ids = logits.topk(6).indices
        ids = torch.where(ids == targets.unsqueeze(1), -1, ids)  # put in below
        ids[:, 0] = torch.where(torch.arange(tokens) % 2 == 0, targets, ids[:, 0])
        ids[4:5] = -3  # a token without candidates
        log_q = logits.log_softmax(-1).gather(1, ids.clamp_min(0)).masked_fill(ids < 0, -20.0)
        fields = {"candidate_ids": ids, "teacher_logps": log_q, "candidate_probs": log_q.exp()}
        return fields | {"candidate_sampling_logps": log_q}
    return {}


# ---------------------------------------------------------------------- comparisons


def check(inputs: Inputs, options: hl.Options, upstream: float = 1.0) -> hl.Output:
    """Run a call, and check all its results against the error allowed relative to plain PyTorch."""
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
        # A mean over positive and negative values may cancel, so the allowed error is relative to
        # at least 0.5.
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
    """Check that the error of `value` against the float64 reference is at most 3 times the error
    of a plain PyTorch computation (`yardstick`) plus 1e-6, or at most `tightest` if `value` is
    float64."""
    found, theirs = error(value, oracle), error(yardstick, oracle)
    budget = tightest if value.dtype == torch.float64 else 3 * theirs + 1e-6
    assert found <= budget, f"{name}: error {found:.3g}, want at most {budget:.3g}"


def same_metrics(got: hl.Metrics, want: hl.Metrics, tolerance: float) -> None:
    """Check that two sets of metrics agree in names and values."""
    assert got.keys() == want.keys()
    a, b = got.compute(), want.compute()
    for name in a:
        assert (
            a[name] == b[name]
            or math.isclose(a[name], b[name], rel_tol=tolerance, abs_tol=tolerance)
            or (math.isnan(a[name]) and math.isnan(b[name]))
        ), (name, a[name], b[name])


def product(axes: Mapping[str, Sequence[str]], fixed: Sequence[str]) -> Iterator[Row]:
    """Yield one row for every combination of values of the axes in `fixed`. An axis that is not in
    `fixed` cycles through its values from row to row."""
    free = [name for name in axes if name not in fixed]
    turns = [itertools.cycle(axes[name]) for name in free]
    for values in itertools.product(*(axes[name] for name in fixed)):
        row = dict(zip(fixed, values, strict=True))
        if applies(row):
            row |= {name: next(turn) for name, turn in zip(free, turns, strict=True)}
            yield tuple(row[name] for name in axes)
