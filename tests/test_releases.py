"""With untested releases of Transformers and TRL, adapters work with one warning, or an error names
the changed function."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
import types
import warnings
from typing import Any

import pytest
import torch
from test_head_models import tiny
from torch import Tensor, nn

import headloss as hl
from headloss.head.reading import FAMILIES
from headloss.integrations import seams

transformers = pytest.importorskip("transformers")
from transformers.loss import loss_utils  # noqa: E402

from headloss.integrations.transformers import apply  # noqa: E402

IDS = torch.randint(2, 37, (2, 7), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(torch.arange(7) < torch.tensor([[3], [0]]), -100)


@pytest.fixture(params=["99.0", "4.57.6"])
def another(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    version = importlib.metadata.version
    fakes = dict.fromkeys(("transformers", "trl"), request.param)
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: fakes.get(name) or version(name)
    )
    seams.announce.cache_clear()
    return request.param


def loss_of(model: Any) -> Tensor:
    return model(input_ids=IDS, labels=LABELS).loss


def test_an_untested_release_with_equal_losses_warns_once(another: str) -> None:
    models = [tiny("llama"), tiny("gemma2"), tiny("cohere")]
    want = [loss_of(model) for model in models]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model, loss in zip(models, want, strict=True):
            apply(model)
            torch.testing.assert_close(loss_of(model), loss)
            torch.testing.assert_close(loss_of(model), loss)
    said = [str(w.message) for w in caught if "headloss" in str(w.message)]
    assert len(said) == 1
    assert f"transformers {another} was not tested" in said[0] and "its loss function" in said[0]


def test_a_tested_release_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(seams.TESTED, "transformers", (importlib.metadata.version("transformers"),))
    seams.announce.cache_clear()
    model = tiny("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with apply(model):
            loss_of(model)


# ---------------------------------------------------------------------- the loss function


def unshifted(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, **kwargs):
    labels = labels if shift_labels is None else shift_labels
    return loss_utils.fixed_cross_entropy(
        logits.view(-1, vocab_size), labels.view(-1), num_items_in_batch
    )


def of_its_own_count(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
    return STOCK(logits, labels, vocab_size, **kwargs)


def by_all_tokens(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
    count = labels.numel() if num_items_in_batch is None else num_items_in_batch
    return STOCK(logits, labels, vocab_size, num_items_in_batch=count, **kwargs)


def without_shift_labels(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100):
    return STOCK(logits, labels, vocab_size, num_items_in_batch, ignore_index)


def with_a_mask(logits, labels, loss_mask, vocab_size, num_items_in_batch=None, **kwargs):
    return STOCK(logits, labels, vocab_size, num_items_in_batch, **kwargs)


STOCK = loss_utils.ForCausalLMLoss


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (unshifted, r"it gives [\d.]+ for logits whose shifted mean is 2\.\d+"),
        (
            of_its_own_count,
            r"it gives [\d.]+ with num_items_in_batch for logits whose .* is 0\.\d+",
        ),
        (by_all_tokens, r"it gives [\d.]+ for logits whose shifted mean is"),
        (without_shift_labels, "a call with shift_labels ends in TypeError: "),
        (with_a_mask, r"takes \(logits, labels, loss_mask, .*want \(logits, labels, vocab_size"),
    ],
)
def test_another_loss_function(
    changed: Any, says: str, another: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", changed)
    got = rf"model\.loss_function: got {changed.__name__}, want Transformers' own; pass terms; .*"
    with pytest.raises(ValueError, match=got + says):
        apply(tiny("llama"))


@pytest.mark.parametrize("changed", [unshifted, of_its_own_count, by_all_tokens])
def test_another_loss_function_of_transformers(changed: Any, monkeypatch: Any) -> None:
    """A changed loss function of Transformers runs, with headloss's objective in place of its
    cross-entropy."""
    monkeypatch.setattr(changed, "__module__", "transformers.loss.another")
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", changed)
    model, count = tiny("llama"), torch.tensor(29)
    want = [loss_of(model), model(IDS, labels=LABELS, num_items_in_batch=count).loss]
    with apply(model) as applied:
        torch.testing.assert_close(loss_of(model), want[0])
        counted = model(IDS, labels=LABELS, num_items_in_batch=count).loss
        torch.testing.assert_close(counted, want[1])
        assert applied.output is not None
    if changed is of_its_own_count:
        smoothed = hl.cross_entropy(label_smoothing=0.2)
        with apply(tiny("llama"), smoothed) as applied:
            wanted = loss_of(applied.model)
        with apply(model, smoothed):
            torch.testing.assert_close(loss_of(model), wanted)


def test_a_loss_function_that_is_read_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    want = loss_of(model)
    monkeypatch.setattr(type(model), "loss_function", staticmethod(STOCK), raising=False)
    with apply(model) as applied:
        torch.testing.assert_close(loss_of(model), want)
        assert applied.output is not None and "_loss_function" not in vars(model)


def test_a_loss_function_of_the_same_meaning_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def another_one(logits, labels, vocab_size, *args, reduction="mean", **kwargs):
        return STOCK(logits, labels, vocab_size, *args, **kwargs)

    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", another_one)
    model = tiny("llama")
    want = loss_of(model)
    with apply(model):
        torch.testing.assert_close(loss_of(model), want)


def test_a_check_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`apply` checks a model without touching its random generators, modules or device, and works
    on a meta model."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny("llama").config)
        monkeypatch.setattr(nn.Module, "__call__", lambda *_: pytest.fail("a module was called"))
        state = torch.get_rng_state()
        with apply(model):
            assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------------- the model's forward


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = tiny("llama")
    head = vars(model.lm_head).copy()
    with apply(model):
        with pytest.raises(ValueError, match=r"got shape \(2, 7, 16\)"):
            model(IDS, labels=LABELS[:, 1:])
        assert vars(model.lm_head).keys() == head.keys() and "_loss_function" not in vars(model)
        loss_of(model)


def test_an_error_of_the_users_own_is_raised_as_it_is() -> None:
    model = tiny("llama")
    with apply(model, hl.reinforce()), pytest.raises(ValueError, match="advantages"):
        loss_of(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["gemma2", "granite", "llama"])
def test_rounding_is_no_change(family: str, dtype: torch.dtype) -> None:
    model = tiny(family).to(dtype)
    with apply(model) as applied:
        loss_of(model)
        assert applied.output is not None


# ---------------------------------------------------------------------- unlisted model families


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "recurrent_gemma", "cohere", "granite", "hyperclovax", "minicpm3"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_family_of_no_table_under_trl(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In TRL's trainers, a model family that headloss does not know gets the log-probs of its own
    logits."""
    pytest.importorskip("trl")
    from headloss.integrations.trl.forward import Request, add_head

    model = tiny(family).to(dtype)
    ids = torch.randint(2, 37, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = model(ids).logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])
    monkeypatch.delitem(FAMILIES, family)
    add_head(model)
    got = Request().of(model, input_ids=ids, labels=ids).log_probs
    assert got is not None
    loose = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(got, want.squeeze(-1), **loose)
    with pytest.raises(ValueError, match=r"in no table; say softcap=\.\.\. and logit_scale="):
        hl.Head.of_model(model)
    assert hl.Head.of_model(model, softcap=None, logit_scale=2.0).logit_scale == 2.0


