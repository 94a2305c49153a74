"""Hugging Face models after `apply(model)` agree with the stock model in loss, gradients, logits
and training runs."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_head_models import tiny
from torch import Tensor

import headloss as hl
from headloss.integrations.documents import as_documents

transformers = pytest.importorskip("transformers")
from headloss.integrations.followed import HeadCall  # noqa: E402
from headloss.integrations.sharding import in_place_of  # noqa: E402
from headloss.integrations.transformers import apply, remove  # noqa: E402

QUICK = ("llama", "gpt2", "gemma2", "cohere", "minicpm3", "mixtral", "rwkv", "falcon_mamba", "opt")
IDS = torch.randint(2, 37, (2, 7), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(torch.arange(7) < torch.tensor([[3], [0]]), -100)
NAMES = ["loss", "logits", "past_key_values"]


def step(model: Any, **call: Any) -> tuple[Any, dict[str, Tensor]]:
    model.zero_grad()
    found = model(**{"input_ids": IDS, "labels": LABELS, **call})
    found.loss.backward()
    named = model.named_parameters()
    return found, {n: p.grad.clone() for n, p in named if p.grad is not None}


def assert_same_step(model: Any, terms: Any = None, **call: Any) -> None:
    want, wanted = step(model, **call)
    with apply(model, terms) as applied:
        got, found = step(model, **call)
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(got.loss, want.loss.to(got.loss.dtype), rtol=2e-6, atol=1e-6)
    scale = max(float(g.abs().max()) for g in wanted.values())
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-5, atol=3e-6 * scale)
    assert list(got.keys()) == list(want.keys())
    torch.testing.assert_close(got.logits + 0, want.logits, rtol=1e-5, atol=1e-5)
    assert list(got.keys()) == list(want.keys())
    assert applied.metrics is not None and "cross_entropy/perplexity" in applied.metrics
    assert not {"forward", "_headloss"} & vars(model).keys()


@pytest.mark.parametrize("model_type", QUICK)
def test_family(model_type: str) -> None:
    assert_same_step(tiny(model_type))


def test_calls() -> None:
    """After `apply(model)`, calls support a token count, router losses, packed documents, and
    shifted labels."""
    model = tiny("llama").train()
    assert_same_step(model, num_items_in_batch=torch.tensor(29))
    assert_same_step(model, num_items_in_batch=29, attention_mask=torch.ones_like(IDS))
    assert_same_step(model, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]))
    assert_same_step(model, shift_labels=LABELS.flip(1), output_hidden_states=True)
    assert_same_step(tiny("mixtral"), output_router_logits=True, num_items_in_batch=29)


def test_checkpointed() -> None:
    model = tiny("llama").train()
    model.gradient_checkpointing_enable()
    assert_same_step(model)


def test_adapters() -> None:
    """PEFT models work, even with adapters on the head."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(tiny("cohere", tie_word_embeddings=False), config)
    want, wanted = step(model)
    apply(model)
    got, found = step(model)
    torch.testing.assert_close(got.loss, want.loss)
    assert any("lm_head.lora_A" in name for name in wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
    with model.disable_adapter():
        base = model(input_ids=IDS, labels=LABELS).loss
    remove(model)
    with model.disable_adapter():
        torch.testing.assert_close(base, model(input_ids=IDS, labels=LABELS).loss)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_compiled(family: str) -> None:
    """A compiled model is one graph up to the loss, without recompilation or headloss warnings; no
    step after the first runs the compiler; fullgraph=True names the graph break."""
    from torch._dynamo.testing import CompileCounter
    from torch._dynamo.utils import counters

    model, counter = tiny(family), CompileCounter()
    want, wanted = step(model)
    apply(model)
    compiled, compiled_frames = torch.compile(model, backend=counter), list[int]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            got, found = step(compiled)
            assert counter.frame_count == 1 and counter.op_count > 50
            compiled_frames.append(counters["frames"]["total"])
    assert len(set(compiled_frames)) == 1
    assert not [w for w in caught if "headloss" in str(w.message)]
    torch.testing.assert_close(got.loss, want.loss)
    torch.testing.assert_close(got.logits + 0, want.logits, rtol=1e-5, atol=1e-5)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[f"_orig_mod.{name}"], gradient, rtol=1e-5, atol=1e-6)
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="transformers.apply breaks the graph at the head and at"):
        whole(input_ids=IDS, labels=LABELS)


