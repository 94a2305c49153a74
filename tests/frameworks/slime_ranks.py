"""Comparison of slime's and miles's log-probs of Megatron-Core's model, from logits and hidden
states.

The frameworks' own functions run on every rank of a test world.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from megatron_ranks import V, config_of, gradients, model_of, off, parallel, worst
from parity import SOURCES
from torch import Tensor

TOTALS, RESPONSES = (9, 4, 11), (4, 3, 6)


def modules(package: str) -> tuple[Any, Any]:
    """Return the framework's log-prob module, and a stub of its model module, which needs
    Megatron's training package."""
    for name in ("httpx", "ray", "uvicorn"):
        if name not in sys.modules:
            sys.modules[name] = MagicMock()
    place = str(SOURCES / package)
    if place not in sys.path:
        sys.path.insert(0, place)
    if package == "slime":
        import slime.backends.megatron_utils.loss as home
    else:
        import miles.backends.training_utils.loss_hub.logit_processors as home
    name = f"{package}.backends.megatron_utils.model_provider"
    provider: Any = ModuleType(name)
    provider.get_model_provider_func = lambda args, role="actor": lambda: args.model
    sys.modules[name] = provider
    parent = name.rpartition(".")[0]
    if parent not in sys.modules:
        sys.modules[parent] = ModuleType(parent)
        sys.modules[parent].__path__ = []
    return home, provider


def samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(V, (n,), generator=generator) for n in TOTALS]


def sets(tokens: list[Tensor]) -> dict[str, Any]:
    """Return a top-p sampler's kept ids per token, including an entry that lacks the sampled token
    and an empty entry."""
    generator = torch.Generator().manual_seed(5)
    ids, offsets = [], []
    for sample, count in zip(tokens, RESPONSES, strict=True):
        kept = [torch.randperm(V, generator=generator)[:5] for _ in range(count)]
        labels = sample[-count:, None]
        rows = [torch.cat([x, y]).unique() for x, y in zip(kept, labels, strict=True)]
        rows[0] = torch.tensor([(int(sample[-count]) + 1) % V])
        rows[1] = rows[1][:0]
        ends = torch.tensor([0, *map(len, rows)]).cumsum(0)
        ids.append(torch.cat(rows).int())
        offsets.append(ends[:-1].tolist() if count == 6 else ends.int())
    return {"top_p_token_ids": ids, "top_p_token_offsets": offsets}


def rows_of(tokens: list[Tensor], cp: int, contiguous: bool, rank: int) -> Tensor:
    """Return this rank's tokens [1, T]: packed, in zigzag chunks, or as one contiguous part."""
    if cp == 1:
        packed = torch.cat(tokens)
        return torch.nn.functional.pad(packed, (0, -len(packed) % 4))[None]
    if contiguous:
        packed = torch.cat(tokens)
        packed = torch.nn.functional.pad(packed, (0, -len(packed) % (2 * cp)))
        return packed.chunk(cp)[rank][None]
    parts = []
    for sample in tokens:
        padded = torch.nn.functional.pad(sample, (0, -len(sample) % (2 * cp)))
        chunks = padded.chunk(2 * cp)
        parts += [chunks[rank], chunks[2 * cp - 1 - rank]]
    return torch.cat(parts)[None]


def state_of(cp: int) -> None:
    """Set miles's record of process groups."""
    from megatron.core import mpu
    from miles.backends.training_utils import parallel as home

    group = SimpleNamespace(
        rank=mpu.get_context_parallel_rank(), size=cp, group=mpu.get_context_parallel_group()
    )
    tensor = SimpleNamespace(group=mpu.get_tensor_model_parallel_group())
    home.set_parallel_state(SimpleNamespace(cp=group, tp=tensor))