def test_a_forward_that_no_head_explains_under_trl() -> None:
    """In TRL, a forward without a head that headloss supports raises if the fused loss was
    requested, and else uses full logits."""
    pytest.importorskip("trl")
    from headloss.integrations.trl.forward import Request, Switches, add_head

    ids = torch.randint(2, 37, (2, 7), generator=torch.Generator().manual_seed(0))

    def clamped() -> Any:
        model: Any = tiny("llama")

        def forward(self, input_ids=None, **kwargs):
            logits = self.lm_head(self.model(input_ids=input_ids)[0]).clamp(-0.5, 0.5)
            return transformers.modeling_outputs.CausalLMOutput(logits=logits)

        model.forward = types.MethodType(forward, model)
        return model

    model = clamped()
    want = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    add_head(model, switches=Switches())
    got = Request().of(model, input_ids=ids, labels=ids).log_probs
    assert got is not None
    torch.testing.assert_close(got, want)
    add_head(model := clamped())
    with pytest.raises(ValueError, match=r"use_fused_loss: got True, but Llama.* more to its logi"):
        Request().of(model, input_ids=ids, labels=ids)


# ---------------------------------------------------------------------- TRL


@pytest.fixture
def trl_install() -> Any:
    pytest.importorskip("trl")
    from headloss.integrations import trl

    yield trl
    trl.uninstall()


def test_trl_that_holds_works_with_one_warning(trl_install: Any, another: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            trl_install.install()
            trl_install.uninstall()
    said = [str(w.message) for w in caught if "headloss" in str(w.message)]
    assert len(said) == 1 and f"trl {another} was not tested" in said[0]


def _log_probs(change: Any) -> Any:
    from trl.trainer import utils

    stock = utils._ChunkedLogProbFunction

    class Function:
        @staticmethod
        def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size,
                    final_logit_softcapping=None, logit_scale=1.0, outputs=()):  # fmt: skip
            raise NotImplementedError

        @staticmethod
        def apply(*args):
            return change(stock.apply, list(args))

    return Function