def test_generation_and_signature_are_the_models_own() -> None:
    model = tiny("llama", use_cache=True)
    own = functools.partial(model.generate, max_new_tokens=5, do_sample=False)
    want, logits = own(IDS), model(input_ids=IDS).logits
    before = inspect.signature(model.forward)
    with apply(model):
        assert inspect.signature(model.forward) == before
        assert torch.equal(own(IDS), want)
        assert torch.equal(model(input_ids=IDS).logits, logits)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.lm_head.weight.zero_()
        assert twin(input_ids=IDS, labels=LABELS).loss.item() == pytest.approx(3.6109179)
    assert torch.equal(model(input_ids=IDS).logits, logits)
    with pytest.raises(ValueError, match="not applied"):
        remove(model)


def test_terms_with_fields() -> None:
    """Terms with fields work on packed rows: segments come from position_ids, and fields shift with
    labels."""
    model = tiny("llama")
    ids, labels = IDS.reshape(1, -1), LABELS.reshape(1, -1).clone()
    position = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]])
    labels[position == 0] = -100
    old = torch.randn(1, 14)
    advantages = torch.tensor([1.0, -1.0, 0.5])
    with apply(model, hl.grpo() + hl.gspo(), fields=("old_logps", "advantages")) as applied:
        call = {"input_ids": ids, "labels": labels, "position_ids": position}
        got = model(**call, old_logps=old, advantages=advantages).loss
        assert applied.metrics is not None and applied.metrics.compute()["segments"] == 3
    hidden = model.model(input_ids=ids, position_ids=position)[0]
    batch = hl.Batch(
        labels[0, 1:],
        hl.Segments.from_lengths([4, 5, 4]),
        advantages,
        old_logps=old[0, 1:],
    )
    want = hl.head_loss(hidden[0, :-1], hl.Head.of_model(model), batch, hl.grpo() + hl.gspo())
    torch.testing.assert_close(got, want.loss)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_no_document(side: str) -> None:
    """Padding tokens with constant position ids are not counted as a document, whether arguments
    are passed by position or by keyword, and with or without packing."""
    model, real = tiny("llama"), torch.tensor([[1] * 5 + [0] * 2, [1] * 7])
    real = real if side == "right" else real.flip(1)
    labels = IDS.masked_fill(real == 0, -100)
    position = (real.cumsum(1) - 1).masked_fill(real == 0, 1)
    with apply(model, hl.cross_entropy().over("sequence_mean")) as applied:
        one = model(input_ids=IDS, labels=labels, attention_mask=real, position_ids=position).loss
        assert applied.metrics is not None and applied.metrics["segments"].value == 2
        two = model(IDS, real, position, labels=labels).loss
    logits = model(IDS, real, position).logits[:, :-1].transpose(1, 2)
    each = torch.nn.functional.cross_entropy(logits, labels[:, 1:], reduction="none")
    want = (each.sum(1) / (labels[:, 1:] != -100).sum(1)).mean()
    torch.testing.assert_close(one, want)
    torch.testing.assert_close(two, want)


def test_padding_between_documents() -> None:
    """Padding between documents neither ends a continued document nor hides the start of a new
    document."""
    real = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 1, 1, 0]])
    position = torch.tensor([[1, 0, 1, 1, 2, 3, 1, 0, 1, 1]])
    found = as_documents(position, real.shape, real)
    assert found.ids.tolist() == [[0, 0, 0, 0, 0, 0, 0, 1, 1, 1]]


def test_positions_of_several_axes_tell_no_documents() -> None:
    """Position ids with several axes (vision models) define no documents."""
    assert as_documents(torch.tensor([0, 1, 0]), torch.Size((2, 3))).count == 4
    with pytest.raises(ValueError, match=r"position_ids: got shape \(3, 2, 5\), want \(2, 5\) or"):
        as_documents(torch.zeros(3, 2, 5), torch.Size((2, 5)))


def test_what_is_refused() -> None:
    model = tiny("llama")
    with pytest.raises(TypeError, match="model: got str, want a causal language model"):
        apply("llama")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fields: got 'advantages', want a tuple of names"):
        apply(model, hl.reinforce(), fields="advantages")
    with apply(model):
        with pytest.raises(ValueError, match="applied to it already"):
            apply(model)
        with pytest.raises(ValueError, match="label_smoothing_factor"):
            model(input_ids=IDS, num_items_in_batch=3)
    with pytest.raises(ValueError, match="model_type None"):
        apply(torch.nn.Linear(2, 2))
    model.loss_function = lambda *args, **kwargs: 0
    with pytest.raises(ValueError, match=r"loss_function: got .*lambda"):
        apply(model)


