"""Every objective, layout, schedule, dtype, head and storage agrees with float64 plain logits.

Errors of loss and statistics against float64 may be 3 times the error of plain PyTorch with
float32 logits, plus 1e-6. Errors of gradients may be 3 times the error of plain PyTorch with
logits in the inputs' dtype, plus 1e-6. The fast tests cover every pair of values of two axes
(objective, layout, ...). The slow tests run all combinations of objective, layout, schedule and
dtype, and all combinations of head, storage, layout, schedule and dtype.
"""

from __future__ import annotations

import functools
import itertools
import math

import matrix
import pytest
import torch
from matrix import AXES, SCHEDULES, Row
from matrix_cases import CASES

import headloss as hl
from headloss.batch.batch import IGNORE
from headloss.losses import catalogue

pytestmark = pytest.mark.usefixtures("skip_small_rows")

COVER = matrix.pairwise()
RUNS = {
    "recompute": "recompute",
    "recompute_rows": "recompute",
    "static_recompute": "recompute",
    "frozen": "frozen",
    "held": "held",
}


def identify(row: Row) -> str:
    return "-".join(row)


def check(row: Row) -> None:
    schedule = row[list(AXES).index("schedule")]
    upstream = 1.0 if len(schedule) % 2 else 1.75
    out = matrix.check(matrix.make_inputs(row), SCHEDULES[schedule], upstream)
    assert out.plan.schedule == RUNS.get(schedule, "one_pass")


@functools.cache
def full() -> dict[str, list[Row]]:
    """Return, by objective, all combinations that the slow tests run; axes that are not combined
    take their values in turn."""
    terms = matrix.product(AXES, ["case", "layout", "dtype", "schedule"])
    some = {**AXES, "case": ["mix", "distillation_topk_js", "grpo", "mix_teachers", "dpo"]}
    heads = matrix.product(some, ["head", "storage", "layout", "dtype", "schedule"])
    rows = [row for row in itertools.chain(terms, heads) if matrix.applies(named(row))]
    return {case: [row for row in rows if named(row)["case"] == case] for case in CASES}


def named(row: Row) -> dict[str, str]:
    return dict(zip(AXES, row, strict=True))


@pytest.mark.parametrize("row", COVER, ids=identify)
def test_within_budget(row):
    check(row)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_full_product_within_budget(case):
    for row in full()[case]:
        check(row)


def test_selection_has_every_pair():
    rows = [named(row) for row in COVER]
    for a, b in itertools.combinations(AXES, 2):
        seen = {(row[a], row[b]) for row in rows}
        possible = {
            (x, y) for x, y in itertools.product(AXES[a], AXES[b]) if matrix.applies({a: x, b: y})
        }
        assert seen == possible
    assert len(COVER) < 1.3 * len(CASES) * max(len(AXES["head"]), len(AXES["schedule"]))


def test_catalogue_is_complete():
    """Every term and every modifier of the library occurs in at least one objective of `CASES`."""
    used = {term.name for case in CASES.values() for _, term in case.objective().parts}
    assert {f.__name__ for f in catalogue.TERMS} <= used
    modifiers = {
        m.name for c in CASES.values() for _, term in c.objective().parts for m in term.modifiers
    }
    assert modifiers == {f.__name__ for f in catalogue.MODIFIERS} | {"draft_weights"}


# ---------------------------------------------------------------------- skipped rows


def inputs_of(case: str, data: str = "far", layout: str = "padded", dtype: str = "float32"):
    return matrix.make_inputs((case, layout, "one_pass", dtype, "everything", "plain", data))


