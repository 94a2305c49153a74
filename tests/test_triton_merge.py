"""One kernel launch merges the online-softmax states of vocabulary blocks or of several ranks into
statistics."""

from __future__ import annotations

import math

import pytest
import torch
from test_triton_product import head, poisoned_held
from triton_cases import DEVICE, NEEDS, transforms

from headloss.kernels import reference
from headloss.kernels import triton as triton_backend
from headloss.kernels.interface import Forward, partials_of
from headloss.kernels.transform import Transform
from headloss.kernels.triton.versions import INTERPRETED, version
from headloss.statistics.softmax import STATISTICS, SoftmaxState, finish, merge

SOME = [NEEDS, frozenset({"logp", "entropy"}), frozenset({"lse"}), frozenset({"top1", "logp"})]


@pytest.fixture(autouse=True)
def poisoned(fresh_memory_is_nan):
    """Make unwritten elements NaN."""


def same(found: dict, wanted: dict, **tolerance) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, **tolerance, msg=f"{name} differs")


@pytest.mark.parametrize("needs", SOME, ids=lambda s: "+".join(sorted(s)))
@pytest.mark.parametrize("n", [1, 18])
def test_statistics_of_a_product(needs, n):
    """The matmul kernel's final statistics equal the statistics that `finish` computes from the
    kernel's online-softmax state.

    In both cases the kernel stores the same bits of exp(z) for logits z.
    """
    v = 600
    x, w, targets, _ = head(max(n, 2), 64, v)
    x, targets = x[:n], targets[:n]
    if n > 4:
        x[4] *= 60  # target far below the largest logit
    forward = Forward(targets, 0, transforms(n)["rows"], needs)
    one, other = poisoned_held(n, v), poisoned_held(n, v)
    found = triton_backend.product_statistics(x, w, forward, v, one)
    partials = triton_backend.product_partials(x, w, forward, other)
    stats, normalizer = finish(partials, v, needs)
    assert torch.equal(one.exp_logits, other.exp_logits) and torch.equal(one.shift, other.shift)
    assert not one.exp_logits.isnan().any()
    same(found.stats.tensors(), stats.tensors(), rtol=5e-7, atol=2e-6)
    # All vectors are aligned to 16 bytes for any number of rows n, since Triton compiles a kernel
    # anew if the alignment changes.
    vectors = *found.stats.tensors().values(), *found.normalizer, *partials
    assert all(t is None or t.data_ptr() % 16 == 0 for t in vectors)
    assert torch.equal(found.normalizer.max_logit, normalizer.max_logit)
    torch.testing.assert_close(found.normalizer.log_sum, normalizer.log_sum, rtol=5e-7, atol=1e-9)


def test_statistics_of_no_tokens_are_empty():
    x, w, targets, _ = head(2, 64, 40)
    forward = Forward(targets[:0], 0, Transform(), NEEDS)
    found = triton_backend.product_statistics(x[:0], w, forward, 40)
    assert [t.shape for t in found.stats.tensors().values()] == [(0,)] * len(STATISTICS)
    found = triton_backend.finish(x.new_empty(3, 5, 0, dtype=torch.float32), NEEDS, 40)
    assert found.stats.entropy is not None and found.stats.entropy.shape == (0,)


def test_a_tokens_statistics_do_not_depend_on_other_tokens():
    v = 900
    x, w, targets, _ = head(40, 64, v)
    needs = frozenset(STATISTICS)
    whole = triton_backend.product_statistics(x, w, Forward(targets, 0, Transform(), needs), v)
    for rows in (slice(0, 1), slice(3, 20), slice(16, 40), slice(7, 39)):
        forward = Forward(targets[rows], 0, Transform(), needs)
        part = triton_backend.product_statistics(x[rows].clone(), w, forward, v)
        for name, value in part.stats.tensors().items():
            assert torch.equal(value, getattr(whole.stats, name)[rows]), name


