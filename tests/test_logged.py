"""A trainer's log contains every headloss term and metric, averaged as the loss is."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import headloss as hl
from headloss.integrations.logged import Logged

OBJECTIVE = hl.cross_entropy() + 1e-3 * hl.z_loss()


class Reads(TorchDispatchMode):
    """Records the name of each PyTorch operation, to count device reads and additions."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def call(rows: slice, totals: hl.Totals | None = None) -> hl.Output:
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 4, 8), torch.randn(30, 8)
    targets = torch.randint(30, (6, 4))
    targets[:, 2] = -100
    batch = hl.Batch(targets[rows], totals=totals)
    return hl.head_loss(hidden[rows], hl.Head(weight), batch, OBJECTIVE)


def test_parts_of_a_step_are_the_step() -> None:
    """Logged terms times coefficients add up to the loss, and metrics cover all tokens of a
    step."""
    whole = call(slice(None))
    totals, logged = hl.Totals(18, 6), Logged()
    for _ in range(2):
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
            out = call(rows, totals)
            logged.add({**out.terms, "probe": torch.ones(())}, out.metrics, parts=3)
    found, want = logged.take(), whole.metrics.compute()
    for name, value in whole.terms.items():
        assert found.pop(name) == pytest.approx(value.item(), rel=1e-6)
    assert found.keys() == want.keys() - whole.terms.keys()
    for name, value in found.items():
        assert value == pytest.approx(want[name], rel=1e-6), name
    assert logged.take() == {}  # empty after a take


def test_a_call_adds_one_vector_and_reads_nothing() -> None:
    logged, out = Logged(), call(slice(None))
    logged.add(out.terms, out.metrics)
    with Reads() as reads:
        logged.add(out.terms, out.metrics)
    assert reads.names.count("add") == 1 and "_local_scalar_dense" not in reads.names
    assert len(reads.names) < 20, reads.names
    with Reads() as reads:
        logged.take()
    assert reads.names.count("_local_scalar_dense") == 0  # tolist() of one vector is not counted


