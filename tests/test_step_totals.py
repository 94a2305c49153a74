"""A trainer's step equals the whole batch's step for any micro-batches and ranks."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from test_head_models import tiny
from torch import Tensor

import headloss as hl

transformers = pytest.importorskip("transformers")
from headloss.integrations.transformers import Trainer, apply  # noqa: E402

LENGTHS = (9, 4, 7, 3, 8, 5, 2, 6)  # rows 2k and 2k + 1 are pairs


def rows() -> list[dict[str, Any]]:
    """Return ragged pairs of rows, with fields in addition to labels."""
    generator = torch.Generator().manual_seed(3)
    examples = []
    for i, length in enumerate(LENGTHS):
        ids = torch.randint(2, 37, (10,), generator=generator)
        examples.append(
            {
                "input_ids": ids[:length],
                "labels": ids[:length].masked_fill(torch.arange(length) < 1 + i % 3, -100),
                "ref_logps": -torch.rand(10, generator=generator)[:length],
                "old_logps": -3 - torch.rand(10, generator=generator)[:length],
                "keep": torch.rand(10, generator=generator)[:length] < 0.6,
                "advantages": torch.randn((), generator=generator),
            }
        )
    return [{"pair": examples[i : i + 2]} for i in range(0, len(examples), 2)]


def collate(pairs: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad rows to the longest row of a micro-batch."""
    examples = [row for pair in pairs for row in pair["pair"]]
    fill = {"labels": -100}
    return {
        name: torch.nn.utils.rnn.pad_sequence(
            [row[name] for row in examples], batch_first=True, padding_value=fill.get(name, 0)
        )
        if examples[0][name].dim()
        else torch.stack([row[name] for row in examples])
        for name in examples[0]
    }


def run(
    terms: Any, pairs: int, kind: type = Trainer, model: Any = None, collate: Any = collate,
    fields: Any = None, **settings: Any,
) -> Any:  # fmt: skip
    """Train one SGD step on all rows, in micro-batches of `pairs` pairs of rows; return the logged
    losses and the parameters."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    ranks //= getattr(settings.get("parallelism_config"), "cp_size", 1)  # ranks with different rows
    model = tiny("llama") if model is None else model
    apply(model, terms, fields=FIELDS if fields is None else fields)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=pairs, max_steps=1, learning_rate=0.1,
            gradient_accumulation_steps=len(LENGTHS) // 2 // pairs // ranks, max_grad_norm=0.0,
            optim="sgd", lr_scheduler_type="constant", report_to="none", logging_steps=1,
            use_cpu=True, save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
            per_device_eval_batch_size=pairs, **settings,
        )  # fmt: skip
        trainer = kind(model, arguments, collate, train_dataset=rows(), eval_dataset=rows())
        trainer.train()
        logs = trainer.state.log_history[0]
        evaluated = trainer.evaluate()["eval_loss"]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return logs["loss"], logs["grad_norm"], weights, evaluated


def assert_same(got: Any, want: Any) -> None:
    assert got[0] == pytest.approx(want[0], rel=2e-5)
    assert got[1] == pytest.approx(want[1], rel=2e-5)
    torch.testing.assert_close(got[2], want[2], rtol=2e-5, atol=2e-6)


def per(count: float) -> hl.Reduction:
    return hl.Reduction("per", lambda lengths, tokens, segments: torch.ones_like(lengths) / count)


OBJECTIVES: dict[str, Any] = {
    "tokens": hl.cross_entropy,
    "sequence_mean": lambda: hl.cross_entropy().over("sequence_mean"),
    "fixed_length": lambda: hl.cross_entropy().over(hl.fixed_length(7)),
    "where": lambda: hl.cross_entropy().where("keep"),
    "sum": lambda: (
        hl.cross_entropy()
        + 0.1 * hl.z_loss().where("keep").over("sequence_mean")
        - 0.2 * hl.entropy().over("sequence_sum")
        + 0.5 * hl.unlikelihood().over(per(17))
    ),
    "grpo": lambda: hl.grpo(epsilon_low=0.9, epsilon_high=9.0),
    "gspo": lambda: hl.gspo(epsilon_low=0.9, epsilon_high=9.0),
    "dpo": hl.dpo,
    "constant": lambda: hl.cross_entropy().over(per(23)),
}


FIELDS = ("ref_logps", "old_logps", "keep", "advantages")


def large_batch(terms: Any) -> tuple[float, float, Tensor]:
    """Return loss, gradient norm and parameters after one SGD step on a single batch of all rows,
    with materialised logits."""
    model, inputs = tiny("llama"), collate(rows())

    def shifted(name: str, fill: float) -> Tensor:
        value = inputs[name]
        pad = torch.nn.functional.pad
        return pad(value[:, 1:], (0, 1), value=fill) if value.dim() == 2 else value

    fields: dict[str, Any] = {name: shifted(name, 0) for name in FIELDS}
    logits = model(inputs["input_ids"]).logits.float()
    loss = hl.logits_loss(logits, hl.Batch(shifted("labels", -100), **fields), terms).loss
    weights = list(model.parameters())
    gradients = torch.autograd.grad(loss, weights)
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    pairs = zip(weights, gradients, strict=True)
    moved = torch.cat([(w.detach() - 0.1 * g).flatten() for w, g in pairs])
    return loss.item(), norm.item(), moved


@pytest.mark.parametrize("name", OBJECTIVES)
def test_accumulation(name: str) -> None:
    """A training step in 1, 2 or 4 micro-batches equals the step on the whole batch."""
    want = large_batch(OBJECTIVES[name]())
    assert want[1] > 1e-3
    for pairs in (4, 2, 1):
        assert_same(run(OBJECTIVES[name](), pairs), want)


def test_a_routers_loss_is_averaged() -> None:
    """A router's loss, added in each forward, is averaged over micro-batches."""
    model, inputs = tiny("mixtral", output_router_logits=True), collate(rows())
    plain = model(inputs["input_ids"], output_router_logits=True)
    targets = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    term = hl.cross_entropy().over("sequence_mean")
    main = hl.logits_loss(plain.logits.float(), hl.Batch(targets), term).loss.item()
    parts = [model(collate([pair])["input_ids"], output_router_logits=True) for pair in rows()]
    routers = sum(part.aux_loss.item() for part in parts) / len(parts)
    want = main + model.router_aux_loss_coef * routers
    model.train()
    assert run(term, 1, model=model)[0] == pytest.approx(want, rel=1e-5)


