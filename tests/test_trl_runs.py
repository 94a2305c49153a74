"""Two steps of further TRL trainers give equal numbers with and without `install()`.

Losses, metrics and parameters after SGD are compared, so that equal parameters mean equal
gradients.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("trl")
import trl_case
from datasets import Dataset
from torch import Tensor
from trl.trainer.utils import add_fused_lm_head

from headloss.integrations.trl import install, uninstall

Run = tuple[list[dict[str, float]], dict[str, Tensor]]


@pytest.fixture(autouse=True)
def afterwards() -> Iterator[None]:
    yield
    uninstall()


def compare(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Run]) -> None:
    """Run a trainer without and with `install()`, compare the results, and check that the second
    run called headloss."""
    calls, module = [], sys.modules[install.__module__]
    for name in ("head_stats", "head_loss"):
        own = getattr(module, name)
        mine = mock.Mock(side_effect=own, name=name)
        calls.append(mine)
        monkeypatch.setattr(module, name, mine)
    want, wanted = run()
    assert not any(mine.called for mine in calls)
    install()
    got, gotten = run()
    assert sum(mine.call_count for mine in calls) >= 2
    assert len(want) == len(got) == 2
    for a, b in zip(want, got, strict=True):
        names = {name for name in a if not name.endswith((*trl_case.TIMES, "per_second"))}
        assert names == {n for n in b if not n.endswith((*trl_case.TIMES, "per_second"))}
        for name in names:
            close = math.isclose(a[name], b[name], rel_tol=2e-5, abs_tol=5e-5)
            assert a[name] == b[name] or close, f"{name}: {a[name]} and {b[name]}"
    start = dict(trl_case.load(trl_case.llama()).named_parameters())
    moved = 0.0
    for name, value in wanted.items():
        torch.testing.assert_close(gotten[name], value, rtol=2e-5, atol=5e-6)
        moved = max(moved, float((value - start[name]).abs().max()))
    assert moved > 1e-3


def options(tmp_path: Any, **more: Any) -> dict[str, Any]:
    return {**trl_case.ARGUMENTS, "output_dir": str(tmp_path), "max_steps": 2, **more}


# ---------------------------------------------------------------------- KTO


def unpaired() -> Dataset:
    words = [f" w{3 + 5 * i % 90} w{4 + 3 * i % 90} w{7 + i}"[: 9 - i % 3] for i in range(16)]
    return Dataset.from_dict(
        {"prompt": trl_case.PROMPTS, "completion": words, "label": [i % 3 != 0 for i in range(16)]}
    )


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.slow
def test_kto(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, loss_type: str) -> None:
    from trl import KTOConfig, KTOTrainer

    def run() -> Run:
        config = options(
            tmp_path, per_device_train_batch_size=4, loss_type=loss_type, beta=0.4
        )
        config.pop("shuffle_dataset")
        trainer = KTOTrainer(
            model=trl_case.llama(), args=KTOConfig(**config), train_dataset=unpaired(),
            processing_class=trl_case.tokenizer(),
        )  # fmt: skip
        return trl_case.train(trainer)

    compare(monkeypatch, run)


# ---------------------------------------------------------------------- distillation


SLOW = [pytest.param(beta, marks=pytest.mark.slow) for beta in (0.0, 0.5)]


@pytest.mark.parametrize("beta", [*SLOW, 1.0])
def test_distillation(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, beta: float) -> None:
    """On-policy distillation (GKD's successor) from a larger model with a different head agrees."""
    from trl import DistillationConfig, DistillationTrainer

    def run() -> Run:
        class Given(DistillationTrainer):
            def _generate_single_turn(self, prompt_ids, *args, **kwargs):
                return trl_case.sampled(1, len(prompt_ids), seed=self.state.global_step)[0]

        config = options(
            tmp_path, per_device_train_batch_size=4, beta=beta, max_completion_length=6
        )
        trainer = Given(
            model=trl_case.llama(), teacher_model=trl_case.saved("gemma2"),
            args=DistillationConfig(**config), train_dataset=trl_case.prompts(),
            processing_class=trl_case.tokenizer(),
        )  # fmt: skip
        return trl_case.train(trainer)

    compare(monkeypatch, run)


# ---------------------------------------------------------------------- async GRPO


def test_async_grpo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Async GRPO's loss on packed rows agrees.

    TRL's trainer needs a vLLM server and GPU attention, so its `compute_loss` runs on a stub
    trainer.
    """
    trainers = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer")

    def run() -> Run:
        model: Any = trl_case.load(trl_case.llama())
        # remove TRL's tree indices, which eager attention does not accept
        own = model.base_model.forward
        model.base_model.forward = lambda *args, **kwargs: own(
            *args, **{k: v for k, v in kwargs.items() if not k.startswith("tree_")}
        )
        add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy"))
        metrics: Any = defaultdict(list)
        trainer = SimpleNamespace(
            aux_loss_enabled=False, epsilon_low=0.2, epsilon_high=0.3, _metrics={"train": metrics},
            current_gradient_accumulation_steps=1, _step_forward_tokens=0.0,
            _step_trained_tokens=0.0, _step_seq_len_weighted=0.0, _step_samples=0.0,
            _step_forward_s=0.0, _step_microbatches=0,
            accelerator=SimpleNamespace(
                num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
            ),
        )  # fmt: skip
        optimizer, logs = torch.optim.SGD(model.parameters(), 0.5), []
        for step in range(2):
            optimizer.zero_grad()
            loss = trainers.AsyncGRPOTrainer.compute_loss(trainer, model, rows(step))
            loss.backward()
            optimizer.step()
            last = {name: values[-1] for name, values in metrics.items()}
            logs.append({"loss": loss.item(), **last})
        return logs, {n: p.detach().clone() for n, p in model.named_parameters()}

    compare(monkeypatch, run)


def rows(seed: int) -> dict[str, Tensor]:
    """Return a packed row of two prompts of 3 tokens with completions of 5 and 4 tokens, and
    padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 100, (1, 17), generator=generator)
    scored = torch.tensor([[2, 3, 4, 5, 6, 10, 11, 12, 13]])
    count = scored.shape[1]
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(17) < 15).long()[None],
        "position_ids": torch.cat([torch.arange(8), torch.arange(9)])[None],
        "shift_labels": ids.roll(-1, 1),
        "token_index": scored,
        "old_log_probs": -4.8 + 0.4 * torch.randn(1, count, generator=generator),
        "advantages": torch.randn(1, count, generator=generator),
        "segment_id": torch.tensor([[0] * 5 + [1] * 4]),
        "tree_kv_index": torch.zeros(1, 1, dtype=torch.int64),
        "tree_cu_seqlens_q": torch.zeros(1, 1, dtype=torch.int64),
        "tree_cu_seqlens_k": torch.zeros(1, 1, dtype=torch.int64),
        "tree_max_seqlens": torch.ones(1, 2, dtype=torch.int64),
        "global_n_tokens": torch.tensor([count]),
        "global_n_forward_tokens": torch.tensor([15]),
        "mean_seq_len": torch.tensor([7.5]),
    }