def test_metrics_without_a_measurement_are_not_logged() -> None:
    logged = Logged()
    logged.add({}, {"a": hl.Mean(torch.zeros(()), torch.zeros(())), "b": hl.Max(torch.tensor(2.0))})
    logged.add({}, {"b": hl.Max(torch.tensor(1.0)), "c": hl.Min(torch.tensor(3.0))})
    assert logged.take() == {"b": 2.0, "c": 3.0}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets one entry per call whose metrics were computed."""
    calls: list[int] = []
    module = sys.modules["headloss.head_loss"]
    find = module._metrics
    monkeypatch.setattr(module, "_metrics", lambda *args: calls.append(1) or find(*args))
    return calls


@pytest.mark.parametrize("how", ["apply", "callback", "Trainer", "off"])
def test_a_trainer_of_transformers_logs_terms(
    how: str, tmp_path: Any, measured: list[int]
) -> None:
    """transformers' Trainer logs terms in training and evaluation without an added callback; other
    callbacks see the terms."""
    transformers = pytest.importorskip("transformers")
    from test_head_models import tiny
    from test_transformers import trainer

    from headloss.integrations.transformers import HeadLossCallback, Trainer, apply

    seen: list[dict[str, float]] = []

    class Report(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    model = tiny("llama")
    made = trainer(model, str(tmp_path))
    made.args.max_steps, made.args.logging_steps = 4, 2
    callbacks: list[Any] = [Report()]
    if how == "callback":
        callbacks = [HeadLossCallback(OBJECTIVE), Report()]
    else:
        applied = apply(model, OBJECTIVE)
        applied.log_terms = how != "off"
    kind = Trainer if how == "Trainer" else transformers.Trainer
    made = kind(
        model, made.args, made.data_collator, callbacks=callbacks,
        train_dataset=made.train_dataset, eval_dataset=made.eval_dataset,
    )  # fmt: skip
    assert made.args.gradient_accumulation_steps == 2
    made.train()
    # Two steps were logged, with two micro-batches each.
    assert len(measured) == (0 if how == "off" else 4)
    evaluated = made.evaluate()
    logs = [entry for entry in made.state.log_history if "loss" in entry]
    assert len(logs) == 2
    if how == "off":
        assert not [name for entry in seen for name in entry if "headloss" in name]
        return
    for entry in logs:
        terms = entry["headloss/cross_entropy"] + 1e-3 * entry["headloss/z_loss"]
        assert entry["loss"] == pytest.approx(terms, rel=2e-5)
        # Values of one step.
        assert entry["headloss/segments"] == 4 and entry["headloss/tokens"] > 0
    last = made.state.log_history[-1]
    terms = last["eval_headloss/cross_entropy"] + 1e-3 * last["eval_headloss/z_loss"]
    # Trainer averages the evaluation batches by rows, not by tokens.
    assert evaluated["eval_loss"] == pytest.approx(terms, rel=0.1)
    assert [entry["headloss/z_loss"] for entry in seen if "loss" in entry] == [
        entry["headloss/z_loss"] for entry in logs
    ]


@pytest.mark.parametrize("switch", [True, False])
def test_a_trainer_logs_terms_over_the_interval(switch: bool, measured: list[int]) -> None:
    """Logged terms add up to the logged loss, with two micro-batches per step and an entry every
    two steps."""
    pytest.importorskip("trl", reason="TRL is the trainer that headloss is put into")
    from test_trl_sft_dpo import sft
    from trl_case import train

    from headloss.integrations.trl import SFTTrainer

    class Adding(SFTTrainer):
        log_terms = switch

        def objective(self, inputs):
            return OBJECTIVE

    options = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    logs, _ = train(sft(Adding, logging_steps=2, max_steps=4, **options))
    assert len(logs) == 2 and len(measured) == 4 * switch
    for entry in logs:
        assert any(name.startswith("headloss/") for name in entry) is switch
        if switch:
            terms = entry["headloss/cross_entropy"] + 1e-3 * entry["headloss/z_loss"]
            assert entry["loss"] == pytest.approx(terms, rel=1e-5)
            assert {"headloss/tokens", "headloss/cross_entropy/perplexity"} <= entry.keys()


def test_policies_log_their_terms() -> None:
    pytest.importorskip("trl", reason="TRL is the trainer that headloss is put into")
    from test_rl import make
    from trl_case import train

    from headloss import rl

    class Adding(rl.GSPO):
        def objective(self, inputs):
            return super().objective(inputs) + 0.1 * hl.z_loss()

    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    logs, _ = train(make(Adding, max_steps=2, logging_steps=2, num_generations=2, **cut))
    (entry,) = logs
    policy = next(name for name in entry if name in ("headloss/grpo", "headloss/gspo"))
    terms = entry[policy] + 0.1 * entry["headloss/z_loss"]
    assert entry["loss"] == pytest.approx(terms, rel=1e-5, abs=1e-6)
    assert entry["headloss/z_loss"] > 1


@pytest.mark.slow
def test_ranks_log_what_one_process_logs() -> None:
    """Two ranks under DDP: terms and metrics are means over the tokens of both, as the loss is."""
    pytest.importorskip("transformers")
    import logged_ranks
    from worlds import world_of

    want = logged_ranks.trained(per_rank=4)
    with world_of(2) as world:
        found = world.run(logged_ranks.trained, 2, seconds=120)
    for entries in found:
        assert len(entries) == len(want) == 4
        for got, whole in zip(entries, want, strict=True):
            names = [name for name in whole if "loss" in name and name != "train_loss"]
            assert "train_loss" in whole or sum("z_loss" in name for name in names) == 1
            for name in names:
                assert got[name] == pytest.approx(whole[name], rel=1e-5), name
