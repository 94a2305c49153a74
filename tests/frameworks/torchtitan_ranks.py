"""torchtitan's own Llama on CPUs, with its chunked loss and with headloss's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from parity import stubbed
from torch import Tensor

import headloss as hl

B, L = 2, 16


def model_of(tied: bool = False, capped: bool = False) -> Any:
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
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    for layer in model.layers.values():
        layer.attention = Mean()
    return model


class Mean(torch.nn.Module):
    """The mean of all tokens so far, in place of attention, which needs a GPU."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1).to(x.dtype)[:, None]


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
    """What the trainer does in a step."""
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
    stubbed("wandb", "tensorboard", "torch.utils.tensorboard")
    from torchtitan.components.loss import ChunkedLossWrapper

    from headloss.integrations.torchtitan import HeadLossWrapper

    return SimpleNamespace(theirs=ChunkedLossWrapper, ours=HeadLossWrapper)


def sharded(tied: bool, half: bool) -> dict[str, float]:
    """FSDP2 over two ranks with different tokens, divided by the tokens of both."""
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