def test_calls_from_two_threads() -> None:
    """During a forward, a concurrent call without labels runs the stock forward, and a second call
    with labels raises."""
    model = tiny("llama")
    want, loss = model(IDS).logits, model(IDS, labels=LABELS).loss
    with apply(model), ThreadPoolExecutor(1) as other:
        found: list[Any] = []

        def meanwhile(*_: Any) -> None:
            hook.remove()
            found.append(other.submit(lambda: model(IDS).logits).result())
            found.append(other.submit(lambda: model(IDS, labels=LABELS)).exception())

        hook = model.model.register_forward_hook(meanwhile)
        assert model(IDS, labels=LABELS).loss.item() == pytest.approx(loss.item(), rel=1e-6)
        torch.testing.assert_close(found[0], want)
        assert "call with labels during another call with labels" in str(found[1])
        assert model(IDS, labels=LABELS).loss.item() == pytest.approx(loss.item(), rel=1e-6)
        copy.deepcopy(model)(IDS, labels=LABELS).loss.backward()


@pytest.mark.filterwarnings("error")
def test_threads_that_race() -> None:
    """Of calls with labels from several threads at once, each returns its loss or raises that the
    calls overlap; calls without labels return the logits, no call warns, and the model stays as it
    was."""
    model = tiny("llama").eval()
    rows = [(IDS[i : i + 1], LABELS[i : i + 1]) for i in range(2)]
    want = [(model(x, labels=y).loss.item(), model(x).logits) for x, y in rows]
    start = threading.Barrier(4)
    before = sys.getswitchinterval()

    def act(thread: int) -> int:
        x, y = rows[thread % 2]
        loss, logits = want[thread % 2]
        done = 0
        start.wait()
        for _ in range(40):
            if thread < 2:
                torch.testing.assert_close(model(x).logits, logits)
                continue
            try:
                assert model(x, labels=y).loss.item() == pytest.approx(loss, rel=1e-6)
                done += 1
            except RuntimeError as error:
                if "call with labels during another call with labels" not in str(error):
                    raise
        return done

    with apply(model) as applied, ThreadPoolExecutor(4) as pool:
        sys.setswitchinterval(1e-6)
        try:
            assert sum(pool.map(act, range(4)))
        finally:
            sys.setswitchinterval(before)
        assert not applied.running
        own = vars(model).get("_loss_function"), vars(model.lm_head).get("forward")
        assert own == (None, None)
        ids, labels = rows[0]
        assert model(ids, labels=labels).loss.item() == pytest.approx(want[0][0], rel=1e-6)


def test_replacements_of_one_forward_do_not_overlap() -> None:
    """A thread that replaces a module's forward waits until another thread has restored it."""
    module, entered = torch.nn.Linear(2, 2), threading.Event()

    def other() -> str:
        with in_place_of(module, lambda _: "other"):
            entered.set()
            return module(IDS)

    with ThreadPoolExecutor(1) as pool:
        with in_place_of(module, lambda _: "mine"), in_place_of(module, lambda _: "inner"):
            found = pool.submit(other)
            assert not entered.wait(0.1) and module(IDS) == "inner"
        assert found.result() == "other" and "forward" not in vars(module)


# ---------------------------------------------------------------------- Trainer


def trainer(model: Any, folder: str, packed: bool = False, **settings: Any) -> Any:
    rows = [{"input_ids": r.tolist(), "labels": lab.tolist()}
            for r, lab in zip(IDS, LABELS, strict=True)] * 4  # fmt: skip
    rows = [{k: v[: 4 + i % 3] for k, v in row.items()} for i, row in enumerate(rows)]
    collate = transformers.default_data_collator
    if packed:
        collate = transformers.DataCollatorWithFlattening(return_tensors="pt")
    else:
        rows = [{k: v + [-100 if k == "labels" else 0] * (6 - len(v)) for k, v in row.items()}
                for row in rows]  # fmt: skip
    metrics = settings.pop("compute_metrics", None)
    arguments = transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        max_steps=2, learning_rate=0.1, optim="sgd", report_to="none", logging_steps=1,
        use_cpu=True, save_strategy="no", disable_tqdm=True, **settings,
    )  # fmt: skip
    sets: Any = {"train_dataset": rows, "eval_dataset": rows[:3]}
    return transformers.Trainer(model, arguments, collate, compute_metrics=metrics, **sets)