def log_probs(
    package: str, size: int, spread: bool, layout: str, replay: bool, entropy: float
) -> dict[str, float]:
    """Compare log-probs in a `layout`: "packed", or "zigzag" and "contiguous" over two
    context-parallel ranks."""
    from headloss.integrations import slime as adapter

    cp = 1 if layout == "packed" else 2
    parallel(size, context_parallel_size=cp)
    home, provider = modules(package)
    if package == "miles":
        state_of(cp)
    model = model_of(config_of(size, sequence_parallel=spread), attention=False, length=64)
    args = Namespace(
        rollout_temperature=0.7, log_probs_chunk_size=-1, entropy_coef=entropy, model=model,
        allgather_cp=layout == "contiguous", qkv_format="thd", true_on_policy_mode=False,
        loss_type="policy_loss",
    )  # fmt: skip
    tokens = samples()
    rank = torch.distributed.get_rank() % cp if cp == 2 else 0
    ids = rows_of(tokens, cp, args.allgather_cp, rank)
    more = sets(tokens) if replay else {}
    if package == "miles":
        more["entropy_requires_grad"] = entropy != 0
    own, found = home.get_log_probs_and_entropy, []
    for ours in (False, True):
        if ours:
            adapter.init(args)
            built = provider.get_model_provider_func(args)()
            assert built is model and home.get_log_probs_and_entropy is not own
        output = model(ids, torch.arange(ids.shape[1])[None], None)
        out = home.get_log_probs_and_entropy(
            output.float(), args=args, unconcat_tokens=tokens, total_lengths=list(TOTALS),
            response_lengths=list(RESPONSES), with_entropy=True, **more,
        )  # fmt: skip
        out = out[1] if isinstance(out, tuple) else out
        values = [torch.cat(out[name]) for name in ("log_probs", "entropy")]
        assert layout == "contiguous" or values[1].requires_grad == (entropy != 0)
        slopes = torch.Generator().manual_seed(3)
        carry = values if entropy else values[:1]
        loss = sum((torch.randn(x.shape, generator=slopes) * x).sum() for x in carry)
        (loss + 0 * output.sum()).backward()
        lengths = torch.tensor([len(x) for x in out["log_probs"]])
        found.append(([x.detach() for x in values], gradients(model), lengths))
    critic = provider.get_model_provider_func(args, "critic")()
    assert critic is model
    adapter.uninstall()
    assert home.get_log_probs_and_entropy is own
    (want, grads, lengths), (got, our_grads, our_lengths) = found
    assert torch.equal(lengths, our_lengths)
    values = max(off(a, b) for a, b in zip(got, want, strict=True) if b.numel())
    return {"values": values, "gradient": worst(our_grads, grads)}


def losses(size: int, layout: str, estimator: str) -> dict[str, float]:
    """Compare slime's losses and metrics: "sft", or a policy loss with an `estimator`.

    The second sample has one response token, so that a context-parallel rank has no response
    token.
    """
    from headloss.integrations import slime as adapter

    cp, responses = 1 if layout == "packed" else 2, (4, 1, 6)
    parallel(size, context_parallel_size=cp)
    home, provider = modules("slime")
    model = model_of(config_of(size), attention=False, length=64)
    args = Namespace(
        rollout_temperature=0.7, log_probs_chunk_size=-1, entropy_coef=0.01, model=model,
        allgather_cp=layout == "contiguous", qkv_format="thd", true_on_policy_mode=False,
        loss_type="policy_loss", advantage_estimator=estimator, use_rollout_logprobs=False,
        use_opsm=False, eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=None, use_tis=False,
        get_mismatch_metrics=False, use_kl_loss=True, use_unbiased_kl=False, kl_loss_coef=0.1,
        kl_loss_type="low_var_kl", calculate_per_token_loss=False, rollout_top_p=1.0,
        use_rollout_top_p_replay=False,
    )  # fmt: skip
    tokens, generator = samples(), torch.Generator().manual_seed(6)
    rank = torch.distributed.get_rank() % cp if cp == 2 else 0
    ids = rows_of(tokens, cp, args.allgather_cp, rank)

    def local(shift: float) -> list[Tensor]:
        rows = [shift + torch.randn(n, generator=generator) for n in responses]
        lengths = zip(rows, TOTALS, responses, strict=True)
        return [home.slice_log_prob_with_cp(*each) for each in lengths] if cp == 2 else rows

    masks = [torch.ones(n) for n in responses]
    masks[0][1] = 0
    batch = {
        "unconcat_tokens": tokens, "total_lengths": list(TOTALS), "loss_masks": masks,
        "response_lengths": list(responses), "advantages": local(0), "log_probs": local(-4),
        "ref_log_probs": local(-4),
    }  # fmt: skip
    mean = home.get_sum_of_sample_mean(list(TOTALS), list(responses), masks)
    function = home.sft_loss_function if estimator == "sft" else home.policy_loss_function
    found = []
    for ours in (False, True):
        if ours:
            adapter.init(args)
            provider.get_model_provider_func(args)()
        output = model(ids, torch.arange(ids.shape[1])[None], None)
        loss, metrics = function(args, batch, output.float(), mean)
        (loss + 0 * output.sum()).backward()
        found.append(({**metrics, "total": loss.detach()}, gradients(model)))
    adapter.uninstall()
    (want, grads), (got, our_grads) = found
    assert got.keys() == want.keys() and (estimator == "sft" or len(want) > 5)
    apart = {name: float((got[name] - x).abs() / x.abs().clamp_min(1)) for name, x in want.items()}
    return apart | {"gradient": worst(our_grads, grads)}
