"""The callback that applies headloss to a Trainer's model agrees with the stock Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
from test_head_models import tiny  # noqa: E402
from test_transformers import IDS, LABELS, trainer  # noqa: E402

import headloss as hl  # noqa: E402
from headloss.integrations.followed import HeadCall  # noqa: E402
from headloss.integrations.transformers import HeadLossCallback, apply, remove  # noqa: E402


def run(folder: Any, callback: HeadLossCallback | None, **settings: Any) -> Any:
    model = tiny("llama")
    made = trainer(model, str(folder), **settings)
    if callback is not None:  # pass `callbacks=` to the constructor, as frameworks do
        made = type(made)(
            model, made.args, made.data_collator, callbacks=[callback],
            train_dataset=made.train_dataset, eval_dataset=made.eval_dataset,
        )  # fmt: skip
    made.train()
    logs = [log["loss"] for log in made.state.log_history if "loss" in log]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return logs, weights, made.evaluate()["eval_loss"], model


def test_as_the_stock_trainer(tmp_path: Any, monkeypatch: Any) -> None:
    """Two accumulated steps and an evaluation with the callback equal stock Trainer, without
    logits."""
    want, weights, evaluated, _ = run(tmp_path, None)
    with monkeypatch.context() as patch:
        patch.setattr(HeadCall, "raw", lambda *_: pytest.fail("logits were made"))
        got, moved, measured, model = run(tmp_path, callback := HeadLossCallback())
    assert len(want) == 2 and got == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(moved, weights, rtol=1e-5, atol=1e-6)
    assert measured == pytest.approx(evaluated, rel=1e-5)
    assert callback.applied is not None and callback.applied.model is model
    remove(model)


def test_terms_options_and_fields(tmp_path: Any) -> None:
    terms, options = hl.cross_entropy(label_smoothing=0.2), hl.Options(schedule="recompute")
    want, weights, *_ = run(tmp_path, None, label_smoothing_factor=0.2)
    callback = HeadLossCallback(terms, options, fields=("advantages",))
    got, moved, *_ = run(tmp_path, callback)
    assert got == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(moved, weights, rtol=1e-5, atol=1e-6)
    assert callback.applied is not None
    assert callback.applied.options is options and callback.applied.fields == ("advantages",)


def test_settings_that_take_the_loss_elsewhere(tmp_path: Any) -> None:
    """Settings that bypass the loss are refused by name before any update."""
    with pytest.raises(ValueError, match=r"label_smoothing_factor: got 0\.1, want 0, .*as terms"):
        run(tmp_path, HeadLossCallback(), label_smoothing_factor=0.1)
    model = tiny("llama")
    apply(model)
    made = trainer(model, str(tmp_path))
    with pytest.raises(ValueError, match="headloss is applied to it already"):
        type(made)(model, made.args, callbacks=[HeadLossCallback()])


@pytest.mark.parametrize("how", ["its own loss", "another model"])
def test_a_loss_that_is_not_ours_is_an_error(how: str, tmp_path: Any) -> None:
    made = trainer(tiny("llama"), str(tmp_path))
    models = [tiny("llama") for _ in range(2)]

    class Around(transformers.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
            labels = inputs["labels"][:, 1:]
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    kind: Any = Around if how == "its own loss" else transformers.Trainer
    source: dict[str, Any] = {"model": models[0]}
    if how == "another model":
        source = {"model_init": iter(models).__next__}
    made = kind(
        **source, args=made.args, data_collator=made.data_collator,
        train_dataset=made.train_dataset, callbacks=[HeadLossCallback()],
    )  # fmt: skip
    before = [p.detach().clone() for p in models[-1].parameters()]
    with pytest.raises(RuntimeError, match="the loss of the first step did not come from headloss"):
        made.train()
    assert all(map(torch.equal, before, models[-1].parameters()))


def test_the_end_removes_nothing(tmp_path: Any) -> None:
    """The end of training removes nothing: later trainers and direct calls still use headloss's
    loss."""
    *_, model = run(tmp_path, callback := HeadLossCallback())
    trainer(model, str(tmp_path)).train()
    assert callback.applied is not None
    loss = model(input_ids=IDS, labels=LABELS).loss
    metrics: Any = callback.applied.metrics
    perplexity = metrics.compute()["cross_entropy/perplexity"]
    assert loss.exp().item() == pytest.approx(perplexity, rel=1e-5)
