"""After `apply(model)` a model's own forward runs with its loss function replaced by the objective.

The objective gets the model's own labels, label shift, token count and changes of logits. Expected
values come from the stock model whose loss function is the objective on its logits.
"""

from __future__ import annotations

import copy
import os
import pickle
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_forwards import CE, DENSE, FORWARDS, OTHERS, Beside, LeavesOut, Llama, forward
from test_head_models import tiny
from torch import Tensor, nn

import headloss as hl

transformers = pytest.importorskip("transformers")
from headloss.integrations.followed import Followed  # noqa: E402
from headloss.integrations.transformers import apply, remove  # noqa: E402

IDS = torch.randint(2, 37, (2, 7), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(torch.arange(7) < torch.tensor([[3], [0]]), -100)
TERMS = hl.cross_entropy(label_smoothing=0.2) + 0.1 * hl.z_loss()


def of_class(kind: Any, family: str = "llama") -> Any:
    model = tiny(family)
    model.__class__ = kind
    return model.train()


def loss_function_of(terms: Any) -> Callable[..., Tensor]:
    """Return an objective on logits as a loss function of Transformers."""

    def function(logits, labels, vocab_size=None, num_items_in_batch=None, ignore_index=-100,
                 shift_labels=None, **_):  # fmt: skip
        targets = shift_labels
        if targets is None:
            targets = nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
        targets = targets.masked_fill(targets == ignore_index, -100)
        loss = hl.logits_loss(logits.float(), hl.Batch(targets), terms).loss
        if num_items_in_batch is None:
            return loss
        return loss * (targets != -100).sum() / num_items_in_batch

    return function


def outcome(model: Any, **more: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = model(**{"input_ids": IDS, "labels": LABELS, **more})
    out.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return out.loss.detach(), out.logits.detach() + 0, gradients


def assert_same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=3e-6, atol=1e-6)
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=0)
    assert got[2].keys() == want[2].keys()
    scale = max(float(g.abs().max()) for g in want[2].values())
    for name, gradient in want[2].items():
        torch.testing.assert_close(got[2][name], gradient, rtol=2e-5, atol=3e-6 * scale)


# ---------------------------------------------------------------------- A and B: the forward's code


@pytest.mark.parametrize("kind", FORWARDS, ids=lambda kind: kind.__name__)
def test_changes_by_a_models_own_forward_take_effect(kind: Any, monkeypatch: Any) -> None:
    """After `apply(model)`, changes that a model's own forward makes to logits and loss still take
    effect, for any terms and mostly without materialising logits."""
    stock, count = of_class(kind), {"num_items_in_batch": torch.tensor(13)}
    want = [outcome(stock), outcome(stock, **count)]
    stock.loss_function = loss_function_of(TERMS)
    wanted = outcome(stock)
    dense: list[Any] = []
    logits_loss = hl.head_loss.__globals__["logits_loss"]
    monkeypatch.setattr(
        "headloss.integrations.transformers.call.logits_loss",
        lambda *args, **options: dense.append(1) or logits_loss(*args, **options),
    )
    for model in (of_class(kind), copy.deepcopy(of_class(kind))):
        with apply(model):
            assert_same(outcome(model), want[0])
            assert_same(outcome(model, **count), want[1])
        with apply(model, TERMS):
            for _ in range(2):
                assert_same(outcome(model), wanted)
    assert bool(dense) == (kind in DENSE)


@forward
def Direct(self, hidden, labels, **kwargs):
    """A forward with its own cross-entropy on unshifted labels, as in encoder-decoder models."""
    logits = self.lm_head(hidden)
    return nn.CrossEntropyLoss()(logits.view(-1, 37), labels.view(-1)), logits


@forward
def DirectShifted(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden)
    shifted = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return CE(shifted[0].view(-1, 37), shifted[1].view(-1), reduction="sum") / 29, logits


