"""Distillation in Triton agrees with the float64 reference (interpreted on a CPU).

n tokens, v columns of a tile of logits, V vocabulary size, K teacher ids per token.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import twins
from triton_cases import (
    DEVICE,
    EPS,
    backward_of,
    coefficients_of,
    error,
    in_float64,
    targets_of,
    tile,
)

import headloss as hl
from headloss.head import products
from headloss.kernels import reference as reference_divergence
from headloss.kernels import triton as triton_divergence
from headloss.kernels.interface import Backward, Forward
from headloss.kernels.pair import Distribution, Divergence, Pair, StoredTopk
from headloss.kernels.transform import Transform
from headloss.statistics.divergence import Measure
from headloss.statistics.softmax import Normalizer, SoftmaxCoefficients, finish
from headloss.testing import trained_looking, within_budget

KINDS = ("forward_kl", "reverse_kl", "js")
MORE_KINDS = ("skew_forward_kl", "skew_reverse_kl", "total_variation")
BETA = 0.3
PAIRS = {
    "plain": (Transform(), Transform()),
    "temperature": (Transform(temperature=2.5), Transform(scale=0.6, temperature=2.5)),
    "capped": (
        Transform(scale=1.1, softcap=12.0, temperature=0.9),
        Transform(softcap=20.0, temperature=0.9),
    ),
    "student capped": (Transform(softcap=9.0), Transform()),
}


def pair(p, q, kind, beta=BETA):
    return Pair(p, q, (Measure(kind, beta),))


def shares(acts, raw, raw_teacher, of):
    """Return [2, n]: a single divergence between teacher and student, and the mean of its
    derivative over the vocabulary."""
    return acts.divergence(raw, raw_teacher, of)[:, 0].t()


def one(raw_teacher, of, pivot, weight):
    """Return a gradient kernel's arguments for a single divergence between teacher and student."""
    return Divergence(raw_teacher, of, pivot.unsqueeze(1), weight.unsqueeze(1))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Set the kernels' block size to 64 columns, so that every row has several blocks and its last
    block is not full."""
    monkeypatch.setattr("headloss.kernels.triton.pair.BLOCK", 64)
    monkeypatch.setattr("headloss.kernels.triton.records.BLOCK", 64)
    monkeypatch.setattr("headloss.kernels.triton.statistics.BLOCK", 64)


def narrow(normalizer: Normalizer) -> Normalizer:
    return Normalizer(*(t.float() for t in normalizer))


def wide(normalizer: Normalizer) -> Normalizer:
    return Normalizer(*(t.double() for t in normalizer))


def normalizer_of(raw, transform) -> Normalizer:
    """Return the normalizer of a whole row, rounded to float32."""
    nowhere = torch.full((len(raw),), -1, device=DEVICE)
    exact = twins.partials(
        raw.double(), Forward(nowhere, 0, in_float64(transform), frozenset())
    )
    return narrow(finish(exact, 1, frozenset())[1])


def sides(raw, raw_teacher, transforms) -> tuple[Distribution, Distribution]:
    pair = zip((raw, raw_teacher), transforms, strict=True)
    return tuple(Distribution(t, normalizer_of(tile, t)) for tile, t in pair)  # type: ignore[return-value]


def in_double(side: Distribution) -> Distribution:
    return Distribution(side.transform, wide(side.normalizer))


def pair_of(n, v, dtype, teacher_dtype=None):
    """Return logit tiles of student and teacher, as views into larger buffers of NaN. In odd rows
    the teacher's logits are close to the student's."""
    raw = tile(n, v, dtype)
    raw_teacher = tile(n, v, teacher_dtype or dtype, seed=1, pad=7)
    raw_teacher[1::2] = (raw[1::2].float() + 0.05 * raw_teacher[1::2].float()).to(raw_teacher.dtype)
    return raw, raw_teacher


# ---------------------------------------------------------------------- values


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(
    ("n", "v", "dtype", "teacher_dtype"),
    [
        (5, 97, torch.float32, torch.float32),
        (1, 1030, torch.float32, torch.bfloat16),
        (3, 130, torch.bfloat16, torch.float16),
    ],
)
def test_divergence(n, v, dtype, teacher_dtype, name, kind):
    raw, raw_teacher = pair_of(n, v, dtype, teacher_dtype)
    p, q = sides(raw, raw_teacher, PAIRS[name])
    found = shares(triton_divergence, raw, raw_teacher, pair(p, q, kind))
    exact = shares(reference_divergence,
        raw.double(), raw_teacher.double(), pair(in_double(p), in_double(q), kind)
    )
    plain = shares(reference_divergence,
        raw.float(), raw_teacher.float(), pair(p, q, kind)
    )
    for i in range(2 if kind != "forward_kl" else 1):
        assert within_budget(found[i], exact[i], plain[i]), (i, error(found[i], exact[i]))


@pytest.mark.parametrize("kind", KINDS)
def test_no_divergence_from_oneself(kind):
    raw = tile(3, 97, torch.float32)
    p, q = sides(raw, raw, PAIRS["plain"])
    found = shares(triton_divergence, raw, raw, pair(p, q, kind))
    assert not found.any()
    weight = torch.ones(3, device=DEVICE)
    part = one(raw, pair(p, q, kind), found[1], weight)
    gradient = triton_divergence.part_gradient_(raw, part)
    assert not gradient.any()


def test_a_small_mixture_divergence_keeps_its_digits():
    """A Jensen-Shannon divergence of about 1e-9 is accurate, although it is the sum of terms of
    about 1e-4 that nearly cancel."""
    raw = tile(4, 97, torch.float32)
    raw_teacher = raw + 1e-4 * torch.randn(4, 97).to(DEVICE)
    p, q = sides(raw, raw_teacher, PAIRS["plain"])
    arguments = ("js", 0.5)
    found = shares(triton_divergence, raw, raw_teacher, pair(p, q, *arguments))[0]
    plain = shares(reference_divergence, raw, raw_teacher, pair(p, q, *arguments))[0]
    exact_pair = pair(in_double(p), in_double(q), *arguments)
    exact = shares(reference_divergence, raw.double(), raw_teacher.double(), exact_pair)[0]
    assert (found - exact).abs().max() <= 3 * (plain - exact).abs().max() + 1e-11


@pytest.mark.parametrize("kind", KINDS)
def test_ruled_out_tokens(kind):
    """Divergences are correct if teacher logits are -inf at some tokens or in a whole block of
    columns, and if a student logit is -inf."""
    raw, raw_teacher = pair_of(3, 200, torch.float32)
    raw_teacher[:, ::3] = -math.inf
    raw_teacher[:, 64:128] = -math.inf
    raw[1, 5] = -math.inf
    p, q = sides(raw, raw_teacher, PAIRS["plain"])
    found = shares(triton_divergence, raw, raw_teacher, pair(p, q, kind))
    exact_pair = pair(in_double(p), in_double(q), kind)
    exact = shares(reference_divergence, raw.double(), raw_teacher.double(), exact_pair)
    assert error(found, exact) <= 1e-6
    weight = torch.ones(3, device=DEVICE)
    part = one(raw_teacher, pair(p, q, kind), found[1], weight)
    gradient = triton_divergence.part_gradient_(raw, part)
    part = one(raw_teacher.double(), exact_pair, found[1].double(), weight.double())
    oracle = reference_divergence.part_gradient_(raw.double(), part)
    assert error(gradient, oracle) <= 3e-6


# ---------------------------------------------------------------------- gradients


def others_of(n, v, which, transform, dtype=None) -> Backward:
    """Return arguments of a backward kernel (`Backward`) for the gradient of softmax statistics,
    on a logit tile that begins at vocabulary column 40, with the head's temperature."""
    own = Transform(
        scale=transform.scale,
        softcap=transform.softcap,
        temperature=torch.linspace(0.5, 2, n, device=DEVICE) if "e" in which else 1.3,
    )
    raw = tile(n, v, torch.float32)
    given = targets_of(n, v) + 40, 40, own, normalizer_of(raw, own), coefficients_of(n, which)
    return backward_of(raw, *given)._replace(dtype=dtype)


