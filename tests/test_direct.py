"""Calls whose launches are sent from addresses, against the acts one by one: the same bits."""

from __future__ import annotations

import pytest
import torch
from test_triton_product import head
from torch import Tensor
from triton_cases import DEVICE

import headloss as hl
from headloss.batch.packing import packing_of
from headloss.kernels import triton as acts
from headloss.kernels.interface import Backward, Forward, Held, Scaling
from headloss.kernels.transform import Transform
from headloss.kernels.triton.direct import Direct
from headloss.losses.term import Objective
from headloss.objective.taping import record
from headloss.run.prepare import Prepared

NEEDS = frozenset({"logp", "entropy", "top1"})
GPU = pytest.mark.skipif(DEVICE == "cpu", reason="addresses are sent to compiled kernels alone")


def batch_of(targets: Tensor, seed: int) -> hl.Batch:
    generator = torch.Generator().manual_seed(seed)
    old, advantages = torch.randn(2, len(targets), generator=generator).to(DEVICE)
    segments = hl.Segments.from_ids(torch.arange(len(targets), device=DEVICE) // 3)
    return hl.Batch(targets, segments, advantages=advantages, old_logps=old - 2)


def products_(terms: Tensor, features: Tensor, into_weight: Tensor | None) -> Tensor:
    if into_weight is not None:
        into_weight.copy_(terms.float().t() @ features.float())
    return terms.float() @ features.new_ones(terms.shape[1], features.shape[1]).float()


@pytest.mark.parametrize("n", [1, 7, 16])
@pytest.mark.parametrize("into_weight", [True, False])
def test_launches_are_those_of_the_acts(n: int, into_weight: bool) -> None:
    x, w, targets, _ = head(max(n, 2), 64, 300)
    x, targets = x[:n], targets[:n] % 300
    batch, objective = batch_of(targets, n), Objective.of(hl.grpo())
    packing, _ = packing_of(batch, 300)
    view, transform = packing.view(batch, torch.float32), Transform(scale=0.7, temperature=1.3)
    kinds = {name: dtype for name, (dtype, _) in batch.kinds(torch.float32).items()}
    tape = record(objective, NEEDS, kinds, torch.float32)
    assert tape is not None and tape.is_multiple
    totals, upstream = hl.Totals.of(batch), torch.tensor(3.0, device=DEVICE)

    held = Held.empty(x, 300)
    forward = Forward(targets, 0, transform, NEEDS, True)
    stats, normalizer = acts.product_statistics(x, w, forward, 300, held)
    gradient = tape.run(stats, view, totals, [1.0], vocabulary=300, backend="triton")
    c = gradient.coefficients
    backward = Backward(targets, 0, transform, normalizer, c, stats.logp)
    multiple, features = acts.held_multiple_(held, backward, x=x)
    assert features is not None
    room = torch.empty_like(w) if into_weight else None
    sums = [Scaling(products_(held.terms, features, room), torch.float32, rows=multiple)]
    sums += [] if room is None else [Scaling(room, w.dtype)]
    want = acts.scaled(sums, upstream)

    direct = Direct(tape, NEEDS, transform, 64, 300, x.device)
    for _ in range(3):
        seen: list[bool] = []
        call = direct.call(x, w, targets, into_weight)
        call.forward(
            lambda seen=seen: seen.append(True),
            lambda of: tape.launch(of, view, totals, [1.0], vocabulary=300),
            products_,
        )
        found = call.finish(upstream)
        assert seen == [True] and len(found) == len(want)
        assert torch.equal(call.loss, gradient.loss)
        assert torch.equal(call.measured, gradient.values)
        assert torch.equal(call.statistic("logp"), stats.logp)
        assert torch.equal(call.statistic("entropy"), stats.entropy)
        assert call.statistic("lse") is None
        for mine, theirs in zip(found, want, strict=True):
            assert torch.equal(mine, theirs)
    assert bool(direct.kept) == (DEVICE == "cuda")


def result_of(n: int, seed: int, objective: hl.Objective, **more) -> tuple:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(n, 128, generator=generator, device=DEVICE).mul(2).bfloat16()
    w = torch.randn(4100, 128, generator=generator, device=DEVICE).mul(0.1).bfloat16()
    x.requires_grad_(), w.requires_grad_(more.get("trains", True))
    targets = torch.randint(4100, (n,), generator=generator, device=DEVICE)
    if more.get("masked"):
        targets[::3] = -100
    head = hl.Head(w, temperature=more.get("temperature", 1.0))
    out = hl.head_loss(x, head, batch_of(targets, seed), objective, more.get("options"))
    upstream = torch.tensor([0.0, 3.0], device=DEVICE)[1] if more.get("odd") else 0.5
    out.loss.backward(out.loss.new_tensor(0.5) if upstream == 0.5 else upstream)
    metrics = {name: metric.value for name, metric in out.metrics.items()}
    return out.plan.direct, (out.loss, x.grad, w.grad, out.logps, out.entropies), metrics


@GPU
@pytest.mark.parametrize("name", ["ce", "grpo", "gspo", "mixed"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"masked": True},
        {"trains": False},
        {"temperature": 0.7},
        {"odd": True},
        {"options": hl.Options(metrics=False)},
    ],
    ids=["plain", "masked", "frozen", "temperature", "unaligned upstream", "no metrics"],
)
def test_calls_give_the_bits_of_the_loop(name, more, monkeypatch) -> None:
    objectives = {"ce": hl.cross_entropy(), "grpo": hl.grpo(), "gspo": hl.gspo()}
    objectives["mixed"] = hl.grpo() + 0.1 * hl.cross_entropy() + 1e-3 * hl.z_loss()
    sizes = (256, 1000, 2, 255, 256, 2048)
    found = [result_of(n, n, objectives[name], **more) for n in sizes]
    assert all(direct for direct, _, _ in found)
    monkeypatch.setattr(Prepared, "direct", lambda *_: None)
    for n, (_, mine, metrics) in zip(sizes, found, strict=True):
        _, theirs, others = result_of(n, n, objectives[name], **more)
        for a, b in zip(mine, theirs, strict=True):
            assert (a is None and b is None) or torch.equal(a, b), n
        assert metrics.keys() == others.keys()
        assert all(torch.equal(metrics[k].nan_to_num(), others[k].nan_to_num()) for k in metrics)


@GPU
def test_hooks_and_clearing_are_heeded() -> None:
    """With a profiler's hook every launch goes through Triton; what was kept is forgotten."""
    import triton

    seen: list[object] = []
    hook = triton.knobs.runtime.launch_enter_hook

    def watch(metadata: object) -> None:
        seen.append(metadata)

    for _ in range(2):
        want = result_of(64, 1, hl.grpo())[1]
    hook.add(watch)
    try:
        found = result_of(64, 1, hl.grpo())[1]
    finally:
        hook.remove(watch)
    assert len(seen) >= 6
    hl.clear_cache()
    again = result_of(64, 1, hl.grpo())[1]
    for a, b, c in zip(want, found, again, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