@forward
def DirectThenAnother(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden)
    other = CE(logits.flatten(0, 1), OTHERS.flatten())
    return other + CE(logits.flatten(0, 1), labels.flatten()), logits


@pytest.mark.parametrize("kind", [Direct, DirectShifted, DirectThenAnother])
def test_a_cross_entropy_of_the_labels_is_the_loss(kind: Any, monkeypatch: Any) -> None:
    want = outcome(of_class(kind))
    with apply(model := of_class(kind)):
        assert_same(outcome(model), want)
    stock, cross_entropy = loss_function_of(TERMS), CE

    def replaced(logits, targets, reduction="mean", **options):
        if torch.equal(targets, OTHERS.flatten()):
            return cross_entropy(logits, targets)
        scored = int((targets != -100).sum()) if reduction == "sum" else 1
        return stock(logits, None, shift_labels=targets) * scored

    model = of_class(kind)
    monkeypatch.setitem(kind.after.__globals__, "CE", replaced)
    monkeypatch.setattr(nn.CrossEntropyLoss, "forward", lambda self, *args: replaced(*args))
    wanted = outcome(model)
    monkeypatch.undo()
    with apply(model, TERMS):
        assert_same(outcome(model), wanted)


@forward
def Smoothed(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden)
    return CE(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1), logits


@forward
def Weighed(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden)
    return CE(logits.flatten(0, 1), labels.flatten(), torch.linspace(1, 2, 37)), logits


@forward
def Sigmoids(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden)
    return nn.functional.softplus(-logits).mean(), logits


@pytest.mark.parametrize("kind", [Smoothed, Weighed, Sigmoids])
def test_a_loss_that_is_no_cross_entropy(kind: Any) -> None:
    """A model whose loss is not a cross-entropy keeps its loss with a warning; `apply(model,
    terms)` raises."""
    want = outcome(of_class(kind))
    with apply(model := of_class(kind)), pytest.warns(UserWarning, match="calls no loss func"):
        assert_same(outcome(model), want)
    with apply(model, TERMS), pytest.raises(RuntimeError, match="its loss is not the objective"):
        outcome(model)


def test_two_cross_entropies_of_the_labels_are_refused() -> None:
    @forward
    def TwoDirect(self, hidden, labels, **kwargs):
        logits = self.lm_head(hidden)
        return sum(CE(logits.flatten(0, 1), labels.flatten()) for _ in range(2)), logits

    want = outcome(of_class(TwoDirect))
    with apply(model := of_class(TwoDirect)):
        assert_same(outcome(model), want)
    with apply(model, TERMS), pytest.raises(RuntimeError, match="takes two cross-entropies"):
        outcome(model)


def test_a_config_that_changes_after_apply() -> None:
    """A soft cap (PaliGemma) or logit scale changed in the config after `apply` is respected."""
    for family, change in (
        ("gemma2", lambda m: setattr(m.config, "final_logit_softcapping", 0.7)),
        ("gemma2", lambda m: setattr(m.config, "final_logit_softcapping", None)),
        ("cohere", lambda m: setattr(m, "logit_scale", 1.7)),
    ):
        stock, model = tiny(family).train(), tiny(family).train()
        apply(model)
        assert_same(outcome(model), outcome(stock))
        change(stock)
        change(model)
        assert_same(outcome(model), outcome(stock))


def test_fields_lie_beside_the_labels_that_the_loss_gets() -> None:
    w = torch.rand(2, 7, generator=torch.Generator().manual_seed(2))
    weighted, match = hl.cross_entropy().weighted("w"), r"w: got \(2, 7\) beside .* want \(2, 5\)"
    apply(model := of_class(LeavesOut), weighted, fields=("w",))
    with pytest.raises(ValueError, match=match):
        model(IDS, labels=LABELS, w=w)
    with apply(model := of_class(Beside), weighted, fields=("w",)):
        got = model(IDS, labels=LABELS, w=w).loss
    logits = model.lm_head(model.model(IDS)[0])
    each = CE(logits.flatten(0, 1), LABELS.flatten(), reduction="none") * w.flatten()
    torch.testing.assert_close(got, each.sum() / (LABELS != -100).sum())