def others_in_double(others: Backward) -> Backward:
    return others._replace(
        transform=in_float64(others.transform),
        normalizer=wide(others.normalizer),
        coefficients=others.coefficients.map(lambda t: t.double()),
        dtype=None,
    )


def references(raw, raw_teacher, p, q, kind, pivot, weight, extra=None, others=None):
    """Return the reference backend's gradients of a divergence, in float64 and in float32."""
    copy = None if extra is None else extra.clone()
    part = one(raw_teacher.float(), pair(p, q, kind), pivot, weight)
    plain = reference_divergence.part_gradient_(
        raw.float().clone(), part, copy, None if others is None else others._replace(dtype=None)
    )
    exact_pair = pair(in_double(p), in_double(q), kind)
    exact = reference_divergence.part_gradient_(
        raw.double().clone(),
        one(raw_teacher.double(), exact_pair, pivot.double(), weight.double()),
        None if extra is None else extra.double().clone(),
        None if others is None else others_in_double(others),
    )
    return exact, plain


def assert_gradient(found, references, dtype):
    exact, plain = references
    assert error(found, exact) <= EPS[dtype] + 3 * error(plain, exact) + 1e-6


@pytest.mark.covering
@pytest.mark.parametrize("which", [None, "", "tp", "tpeu"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["temperature", "capped"])
def test_gradient(name, kind, which):
    """The gradient of a divergence is correct both when it is written to separate memory and when
    it is added to other terms' gradient in the memory of the student's logits."""
    n, v = 3, 97
    weight = torch.tensor([0.3, 0.0, -2.0], device=DEVICE)
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    for dtype in dtypes if which == "tpeu" else dtypes[:1]:
        raw, raw_teacher = pair_of(n, v, dtype, torch.bfloat16)
        p, q = sides(raw, raw_teacher, PAIRS[name])
        pivot = shares(triton_divergence, raw, raw_teacher, pair(p, q, kind))[1]
        others = None if which is None else others_of(n, v, which, p.transform)
        both = references(raw, raw_teacher, p, q, kind, pivot, weight, None, others)
        before, teacher_before = raw.clone(), raw_teacher.clone()
        part = one(raw_teacher, pair(p, q, kind), pivot, weight)
        found = triton_divergence.part_gradient_(raw, part, None, others)
        in_place = found.data_ptr() == raw.data_ptr()
        assert in_place == (others is not None) and (in_place or torch.equal(raw, before))
        assert torch.equal(raw_teacher, teacher_before)
        assert raw._base[:, v:].isnan().all()  # memory next to the tile is untouched
        assert_gradient(found, both, dtype if in_place else torch.float32)


@pytest.mark.parametrize("kind", MORE_KINDS)
def test_skewed_and_total_variation(kind):
    """Skewed KL and total variation have correct values and gradients, for teachers close to the
    student, far from it, and with tokens of probability 0."""
    test_divergence(5, 97, torch.float32, torch.bfloat16, "temperature", kind)
    test_ruled_out_tokens(kind)
    test_gradient("capped", kind, None)
    test_gradient("temperature", kind, "tp")


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradient_narrows_in_place_onto_another_part(out_dtype):
    n, v = 3, 130
    raw, raw_teacher = pair_of(n, v, torch.float32)
    p, q = sides(raw, raw_teacher, PAIRS["capped"])
    weight, extra = torch.randn(n, device=DEVICE), torch.randn(n, v, device=DEVICE)
    pivot = shares(triton_divergence, raw, raw_teacher, pair(p, q, "js"))[1]
    others = others_of(n, v, "tpe", p.transform, out_dtype)
    both = references(raw, raw_teacher, p, q, "js", pivot, weight, extra, others)
    alone = references(raw, raw_teacher, p, q, "js", pivot, weight, extra)
    part = one(raw_teacher, pair(p, q, "js"), pivot, weight)
    onto = triton_divergence.part_gradient_(raw, part, extra.clone())
    assert_gradient(onto, alone, torch.float32)
    found = triton_divergence.part_gradient_(raw, part, extra, others)
    assert found.dtype == out_dtype and found.data_ptr() == raw.data_ptr()
    assert_gradient(found, both, out_dtype)


def test_poison_where_the_weight_is_zero():
    raw, raw_teacher = pair_of(3, 97, torch.float32)
    raw_teacher[1] = math.nan
    p, q = sides(raw, raw_teacher, PAIRS["plain"])
    pivot = torch.tensor([0.1, math.nan, 0.2], device=DEVICE)
    weight = torch.tensor([1.0, 0.0, 1.0], device=DEVICE)
    for kind in KINDS:
        part = one(raw_teacher, pair(p, q, kind), pivot, weight)
        found = triton_divergence.part_gradient_(raw, part)
        assert found.isfinite().all() and not found[1].any() and found[0].any()


def test_divergences_of_no_tokens_are_empty():
    raw, raw_teacher = tile(0, 97, torch.float32), tile(0, 97, torch.float32)
    nothing = torch.zeros(0, device=DEVICE)
    side = Distribution(Transform(), Normalizer(nothing, nothing))
    found = shares(triton_divergence, raw, raw_teacher, pair(side, side, "js"))
    assert found.shape == (2, 0)
    others = Backward(nothing.long(), 0, Transform(), side.normalizer, SoftmaxCoefficients(), None)
    part = one(raw_teacher, pair(side, side, "js"), nothing, nothing)
    found = triton_divergence.part_gradient_(raw, part, None, others)
    assert found.shape == (0, 97)


# ---------------------------------------------------------------------- stored outcomes


def columns_of(n: int, v: int) -> torch.Tensor:
    """Return [n, 6] distinct columns in random order, some outside a tile of v columns."""
    inside = torch.stack([torch.randperm(v)[:4] for _ in range(n)])
    outside = torch.tensor([[-1, v + 3]]).expand(n, -1)
    return torch.cat([inside[:, :2], outside, inside[:, 2:]], 1).to(DEVICE)


@pytest.mark.parametrize("name", ["temperature", "capped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tail_partials(name, dtype):
    n, v, forward = 4, 230, Forward(None, 0, PAIRS[name][0], frozenset())
    raw, columns = tile(n, v, dtype), columns_of(n, v)
    columns[0, 0] = v // 3  # the largest logit
    running = None
    for start in (0, 100, 200):
        running = triton_divergence.partials(
            raw[:, start : start + 100], forward, running, columns - start
        )
    exact = reference_divergence.partials(raw.double(), forward, None, columns)
    for name in ("max_logit", "sumexp_m1"):
        assert error(getattr(running, name), getattr(exact, name)) <= 2e-6, name
    assert (running.target == -math.inf).all()


def test_a_tile_with_nothing_but_stored_outcomes():
    raw = tile(2, 3, torch.float32)
    columns = torch.tensor([[2, 0, 1], [1, 2, 0]], device=DEVICE)
    forward = Forward(None, 0, Transform(), frozenset())
    found = triton_divergence.partials(raw, forward, None, columns)
    assert (found.max_logit == -math.inf).all() and (found.sumexp_m1 == -1).all()


@pytest.mark.parametrize("which", [None, "", "tpeu"])
@pytest.mark.parametrize("name", ["temperature", "capped"])
def test_sparse_gradient(name, which):
    n, v, transform = 4, 230, PAIRS[name][0]
    raw, columns = tile(n, v, torch.float32), columns_of(n, v)
    slopes, slope_tail = torch.randn(n, 6, device=DEVICE), torch.randn(n, device=DEVICE)
    forward = Forward(None, 0, transform, frozenset())
    exact = reference_divergence.partials(raw.double(), forward, None, columns)
    tail = Distribution(transform, narrow(finish(exact, 1, frozenset())[1]))
    extra = torch.randn(n, v, device=DEVICE)
    others = None if which is None else others_of(n, v, which, transform)
    oracle = reference_divergence.part_gradient_(
        raw.double().clone(),
        StoredTopk(columns, in_double(tail), slopes.double(), slope_tail.double()),
        extra.double(),
        None if others is None else others_in_double(others),
    )
    part = StoredTopk(columns, tail, slopes, slope_tail)
    found = triton_divergence.part_gradient_(raw, part, extra, others)
    assert error(found, oracle) <= 3e-6


# ---------------------------------------------------------------------- end to end

T, V, H = 6, 97, 6
FORMS = ("logits", "hidden", "topk")
OPTIONS = {
    "one_pass": {"chunk_tokens": 3},
    "recompute": {"schedule": "recompute", "memory_budget": 1},
    "static": {"static": True},
}


def run(form, kind, backend, dtype, options, temperature=1.0, mixed=True):
    """Return the loss and the gradients of hidden and weight, for inputs with float32 values."""
    hidden, weight, targets = trained_looking(T, H, V)
    targets[4] = -100
    states, other = torch.randn(T, 5), torch.randn(V, 5) * 1.5
    hidden, weight, states, other = (t.to(DEVICE, dtype) for t in (hidden, weight, states, other))
    logits = (states.float() @ other.float().t()).to(torch.bfloat16).to(dtype)
    logits[:, 3] = -math.inf
    fields = {"teacher_hidden": states} if form == "hidden" else {"teacher_logits": logits}
    if form == "topk":
        logps, ids = (logits.float() / temperature).log_softmax(-1).topk(5)
        fields = {"teacher_topk_ids": ids, "teacher_topk_logps": logps.to(dtype)}
    objective = hl.distillation(
        divergence=kind,
        beta=BETA,
        temperature=temperature,
        teacher_head=hl.Head(other, softcap=8.0) if form == "hidden" else None,
    )
    if mixed:
        objective = 0.5 * objective + hl.cross_entropy() - 0.1 * hl.entropy()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    head = hl.Head(weight, softcap=15.0, temperature=1.0)
    batch = hl.Batch(targets.to(DEVICE), **fields)
    out = hl.head_loss(hidden, head, batch, objective, hl.Options(backend=backend, **options))
    return out.loss.detach(), *torch.autograd.grad(out.loss, leaves)


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schedule", OPTIONS)
def test_head_loss(schedule, form, kind):
    temperature = 1.0 if kind == "forward_kl" else 1.7
    rest = (OPTIONS[schedule], temperature, kind != "js")
    torch.manual_seed(1)
    found = run(form, kind, "triton", torch.float32, *rest)
    torch.manual_seed(1)
    plain = run(form, kind, "reference", torch.float32, *rest)
    torch.manual_seed(1)
    exact = run(form, kind, "reference", torch.float64, *rest)
    for mine, theirs, oracle in zip(found, plain, exact, strict=True):
        assert within_budget(mine, oracle, theirs)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs the products of a GPU")
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("kind", "temperature"), [("forward_kl", 1.0), ("reverse_kl", 1.7), ("js", 1.0)]
)
def test_recompute_in_bfloat16_is_one_pass(kind, temperature, mixed):
    """In bfloat16 the `recompute` schedule gives the gradients of `one_pass`, with several blocks
    of vocabulary rows and rows without gradient."""
    count, width, columns = 700, 64, 3000
    hidden, weight, targets = trained_looking(count, width, columns, torch.bfloat16, DEVICE)
    states = torch.randn(count, 72, device=DEVICE).bfloat16()
    other = (torch.randn(columns, 72, device=DEVICE) / 3).bfloat16()
    found = {}
    for schedule, dtype in (
        ("exact", torch.float64),
        ("one_pass", torch.bfloat16),
        ("recompute", torch.bfloat16),
    ):
        x, w = (t.to(dtype).clone().requires_grad_() for t in (hidden, weight))
        term = hl.distillation(
            divergence=kind, temperature=temperature, teacher_head=hl.Head(other.to(dtype))
        )
        term = term.where("kept")
        if mixed:
            term += 0.2 * hl.cross_entropy().where("kept")
        kept = torch.arange(count, device=DEVICE) % 5 > 0
        batch = hl.Batch(targets, teacher_hidden=states.to(dtype), kept=kept)
        options = hl.Options(schedule="one_pass" if schedule == "exact" else schedule)
        if schedule == "recompute":
            options = replace(options, memory_budget=300 * columns * 4)
        out = hl.head_loss(x, hl.Head(w), batch, term, options)
        assert schedule != "recompute" or out.plan.tile.columns < columns
        found[schedule] = out.loss.detach(), *torch.autograd.grad(out.loss, (x, w))
    for exact, once, again in zip(*found.values(), strict=True):
        assert error(again, exact) <= 1.2 * error(once, exact) + 1e-6
    assert error(found["recompute"][0], found["exact"][0]) <= 1e-5


def test_several_teachers_and_skipped_rows():
    """Several teachers with skipped token rows are correct: three divergences at two temperatures,
    each on some of the tokens."""
    found = {}
    for backend in ("triton", "reference"):
        hidden, weight, targets = (t.to(DEVICE) for t in trained_looking(T, H, V))
        generator = torch.Generator().manual_seed(3)
        logits = torch.randn(T, V, generator=generator).to(DEVICE)
        batch = hl.Batch(targets, teacher_logits=logits, kept=torch.arange(T, device=DEVICE) > 1)
        terms = [
            hl.distillation(divergence=kind, temperature=t).where("kept")
            for kind, t in zip(KINDS, (1, 2, 0.7), strict=True)
        ]
        leaves = [hidden.requires_grad_(), weight.requires_grad_()]
        out = hl.head_loss(hidden, hl.Head(weight), batch, sum(terms), hl.Options(backend=backend))
        found[backend] = (out.loss.detach(), *torch.autograd.grad(out.loss, leaves))
    for mine, theirs in zip(*found.values(), strict=True):
        assert error(mine, theirs.double()) <= 2e-6


def test_a_chunks_teacher_logits_are_made_once(monkeypatch):
    """A chunk's teacher logits are computed once, even with rows without gradient."""
    hidden, weight, targets = (t.to(DEVICE) for t in trained_looking(T, H, V))
    made = []
    product = products.PLAIN.logits

    def counted(features, weight, *more):
        made.append(len(features))
        return product(features, weight, *more)

    monkeypatch.setattr(products.PLAIN, "logits", counted)
    batch = hl.Batch(
        targets,
        teacher_hidden=torch.randn(T, 4).to(DEVICE),
        kept=torch.arange(T, device=DEVICE) % 2 > 0,
    )
    term = hl.distillation(teacher_head=hl.Head(torch.randn(V, 4).to(DEVICE))).where("kept")
    options = hl.Options(backend="triton", chunk_tokens=2)
    hl.head_loss(hidden.requires_grad_(), hl.Head(weight), batch, term, options).loss.backward()
    # six logit tiles: one of the student and one of the teacher for each of three chunks
    assert made == [2] * 6


TEACHER_LOGITS = {
    "float32": lambda: torch.randn(T, V),
    "bfloat16": lambda: torch.randn(T, V).bfloat16(),
    "float64": lambda: torch.randn(T, V).double(),
    "transposed": lambda: torch.randn(V, T).t(),
}


@pytest.mark.parametrize("name", TEACHER_LOGITS)
def test_given_teacher_logits_are_read_where_they_are(name, monkeypatch):
    """Teacher logits passed in by the caller are read without a copy, except transposed and float64
    logits."""
    seen = []
    acts = ("divergence", "part_gradient_")
    for act in (getattr(triton_divergence, name) for name in acts):

        def noted(raw, other, *rest, act=act):
            seen.append(other.teacher if isinstance(other, Divergence) else other)
            return act(raw, other, *rest)

        monkeypatch.setattr(triton_divergence, act.__name__, noted)
    hidden, weight, targets = (t.to(DEVICE) for t in trained_looking(T, H, V))
    logits = TEACHER_LOGITS[name]().to(DEVICE)
    batch, options = hl.Batch(targets, teacher_logits=logits), hl.Options(backend="triton")
    hidden.requires_grad_()
    hl.head_loss(hidden, hl.Head(weight), batch, hl.distillation(), options).loss.backward()
    is_copied = name in ("float64", "transposed")
    assert [t.data_ptr() == logits.data_ptr() for t in seen] == [not is_copied] * 2
    dtype = torch.float32 if is_copied else logits.dtype
    assert all(t.dtype == dtype and t.stride(1) == 1 for t in seen)
    assert all(torch.equal(t, logits.to(dtype)) for t in seen)


def test_a_gradient_that_overwrites_a_part_of_a_tensor_is_scaled_in_its_place():
    """If `logits_loss(inplace=True)` overwrites a view such as `logits[:, :-1]` by its gradient,
    the backward pass multiplies the view in place by the upstream gradient."""
    logits, teacher, targets = torch.randn(2, 5, V), torch.randn(2, 4, V), torch.ones(2, 4).long()
    gradients = []
    for inplace in (False, True):
        leaf = logits.to(DEVICE).requires_grad_()
        batch, options = hl.Batch(targets, teacher_logits=teacher), hl.Options(backend="triton")
        batch, part = batch.to(DEVICE), (leaf * 1)[:, :-1]
        out = hl.logits_loss(part, batch, hl.distillation(), options=options, inplace=inplace)
        (gradient,) = torch.autograd.grad(3.0 * out.loss, leaf)
        gradients.append(gradient)
    torch.testing.assert_close(*gradients)
