"""torchtitan's model gives equal results with its own and with headloss's loss wrapper."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from parity import extracted, file_of
from worlds import World, world_of

if importlib.util.find_spec("spmd_types") is None:
    pytest.skip("torchtitan is not installed here", allow_module_level=True)

import torchtitan_ranks as case

import headloss as hl

NEAR = 2e-6


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_cross_entropy(tied: bool, capped: bool) -> None:
    """A training step with cross-entropy gives equal loss and gradients with torchtitan's and
    headloss's loss, also with a tied or soft-capped head."""
    kinds, model = case.both(), case.model_of(tied, capped)
    ids, labels = case.batch_of(1)
    count = torch.tensor(33)
    want = case.a_step(model, kinds.theirs.Config(num_chunks=4), ids, labels, count)
    got = case.a_step(model, kinds.ours.Config(), ids, labels, count)
    assert case.off(got[0], want[0]) < NEAR and case.off_all(got[1], want[1]) < NEAR


def test_validation() -> None:
    """Validation returns a sum without an autograd graph."""
    kinds, model = case.both(), case.model_of()
    ids, labels = case.batch_of(1)
    found = []
    for config in (kinds.theirs.Config(num_chunks=4), kinds.ours.Config()):
        loss_fn = config.build(compile_config=None)
        loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
        with torch.no_grad():
            found.append(loss_fn(model(ids), labels)[0])
    assert case.off(found[1], found[0]) < NEAR
    assert not found[1].requires_grad


def test_its_policy_loss() -> None:
    """torchtitan's DAPO on chunked log-probs agrees with headloss's term in one pass."""
    kinds, model = case.both(), case.model_of()
    from torchtitan.components.loss import BaseLoss, compute_logprobs

    call = vars(
        extracted(
            file_of("torchtitan", "experiments/rl/losses/dapo.py"),
            "DAPOLoss.__call__",
            _MAX_LOG_RATIO=10.0,
            compute_logprobs=compute_logprobs,
        )
    )["__call__"]

    class Dapo(BaseLoss):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseLoss.Config):
            pass

        def __init__(self, config: Any, *, compile_config: Any = None) -> None:
            self.ratio_clip_low, self.ratio_clip_high = 0.15, 0.25

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return call(self, *args, **kwargs)

    ids, labels = case.batch_of(1)
    labels, count, given = labels.clamp(min=0), torch.tensor(19.0), case.dapo(3)
    config = kinds.theirs.Config(num_chunks=4, loss_fn=Dapo.Config())
    want = case.a_step(model, config, ids, labels, count, **given)
    config = kinds.ours.Config(objective=case.OBJECTIVE)
    got = case.a_step(model, config, ids, labels, count, **given)
    assert case.off(got[0], want[0]) < 2e-5 and case.off_all(got[1], want[1]) < 2e-5
    with pytest.raises(ValueError, match=r"loss_fn: got Dapo, want it as objective"):
        kinds.ours.Config(loss_fn=Dapo.Config()).build(compile_config=None)


def test_documents_are_segments() -> None:
    """Documents, read from the positions, are the segments of a sequence-level policy loss."""
    kinds, model = case.both(), case.model_of()
    ids, labels = case.batch_of(1)
    given = case.dapo(3)
    positions = torch.tensor([[*range(5), *range(11)], [*range(16)]])
    term = hl.gspo(epsilon_low=0.1, epsilon_high=0.1)
    config = kinds.ours.Config(objective=term)
    loss, _ = case.a_step(model, config, ids, labels, None, positions=positions, **given)
    model._skip_lm_head = False
    segments = hl.Segments.from_lengths([5, 11, 16])
    targets = labels.masked_fill(~given["loss_mask"], -100).flatten()
    batch = hl.Batch(
        targets,
        segments,
        advantages=given["advantages"].flatten(),
        old_logps=given["generator_logprobs"].flatten(),
    )
    want = hl.logits_loss(model(ids).flatten(0, 1), batch, term).loss
    assert case.off(loss, want) < NEAR


