"""A call with `Options(static=True)` never reads the device, and can be captured in a CUDA graph.

N positions, S segments, H hidden width, V vocabulary. Tests on any device check that no operator
reads the device; tests of capture, replay and equal bits need a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import headloss as hl
from headloss.testing import trained_looking

N, S, H, V = 512, 8, 256, 1000
aten = torch.ops.aten

OBJECTIVES = {
    "grpo": hl.grpo(),
    "gspo": hl.gspo(),
    "ce + z-loss": hl.cross_entropy() + 1e-4 * hl.z_loss(),
    "everything": hl.dapo().corrected(mode="token_truncate")
    + hl.gspo_token().off_policy_masked(0.1)
    + 0.1 * hl.kl(estimator="k3")
    - 0.01 * hl.entropy()
    + hl.cross_entropy(label_smoothing=0.1).where("kept"),
    "pairs": hl.dpo() + 0.5 * hl.cispo(),
    "quantile": hl.grpo().top_entropy(quantile=0.3),
    "distillation": hl.distillation(divergence="js", temperature=2.0) + hl.cross_entropy(),
}
OPTIONS = {
    "auto": hl.Options(static=True),
    "chunks": hl.Options(static=True, chunk_tokens=128),
    "recompute": hl.Options(static=True, schedule="recompute"),
    "declared": hl.Options(static=True, upstream=1.0),
}


def inputs(seed: int, device: str, dtype: torch.dtype, tokens=N, width=H, vocabulary=V):
    """Return all inputs of a step by name; scored positions and segments depend on the seed."""
    hidden, weight, targets = trained_looking(tokens, width, vocabulary, dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    with torch.no_grad():
        z = hidden.float() @ weight.float().t()
        logps = z.log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    targets[torch.rand(tokens, generator=generator) < 0.2] = -100
    near = {f"{name}_logps": logps + 0.2 * noise(tokens) for name in ("old", "ref", "sampling")}
    found = {
        "hidden": hidden,
        "weight": weight,
        "targets": targets,
        "ids": torch.randint(S, (tokens,), generator=generator).sort().values,
        "advantages": noise(S),
        "kept": torch.rand(tokens, generator=generator) < 0.5,
        "teacher_logits": (z + noise(tokens, vocabulary)).to(dtype),
        **near,
    }
    hidden[targets == -100] = float("nan")
    return {name: value.to(device) for name, value in found.items()}


def step(given: dict[str, Tensor], objective, options) -> dict[str, Tensor]:
    """Return all outputs and gradients of one call."""
    rest = {k: v for k, v in given.items() if k not in ("hidden", "weight", "targets", "ids")}
    batch = hl.Batch(given["targets"], hl.Segments.from_ids(given["ids"], count=S), **rest)
    leaves = [given[name].requires_grad_() for name in ("hidden", "weight")]
    out = hl.head_loss(leaves[0], hl.Head(leaves[1]), batch, objective, options)
    gradients = torch.autograd.grad(out.loss, leaves)
    metrics = {name: metric.value for name, metric in out.metrics.items()}
    named = dict(zip(("dX", "dW"), gradients, strict=True))
    return {"loss": out.loss.detach(), "logps": out.logps, **out.terms, **metrics, **named}


class NoReads(TorchDispatchMode):
    """Raise at every operator that reads or waits for a GPU: reads of values, sizes that depend on
    values, and tensors made from Python numbers (copies from pageable memory)."""

    READS = frozenset(
        {
            aten._local_scalar_dense,
            aten.equal,
            aten.is_nonzero,
            aten.masked_select,
            aten.nonzero,
            aten.unique_dim,
            aten._unique2,
            aten.bincount,
        }
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        masks = args[1] if packet in (aten.index, aten.index_put, aten.index_put_) else ()
        by_mask = any(t is not None and t.dtype == torch.bool for t in masks)
        by_mask |= func is aten.repeat_interleave.Tensor
        # filling a tensor with one Python number reads nothing
        of_numbers = packet is aten.lift_fresh and args[0].dim() > 0
        if packet in self.READS or by_mask or of_numbers:
            raise AssertionError(f"{func} reads the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_is_read(name, options):
    given = inputs(0, "cpu", torch.float32, tokens=40, width=8, vocabulary=33)
    # a first call, which tries out each term on a small batch
    step(given, OBJECTIVES[name], OPTIONS[options])
    with NoReads():
        step(given, OBJECTIVES[name], OPTIONS[options])


@pytest.mark.usefixtures("skip_small_rows")
def test_reads_are_noticed():
    given = inputs(0, "cpu", torch.float32, tokens=40, width=8, vocabulary=33)
    with pytest.raises(AssertionError, match="reads the device"), NoReads():
        step(given, OBJECTIVES["grpo"], hl.Options())
    for read in (lambda: torch.zeros(2).new_tensor([1.0, 2.0]), lambda: torch.tensor([1.0])):
        with pytest.raises(AssertionError), NoReads():
            read()


@pytest.fixture
def no_synchronisation():
    """Let a test turn on PyTorch's error at GPU synchronisation, and restore the setting
    afterwards."""
    yield lambda mode: torch.cuda.set_sync_debug_mode(mode)
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


def assert_same(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    different = [name for name, value in want.items() if not torch.equal(found[name], value)]
    assert found.keys() == want.keys() and not different, different


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_capture_and_replay(name, options, dtype, no_synchronisation):
    """Two graph replays with new inputs in the captured buffers give the bits of eager calls."""
    objective, options = OBJECTIVES[name], OPTIONS[options]
    given = inputs(0, "cuda", dtype)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(given, objective, options)
        no_synchronisation("error")
        step(given, objective, options)
        no_synchronisation("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(given, objective, options)
    for seed in (1, 2):
        with torch.no_grad():
            for key, value in inputs(seed, "cuda", dtype).items():
                given[key].copy_(value)
        graph.replay()
        once = {key: value.clone() for key, value in found.items()}
        want = step(given, objective, options)
        graph.replay()
        assert all(value.isfinite().all() for value in want.values())
        assert_same(once, want)
        assert_same(found, want)