def test_where_trainer_divides_by_the_micro_batches() -> None:
    """The loss of a step is correct for models whose forward accepts no token count, where Trainer
    divides the loss by the number of micro-batches."""

    class Divided(Trainer):
        loss_is_scaled_for_ga = False

    class Uncounted(Trainer):
        model_accepts_loss_kwargs = property(lambda self: False, lambda self, value: None)

    term = OBJECTIVES["sum"]()
    for kind in (Divided, Uncounted):
        assert_same(run(term, 1, kind), large_batch(term))


def test_an_attribute_that_a_release_does_not_heed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class attribute that a Transformers release (such as 5.17) ignores changes nothing."""
    monkeypatch.setattr(transformers.Trainer, "loss_is_scaled_for_ga", None, raising=False)
    counted = type("Counted", (Trainer,), {"loss_is_scaled_for_ga": False})
    trainer = counted(tiny("llama"))
    trainer.model_accepts_loss_kwargs = True
    assert trainer.divides(3)
    monkeypatch.delattr(transformers.Trainer, "loss_is_scaled_for_ga")
    assert not trainer.divides(3) and trainer.divides(None)


def test_evaluation() -> None:
    """In evaluation each batch has its own reduction, and Trainer averages batches."""
    term = hl.cross_entropy().over("sequence_mean") + 0.1 * hl.z_loss().where("keep")
    model = tiny("llama")
    *_, got = run(term, 2, model=model)
    inputs = [collate(rows()[i : i + 2]) for i in (0, 2)]
    losses = [model.eval()(**call).loss.item() for call in inputs]
    assert got == pytest.approx(sum(losses) / 2, rel=1e-5)


# ---------------------------------------------------------------------- ranks


def _rank(names: list[str], settings: dict[str, Any]) -> list[Any]:
    import os

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", ACCELERATE_USE_CPU="true")
    return [run(OBJECTIVES[name](), pairs, **settings) for name in names for pairs in (2, 1)]


@pytest.mark.slow
def test_ranks() -> None:
    """Two ranks under DDP with 1 and 2 micro-batches train as one step on the whole batch."""
    from worlds import world_of

    names = ["tokens", "where", "sum", "gspo", "dpo", "constant"]
    with world_of(2) as world:
        for steps in world.run(_rank, names, {}, seconds=400):
            for i, name in enumerate(names):
                want = large_batch(OBJECTIVES[name]())
                assert_same(steps[2 * i], want)
                assert_same(steps[2 * i + 1], want)
        one, two = world.run(_rank, ["sequence_mean"], {"average_tokens_across_devices": False})
    want = large_batch(OBJECTIVES["sequence_mean"]())  # ranks have equal numbers of sequences
    for step in (*one, *two):
        assert_same(step, want)


# ---------------------------------------------------------------------- plain `apply`


IDS = torch.randint(2, 37, (4, 7), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(torch.arange(7) < torch.tensor([[3], [0], [1], [5]]), -100)
SCORED = int((LABELS[:, 1:] != -100).sum())


@pytest.mark.parametrize("name", ["sequence_mean", "fixed_length", "where", "sum", "gspo", "dpo"])
def test_a_count_of_tokens_is_not_enough(name: str) -> None:
    """Other reductions than a token mean raise an error if Trainer passes a token count of several
    micro-batches; a count of one batch is exact."""
    fields = {"keep": IDS % 3 > 0, "old_logps": -3.0 - IDS / 50, "ref_logps": -2.0 - IDS / 40}
    fields["advantages"] = torch.tensor([1.0, -1.0, 0.5, 2.0])
    model = tiny("llama")
    with apply(model, OBJECTIVES[name](), fields=tuple(fields)):
        want = model(IDS, labels=LABELS, **fields).loss
        for count in (SCORED, torch.tensor(float(SCORED))):
            got = model(IDS, labels=LABELS, num_items_in_batch=count, **fields).loss
            torch.testing.assert_close(got, want)
        match = rf"num_items_in_batch: got 29 tokens of the step, .* has {SCORED}; .*TotalsMixin"
        with pytest.raises(ValueError, match=match):
            model(IDS, labels=LABELS, num_items_in_batch=29, **fields)


def test_ones_own_denominators_are_never_rescaled() -> None:
    model, fields = tiny("llama"), ("totals",)
    logits = model(IDS).logits[:, :-1].transpose(1, 2)
    each = torch.nn.functional.cross_entropy(logits, LABELS[:, 1:], reduction="none")
    means = (each.sum(1) / (LABELS[:, 1:] != -100).sum(1)).sum()
    call: dict[str, Any] = {"labels": LABELS, "num_items_in_batch": 29}
    with apply(model, hl.cross_entropy().over(per(23)) + hl.cross_entropy()):
        torch.testing.assert_close(model(IDS, **call).loss, each.sum() / 23 + each.sum() / 29)
    totals = hl.Totals(50, 8)
    with apply(model, hl.cross_entropy().over("sequence_mean") + hl.cross_entropy(), fields=fields):
        got = model(IDS, **call, totals=totals).loss
    torch.testing.assert_close(got, means / 8 + each.sum() / 50)


def test_what_the_mixin_refuses() -> None:
    for settings, match in (
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor and compute_loss_func: take"),
        ({}, "model: headloss is not applied to it"),
    ):
        model = tiny("llama")
        if settings:
            apply(model)
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, use_cpu=True, report_to="none", max_steps=1, remove_unused_columns=False,
                **settings,
            )  # fmt: skip
            with pytest.raises(ValueError, match=match):
                Trainer(model, arguments, collate, train_dataset=rows()).train()


# ---------------------------------------------------------------------- no scored tokens


@pytest.mark.parametrize("kind", [transformers.Trainer, Trainer])
def test_an_evaluation_leaves_out_what_has_nothing_scored(kind: type) -> None:
    """An evaluation leaves out batches without scored tokens, like stock Trainer.

    Counting a batch without scored tokens as loss 0 would lower the mean evaluation loss. Older
    Trainer releases count batches without scored tokens in the mean.
    """
    data = [
        {"input_ids": row.tolist(), "labels": [-100] * 7 if i % 2 else row.tolist()}
        for i, row in enumerate(IDS)
    ]
    losses = []
    for trainer in (transformers.Trainer, kind):
        model = tiny("llama")
        if losses:
            apply(model)
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, use_cpu=True, report_to="none", per_device_eval_batch_size=1
            )
            losses.append(trainer(model, arguments, eval_dataset=data).evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5, nan_ok=True)


def test_nothing_scored() -> None:
    """Without scored tokens an evaluation gives NaN, and training gives loss 0 and zero
    gradients."""
    model, labels = tiny("llama"), torch.full_like(IDS, -100)
    for count in ({}, {"num_items_in_batch": 0}, {"num_items_in_batch": torch.tensor(0)}):
        stock = model.eval()(IDS, labels=labels, **count).loss
        with apply(model, hl.cross_entropy() + hl.z_loss().over("sequence_mean")):
            assert stock.isnan() and model.eval()(IDS, labels=labels, **count).loss.isnan()
            loss = model.train()(IDS, labels=labels, **count).loss
        model.zero_grad()
        loss.backward()
        assert loss == 0 and all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    with apply(model):  # another micro-batch of the step has scored tokens
        assert model.eval()(IDS, labels=labels, num_items_in_batch=3).loss == 0