@dataclass
class Term:
    """A stub with the interface of torchtitan's loss terms after version 0.3."""

    pred: Any
    labels: Any
    inputs: Any
    weight: float


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_multi_token_prediction(layout: str) -> None:
    """Multi-token prediction with two depths agrees with torchtitan's loss of materialised logits,
    for hidden states in rows [B, L, H] and for flattened hidden states.

    torchtitan 0.3 passes a list of [B, L, H] with positions, while later versions pass a tuple of
    flattened tensors with masks.
    """
    kinds, model = case.both(), case.model_of()
    from torchtitan.models.deepseek_v3.mtp import MTPLoss, roll_mtp_sequence

    torch.manual_seed(3)
    rows = 1 if layout == "flat" else case.B
    hidden = torch.randn(3, rows, case.L, model.lm_head.in_features, requires_grad=True)
    labels = case.batch_of(1)[1][:rows]
    positions = torch.tensor([[*range(5), *range(11)], [*range(16)]])[:rows]
    count, inner = torch.tensor(33.0), MTPLoss.Config(mtp_scale=0.4)
    outputs = [model.lm_head(x) for x in hidden]
    loss, _ = inner.build()(outputs, labels, count, positions=positions)
    want = [loss.detach(), *torch.autograd.grad(loss, [hidden, model.lm_head.weight])]
    wrapper = kinds.ours.Config(loss_fn=inner).build(compile_config=None)
    wrapper.set_lm_head(model.lm_head)
    pred: Any = list(hidden)
    if layout == "flat":
        shifts = [
            roll_mtp_sequence(labels, shift=k, fill_value=-100, positions=positions) for k in (1, 2)
        ]

        def terms(pred: Any, labels: Any, **inputs: Any) -> list[Term]:
            assert len(pred) == 5 and labels.shape == (case.L,)
            others = zip(pred[1:3], shifts, strict=True)
            return [Term(pred[0], labels, {}, 1.0), *(Term(x, y[0], {}, 0.2) for x, y in others)]

        wrapper.loss_fn._build_loss_terms = terms
        masks = [x[0] != -100 for x in shifts]
        pred, labels, positions = (*hidden[:, 0], *masks), labels[0], positions[0]
    loss, _ = wrapper(pred, labels, count, positions=positions)
    got = [loss.detach(), *torch.autograd.grad(loss, [hidden, model.lm_head.weight])]
    assert max(case.off(a, b) for a, b in zip(got, want, strict=True)) < NEAR
    with pytest.raises(ValueError, match="pred: got Tensor, want main rows and depths of MTPLoss"):
        wrapper(hidden[0], labels, count, positions=positions)
    wrapper = kinds.ours.Config(objective=hl.cross_entropy()).build(compile_config=None)
    wrapper.set_lm_head(model.lm_head)
    with pytest.raises(ValueError, match="want one tensor without MTPLoss"):
        wrapper(pred, labels, count, positions=positions)


def test_flat_tokens() -> None:
    """A call with flattened positions finds the same document boundaries, so the same segments, as
    a call with rows."""
    kinds, model = case.both(), case.model_of()
    ids, labels = case.batch_of(1)
    given, model._skip_lm_head = case.dapo(3), True
    given["positions"] = torch.tensor([[*range(5), *range(11)], [*range(16)]])
    term = hl.gspo(epsilon_low=0.1, epsilon_high=0.1)
    loss_fn = kinds.ours.Config(objective=term).build(compile_config=None)
    loss_fn.set_lm_head(model.lm_head)
    hidden = model(ids)
    want, _ = loss_fn(hidden, labels, None, **given)
    flat = {name: value.flatten() for name, value in given.items()}
    got, _ = loss_fn(hidden.flatten(0, 1), labels.flatten(), None, **flat)
    assert case.off(got, want) < NEAR
    assert len(loss_fn.held) == 2
    del want, got
    assert not loss_fn.held


def test_refusals() -> None:
    """A loss called without a head, or with a head of an unsupported class, raises an error."""
    kinds = case.both()
    loss_fn = kinds.ours.Config().build(compile_config=None)
    hidden, labels = torch.zeros(1, 2, 4), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="lm_head: is not set"):
        loss_fn(hidden, labels)
    loss_fn.set_lm_head(torch.nn.Bilinear(4, 4, 8))
    with pytest.raises(TypeError, match="lm_head: got Bilinear, want Linear, CastLinear or Soft"):
        loss_fn(hidden, labels)
    assert "forward" not in vars(loss_fn.lm_head)


def test_fsdp2() -> None:
    """FSDP2 training agrees in float32 and in bfloat16 (where torchtitan rounds logits), with tied
    and untied embeddings."""
    with world_of(2) as world:
        for tied, half in itertools.product((False, True), repeat=2):
            for found in world.run(case.sharded, tied, half, seconds=300):
                assert max(found.values()) < (2e-2 if half else NEAR), found


@pytest.fixture(scope="module")
def world():
    with world_of(2) as made:
        yield made


def test_data_parallel_dtensors(world: World) -> None:
    """Losses and gradients agree with torchtitan's under data parallelism with DTensor
    parameters."""
    for found in world.run(case.of_data, seconds=300):
        assert max(found.values()) < NEAR, found


@pytest.mark.parametrize("kind", ["ScheduleGPipe", "Schedule1F1B"])
def test_pipelines(world: World, kind: str) -> None:
    """In a pipeline schedule the head's gradient is reduced once per step, and only one gradient is
    in memory at a time."""
    for found in world.run(case.pipelined, kind, seconds=300):
        assert found["heads"] == 1 and found["gradient"] < 1e-12, found
        later = "recompute" if kind == "ScheduleGPipe" else "one_pass"
        assert found["plans"] == ["one_pass", *[later] * 3], found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("backend", ["partial_dtensor", "full_dtensor", "spmd_types"])
def test_tensor_parallel(world: World, backend: str, spread: bool, tied: bool) -> None:
    """Losses and gradients agree with torchtitan's loss of sharded logits on two tensor-parallel
    ranks."""
    for found in world.run(case.tensor_parallel, backend, spread, tied, seconds=300):
        assert max(found.values()) < NEAR, found


@pytest.mark.parametrize("spread", [False, True])
def test_data_and_tensor_parallel(spread: bool) -> None:
    """Losses and gradients agree on four ranks: two-way tensor parallelism times two-way data
    parallelism."""
    with world_of(4) as four:
        for found in four.run(case.tensor_parallel, "full_dtensor", spread, False, 2, seconds=300):
            assert max(found.values()) < NEAR, found
