"""Comparison of torchtitan's Llama on CPUs with its chunked loss and with headloss's loss."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from parity import stubbed
from torch import Tensor

import headloss as hl

B, L = 2, 16


def model_of(tied: bool = False, capped: bool = False, spread: bool | None = None) -> Any:
    """Return a one-layer model under tensor parallelism, with sequence parallelism if `spread` is
    True."""
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.models.muse_glimmer.model import SoftCappedLinear

    config = llama3_configs["debugmodel"]("varlen")
    config.enable_weight_tying = tied
    config.layers = config.layers[:1]
    if capped:
        linear = config.lm_head
        config.lm_head = SoftCappedLinear.Config(
            in_features=linear.in_features,
            out_features=linear.out_features,
            param_init=linear.param_init,
            output_multiplier=1.7,
            output_soft_cap_temp=3.0,
        )
    if spread is not None:
        from torchtitan.models.llama3.sharding import set_llama3_sharding_config

        set_llama3_sharding_config(config, enable_sp=spread)
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    for name, layer in model.layers.items():
        if spread is None:
            layer.attention = Mean()
        else:  # only shard embedding, norm and head
            model.layers[name] = Squashed()
    return model


class Mean(torch.nn.Module):
    """The mean of all previous tokens, in place of attention, which needs a GPU."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1).to(x.dtype)[:, None]


class Squashed(torch.nn.Module):
    """A tanh in place of a decoder layer, which accepts plain tensors and DTensors."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return torch.tanh(x)


def batch_of(seed: int, vocabulary: int = 2048) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    ids, labels = torch.randint(vocabulary, (2, B, L))
    return ids, labels.masked_fill(torch.rand(B, L) > 0.7, -100)


def off(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def off_all(got: list[Tensor], want: list[Tensor]) -> float:
    assert len(got) == len(want) and len(got) > 5
    return max(off(a, b) for a, b in zip(got, want, strict=True))


def a_step(
    model: Any, config: Any, ids: Tensor, labels: Tensor, count: Any, **given: Any
) -> tuple[Tensor, list[Tensor]]:
    """Run a training step as torchtitan's trainer does."""
    loss_fn = config.build(compile_config=None)
    loss_fn.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    loss, _ = loss_fn(model(ids), labels, count, **given)
    loss.backward()
    gradients = [whole(p.grad).clone() for p in model.parameters()]
    model.zero_grad()
    return loss.detach(), gradients


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def both() -> SimpleNamespace:
    stubbed("torchtitan", "wandb", "tensorboard", "torch.utils.tensorboard")
    from torchtitan.components.loss import ChunkedLossWrapper

    from headloss.integrations.torchtitan import HeadLossWrapper

    return SimpleNamespace(theirs=ChunkedLossWrapper, ours=HeadLossWrapper)


def sharded(tied: bool, half: bool) -> dict[str, float]:
    """Compare FSDP2 over two ranks with different data; losses are divided by the tokens of both
    ranks."""
    from torch.distributed import get_rank
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    kinds, mesh = both(), init_device_mesh("cpu", (2,))
    model = model_of(tied)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32
    )
    parts = list(model.layers.values()) if tied else [*model.layers.values(), model.lm_head]
    for part in parts:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    batches = [batch_of(seed) for seed in (1, 2)]
    count = torch.stack([(labels != -100).sum() for _, labels in batches]).sum()
    ids, labels = batches[get_rank()]
    want = a_step(model, kinds.theirs.Config(num_chunks=4), ids, labels, count)
    got = a_step(model, kinds.ours.Config(), ids, labels, count)
    again = a_step(model, kinds.ours.Config(), ids, labels, count)
    assert torch.equal(got[0], again[0])
    return {"loss": off(got[0], want[0]), "gradient": off_all(got[1], want[1])}


def dapo(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "generator_logprobs": -7.6 + 0.3 * torch.randn(B, L),
        "advantages": torch.randn(B, L),
        "loss_mask": torch.rand(B, L) > 0.4,
    }


OBJECTIVE = hl.dapo(epsilon_low=0.15, epsilon_high=0.25)


def of_data() -> dict[str, float]:
    """Compare headloss with torchtitan's loss under the backend "full_dtensor" and data parallelism
    alone: parameters are DTensors, and each rank has different tokens."""
    from torchtitan.distributed import full_dtensor, parallel_dims
    from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend

    kinds, parallel_dims.device_type = both(), "cpu"
    set_spmd_backend("partial_dtensor")
    model = model_of(spread=False)
    set_spmd_backend("full_dtensor")
    try:
        dims = parallel_dims.ParallelDims(
            dp_replicate=2, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=2,
            spmd_backend="full_dtensor",
        )  # fmt: skip
        dims.build_mesh()
        with get_spmd_context(parallel_dims=dims)():
            model.parallelize(dims)
            ids, labels = batch_of(1 + torch.distributed.get_rank())
            count = (labels != -100).sum()
            torch.distributed.all_reduce(count)
            ids, labels, _ = full_dtensor.parallelize_inputs(dims, ids, labels, {})
            names = model.lm_head.weight.device_mesh.mesh_dim_names
            want = a_step(model, kinds.theirs.Config(num_chunks=4), ids, labels, count)
            got = a_step(model, kinds.ours.Config(), ids, labels, count)
    finally:
        set_spmd_backend("spmd_types")
    assert "tp" not in names, names
    worst = max(off(a, b) for a, b in zip(got[1], want[1], strict=True))
    return {"loss": off(whole(got[0]), whole(want[0])), "gradient": worst}


