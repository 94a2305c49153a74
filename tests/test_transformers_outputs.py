"""After `apply(model)`, a model's output holds lazy logits that know how the head computes them;
any operation on the lazy logits computes their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_head_models import tiny
from torch.nn.functional import log_softmax
from torch.utils._pytree import tree_flatten, tree_map

transformers = pytest.importorskip("transformers")
from headloss.integrations.followed import Followed, HeadCall  # noqa: E402
from headloss.integrations.transformers import apply  # noqa: E402

IDS = torch.randint(2, 37, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record an entry each time logits are computed."""
    times: list[int] = []
    raw = HeadCall.raw
    monkeypatch.setattr(HeadCall, "raw", lambda *a: times.append(1) or raw(*a))
    return times


def outputs(training: bool, gradient: bool = True) -> tuple[Any, Any]:
    """Return the outputs of the stock model, and of the model after `apply`."""
    model = tiny("llama", use_cache=True).train(training)
    with torch.set_grad_enabled(gradient):
        stock = model(IDS, labels=IDS)
        apply(model)
        return stock, model(IDS, labels=IDS)


BY_NAME: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda out: out.logits,
    "item": lambda out: out["logits"],
    "get": lambda out: out.get("logits"),
    "get with a default": lambda out: out.get("logits", 0),
    "getattr": lambda out: getattr(out, "logits", None),
    "slice": lambda out: out[1:2][0],
    "place": lambda out: out[1],
    "items": lambda out: dict(out.items())["logits"],
    "**": lambda out: {**out}["logits"],
}


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_reading_logits_computes_them_once(training: bool, gradient: bool, computed: Any) -> None:
    for name in BY_NAME:
        stock, out = outputs(training, gradient)
        computed.clear()
        assert "logits" in out and not computed, name
        logits = BY_NAME[name](out)
        assert logits.shape == stock.logits.shape and logits.dtype == stock.logits.dtype
        assert logits.requires_grad == gradient and not computed, name
        assert torch.equal(logits + 0, stock.logits) and len(computed) == 1, name
        assert out.logits is logits and torch.equal(out.logits * 1, stock.logits)
        assert len(computed) == 1 and type(out) is type(stock), name


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_iterating_an_output_gives_the_stock_entries(training: bool, gradient: bool) -> None:
    stock, out = outputs(training, gradient)
    names = ["loss", "logits", "past_key_values"]
    assert [*stock] == names
    assert [*out] == [*out.keys()] == [*{**out}] == [*dict(out)] == names
    assert [name for name, _ in out.items()] == names == [n for n in out if out[n] is not None]
    parts = [out.to_tuple(), out[:], tuple(out.values()), tuple(dict(out).values())]
    for values in [*parts, tuple(v for _, v in out.items()), tree_flatten(out)[0]]:
        assert values[1] is not None and values[0] is out.loss
    assert {len(values) for values in parts} == {3} and len(out) == 3 and len(out[:2]) == 2


def goes_through(out: Any) -> Iterator[Any]:
    """Traverse outputs like DDP, FSDP2, accelerate, and code that searches for tensors."""
    from accelerate.utils.operations import convert_to_fp32
    from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor
    from torch.nn.parallel.distributed import _find_tensors

    yield [*out.keys(), *out.values(), *out.items(), *out, out[:], out[:2], out.to_tuple()]
    yield [{**out}, dict(out), "logits" in out, len(out), out.get("logits"), out["logits"]]
    tensors = _find_tensors(out)
    assert sum(isinstance(x, Followed) for x in tensors) == 1
    yield [(x.shape, x.dtype, x.device, x.grad_fn, x.requires_grad, x.numel()) for x in tensors]
    yield convert_to_fp32(out)
    yield tree_map(lambda x: _cast_fp_tensor(torch.float32, x), out)


def test_training_computes_no_logits_until_read(computed: list[int]) -> None:
    stock, out = outputs(True)
    for through in goes_through(out):
        if isinstance(through, dict):
            assert type(through) is type(out) and [*through] == [*out]
            torch.testing.assert_close(through.loss, stock.loss)
    out.loss.backward()
    assert not computed
    torch.testing.assert_close(convert_logits(out) + 0, stock.logits, rtol=1e-5, atol=1e-5)
    assert len(computed) == 1


def convert_logits(out: Any) -> Any:
    from accelerate.utils.operations import convert_to_fp32

    return convert_to_fp32(out).logits


def test_a_step_of_ddp_computes_no_logits(computed: list[int], tmp_path: Any) -> None:
    """A DDP step computes no logits, although DDP passes all outputs through its own function."""
    from torch.nn.parallel import DistributedDataParallel

    stock, _ = outputs(True)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        for settings in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            model = tiny("llama").train()
            apply(model)
            wrapped: Any = DistributedDataParallel(model, **settings)
            for _ in range(2):
                out = wrapped(input_ids=IDS, labels=IDS)
                out.loss.backward()
                torch.testing.assert_close(out.loss, stock.loss)
            assert not computed, settings
            torch.testing.assert_close(out.logits + 0, stock.logits, rtol=1e-5, atol=1e-5)
            computed.clear()
            # Delete the DDP model before the process group ends, since its reducer would deadlock
            # with gloo's thread.
            del wrapped, out
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", BY_NAME)
def test_gradients_flow_through_logits_of_a_training_step(name: str) -> None:
    model = tiny("llama").train()
    teacher = torch.randn(2, 7, 37, generator=torch.Generator().manual_seed(2)).softmax(-1)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        out = model(IDS, labels=IDS)
        with torch.no_grad():
            out.logits.argmax(-1)  # a metric without gradient
        loss = out.loss - (teacher * log_softmax(BY_NAME[name](out), -1)).mean()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    want = gradients()
    with apply(model):
        torch.testing.assert_close(gradients(), want, rtol=1e-5, atol=1e-6)


def test_an_output_is_changed_like_any() -> None:
    stock, out = outputs(True)
    out.logits = stock.logits * 2
    assert out.logits is out["logits"] is out[1]
    out["logits"] = stock.logits
    assert out.logits is stock.logits and dict(out)["logits"] is stock.logits
    assert dataclasses.replace(out, loss=None).logits is stock.logits
