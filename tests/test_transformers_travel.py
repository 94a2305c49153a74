"""A model after `apply(model)` still computes the objective after saving, pickling, copying, or
sending to a process."""

from __future__ import annotations

import copy
import io
import multiprocessing as mp
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import travel
from test_head_models import tiny

import headloss as hl

transformers = pytest.importorskip("transformers")
from headloss.integrations.transformers import apply, remove  # noqa: E402

IDS = torch.randint(2, 37, (2, 7), generator=torch.Generator().manual_seed(0))


def saved(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle in Python": lambda model: pickle._loads(pickle._dumps(model)),  # type: ignore[attr-defined]
    "oldest protocol": lambda model: pickle.loads(pickle.dumps(model, 2)),
    "torch.save": saved,
    "spawn": lambda model: pickle.loads(ForkingPickler.dumps(model)),
    "deepcopy": copy.deepcopy,
    "twice": lambda model: copy.deepcopy(saved(saved(model))),
}
TERMS = {
    "smoothing": hl.cross_entropy(label_smoothing=0.5),
    "sum": hl.cross_entropy().over("sequence_mean") + 0.1 * hl.z_loss().weighted("w"),
    "of a module": travel.watched(),
}


def call(model: Any, **more: Any) -> Any:
    out = model(input_ids=IDS, labels=IDS, **more)
    model.zero_grad()
    out.loss.backward()
    return out.loss.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("way", WAYS)
def test_a_copied_or_pickled_model_is_still_applied(way: str, terms: str) -> None:
    model, options = tiny("llama").train(), hl.Options(schedule="recompute")
    plain = call(model)
    applied = apply(model, TERMS[terms], options, fields=("w",))
    fields = {"w": torch.ones(2, 7)}
    want = call(model, **fields)
    twin = WAYS[way](model)
    torch.testing.assert_close(call(twin, **fields), want, rtol=0, atol=0)
    theirs = vars(twin)["_headloss"]
    assert theirs is not applied and theirs.model is twin
    assert theirs.objective == applied.objective and theirs.options == options
    assert theirs.fields == ("w",) and theirs.metrics is not None
    with pytest.raises(ValueError, match=r"applied to it already; call remove\(model\) first"):
        apply(twin)
    with torch.no_grad():
        # Zeroing the copy's head must not change the original.
        twin.lm_head.weight = torch.nn.Parameter(torch.zeros(37, 16))
    torch.testing.assert_close(call(model, **fields), want, rtol=0, atol=0)
    twin.load_state_dict(model.state_dict())
    remove(twin)
    assert not {"forward", "_headloss"} & vars(twin).keys()
    torch.testing.assert_close(call(twin), plain)
    with apply(twin, TERMS[terms], options, ("w",)):
        torch.testing.assert_close(call(twin, **fields), want, rtol=0, atol=0)
    torch.testing.assert_close(call(model, **fields), want, rtol=0, atol=0)
    remove(model)


def test_with_what_wraps_it() -> None:
    """After `apply(model)`, a copied or pickled model works inside PEFT's model and with
    accelerate's mixed-precision forward."""
    peft = pytest.importorskip("peft")
    accelerate = pytest.importorskip("accelerate")
    term = hl.cross_entropy(label_smoothing=0.5)
    model = peft.get_peft_model(tiny("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    apply(model, term)
    want = model(input_ids=IDS, labels=IDS).loss
    for way in WAYS.values():
        twin = way(model)
        torch.testing.assert_close(twin(input_ids=IDS, labels=IDS).loss, want)
        remove(twin)
    model = tiny("llama")
    apply(model, term)
    want = model(input_ids=IDS, labels=IDS).loss
    accelerate.state.AcceleratorState._reset_state(True)  # clears state left by other tests
    prepared = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)
    accelerate.state.AcceleratorState._reset_state(True)
    rounded = prepared(input_ids=IDS, labels=IDS).loss
    twin = copy.deepcopy(prepared)
    torch.testing.assert_close(twin(input_ids=IDS, labels=IDS).loss, rounded)
    # pickling drops accelerate's mixed precision, with and without headloss
    twin = pickle.loads(pickle.dumps(prepared))
    torch.testing.assert_close(twin(input_ids=IDS, labels=IDS).loss, want)
    remove(twin)


def test_terms_that_pickle_does_not_take_are_named() -> None:
    @hl.term
    def of_this_test(stats, batch):
        return -stats.logp

    model = tiny("llama")
    apply(model, of_this_test())
    with pytest.raises((AttributeError, pickle.PicklingError), match="of_this_test"):
        pickle.dumps(model)
    want = call(model)
    torch.testing.assert_close(call(copy.deepcopy(model)), want)
    remove(model)
    torch.testing.assert_close(call(WAYS["pickle"](model)), want)


def _loss(model: Any, results: Any) -> None:
    results.put(model(input_ids=IDS, labels=IDS).loss.item())


@pytest.mark.slow
def test_in_a_process_that_is_spawned() -> None:
    model, context = tiny("llama"), mp.get_context("spawn")
    apply(model, TERMS["smoothing"])
    results = context.Queue()
    process = context.Process(target=_loss, args=(model, results))
    process.start()
    assert results.get(timeout=120) == pytest.approx(call(model)[0].item(), rel=1e-6)
    process.join()