# ---------------------------------------------------------------------- C: the objective stays


def test_a_loss_function_set_after_apply_is_used_with_a_warning() -> None:
    stock, model = of_class(Llama), of_class(Llama)
    apply(model, TERMS)
    for each in (stock, model):
        each.loss_function = lambda logits, labels, **_: CE(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.3
        )
    with pytest.warns(UserWarning, match=r"loss_function: was set after apply\(\), and is used"):
        assert_same(outcome(model), outcome(stock))
    del model._loss_function
    stock.loss_function = loss_function_of(TERMS)
    assert_same(outcome(model), outcome(stock))


@pytest.fixture
def accelerator() -> Any:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    yield accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    accelerate.state.AcceleratorState._reset_state(True)


def test_unwrapping_keeps_the_objective(accelerator: Any) -> None:
    """Unwrapping by accelerate, which follows `__wrapped__`, keeps the objective."""
    stock = of_class(Llama)
    stock.loss_function = loss_function_of(TERMS)
    want, model = outcome(stock), of_class(Llama)
    applied = apply(model, TERMS)
    prepared = accelerator.prepare_model(model)
    prepared(IDS, labels=LABELS)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert_same(outcome(unwrapped), want)
    applied.remove()
    assert_same(outcome(model), outcome(of_class(Llama)))
    again = accelerator.prepare_model(of_class(Llama))
    with pytest.raises(ValueError, match=r"before accelerator\.prepare"):
        apply(again)
    unwrapped = accelerator.unwrap_model(again, keep_fp32_wrapper=False)
    with apply(unwrapped, TERMS):
        assert_same(outcome(unwrapped), want)


def test_hooks_of_accelerate_keep_the_objective() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    stock = of_class(Llama)
    stock.loss_function = loss_function_of(TERMS)
    want = outcome(stock)
    for before in (True, False):
        model = of_class(Llama)
        if before:
            hooks.add_hook_to_module(model, hooks.ModelHook())
        apply(model, TERMS)
        if not before:
            hooks.add_hook_to_module(model, hooks.ModelHook())
        assert_same(outcome(model), want)
        hooks.remove_hook_from_module(model)
        assert_same(outcome(model), want)
        remove(model)
        assert_same(outcome(model), outcome(of_class(Llama)))


def test_training_calls_that_pass_the_objective_by() -> None:
    """A training call whose loss is not computed by the objective of `apply` warns once if the
    objective is cross-entropy, and raises an error for other terms."""
    for call in (
        lambda m: m(IDS),
        lambda m: m.model(IDS),
        lambda m: Llama.forward(m, IDS, labels=LABELS),
    ):
        with apply(model := of_class(Llama), TERMS):
            with pytest.raises(RuntimeError, match=r"but .*: its loss is not the objective of app"):
                call(model)
            with torch.no_grad():
                call(model)
            call(model.eval())
        with apply(model.train()):
            with pytest.warns(UserWarning, match="if that is meant"):
                call(model)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("default")
                for _ in range(2):
                    call(model)
                model.generate(IDS, max_new_tokens=2, do_sample=False)
            assert sum("if that is meant" in str(w.message) for w in said) == 1


