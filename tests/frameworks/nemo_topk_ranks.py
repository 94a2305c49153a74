"""What every rank of a test world runs: NeMo-RL's own function of the student's top k, of the
logits of Megatron-Core's model, and headloss's of its hidden states."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed.nn  # of NeMo-RL's functions
from megatron_ranks import V, config_of, gradients, model_of, off, parallel, worst
from parity import extracted, file_of

K, PADDED, LENGTHS = 5, (8, 4), (7, 4)  # of packed sequences


def stock(tree: str) -> Any:
    file = file_of(tree, "nemo_rl/distributed/model_utils.py")
    source = file.read_text()
    names = [
        "_compute_distributed_log_softmax", "_compute_distributed_log_softmax_with_grad",
        "_get_tokens_on_this_cp_rank", "AllGatherCPTensor", "allgather_cp_sharded_tensor",
        "_AllReduceSum", "ChunkedDistributedGatherLogprob", "ChunkedDistributedEntropy",
        "gather_logits_at_global_indices", "get_distillation_topk_logprobs_from_logits",
    ]  # fmt: skip
    names = [n for n in names if f"def {n}(" in source or f"class {n}(" in source]
    torch.Tensor.cuda = lambda self, *args, **more: self  # type: ignore[method-assign]
    space: Any = ModuleType("torch")
    vars(space).update(vars(torch))
    space.tensor = lambda *args, pin_memory=False, **more: torch.tensor(*args, **more)  # on a CPU
    return extracted(file, *names, Any=Any, Optional=None, torch=space)


def topk(tree: str, size: int, spread: bool, outside: bool, entropy: bool) -> dict[str, float]:
    """Two packed sequences, one by one as NeMo-RL's wrapper has them; `size` 1: two ranks of
    context parallelism."""
    from megatron.core import mpu

    from headloss.integrations import nemo_rl_topk as adapter

    cp = 2 // size
    parallel(size, context_parallel_size=cp)
    own = stock(tree)
    home: Any = ModuleType(adapter.MODELS)
    vars(home).update(vars(own))
    train: Any = ModuleType(adapter.TRAIN)
    model = model_of(config_of(size, sequence_parallel=spread), attention=False, length=32)

    def forward(
        data_iterator: Any, model: Any, post_processing_fn: Any, sampling_params: Any = None
    ) -> Any:
        ids = next(data_iterator)
        output = model(ids, torch.arange(ids.shape[1])[None], None)
        return output, post_processing_fn

    train.forward_with_post_processing_fn = forward
    sys.modules.update({adapter.MODELS: home, adapter.TRAIN: train})
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(V, (n,), generator=generator) for n in PADDED]
    # Under tensor parallelism NeMo-RL's own backward of one of its ways takes no padded tail.
    lengths = PADDED if outside and size == 2 else LENGTHS
    teacher = [4 * torch.randn(1, n, V, generator=generator) for n in lengths]
    likeliest = [x.topk(K) for x in teacher]
    rank = mpu.get_context_parallel_rank()
    local = [own._get_tokens_on_this_cp_rank(x[None], rank, cp) for x in rows]
    kind = SimpleNamespace(loss_fn=SimpleNamespace(input_type=SimpleNamespace(name="DISTILLATION")))
    found = []
    for ours in (False, True):
        if ours:
            adapter.install()
        output, _ = train.forward_with_post_processing_fn(iter([torch.cat(local, 1)]), model, kind)
        values, start = [], 0
        for padded, chosen in zip(PADDED, likeliest, strict=True):
            part = output.narrow(1, start // cp, padded // cp)
            start += padded
            values += home.get_distillation_topk_logprobs_from_logits(
                part, chosen.values, chosen.indices, outside, entropy,
                vocab_parallel_rank=mpu.get_tensor_model_parallel_rank(),
                vocab_parallel_group=mpu.get_tensor_model_parallel_group(),
                context_parallel_group=mpu.get_context_parallel_group(),
            )  # fmt: skip
        values = [x for x in values if x is not None]
        slopes = torch.Generator().manual_seed(3)
        carry = [x for x in values if x.requires_grad]
        sum((torch.randn(x.shape, generator=slopes) * x).sum() for x in carry).backward()
        found.append(([x.detach() for x in values], gradients(model)))
    adapter.uninstall()
    assert train.forward_with_post_processing_fn is forward
    assert "forward" not in vars(model.output_layer)
    (want, grads), (got, our_grads) = found
    assert [x.shape for x in got] == [x.shape for x in want]
    values = max(off(a, b) for a, b in zip(got, want, strict=True))
    return {"values": values, "gradient": worst(our_grads, grads)}
