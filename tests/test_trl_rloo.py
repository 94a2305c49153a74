"""The same numbers as TRL's RLOO and reward trainers: their own methods on stubs."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from losses_case import assert_same, value_and_gradient
from test_trl_parity import inputs, ours, stub

import headloss as hl

pytest.importorskip("trl", reason="TRL is the peer that these are compared with")
from trl import RewardTrainer, RLOOTrainer


@pytest.mark.parametrize("epsilon", [0.2, 1e-3])
def test_rloo(epsilon: float) -> None:
    """One ratio per sequence, of the product of its tokens' probabilities."""
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
    order = torch.tensor([0, 3, 1, 4, 2, 5])  # theirs are all chosen, then all rejected
    got = hl.bradley_terry(
        rewards[order, 0],
        hl.Batch(torch.zeros(6, 2).long(), **fields),  # type: ignore[arg-type]
        centre=centre or 0.0,
    )
    assert_same(value_and_gradient(got, rewards), value_and_gradient(want, rewards))