@pytest.mark.parametrize("adapters", [False, True])
def test_trls_sft_trainer_warns_or_raises_about_its_own_loss(adapters: bool, tmp_path: Any) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"input_ids": r, "labels": r} for r in IDS.tolist()])
    for terms in (None, TERMS):
        model = tiny("llama")
        if adapters:
            peft = pytest.importorskip("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
        apply(model, terms)
        trainer = trl.SFTTrainer(
            model, trl.SFTConfig(str(tmp_path), max_steps=1, use_cpu=True, report_to="none",
                                 bf16=False, save_strategy="no", disable_tqdm=True),
            train_dataset=rows, processing_class=tokenizer(),
        )  # fmt: skip
        if terms is None:
            with pytest.warns(UserWarning, match="as under TRL's trainers"):
                trainer.train()
        else:
            with pytest.raises(RuntimeError, match="as under TRL's trainers"):
                trainer.train()


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(37)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    kind = transformers.PreTrainedTokenizerFast
    return kind(tokenizer_object=made, pad_token="w0", eos_token="w1")


# ---------------------------------------------------------------------- D: logits belong to a call


def adapted(**options: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, init_lora_weights=False, **options)
    return peft.get_peft_model(tiny("llama"), config).train()


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "fused": lambda m, _: torch.optim.AdamW(m.parameters(), 0.1, fused=True).step(),
    "foreach": lambda m, _: torch.optim.AdamW(m.parameters(), 0.1, foreach=True).step(),
    "sgd": lambda m, _: torch.optim.SGD(m.parameters(), 0.1).step(),
    "merge": lambda m, _: m.merge_adapter(),
    "disable": lambda m, _: m.base_model.disable_adapter_layers(),
    "scale": lambda m, _: m.lm_head.scaling.update(default=9.0),
    "load": lambda m, _: m.load_state_dict(m.state_dict()),
    "swap": lambda m, _: setattr(m.lm_head.base_layer.weight, "data", torch.zeros(37, 16)),
    "hidden": lambda m, hidden: hidden.detach().zero_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_logits_of_other_weights_are_refused(change: str) -> None:
    """Reading `logits` after `optimizer.step()` raises, unless they were read before."""
    model, hidden = adapted(target_modules=["q_proj", "lm_head"]), []
    model.base_model.model.model.register_forward_hook(lambda *a: hidden.append(a[-1][0]))
    want = model(IDS, labels=LABELS).logits.detach()
    apply(model)
    early, late = model(IDS, labels=LABELS), model(IDS, labels=LABELS)
    torch.testing.assert_close(early.logits + 0, want)
    for out in (early, late):
        out.loss.backward()
    for each in hidden:
        CHANGES[change](model, each)
    torch.testing.assert_close(early.logits.argmax(-1), want.argmax(-1))
    for read in (lambda x: x.argmax(-1), lambda x: x[:, 1:] + 1, lambda x: x.numpy(), repr):
        with pytest.raises(RuntimeError, match=r"logits: cannot be made any more, .* read them b"):
            read(late.logits.detach())


def test_dropout_of_the_head_is_drawn_once() -> None:
    model = adapted(target_modules=["lm_head"], lora_dropout=0.5)
    apply(model)
    out = model(IDS, labels=LABELS)
    with pytest.raises(RuntimeError, match="dropout of the head's adapter has been drawn"):
        out.logits.sum()
    torch.manual_seed(3)
    with torch.no_grad():
        out = model.eval()(IDS, labels=LABELS)
    want = CE(out.logits[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten())
    torch.testing.assert_close(out.loss, want)

    @forward
    def ReadsFirst(self, hidden, labels, **kwargs):
        logits = self.lm_head(hidden)
        self.read = logits.sum()
        return self.loss_function(logits, labels, 37), logits

    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], lora_dropout=0.5)
    model = peft.get_peft_model(of_class(ReadsFirst), config)
    apply(model)
    out = model(input_ids=IDS, labels=LABELS)
    want = CE(out.logits[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten())
    torch.testing.assert_close(out.loss, want)
    torch.testing.assert_close(out.logits.sum(), model.base_model.model.read)


def test_reading_a_view_of_overwritten_logits_raises() -> None:
    with apply(model := of_class(Llama)):
        out = model(IDS, labels=LABELS)
        scaled, logits = out.logits * 2, out.logits
        logits[..., 3] = 7.0
        assert (logits[..., 3] == 7).all() and (out.logits[..., 3] == 7).all()
        with pytest.raises(RuntimeError, match="written to by another name"):
            scaled.sum()


def test_a_gradient_of_logits_is_not_lost() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return 2 * gradients[0]

    def gradients(model: Any) -> list[Tensor]:
        model.zero_grad()
        out = model(IDS, labels=LABELS)
        (out.loss + Doubled.apply(out.logits).pow(2).mean()).backward()
        return [p.grad.clone() for p in model.parameters()]

    want = gradients(of_class(Llama))
    with apply(model := of_class(Llama)):
        torch.testing.assert_close(gradients(model), want, rtol=1e-4, atol=1e-6)
        out = model(IDS, labels=LABELS)
        with pytest.raises(RuntimeError, match="retain_grad"):
            out.logits.retain_grad()
        assert type(out.logits) is Followed and out.logits.dtype == torch.float32


def test_tuple_outputs_and_one_adapter_per_row() -> None:
    """Results are correct if a forward returns a tuple, and if PEFT uses a different head for each
    row."""
    stock = of_class(Llama)
    want = stock(IDS, labels=LABELS, return_dict=False)
    with apply(model := of_class(Llama)):
        got = model(IDS, labels=LABELS, return_dict=False)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1] + 0, want[1])
    config, model = None, adapted(target_modules=["q_proj", "lm_head"])
    config = model.peft_config["default"]
    model.add_adapter("other", config)
    model.eval()
    call = {"input_ids": IDS, "labels": LABELS, "adapter_names": ["default", "other"]}
    want = model(**call)
    with apply(model):
        got = model(**call)
    torch.testing.assert_close(got.loss, want.loss)
    torch.testing.assert_close(got.logits, want.logits)