@pytest.mark.covering
@pytest.mark.parametrize("case", ["grpo", "gspo", "dapo", "token_mask", "where", "mix_restricted"])
@pytest.mark.parametrize("schedule", ["one_pass", "recompute"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_skipping_rows_changes_nothing(case, schedule, dtype):
    inputs = inputs_of(case, dtype=dtype)
    (skipped, a), (kept, b) = (
        inputs.run(hl.Options(schedule=schedule, chunk_tokens=16, skip_rows=skip))
        for skip in (True, False)
    )
    torch.testing.assert_close(skipped.loss, kept.loss, rtol=0, atol=0)
    torch.testing.assert_close(skipped.logps, kept.logps, rtol=0, atol=0)
    for name in a:  # a matmul of fewer rows may round differently
        tolerance = 1e-6 if a[name].dtype == torch.float32 else 1e-2
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


def test_rows_without_gradient_get_exactly_zero():
    inputs = inputs_of("grpo")
    _, gradients = inputs.run(hl.Options())
    advantages = inputs.batch.advantages
    dead = (inputs.batch.targets == IGNORE) | (advantages == 0)
    assert dead.any() and not dead.all()
    assert not gradients["hidden"][dead].any()
    assert gradients["hidden"][~dead].any()


@pytest.mark.parametrize("schedule", ["one_pass", "recompute"])
@pytest.mark.parametrize("case", ["grpo", "gspo", "mix"])
def test_no_row_with_a_gradient(case, schedule):
    """With all advantages 0 the loss is 0 and all gradients are zeros."""
    inputs = inputs_of("grpo")
    zero = torch.zeros_like(inputs.batch.advantages)
    fields = {**inputs.batch.fields, "advantages": zero}
    batch = hl.Batch(inputs.batch.targets, inputs.batch.segments, **fields)
    out = hl.head_loss(inputs.hidden, inputs.head, batch, hl.grpo(), hl.Options(schedule=schedule))
    leaves = inputs.leaves()
    found = torch.autograd.grad(out.loss, list(leaves.values()))
    assert out.loss == 0
    assert all(not g.any() for g in found)


# ---------------------------------------------------------------------- infinite ratios

CLIPPED = ["grpo", "dapo", "bnpo", "ppo", "cispo", "sapo", "gspo", "luspo", "gmpo", "vespo"]


@pytest.mark.parametrize("case", CLIPPED)
@pytest.mark.parametrize("schedule", ["one_pass", "small_chunks", "recompute", "static"])
def test_infinite_ratio_on_the_clipped_branch(case, schedule):
    """An old log-prob of -inf under a positive advantage gives no NaN, and no gradient at a clipped
    token."""
    inputs = inputs_of(case, layout="packed")
    assert inputs.batch.old_logps[7] == -math.inf
    out, gradients = inputs.run(SCHEDULES[schedule])
    assert out.loss.isfinite()
    assert all(g.isfinite().all() for g in gradients.values())
    if case not in ("cispo", "vespo"):  # their weights are constants
        assert not gradients["hidden"][7].any()


# ---------------------------------------------------------------------- given logits


@pytest.mark.covering
@pytest.mark.parametrize("case", ["mix", "grpo", "dpo", "mix_teachers", "distillation_topk_js"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_logits_loss_is_head_loss(case, inplace, layout, dtype):
    """`logits_loss` equals `head_loss` with an identity weight."""
    source = matrix.make_inputs((case, layout, "one_pass", dtype, "plain", "plain", "near"))
    logits = source.head.logits(source.hidden).detach().to(source.hidden.dtype)
    width = logits.shape[-1]
    head = hl.Head(torch.eye(width, dtype=logits.dtype), softcap=15.0, logit_scale=0.8)
    inputs = matrix.Inputs(
        hidden=logits.clone().requires_grad_(),
        head=head,
        batch=source.batch,
        objective=source.objective,
    )
    given = logits.clone().requires_grad_()
    work = given * 1  # not the leaf itself: autograd forbids in-place changes of a leaf
    out = hl.logits_loss(
        work, source.batch, source.objective, softcap=15.0, logit_scale=0.8, inplace=inplace
    )
    # In-place 16-bit gradients are rounded before backward scales them, and scaling by a power of
    # two adds no rounding error.
    upstream = 2.0 if inplace else 1.5
    (found,) = torch.autograd.grad(out.loss * upstream, given)
    oracle, coarse = inputs.plain("float64", upstream), inputs.plain("input", upstream)
    exact = inputs.plain("float32", upstream)
    matrix.within("loss", out.loss, oracle.loss, exact.loss)
    matrix.within("logps", out.logps, oracle.logps, exact.logps)
    matrix.within("entropies", out.entropies, oracle.entropies, exact.entropies)
    matrix.within("grad", found, oracle.gradients["hidden"], coarse.gradients["hidden"])
