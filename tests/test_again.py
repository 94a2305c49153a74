"""Calls whose launches are sent again from addresses: the loop's arguments, and its bits."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

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
from headloss.kernels.triton import again, launch, order, product
from headloss.losses.term import Objective
from headloss.objective.statistics import Coefficients
from headloss.objective.taping import record
from headloss.run import loop
from headloss.run.prepare import Prepared
from headloss.softmax.linear import Wants

ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="addresses are sent to compiled kernels alone")
NEEDS = frozenset({"logp", "entropy", "top1"})


def batch_of(targets: Tensor, seed: int) -> hl.Batch:
    generator = torch.Generator().manual_seed(seed)
    old, advantages = torch.randn(2, len(targets), generator=generator).to(DEVICE)
    segments = hl.Segments.from_ids(torch.arange(len(targets), device=DEVICE) // 3)
    return hl.Batch(targets, segments, advantages=advantages, old_logps=old - 2)


class Seen:
    """A compiled kernel, which only tells what it was sent."""

    def __init__(self) -> None:
        self.sent: Any = None

    def send(self, programs: int, stream: int, values: Any, tiles: Any = ()) -> None:
        self.sent = programs, plain(values)


def plain(value: Any) -> Any:
    """Without what differs from call to call: addresses."""
    if isinstance(value, tuple | list):
        return tuple(map(plain, value))
    value = getattr(value, "value", value)  # of a constexpr
    return "address" if type(value) is int and value > 1 << 32 else value


@pytest.mark.parametrize(("n", "share"), [(1, 1e-6), (7, 0.0), (16, 1e-6)])  # that sums lose
@pytest.mark.parametrize(
    ("bias", "into"),
    [
        (None, "weight"),
        (None, ""),
        (torch.bfloat16, "weight and bias"),
        (torch.float32, "weight and bias"),
        (torch.bfloat16, "bias"),
        (torch.float32, "weight"),
        (torch.bfloat16, ""),
    ],
)
def test_arguments_are_those_that_are_described(n, share, bias, into, monkeypatch) -> None:
    x, w, targets, _ = head(max(n, 2), 64, 300)
    x, targets, upstream = x[:n], targets[:n] % 300, torch.tensor(3.0, device=DEVICE)
    bias = None if bias is None else torch.randn(300, device=DEVICE).to(bias)
    batch, objective = batch_of(targets, n), Objective.of(hl.grpo())
    packing, _ = packing_of(batch, 300)
    view, transform = packing.view(batch, torch.float32), Transform(scale=0.7, temperature=1.3)
    kinds = {name: dtype for name, (dtype, _) in batch.kinds(torch.float32).items()}
    tape = record(objective, NEEDS, kinds, torch.float32)
    assert tape is not None and tape.is_multiple
    totals, described = hl.Totals.of(batch), {}
    launched = launch.Launcher.__call__

    def watched(self, programs, *arguments, **constants) -> None:
        _, values = (self.describe or launch.describer(arguments))(constants, *arguments)
        described[self] = programs, plain(values)
        launched(self, programs, *arguments, **constants)

    monkeypatch.setattr(again, "current_stream", lambda device: 0)
    for module in (again, product):
        monkeypatch.setattr(module, "lost", lambda *_: share)
    for module in (again, order):
        monkeypatch.setattr(module, "WIDEST", 128)  # so that a vector takes several programs
    with monkeypatch.context() as patch:
        patch.setattr(launch.Launcher, "__call__", watched)
        held = Held.empty(x, 300)
        forward = Forward(targets, 0, replace(transform, bias=bias), NEEDS, True)
        stats, normalizer = acts.product_statistics(x, w, forward, 300, held)
        gradient = tape.run(stats, view, totals, [1.0], vocabulary=300)
        backward = Backward(targets, 0, transform, normalizer, gradient.coefficients, stats.logp)
        multiple, features = acts.held_multiple_(held, backward, x=x)
        sums = [Scaling(features, features.dtype, rows=multiple)]
        sums += [Scaling(w, w.dtype)] if "weight" in into else []
        total = torch.zeros(300, device=DEVICE) if "bias" in into else None
        sums += [] if total is None else [Scaling(total, bias.dtype)]
        acts.scaled(sums, upstream)

    of = again.Again(tape, NEEDS, transform, 64, 300, x.device, bias)
    sent = again.Sent([Seen(), Seen(), Seen()], Seen(), Seen(), Seen())
    call = again.Call(of, sent, x, w, bias, targets)
    call.room[: 5 * call.pitch] = 0  # what act one would have written is read by the tape
    features = call.differentiate(
        lambda tape, found: tape.launch(found, view, totals, [1.0], vocabulary=300)
    )
    call.finish(features, w if "weight" in into else None, total, upstream)
    counts, values = described[of.product]
    assert [one.sent for one in sent.act_one] == [(count, values) for count in counts]
    assert sent.tape.sent == described[again.launch_tape]
    assert sent.act_two.sent == described[again.launch_rows]
    assert sent.scaled.sent == described[again.launch_scaled]


def keys_of(n: int, pad: int, shift: int) -> tuple[Any, dict[Any, Any]]:
    """The kind of a call, and what Triton would compile its kernels for."""
    x, w, targets, _ = head(max(n, 2), 64, 300)
    x = torch.cat([x, x.new_zeros(len(x), pad)], 1)[:n, :64]
    targets = torch.cat([targets.new_zeros(shift), targets % 300])[shift:][:n]
    found: dict[Any, Any] = {}

    def watched(self, programs, *arguments, **constants) -> None:
        found[self], _ = (self.describe or launch.describer(arguments))(constants, *arguments)

    held, some = Held.empty(x, 300), torch.ones(n, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.Launcher, "__call__", watched)
        stats, normalizer = acts.product_statistics(
            x, w, Forward(targets, 0, Transform(), NEEDS, True), 300, held
        )
        c = Coefficients(target=some, prob=some.clone())
        backward = Backward(targets, 0, Transform(), normalizer, c, stats.logp)
        multiple, features = acts.held_multiple_(held, backward, x=x)
        sums = [Scaling(features, features.dtype, rows=multiple), Scaling(w, w.dtype)]
        acts.scaled(sums, some.sum())
    of = again.Again(None, NEEDS, Transform(), 64, 300, x.device, None)
    kernels = [found[one] for one in (of.product, again.launch_rows, again.launch_scaled)]
    return of.kind(n, (x.stride(0), w.stride(0)), targets), kernels


def test_a_kind_is_as_fine_as_what_kernels_are_compiled_for() -> None:
    """Calls of one kind may send each other's kernels."""
    calls = [(n, pad, shift) for n in (1, 2, 15, 16, 17, 32) for pad in (0, 8) for shift in (0, 1)]
    known: dict[Any, Any] = {}
    for call in calls:
        kind, kernels = keys_of(*call)
        assert known.setdefault(kind, kernels) == kernels, call
    assert len(known) == 12  # one token, some, a multiple of 16; two strides; two alignments