def pipelined(kind: str) -> dict[str, Any]:
    """Compare FSDP2 over two ranks in a torch pipeline schedule of one stage and four
    micro-batches.

    Return the sizes of the reduce-scatters of the head's gradient, the schedules that headloss
    chose, and the gradient differences from torchtitan's wrapper. All computations, torchtitan's
    loss included, are float64.
    """
    from torch import distributed
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from headloss.integrations import torchtitan as adapter

    kinds = both()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    model, rounded = model_of().double(), Tensor.float
    for part in (*model.layers.values(), model.lm_head, model):
        fully_shard(part, mesh=mesh["dp"])
    model._skip_lm_head = True
    torch.manual_seed(7 + distributed.get_rank())
    ids, labels = torch.randint(2048, (2, 8, L))
    rows, found, scattered = 2048 * model.lm_head.in_features, {}, []
    name = "reduce_scatter_single"  # the collective that FSDP2 calls in torch 2.13
    name = name if hasattr(distributed, name) else "reduce_scatter_tensor"
    scatter, called, plans = getattr(distributed, name), adapter.head_loss, []

    def counted(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        scattered.append(input.numel())
        return scatter(output, input, *args, **kwargs)

    def noted(*args: Any) -> Any:
        out = called(*args)
        plans.append(out.plan.schedule)
        return out

    adapter.head_loss = noted
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    home: Any = importlib.import_module("torchtitan.components.loss")
    home.torch = SimpleNamespace(**{**vars(torch), "float32": torch.float64})
    setattr(distributed, name, counted)
    try:
        for side, config in (
            ("theirs", kinds.theirs.Config(num_chunks=4)),
            ("ours", kinds.ours.Config()),
        ):
            loss_fn = config.build(compile_config=None)
            loss_fn.set_lm_head(model.lm_head)
            stage = pipelining.PipelineStage(
                model, 0, 1, torch.device("cpu"), group=mesh["pp"].get_group()
            )
            schedule = getattr(pipelining, kind)(
                stage, 4, loss_fn=lambda x, y, f=loss_fn: f(x, y, torch.tensor(8 * L))[0],
                scale_grads=False,
            )  # fmt: skip
            scattered.clear()
            plans.clear()
            schedule.step(ids, target=labels)
            heads = sum(size == rows for size in scattered)
            found[side] = (heads, [whole(p.grad).clone() for p in model.parameters()])
            model.zero_grad()
    finally:
        adapter.head_loss, home.torch = called, torch
        Tensor.float = rounded  # type: ignore[method-assign]
        setattr(distributed, name, scatter)
    (_, want), (heads, got) = found["theirs"], found["ours"]
    return {"heads": heads, "plans": plans[-4:], "gradient": off_all(got, want)}


def tensor_parallel(backend: str, spread: bool, tied: bool, data: int = 1) -> dict[str, float]:
    """Compare torchtitan's loss of sharded logits with headloss's on two tensor-parallel ranks,
    replicated for `data` data-parallel groups."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.distributed import full_dtensor, parallel_dims
    from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend

    kinds, parallel_dims.device_type = both(), "cpu"
    # torchtitan's other backends need a device mesh to draw random numbers
    set_spmd_backend("partial_dtensor")
    model = model_of(tied, spread=spread)
    set_spmd_backend(backend)
    try:
        dims = parallel_dims.ParallelDims(
            dp_replicate=data, dp_shard=1, cp=1, tp=2, pp=1, ep=1, world_size=2 * data,
            spmd_backend=backend,
        )  # fmt: skip
        dims.build_mesh()
        with get_spmd_context(parallel_dims=dims)():
            model.parallelize(dims)
            if tied:  # ties again like `init_states`
                model.tok_embeddings.weight = model.lm_head.weight
            ids, labels = batch_of(1 + torch.distributed.get_rank() // 2)
            count = (labels != -100).sum()
            torch.distributed.all_reduce(count)
            count //= 2  # each row of data is on two ranks, so the sum counts each token twice
            if backend == "full_dtensor":
                ids, labels, _ = full_dtensor.parallelize_inputs(dims, ids, labels, {})
            inner = CrossEntropyLoss.Config(global_vocab_size=2048)
            config = kinds.theirs.Config(num_chunks=4, loss_fn=inner)
            want = a_step(model, config, ids, labels, count)
            got = a_step(model, kinds.ours.Config(), ids, labels, count)
    finally:
        set_spmd_backend("spmd_types")
    assert len(got[1]) == len(want[1]) == 3 - tied
    worst = max(off(a, b) for a, b in zip(got[1], want[1], strict=True))
    return {"loss": off(whole(got[0]), whole(want[0])), "gradient": worst}