def slices_of(ranks: int, n: int, dtype: torch.dtype, needs=NEEDS) -> torch.Tensor:
    """Return online-softmax states of vocabulary slices, including equal maxima, nearly certain
    tokens, and slices without probability."""
    generator = torch.Generator().manual_seed(ranks)
    z = torch.randn(ranks, n, 12, generator=generator, dtype=torch.float64) * 4
    z[ranks // 2, ::3, 5] += 30
    z[-1, 1::3] = z[0, 1::3]
    if ranks > 2:
        z[1, 2::3] = -math.inf
    z = z.float().to(dtype).to(DEVICE)
    targets = torch.arange(n, device=DEVICE) % (12 * ranks)
    parts = []
    for rank in range(ranks):
        raw = torch.where(z[rank].isfinite(), z[rank], -1e30)
        part = reference.partials(raw, Forward(targets, 12 * rank, Transform(), needs))
        gone = ~z[rank].isfinite().any(1)
        peak = torch.where(gone, -math.inf, part.max_logit)
        rest = torch.where(gone, -1, part.sumexp_m1)
        fields = [peak, rest, torch.where(gone, -math.inf, part.target)]
        more = (part.entropy_sum, part.logit_sum)
        fields += [torch.where(gone, 0, t) for t in more if t is not None]
        parts.append(torch.stack(fields))
    return torch.stack(parts).contiguous()


@pytest.mark.parametrize("needs", SOME, ids=lambda s: "+".join(sorted(s)))
@pytest.mark.parametrize(("ranks", "n"), [(1, 3), (2, 7), (5, 130)])
def test_statistics_of_slices(needs, ranks, n):
    """Statistics merged from several vocabulary slices agree with the kernel's PyTorch twin, with
    float64, and with a merge of slice after slice."""
    wide = slices_of(ranks, n, torch.float64, needs)
    exact = reference.finish(wide, needs, 12 * ranks)
    given = wide.float()
    found = triton_backend.finish(given, needs, 12 * ranks)
    plain = reference.finish(given, needs, 12 * ranks)
    for one, other in zip(
        (*found.stats.tensors().values(), *found.normalizer),
        (*plain.stats.tensors().values(), *plain.normalizer),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=2e-6)
    same(
        {k: t.double() for k, t in found.stats.tensors().items()},
        exact.stats.tensors(),
        rtol=2e-6,
        atol=4e-6,
    )
    parts = [partials_of(part, needs) for part in wide]
    joined: SoftmaxState = parts[0]
    for part in parts[1:]:
        joined = merge(joined, part)
    same(exact.stats.tensors(), finish(joined, 12 * ranks, needs)[0].tensors())


def test_small_rests_and_far_logits_keep_their_digits():
    """`log_sum`, the log of the sum of exp(logit - maximum), is accurate if all logits below the
    maximum add only 1e-12, or if all logits of one vocabulary slice are far below the maximum."""
    rest = torch.cat([torch.logspace(-12, 30, 200), torch.tensor([0.0, -0.5, -1.0, 1.0])])
    n = len(rest)
    given = torch.zeros(1, 3, n, device=DEVICE)
    given[0, 1] = rest.to(DEVICE)
    found = triton_backend.finish(given, frozenset({"lse"}), 5)
    exact = given[0, 1].double().log1p()
    torch.testing.assert_close(found.normalizer.log_sum.double(), exact, rtol=4e-7, atol=0)

    below = -torch.linspace(0, 80, n, device=DEVICE)
    given = torch.stack([torch.zeros(3, n, device=DEVICE), torch.zeros(3, n, device=DEVICE)])
    given[1, 0] = below
    found = triton_backend.finish(given, frozenset({"lse"}), 5)
    exact = below.double().exp().log1p()
    # Before Triton 3.9 the interpreter's fma rounds twice, unlike a GPU's.
    rounds_twice = INTERPRETED.value and version() in ("3.6", "3.7", "3.8")
    rtol = 4e-6 if rounds_twice else 6e-7
    torch.testing.assert_close(found.normalizer.log_sum.double(), exact, rtol=rtol, atol=0)