def assert_same_run(folder: str, terms: Any = None, ours: Any = None, **settings: Any) -> None:
    found = []
    for applied in (False, True):
        model = tiny("llama")
        if applied:
            apply(model, terms)
        run = trainer(model, folder, **{**settings, **((ours or {}) if applied else {})})
        run.train()
        logs = [log["loss"] for log in run.state.log_history if "loss" in log]
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        found.append((logs, weights, run.evaluate()))
    (want, weights, scores), (got, moved, measured) = found
    assert len(want) == 2 and got == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(moved, weights, rtol=1e-5, atol=1e-6)
    for name in scores.keys() - {"eval_runtime", *(n for n in scores if "per_second" in n)}:
        assert measured[name] == pytest.approx(scores[name], rel=1e-5), name


def accuracy(found: Any) -> dict[str, float]:
    return {"mean": float(found.predictions.mean()), "shape": float(found.predictions.shape[-1])}


def test_trainer(tmp_path: Any) -> None:
    assert_same_run(str(tmp_path), compute_metrics=accuracy, max_grad_norm=0.5)


def test_trainer_with_packed_rows_and_checkpointing(tmp_path: Any) -> None:
    assert_same_run(str(tmp_path), packed=True, gradient_checkpointing=True)


def test_trainer_in_bf16_evaluates_losses_alone(tmp_path: Any) -> None:
    """In bf16, evaluation computes losses without logits; accelerate's conversion of outputs makes
    no logits in training."""
    model = tiny("llama")
    apply(model)
    run = trainer(model, str(tmp_path), bf16=True, prediction_loss_only=True)
    run.train()
    assert run.evaluate()["eval_loss"] == pytest.approx(run.state.log_history[-1]["eval_loss"])


@pytest.mark.parametrize("bf16", [False, True])
def test_an_evaluation_of_losses_makes_no_logits(bf16, tmp_path: Any, monkeypatch: Any) -> None:
    """Trainer's evaluation without `compute_metrics` materialises no logits, although Trainer
    handles all outputs of the model."""
    model = tiny("llama")
    apply(model)
    run = trainer(model, str(tmp_path), bf16=bf16)  # no compute_metrics
    monkeypatch.setattr(HeadCall, "raw", lambda *_: pytest.fail("logits were made"))
    assert run.evaluate()["eval_loss"] > 0


def test_logits_of_an_output_that_is_gone_through() -> None:
    model = tiny("llama").eval()
    want = model(input_ids=IDS).logits
    apply(model)
    with torch.no_grad():
        outputs = [model(input_ids=IDS, labels=LABELS) for _ in range(4)]
    made = [dict(output.items())["logits"] for output in outputs]
    found = [made[0] * 1, torch.from_numpy(made[1].numpy()), torch.stack([made[2]])[0]]
    found += [copy.deepcopy(outputs[3])["logits"], outputs[3].logits, outputs[3][1]]
    assert type(found[3]) is Tensor
    with torch.no_grad():
        later = [dict(model(input_ids=IDS, labels=LABELS).items())["logits"] for _ in range(5)]
    found += [pickle.loads(pickle.dumps(later[0])), copy.deepcopy(later[1])]
    found += [torch.from_dlpack(later[2]), torch.tensor(later[3].tolist())]
    found += [later[4].share_memory_()]
    for logits in found:
        torch.testing.assert_close(logits + 0, want, rtol=1e-5, atol=1e-5)
    attached = dict(model(input_ids=IDS, labels=LABELS).items())["logits"]
    assert attached.requires_grad and (attached * 1).grad_fn is not None


def test_trainer_with_label_smoothing(tmp_path: Any) -> None:
    """A label-smoothing term equals Trainer's smoothing of logits, and needs no logits."""
    smoothed = hl.cross_entropy(label_smoothing=0.2)
    settings: dict[str, Any] = {"label_smoothing_factor": 0.2, "eval_strategy": "no"}
    assert_same_run(str(tmp_path), smoothed, {"label_smoothing_factor": 0.0}, **settings)


def _data_parallel(rank_ids: list[list[list[int]]]) -> list[Tensor]:
    from torch.nn.parallel import DistributedDataParallel

    rank = torch.distributed.get_rank()
    ids, found = torch.tensor(rank_ids[rank]), []
    for applied in (False, True):
        model = tiny("llama")
        if applied:
            apply(model)
        wrapped: Any = DistributedDataParallel(model)
        wrapped(input_ids=ids, labels=ids, num_items_in_batch=13).loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append(torch.cat([g.flatten() for g in gradients]))
    return found


