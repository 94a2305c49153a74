"""Terms agree with TRL's RLOO, asynchronous GRPO and reward trainers, run on stubs."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from folds import fold
from losses_case import assert_same, value_and_gradient
from test_trl_parity import inputs, ours, stub
from test_trl_parity import packed as packed_step

import headloss as hl

pytest.importorskip("trl", reason="TRL is the peer that these are compared with")
from trl import RewardTrainer, RLOOTrainer
from trl.experimental.async_grpo import AsyncGRPOTrainer


@pytest.mark.parametrize("epsilon", [0.2, 1e-3])
def test_rloo(epsilon: float) -> None:
    """RLOO agrees, with one ratio per sequence from the product of token probabilities."""
    for seed in range(3):
        step = inputs(empty=False, seed=seed)
        mask = step["completion_mask"]
        leaf = step["logps"].clone().requires_grad_()
        trainer = stub(step, (leaf, step["entropies"]), epsilon_low=epsilon, epsilon_high=epsilon)
        theirs = {**step, "old_logps": (step["old_per_token_logps"] * mask).sum(1)}
        loss = RLOOTrainer._compute_loss(trainer, None, theirs)  # type: ignore[arg-type]
        value, gradient = value_and_gradient(loss, leaf)
        term = hl.grpo(
            epsilon_low=epsilon,
            epsilon_high=epsilon,
            importance_sampling_level="sequence_product",
        )
        assert_same(ours(term, step)[:2], [value, gradient[mask.bool()]])


@pytest.mark.parametrize("with_margin", [False, True])
@pytest.mark.parametrize("centre", [None, 0.1])
def test_reward(with_margin: bool, centre: float | None) -> None:
    rewards = torch.randn(6, 1, dtype=torch.float64, requires_grad=True)
    margin = torch.rand(3, dtype=torch.float64)
    batch = {"margin": margin} if with_margin else {}
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        args=SimpleNamespace(center_rewards_coefficient=centre),
        accelerator=SimpleNamespace(gather_for_metrics=lambda x: x, gather=lambda x: x),
        _total_train_tokens=0,
    )
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    want = RewardTrainer.compute_loss(
        trainer,  # type: ignore[arg-type]
        lambda **kwargs: SimpleNamespace(logits=rewards),
        {**batch, "attention_mask": torch.ones(6, 2)},
    )
    fields = {"margin": margin.repeat_interleave(2)} if with_margin else {}
    order = torch.tensor([0, 3, 1, 4, 2, 5])  # TRL's order: all chosen, then all rejected
    got = hl.bradley_terry(
        rewards[order, 0],
        hl.Batch(torch.zeros(6, 2).long(), **fields),  # type: ignore[arg-type]
        centre=centre or 0.0,
    )
    assert_same(value_and_gradient(got, rewards), value_and_gradient(want, rewards))


def test_async_grpo() -> None:
    """Asynchronous GRPO agrees on packed tokens, with a mean over the step's tokens of two
    ranks."""
    step = inputs(empty=False, per_token=True)
    mask = step["completion_mask"].bool()
    leaf = step["logps"].clone().requires_grad_()
    count = int(mask.sum())
    ones = torch.ones(1, count, dtype=torch.int64)
    outputs = SimpleNamespace(log_probs=leaf[mask], entropy=step["entropies"][mask])
    trainer: Any = SimpleNamespace(
        aux_loss_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.3,
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(
            num_processes=2, reduce=lambda x, reduction: x, gather=lambda x: x
        ),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _step_forward_tokens=0.0,
        _step_trained_tokens=0.0,
        _step_seq_len_weighted=0.0,
        _step_samples=0.0,
        _step_forward_s=0.0,
    )
    names = ("attention_mask", "input_ids", "position_ids", "shift_labels")
    names += ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    batch = {
        **dict.fromkeys(names, ones),
        "tree_max_seqlens": ones[:, :2],
        "token_index": torch.arange(count)[None],
        "old_log_probs": step["old_per_token_logps"][mask][None],
        "advantages": step["advantages"][mask][None],
        "segment_id": mask.nonzero()[:, 0][None],
        "global_n_tokens": torch.tensor([2.0 * count]),
        "global_n_forward_tokens": torch.tensor([count]),
        "mean_seq_len": torch.tensor([5.0]),
    }
    loss = AsyncGRPOTrainer.compute_loss(trainer, lambda **kwargs: outputs, batch)
    value, gradient = value_and_gradient(loss, leaf)
    term = hl.dapo(epsilon_low=0.2, epsilon_high=0.3)
    assert_same(ours(term, step)[:2], [value, gradient[mask]])
    stats, packed = packed_step(step)
    assert term.observe is not None
    found, logged = term.observe(stats, packed), trainer._metrics["train"]
    for name, theirs in {
        "ratio": "ratio",
        "clip_low": "clip_ratio/low_mean",
        "clip_high": "clip_ratio/high_mean",
        "clip_region": "clip_ratio/region_mean",
    }.items():
        assert float(fold(found[name]).value) == pytest.approx(logged[theirs][0]), name
