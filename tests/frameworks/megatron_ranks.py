"""Comparison of Megatron-Core's `GPTModel` on CPUs with and without headloss, run on every rank.

R ranks share the vocabulary; b rows of s positions.
"""

from __future__ import annotations

import contextlib
import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from worlds import World

import headloss as hl

B, S, H, V = 2, 8, 16, 64
NEAR = 2e-6  # largest allowed error: Megatron and headloss both compute in float32


def parallel(size: int, **more: int) -> None:
    """Initialise Megatron's groups with `size` ranks of tensor parallelism, on CPU devices."""
    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.cuda.current_stream = lambda: None  # type: ignore[assignment]
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(size, **more)
    # Megatron's random number tracker needs a GPU; replace it, since the models have no dropout.
    random.CudaRNGStatesTracker.fork = lambda *a, **k: contextlib.nullcontext()  # type: ignore[assignment]


def check(world: World, function: Any, *args: Any, near: float = NEAR) -> None:
    """Run `function` on every rank, and check that all differences that it returns are below the
    tolerance `near`."""
    for found in world.run(function, *args, seconds=300):
        assert max(found.values()) < near, found


def config_of(size: int, **options: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    given: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": H,
        "num_attention_heads": 4,
        "tensor_model_parallel_size": size,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "params_dtype": torch.float32,
    }
    return TransformerConfig(**{**given, **options})


def model_of(config: Any, tied: bool = False, attention: bool = True, length: int = S) -> Any:
    """Return Megatron's model with one layer and no norms, since torch's norm refuses sequence
    parallelism."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
    if not attention:  # Megatron's plain attention refuses packed sequences
        layer.submodules.self_attention, layer.submodules.self_attn_bda = IdentityOp, IdentityFuncOp
    torch.manual_seed(0)
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer], layer_norm=None),
        vocab_size=V,
        max_sequence_length=length,
        share_embeddings_and_output_weights=tied,
    )


def inputs(b: int = B, s: int = S, seed: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "input_ids": torch.randint(V, (b, s)),
        "position_ids": torch.arange(s).expand(b, s),
        "attention_mask": torch.ones(s, s, dtype=torch.bool).triu(1)[None, None],
        "labels": torch.randint(V, (b, s)),
    }


def mask_of(b: int = B, s: int = S) -> Tensor:
    torch.manual_seed(7)
    return (torch.rand(b, s) > 0.4).float()


def gradients(model: Any) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def off(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def worst(got: list[Tensor], want: list[Tensor]) -> float:
    assert len(got) == len(want) and len(got) > 4
    return max(off(a, b) for a, b in zip(got, want, strict=True))


# ---------------------------------------------------------------------- Megatron's loss function


def token_losses(size: int, spread: bool, tied: bool, more: dict[str, Any]) -> dict[str, float]:
    """Compare Megatron's and headloss's token losses, and the gradients of their masked mean."""
    from headloss.integrations.megatron import TokenLosses

    parallel(size)
    model = model_of(config_of(size, sequence_parallel=spread, **more), tied)
    given, mask = inputs(), mask_of()
    found = []
    for processor in (None, TokenLosses()):
        losses = model(**given, loss_mask=mask, output_processor=processor)
        assert losses.shape == (B, S)
        (3 * (losses * mask).sum() / mask.sum()).backward()
        found.append((losses.detach() * mask, gradients(model)))
    return {"loss": off(found[1][0], found[0][0]), "gradient": worst(found[1][1], found[0][1])}


def statistics(size: int) -> dict[str, float]:
    """Compare log-probs and entropies at a temperature with those of Megatron's gathered logits."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from headloss.integrations.megatron import TokenStats

    parallel(size)
    model = model_of(config_of(size))
    given = inputs()
    labels = given.pop("labels")
    heat = 0.5 + torch.rand(B, S)
    logits = gather_from_tensor_model_parallel_region(model(**given)) / heat[..., None]
    table = logits.log_softmax(-1)
    logp = table.gather(-1, labels[..., None])[..., 0]
    entropy = -(table.exp() * table).sum(-1)
    torch.manual_seed(3)
    up = torch.randn(2, B, S)
    (up[0] * logp + up[1] * entropy).sum().backward()
    want = gradients(model)
    stats = model(**given, labels=labels, output_processor=TokenStats(temperature=heat))
    (up[0] * stats.logp + up[1] * stats.entropy).sum().backward()
    pairs = {"logp": (stats.logp, logp), "entropy": (stats.entropy, entropy)}
    found = {name: off(*pair) for name, pair in pairs.items()}
    return found | {"gradient": worst(gradients(model), want)}


# ---------------------------------------------------------------------- Megatron's data parallelism