@pytest.mark.parametrize("turn", range(6))
def test_what_a_kernel_runs_before_it_is_heeded(turn, monkeypatch) -> None:
    """A hook that comes after a call was recorded: kernels are launched through Triton again."""
    x, w, targets, _ = head(4, 64, 300)
    of = again.Again(None, NEEDS, Transform(), 64, 300, x.device, None)
    monkeypatch.setattr(of, "device", 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(again, "scaled", lambda sums, _: slow.append(1) or sums)
    monkeypatch.setattr(again, "current_stream", lambda device: 0)
    slow: list[int] = []
    launchers = of.product, again.launch_tape, again.launch_rows, again.launch_scaled
    kernels = [one.kernel for launcher in launchers for one in launcher.turns]
    assert len(kernels) == 6
    for kernel in kernels:
        monkeypatch.setattr(kernel, "pre_run_hooks", [])
    record = of.record("kind")
    record.update({launcher: [Seen() for _ in launcher.turns] for launcher in launchers})
    record.keep()
    make = of.known("kind")
    assert make is not None
    call = make(x, w, None, targets)
    kernels[turn].pre_run_hooks.append(print)
    assert of.known("kind") is None
    call.finish(x.clone(), None, None, torch.tensor(3.0, device=DEVICE))
    assert slow == [1] and of.kept["kind"].scaled.sent is None
    kernels[turn].pre_run_hooks.clear()
    assert of.known("kind") is not None
    call.finish(x.clone(), None, None, torch.tensor(3.0, device=DEVICE))
    assert slow == [1] and of.kept["kind"].scaled.sent is not None


class Stub:
    """A call that computes nothing."""

    of = SimpleNamespace(tape=SimpleNamespace(metrics=bool))

    def __init__(self, x: Tensor, *_: Tensor | None) -> None:
        self.terms, self.multiples = torch.arange(15.0).view(3, 5), torch.tensor([1.0, -2.0, 0.5])
        self.measured, self.loss = x.new_zeros(1), x.new_zeros(())

    def differentiate(self, _: Any) -> Tensor:
        return torch.zeros(3, 4)

    def statistic(self, _: str) -> Tensor:
        return self.measured

    def finish(self, *given: Tensor | None) -> list[Tensor | None]:
        return [*given[:3]]


def stub_of(wants: Wants) -> Any:
    return SimpleNamespace(
        plan=SimpleNamespace(pull="now"), again=Stub, confirm=bool,
        packing=SimpleNamespace(targets=torch.zeros(3).long()),
        bound=SimpleNamespace(launch=None, measured=None),
        prepared=SimpleNamespace(wants=wants, wide=torch.float32),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_takes_the_sums_of_terms_times_multiples(dtype) -> None:
    x, w, bias = torch.zeros(3, 4), torch.ones(5, 4), torch.zeros(5, dtype=dtype)
    for weight_learns, bias_learns in [(True, True), (False, True), (True, False)]:
        work = stub_of(Wants((True,), (weight_learns,), bias_learns))
        _, finish = loop._resent(work, (x, w, bias))
        terms, multiples = Stub(x).terms, Stub(x).multiples
        into_hidden, into_weight, into_bias = finish(None, None)
        assert torch.equal(into_hidden, terms @ w)
        assert (into_weight is not None) == weight_learns
        assert (into_bias is not None) == bias_learns
        assert into_bias is None or torch.equal(into_bias, terms.t() @ multiples)


def test_who_drops_the_loss_drops_the_gradients(monkeypatch) -> None:
    """No cycle waits for the collector of garbage, which knows nothing of a GPU's memory."""
    made: list[weakref.ref] = []

    def product(*_: Any, **more: Any) -> Tensor:
        made.append(weakref.ref(found := torch.zeros(3, 4)))
        return found

    monkeypatch.setattr(loop.products, "input_gradient", product)
    monkeypatch.setattr(loop.products, "add_weight_gradient_", lambda *_, **__: None)
    work = stub_of(Wants((True,), (True,)))
    x, w = torch.zeros(3, 4, requires_grad=True), torch.zeros(5, 4, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        loss, _ = loop.HeadLoss.apply(work, x, w, None)
        assert made[0]() is not None
        del loss, _
        assert made[0]() is None
    finally:
        gc.enable()


def result_of(n: int, seed: int, objective: hl.Objective, **more) -> tuple:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(n, 128, generator=generator, device=DEVICE).mul(2).bfloat16()
    w = torch.randn(4100, 128, generator=generator, device=DEVICE).mul(0.1).bfloat16()
    x.requires_grad_(), w.requires_grad_(more.get("trains", True))
    targets = torch.randint(4100, (n,), generator=generator, device=DEVICE)
    if more.get("masked"):
        targets[::3] = -100
    bias = None
    if (kind := more.get("bias")) is not None:
        bias = torch.randn(8200, generator=generator, device=DEVICE).to(kind)
        bias = bias[more.get("part", slice(4100))].requires_grad_(more.get("learns", True))
    head = hl.Head(w, bias=bias, temperature=more.get("temperature", 1.0))
    out = hl.head_loss(x, head, batch_of(targets, seed), objective, more.get("options"))
    upstream = torch.tensor([0.0, 3.0], device=DEVICE)[1] if more.get("odd") else 0.5
    out.loss.backward(out.loss.new_tensor(0.5) if upstream == 0.5 else upstream)
    metrics = {name: metric.value for name, metric in out.metrics.items()}
    into_bias = None if bias is None else bias.grad
    results = out.loss, x.grad, w.grad, into_bias, out.logps, out.entropies
    return out.plan.resends, results, metrics


@ON_GPU
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
        {"bias": torch.bfloat16},
        {"bias": torch.float32, "masked": True, "temperature": 0.7},
        {"bias": torch.bfloat16, "odd": True},
        {"bias": torch.bfloat16, "trains": False},
        {"bias": torch.float32, "learns": False},
        {"bias": torch.bfloat16, "learns": False, "trains": False},
    ],
    ids=[
        "plain", "masked", "frozen", "temperature", "unaligned upstream", "no metrics",
        "bias", "float32 bias", "bias and unaligned upstream", "bias and frozen weight",
        "frozen bias", "frozen weight and bias",
    ],
)  # fmt: skip
def test_calls_give_the_bits_of_the_loop(name, more, monkeypatch) -> None:
    objectives = {"ce": hl.cross_entropy(), "grpo": hl.grpo(), "gspo": hl.gspo()}
    objectives["mixed"] = hl.grpo() + 0.1 * hl.cross_entropy() + 1e-3 * hl.z_loss()
    sizes = (256, 1000, 2, 255, 256, 2048)
    sent = []
    evaluate = again.Call.differentiate
    monkeypatch.setattr(again.Call, "differentiate", lambda *of: (sent.append(1), evaluate(*of))[1])
    for _ in range(2):  # the first call of a kind describes
        found = [result_of(n, n, objectives[name], **more) for n in sizes]
    assert all(resends for resends, _, _ in found) and len(sent) >= len(sizes)
    monkeypatch.setattr(Prepared, "again", lambda *_: None)
    for n, (_, mine, metrics) in zip(sizes, found, strict=True):
        _, theirs, others = result_of(n, n, objectives[name], **more)
        for a, b in zip(mine, theirs, strict=True):
            assert (a is None and b is None) or torch.equal(a, b), n
        assert metrics.keys() == others.keys()
        assert all(torch.equal(metrics[k].nan_to_num(), others[k].nan_to_num()) for k in metrics)


@ON_GPU
@pytest.mark.parametrize("part", [slice(1, 4101), slice(0, 8200, 2)], ids=["unaligned", "strided"])
def test_a_bias_that_lies_otherwise_is_described(part) -> None:
    for _ in range(2):
        resends, *_ = result_of(64, 1, hl.cross_entropy(), bias=torch.bfloat16, part=part)
        assert not resends


@ON_GPU
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
        assert (a is b is c is None) or (torch.equal(a, b) and torch.equal(a, c))
