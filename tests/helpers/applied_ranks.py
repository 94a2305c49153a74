"""FSDP2 tests of a model after `apply(model)` on two ranks with different rows: three SGD steps
change the parameters as unsharded training on the mean loss does.

Under gloo, models are in float64 on a CPU; under NCCL, in float32 on GPUs, where Triton's kernels
run."""

from __future__ import annotations

import copy
from typing import Any

import torch
from test_head_models import tiny
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import headloss as hl
from headloss.integrations.transformers import apply

TERMS = hl.cross_entropy(label_smoothing=0.2) + 0.1 * hl.z_loss()
STEPS = 3


def on_gpus() -> bool:
    return distributed.get_backend() == "nccl"


def placed(model: Any) -> Any:
    return model.train().cuda() if on_gpus() else model.train().double()


def rows(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    ids = torch.randint(2, 37, (2, 7), generator=generator)
    return ids.cuda() if on_gpus() else ids


def causal(adapters: bool) -> Any:
    model = tiny("llama")
    if not adapters:
        return placed(model)
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    return placed(get_peft_model(model, config))


def assert_close(got: Tensor, want: Tensor) -> None:
    bounds = {"rtol": 1e-4, "atol": 1e-5} if on_gpus() else {}
    torch.testing.assert_close(got, want, **bounds)


def sharded(model: Any, units: str) -> Any:
    """Shard a model by FSDP2. If `units` is "root", the head belongs to the FSDP group of the root
    module; if `units` is "group", the head and the last norm form a group; otherwise the head is a
    group by itself."""
    mesh = init_device_mesh("cuda" if on_gpus() else "cpu", (distributed.get_world_size(),))
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    if units != "root":
        head = base.get_output_embeddings()
        fully_shard([base.model.norm, head] if units == "group" else head, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model: Any, optimizer: Any, ranks: list[int], index: int) -> Tensor:
    optimizer.zero_grad()
    losses = [model(input_ids=rows(r, index), labels=rows(r, index)).loss for r in ranks]
    loss = sum(losses) / len(ranks)
    loss.backward()
    optimizer.step()
    return losses[-1].detach()


def trains(units: str, adapters: bool, compiled: bool = False) -> None:
    alone = causal(adapters)
    model = sharded(copy.deepcopy(alone), units)
    apply(alone, TERMS)
    applied = apply(model, TERMS)
    backend = "inductor" if on_gpus() and units == "root" else "eager"
    called = torch.compile(model, backend=backend) if compiled else model
    rank, every = distributed.get_rank(), list(range(distributed.get_world_size()))
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (alone, model)]
    for index in range(STEPS):
        with torch.no_grad():
            want = alone(input_ids=rows(rank, index), labels=rows(rank, index)).loss
        step(alone, optimizers[0], every, index)
        assert_close(step(called, optimizers[1], [rank], index), want)
    assert applied.output is not None
    start = dict(causal(adapters).named_parameters())
    trained = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        got = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert_close(got.detach(), trained[name].detach())
        assert not trained[name].requires_grad or not torch.equal(got, start[name]), name
    with torch.no_grad():  # logits of an evaluation
        ids = rows(rank, STEPS)
        got, want = (m.eval()(input_ids=ids, labels=ids).logits for m in (model, alone))
    assert_close(got + 0, want + 0)