def main_grad(tied: bool, overlap: bool) -> dict[str, float]:
    """Compare `main_grad` of two micro-batches under Megatron's DDP with unfused gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from headloss.integrations.megatron import TokenLosses

    parallel(2)
    config = config_of(2)
    found = []
    for processor in (None, TokenLosses()):
        model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=None
            ),
            model_of(config, tied),
        )
        model.zero_grad_buffer()
        if processor is not None:
            model.module.output_layer.gradient_accumulation_fusion = True
        for seed in (1, 2):
            last = contextlib.nullcontext() if seed == 2 else model.no_sync()
            with last:
                losses = model(**inputs(seed=seed), output_processor=processor)
                (losses * mask_of()).sum().backward()
        model.finish_grad_sync()
        assert all(p.grad is None for p in model.parameters())
        found.append([p.main_grad.clone() for p in model.parameters()])
    return {"gradient": worst(found[1], found[0])}


# ---------------------------------------------------------------------- objectives


def packed(spread: bool, masked: bool) -> dict[str, float]:
    """Compare GSPO on packed sequences with GSPO from Megatron's token losses."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from headloss.integrations.megatron import HeadLoss

    parallel(2)
    cu, padded = torch.tensor([0, 5, 6, 13]), torch.tensor([0, 6, 8, 16])
    length = 16
    model = model_of(config_of(2, sequence_parallel=spread), attention=False, length=length)
    given, mask = inputs(1, length), None
    ids = torch.bucketize(torch.arange(length), padded[1:], right=True)
    if masked:
        inside = torch.arange(length) - padded[ids] < cu.diff()[ids]
        mask = (inside & (mask_of(1, length)[0] > 0)).float()[None]
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu if masked else padded,
        cu_seqlens_q_padded=padded if masked else None,
    )
    scored = torch.ones(1, length) if mask is None else mask
    advantages = torch.tensor([1.0, -2.0, 0.5])
    old = -4.0 + 0.1 * torch.randn(1, length)
    losses = model(**given, packed_seq_params=params)
    lengths = torch.zeros(3).index_add(0, ids, scored[0])
    sums = torch.zeros(3).index_add(0, ids, ((-losses - old) * scored)[0])
    ratio, push = (sums / lengths.clamp(min=1)).exp(), advantages * (lengths > 0)
    loss = -torch.minimum(ratio * push, ratio.clamp(0.8, 1.2) * push).mean()
    loss.backward()
    want = gradients(model)
    out = model(
        **given,
        loss_mask=mask,
        packed_seq_params=params,
        output_processor=HeadLoss(hl.gspo(epsilon_low=0.2, epsilon_high=0.2)),
        output_processor_context={"advantages": advantages, "old_logps": old},
    )
    out.loss.backward()
    assert out.plan.schedule == "one_pass", out.plan
    found = {"loss": off(out.loss, loss), "logps": off(out.logps.t() * scored, -losses * scored)}
    return found | {"gradient": worst(gradients(model), want)}


class OnCPU(TorchFunctionMode):
    """Redirect GPU tensors to the CPU, since Megatron's schedule makes a counter on the GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = dict(kwargs or {})
        if given.get("device") == "cuda":
            given["device"] = "cpu"
        return func(*args, **given)


def scheduled(model: Any, forward_step: Any, data: list[dict[str, Tensor]]) -> Tensor:
    """Return the losses of two micro-batches in a step of Megatron's schedule."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    with OnCPU():
        reduced = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(data),
            model=[model],
            num_microbatches=2,
            seq_length=S,
            micro_batch_size=B,
            forward_only=False,
        )
    return torch.stack([r["loss"] for r in reduced])


def a_step(spread: bool) -> dict[str, float]:
    """Compare a bfloat16 training step in Megatron's schedule over two micro-batches, with
    cross-entropy as objective."""
    from megatron.core.transformer.module import Float16Module

    from headloss.integrations.megatron import HeadLoss

    parallel(2)
    half: Any = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    config = config_of(2, sequence_parallel=spread, **half)
    found, mask = [], mask_of()
    for ours in (False, True):
        model = Float16Module(config, model_of(config))
        model.config = config

        def forward_step(data, model, ours=ours):
            given = next(data)
            objective = HeadLoss(hl.cross_entropy()) if ours else None

            def masked_mean(losses, mask=mask):
                mean = (losses * mask).sum() / mask.sum()
                return mean, {"loss": mean.detach().clone()}

            def taken(out):
                return out.loss, {"loss": out.loss.detach().clone()}

            out = model(**given, loss_mask=mask, output_processor=objective)
            return out, taken if ours else masked_mean

        reported = scheduled(model, forward_step, [inputs(seed=1), inputs(seed=2)])
        found.append((reported, gradients(model)))
    return {"loss": off(found[1][0], found[0][0]), "gradient": worst(found[1][1], found[0][1])}


def refusals() -> dict[str, str]:
    """Return the error text of each unsupported call."""
    from headloss.integrations.megatron import HeadLoss, TokenLosses

    parallel(2)
    model = model_of(config_of(2))
    given = inputs()
    found = {}

    def said(name: str, call: Any) -> None:
        try:
            call()
            found[name] = "nothing"
        except (TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    losses = TokenLosses()
    said("labels", lambda: model(**{**given, "labels": None}, output_processor=losses))
    deferred = SimpleNamespace(defer_embedding_wgrad_compute=True)
    direct = {"hidden_states": torch.zeros(S, B, H), "labels": given["labels"], "config": deferred}
    said("defer", lambda: losses(output_layer=model.output_layer, **direct))
    model.config.context_parallel_size = 2
    said("context", lambda: losses_with(model, given, HeadLoss(hl.gspo())))
    model.config.context_parallel_size = 1
    hook = model.output_layer.register_forward_hook(lambda *a: None)
    said("hooks", lambda: model(**given, output_processor=losses))
    hook.remove()
    model.output_layer.weight.__fsdp_param__ = True
    said("fsdp", lambda: model(**given, output_processor=losses))
    del model.output_layer.weight.__fsdp_param__
    model.output_layer = torch.nn.Linear(H, V)
    said("layer", lambda: model(**given, output_processor=losses))
    return found


def losses_with(model: Any, given: dict[str, Tensor], processor: Any) -> Any:
    context = {"advantages": torch.ones(B), "old_logps": torch.zeros(B, S)}
    return model(**given, output_processor=processor, output_processor_context=context)
