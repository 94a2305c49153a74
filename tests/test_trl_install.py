"""headloss in place of TRL's chunked log-probs and divergence agrees with TRL's functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
import trl_case
from trl.trainer import distillation_trainer, utils

from headloss.integrations.trl import install, uninstall


@pytest.fixture(autouse=True)
def afterwards() -> Iterator[None]:
    before = utils._ChunkedLogProbFunction, distillation_trainer._chunked_divergence_loss
    yield
    uninstall()
    after = utils._ChunkedLogProbFunction, distillation_trainer._chunked_divergence_loss
    assert before == after


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_log_probs_of_a_model(family: str) -> None:
    """Log-probs equal those of `add_fused_lm_head`, used by RLOO, KTO, SFT, DPO and async GRPO."""
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    ids = torch.randint(3, 100, (3, 7), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(7) < torch.tensor([[2], [0], [5]]), -100)
    found = []
    for ours in (False, True):
        if ours:
            install()
        model: Any = trl_case.load(trl_case.saved(family))
        utils.add_fused_lm_head(model, temperature=0.7, outputs=outputs)
        out = model(input_ids=ids, labels=labels, fused_lm_head=True)
        (out.log_probs.sum() + 0.3 * (out.entropy**2).sum()).backward()
        gradients = [p.grad for p in model.parameters()]
        found.append(([getattr(out, name) for name in ("loss", *outputs)], gradients))
    (want, wanted), (got, gradients) = found
    for a, b in zip([*want, *wanted], [*got, *gradients], strict=True):
        torch.testing.assert_close(b, a, rtol=2e-5, atol=1e-5)


@pytest.mark.covering
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("count", [None, 17])
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_divergence(beta: float, count: int | None, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, weight = normal(2, 5, 4), normal(23, 4)
    teacher = normal(2, 5, 6), normal(23, 6)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]])
    found = []
    for ours in (False, True):
        if ours:
            install()
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = distillation_trainer._chunked_divergence_loss(
            leaves[0],
            teacher[0],
            leaves[1],
            teacher[1],
            mask,
            beta,
            count,
            student_final_logit_softcapping=5.0,
            teacher_logit_scale=0.5,
            temperature=temperature,
        )
        found.append([*out, *torch.autograd.grad(out[0], leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-6)


def test_a_head_that_zero3_shards(monkeypatch: Any) -> None:
    """A ZeRO-3 head is gathered again in the backward pass by TRL's function, and not kept in
    between."""
    install()
    install()  # a second install changes nothing
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(4, 3), torch.randn(5, 3), torch.randn(5)
    targets, found, times = torch.tensor([0, 4, 2, 2]), [], []
    for sharded in (False, True):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        held = [x.data for x in leaves[1:]]

        @contextlib.contextmanager
        def gathered(*parts: Any, held: Any = held) -> Iterator[None]:
            times.append(len(parts))
            for part, data in zip(parts, held, strict=True):
                part.data = data
            yield
            for part in parts:
                part.data = torch.empty(0)

        monkeypatch.setattr(utils, "maybe_gather_lm_head_ctx", gathered)
        if sharded:
            leaves[1].ds_id = 1  # type: ignore[attr-defined]
        out = utils._ChunkedLogProbFunction.apply(*leaves, targets, 0.7, 8, 3.0, 1.5)
        if sharded:
            for part in leaves[1:]:
                part.data = torch.empty(0)
        loss = (out[0] * torch.arange(4)).sum() + 0.3 * out[1].square().sum()
        found.append([*out, *torch.autograd.grad(loss, leaves)])
    assert times == [2]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a)
    weight.ds_id = 1  # type: ignore[attr-defined]
    states, mask = torch.randn(1, 4, 3), torch.ones(1, 4)
    with pytest.raises(ValueError, match="distillation with a head that ZeRO-3 shards"):
        distillation_trainer._chunked_divergence_loss(states, states, weight, weight, mask, 0.5)


def test_rloo_runs_the_same(tmp_path: Any) -> None:
    """Two RLOO steps with TRL's functions and with headloss give equal losses and weights."""
    from trl import RLOOConfig, RLOOTrainer

    found = []
    for ours in (False, True):
        if ours:
            install()
        arguments = {**trl_case.ARGUMENTS, "output_dir": str(tmp_path), "max_steps": 2}
        config = RLOOConfig(
            **arguments, per_device_train_batch_size=4, num_generations=2, beta=0.1,
            max_completion_length=6,
        )  # fmt: skip

        class Given(RLOOTrainer):
            def _generate_single_turn(self, prompt_ids, *args):
                return trl_case.sampled(1, len(prompt_ids), seed=self.state.global_step)[0]

        trainer = Given(
            model=trl_case.llama(), reward_funcs=trl_case.reward, args=config,
            train_dataset=trl_case.prompts(), processing_class=trl_case.tokenizer(),
        )  # fmt: skip
        logs, weights = trl_case.train(trainer)
        found.append(([log["loss"] for log in logs], weights))
    (want, wanted), (got, weights) = found
    assert len(want) == 2 and got == pytest.approx(want, rel=1e-5, abs=1e-6)
    for name, value in wanted.items():
        torch.testing.assert_close(weights[name], value, rtol=2e-5, atol=2e-6)