# ---------------------------------------------------------------------- E: copies run their weights


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_runs_its_own_forward(way: Any) -> None:
    model = tiny("llama").train()
    apply(model, TERMS)
    twin = way(model)
    twin.lm_head = nn.Linear(16, 37, bias=False)
    stock = tiny("llama").train()
    stock.lm_head = copy.deepcopy(twin.lm_head)
    stock.loss_function = loss_function_of(TERMS)
    assert_same(outcome(twin), outcome(stock))


# ---------------------------------------------------------------------- minimal work


def test_counts_that_differ_are_one_entry_and_one_launch() -> None:
    """Calls with different token counts share one cached result of the term's tracing, and `apply`
    launches no operation of its own."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from headloss.objective import reads

    launches: list[str] = []
    package = os.path.dirname(hl.__file__) + os.sep

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            frames = traceback.extract_stack()
            ours = [f.filename for f in frames if f.filename.startswith(package)]
            beyond = "forward" not in {f.name for f in frames if "modeling_" in f.filename}
            if beyond and ours and "integrations" in ours[-1]:
                launches.append(str(func))
            return func(*args, **(kwargs or {}))

    apply(model := of_class(Llama))
    outcome(model, num_items_in_batch=torch.tensor(9))
    entries = len(reads._TABLE)
    for count in range(10, 13):
        outcome(model, num_items_in_batch=torch.tensor(count))
    assert len(reads._TABLE) == entries
    with Launches():
        model(input_ids=IDS, labels=LABELS, num_items_in_batch=torch.tensor(13)).loss.backward()
    named = [n for n in launches if not any(v in n for v in ("slice", "empty", "view", "detach"))]
    assert not named


def test_transforms_of_functions_are_named() -> None:
    apply(model := of_class(Llama))
    with pytest.raises(RuntimeError, match=r"inside a transform of torch\.func"):
        torch.func.grad(
            lambda p: torch.func.functional_call(model, p, IDS, {"labels": LABELS}).loss
        )(dict(model.named_parameters()))


def test_inference_mode() -> None:
    stock, model = of_class(Llama), of_class(Llama)
    apply(model)
    with torch.inference_mode():
        got, want = (m(IDS, labels=LABELS) for m in (model, stock))
    torch.testing.assert_close(got.loss, want.loss)
    assert torch.equal(got.logits + 0, want.logits)