@pytest.mark.slow
def test_data_parallel() -> None:
    from worlds import world_of

    with world_of(2) as world:
        ranks = world.run(_data_parallel, [IDS[:1].tolist(), IDS[1:, :5].tolist()], seconds=240)
    for want, got in ranks:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def _fsdp2(
    kind: str, schedule: Any, rank_ids: list[list[list[int]]]
) -> list[tuple[list[float], list[Tensor], list[Tensor]]]:
    """Return losses, first gradients and parameters of two steps, for the stock model and
    headloss."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank = torch.distributed.get_rank()
    ids, found = torch.tensor(rank_ids[rank]), []
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if kind == "bf16" else None
    more = {} if policy is None else {"mp_policy": policy}
    for applied in (False, True):
        model: Any = tiny("llama", tie_word_embeddings=kind == "tied").train()
        mesh = init_device_mesh("cpu", (2,))
        alone = [model.lm_head] if kind == "head alone" else []
        for module in [*model.model.layers, *alone, model]:
            fully_shard(module, mesh=mesh, **more)
        if applied:
            apply(model, options=hl.Options(schedule=schedule))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses, gradients = [], []
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids, num_items_in_batch=13).loss
            loss.backward()
            losses.append(loss.item())
            gradients = gradients or [p.grad.full_tensor() for p in model.parameters()]
            optimizer.step()
        found.append((losses, gradients, [p.detach().full_tensor() for p in model.parameters()]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["one_pass", "recompute"])
def test_fsdp2(schedule: str) -> None:
    """Under FSDP2 on two ranks with different data, headloss agrees with the equally sharded stock
    model."""
    from worlds import world_of

    ids = [IDS[:1].tolist(), IDS[1:, :5].tolist()]
    with world_of(2) as world:
        for kind in ("plain", "tied", "head alone", "bf16"):
            for want, got in world.run(_fsdp2, kind, schedule, ids, seconds=240):
                tolerance = 2e-2 if kind == "bf16" else 1e-5  # float32 logits in headloss
                torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=1e-6)
                for a, b in zip((*got[1], *got[2]), (*want[1], *want[2]), strict=True):
                    assert (a - b).norm() <= tolerance * b.norm() + 1e-6, kind
                assert max(g.norm() for g in want[1]) > 0.01


# ---------------------------------------------------------------------- errors that name an input


def test_two_heads() -> None:
    """Under `apply`, GPT2DoubleHeadsModel has the losses and gradients of the stock model,
    including those of its second head."""
    kind = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 37, "num_labels": 1}
    model = transformers.GPT2DoubleHeadsModel(transformers.GPT2Config(**kind)).eval()
    choices = {"input_ids": IDS[None], "labels": LABELS[None], "mc_labels": torch.tensor([1])}

    def run() -> tuple[Tensor, ...]:
        model.zero_grad()
        out = model(**choices)
        (out.loss + out.mc_loss).backward()
        return out.loss, out.mc_loss, *(p.grad.clone() for p in model.parameters())

    want = run()
    with apply(model):
        torch.testing.assert_close(run(), want, rtol=1e-5, atol=1e-6)


def adapted(**options: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, init_lora_weights=False, **options)
    return config, peft.get_peft_model(tiny("llama"), config)


def test_trainable_tokens() -> None:
    """Trainable tokens of the input embedding work; with a tied head they are refused."""
    _, model = adapted(target_modules=["q_proj"], trainable_token_indices=[3, 5])
    assert_same_adapted(model)
    peft = pytest.importorskip("peft")
    tied = tiny("llama", tie_word_embeddings=True)
    config = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 5])
    with pytest.raises(TypeError, match="trainable tokens replace rows of the weight; merge"):
        apply(peft.get_peft_model(tied, config))


def assert_same_adapted(model: Any) -> None:
    want, wanted = step(model)
    with apply(model):
        got, found = step(model)
    torch.testing.assert_close(got.loss, want.loss, rtol=2e-6, atol=1e-6)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-5, atol=1e-5)


def test_a_field_that_was_not_given_says_how_to_give_it() -> None:
    model = tiny("llama")
    for terms in (hl.reinforce(), hl.cross_entropy().where("kept"), hl.z_loss().weighted("w")):
        with apply(model, terms) as applied, pytest.raises(ValueError, match=r"fields=\(names,\)"):
            model(input_ids=IDS, labels=LABELS)
        assert repr(applied) == f"Applied(LlamaForCausalLM, 1 * {terms!r}, fields=())"
