"""Train on a 2-D mesh, data x vocabulary: a Llama with its head sharded over the dimension "tp".

torchrun --nproc-per-node 4 examples/parallel.py
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

import headloss as hl


class Policy(nn.Module):
    """A model and its loss in one forward, in which FSDP2 has gathered the head's weight."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.backbone, self.head = model.model, model.lm_head

    def forward(self, ids: torch.Tensor, batch: hl.Batch, objective: hl.Objective) -> hl.Output:
        hidden = self.backbone(ids).last_hidden_state
        return hl.head_loss(hidden, hl.Head.of(self.head), batch, objective)


def main() -> None:
    a_gpu_each = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    kind = "cuda" if a_gpu_each else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    world = distributed.get_world_size()
    mesh = init_device_mesh(kind, (world // 2, 2), mesh_dim_names=("data", "tp"))

    torch.manual_seed(0)  # All ranks start from equal weights.
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 501, "pad_token_id": 0}
    layers: Any = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    policy = Policy(LlamaForCausalLM(LlamaConfig(**sizes, **layers))).to(kind)
    rows = distribute_tensor(policy.head.weight.detach(), mesh["tp"], [Shard(0)])
    policy.head.weight = nn.Parameter(rows)  # headloss reads the vocabulary group from the DTensor.
    fully_shard(policy, mesh=mesh["data"])  # FSDP2 shards over the data-parallel ranks.

    row = mesh["data"].get_local_rank()
    torch.manual_seed(1 + row)  # Ranks of one vocabulary group draw equal batches.
    ids = torch.randint(1, 501, (2, 9 + row), device=kind)
    advantages = torch.tensor([1.0, -0.5], device=kind)  # one for each row
    batch = hl.Batch.from_labels(ids, advantages=advantages, old_logps=hl.CURRENT)
    group = mesh["data"].get_group()
    batch.totals = hl.Totals.of(batch).all_reduce(group, gradients="mean")  # as FSDP2 averages

    objective = hl.grpo() - 0.01 * hl.entropy() + 0.1 * hl.cross_entropy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for step in range(4):
        out = policy(ids, batch, objective)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen = out.metrics.all_reduce(group).compute()
        if distributed.get_rank() == 0:
            tokens, perplexity = seen["tokens"], seen["cross_entropy/perplexity"]
            print(f"step {step}: {tokens:.0f} tokens, perplexity {perplexity:.1f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