def _warmer(apply, args):
    args[4] = 1 / args[4]
    return apply(*args)


def _capped_first(apply, args):
    args[6], args[7] = args[6] / args[7], args[7] * 2
    return apply(*args)


def _no_bias(apply, args):
    args[2] = None
    return apply(*args)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_warmer, r"its log_probs is \['-.*'\], by the formula \['-"),
        (_capped_first, "its log_probs is"),
        (_no_bias, "its log_probs is"),
        (lambda apply, args: apply(*args)[:2], "it returns 2 values, want 5: log_probs, entropy"),
        (lambda apply, args: apply(*args, 1), "a call of it ends in"),
        (lambda apply, args: (*apply(*args)[:4], apply(*args)[0]), "its is_top1 is"),
    ],
)
def test_another_function_of_trl(
    change: Any, says: str, trl_install: Any, another: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.trainer import distillation_trainer, utils

    changed = _log_probs(change)
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", changed)
    start = rf"trainer\.utils\._ChunkedLogProbFunction of trl {another}: .*"
    with pytest.raises(RuntimeError, match=start + says + ".* do without install"):
        trl_install.install()
    assert utils._ChunkedLogProbFunction is changed
    assert distillation_trainer._chunked_divergence_loss.__module__.startswith("trl.")


def test_a_function_of_trl_with_other_arguments(
    trl_install: Any, another: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.trainer import distillation_trainer, utils

    class Older:
        @staticmethod
        def forward(ctx, last_hidden, weight, targets, temperature, chunk_size):
            raise NotImplementedError

    with monkeypatch.context() as patch:
        patch.setattr(utils, "_ChunkedLogProbFunction", Older)
        with pytest.raises(
            RuntimeError, match=r"it takes \(last_hidden, weight, targets, .*want \("
        ):
            trl_install.install()
    with monkeypatch.context() as patch:
        patch.delattr(utils, "_ChunkedLogProbFunction")
        with pytest.raises(
            RuntimeError, match=rf"_ChunkedLogProbFunction: is not in the installed TRL, {another}"
        ):
            trl_install.install()
    stock = distillation_trainer._chunked_divergence_loss

    def chunked(student, teacher, weight, teacher_weight, mask, beta, chunk_size, **kwargs):
        return stock(student, teacher, weight, teacher_weight, mask, beta, **kwargs)

    def other_way_round(*args, beta=0.5, **kwargs):
        return stock(*args[:5], 1 - args[5], **kwargs)

    other_way_round.__signature__ = inspect.signature(stock)  # type: ignore[attr-defined]
    for changed, says in ((chunked, "takes"), (other_way_round, "its loss is")):
        with monkeypatch.context() as patch:
            patch.setattr(distillation_trainer, "_chunked_divergence_loss", changed)
            seam = rf"distillation_trainer\._chunked_divergence_loss of trl {another}: .*"
            with pytest.raises(RuntimeError, match=seam + says):
                trl_install.install()


def test_whoever_holds_a_function_of_trl_by_name_is_served(
    trl_install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that imported a TRL function by name, like TRL 1.14's trainers, gets headloss's
    function."""
    from trl.trainer import utils

    holder: Any = types.ModuleType("trl.trainer.holder")
    holder._ChunkedLogProbFunction = stock = utils._ChunkedLogProbFunction
    monkeypatch.setitem(sys.modules, holder.__name__, holder)
    trl_install.install()
    assert holder._ChunkedLogProbFunction is utils._ChunkedLogProbFunction is not stock
    # a TRL module that is imported after `install()` and before `uninstall()`
    later: Any = types.ModuleType("trl.trainer.later")
    later._ChunkedLogProbFunction = utils._ChunkedLogProbFunction
    monkeypatch.setitem(sys.modules, later.__name__, later)
    trl_install.uninstall()
    assert holder._ChunkedLogProbFunction is later._ChunkedLogProbFunction is stock


def test_a_method_of_a_trainer_that_takes_other_arguments(
    another: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    from trl.trainer import sft_trainer

    from headloss.integrations.trl import SFTTrainer

    def compute_loss(self, model, inputs, labels, return_outputs=False): ...

    monkeypatch.setattr(sft_trainer.SFTTrainer, "compute_loss", compute_loss)
    with pytest.raises(RuntimeError, match=r"SFTTrainer\.compute_loss of trl: takes .*labels"):
        SFTTrainer()
    monkeypatch.undo()
    monkeypatch.delattr(sft_trainer, "add_fused_lm_head")
    with pytest.raises(RuntimeError, match="add_fused_lm_head: is not in the installed TRL"):
        SFTTrainer()
