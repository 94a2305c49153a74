"""Draft models of the library speculators train alike with speculators' own losses and with
headloss's losses in their place."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from draft_case import agree, installing, train
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

import headloss.integrations.speculators as adapter

pytest.importorskip("speculators.models", reason="speculators is not installed")

V, V_DRAFT, H, T = 97, 61, 32, 40
CONFIGS = {
    "eagle3": "Eagle3SpeculatorConfig",
    "peagle": "PEagleSpeculatorConfig",
    "dflash": "DFlashSpeculatorConfig",
    "dspark": "DSparkSpeculatorConfig",
}
MARKOV = {"markov_rank": 8, "enable_confidence_head": True, "confidence_head_with_markov": True}
STEPS = {"ttt_steps": 3, "ttt_step_loss_decay": 0.8}
CE_AND_TV = '{"ce": 0.1, "tv": 0.9}'
D_PACE = {"max_anchors": 6, "per_position_loss_weight": "dpace"}


def draft_model(kind: str, **more: Any) -> Any:
    """Return a one-layer draft with V_DRAFT of its verifier's V tokens."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    eagle = kind in ("eagle3", "peagle")
    layer = (LlamaConfig if eagle else Qwen3Config)(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=0,
    )
    layer._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=3)
    speculation = SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[proposal],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    layers = "eagle_aux_hidden_state_layer_ids" if eagle else "aux_hidden_state_layer_ids"
    more |= {layers: [0, 1, 2]}
    more |= {} if eagle else {"block_size": 4}
    more |= {} if kind == "eagle3" else {"mask_token_id": 1}
    config_class = getattr(
        importlib.import_module(f"speculators.models.{kind}.config"), CONFIGS[kind]
    )
    config = config_class(
        transformer_layer_config=layer,
        draft_vocab_size=V_DRAFT,
        speculators_config=speculation,
        **more,
    )
    core = importlib.import_module(f"speculators.models.{kind}.core")
    torch.manual_seed(0)
    model = getattr(core, adapter.CLASSES[kind])(config)
    with torch.no_grad():
        head = 0.3 * torch.randn(V_DRAFT, H)  # acceptances above speculators's clamp
        model.lm_head.weight.copy_(head)
        model.verifier_lm_head.weight.copy_(head)
        model.embed_tokens.weight.copy_(torch.randn(V, H))
        model.verifier_norm.weight.fill_(1.0)
        model.t2d.copy_(torch.arange(V) < V_DRAFT)
    return model


def inputs(scored: float = 0.7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(1, T, 3 * H, generator=generator),
        "input_ids": torch.randint(V, (1, T), generator=generator),
        "loss_mask": torch.rand(1, T, generator=generator) < scored,
        "verifier_last_hidden_states": torch.randn(1, T, H, generator=generator),
        "document_ids": torch.zeros(1, T, dtype=torch.long),
    }


def losses(kind: str, spec: str) -> dict[str, Any]:
    from speculators.losses import resolve_loss_config

    named: dict[str, Any] = {"loss_config": resolve_loss_config(spec, "eager")}
    if kind == "dspark":
        named["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
    return named


def loss_of(out: Any) -> Tensor:
    return out[1]


@pytest.fixture
def installed() -> Any:
    yield from installing(adapter)


CASES = [
    *(("eagle3", {}, STEPS, spec) for spec in ("kl_div", "nla", CE_AND_TV, "rkl", "lk_hybrid")),
    *(("peagle", {}, {}, spec) for spec in ("kl_div", "jsd")),
    *(("dflash", {}, {"max_anchors": 6}, spec) for spec in ("ce", "tv")),
    *(("dflash", {}, D_PACE, spec) for spec in ("ce", CE_AND_TV)),
    ("dspark", {"markov_rank": 0, "enable_confidence_head": False}, {"max_anchors": 6}, CE_AND_TV),
    *(
        ("dspark", MARKOV | {"markov_head_type": kind}, {"max_anchors": 6}, CE_AND_TV)
        for kind in ("vanilla", "gated", "rnn")
    ),
]


@pytest.mark.parametrize(("kind", "more", "named", "spec"), CASES)
def test_loss_metrics_and_all_gradients(
    installed: Any, kind: str, more: dict, named: dict, spec: str
) -> None:
    """EAGLE-3, P-EAGLE, DFlash and DSpark give equal losses, metrics, draft tokens and gradients
    with and without headloss."""
    model = draft_model(kind, **more)
    named = named | losses(kind, spec)
    theirs = train(model, loss_of, **inputs(), **named)
    ours = installed(model, loss_of, **inputs(), **named)
    agree(theirs, ours)
    (tokens, _, metrics), (got_tokens, _, got_metrics) = theirs.out, ours.out
    assert list(got_metrics) == list(metrics)
    for name, metric in metrics.items():
        counted = "_acc_" in name or name.startswith("eal")
        slack = 0.0 if counted else 1e-6 * max(1.0, abs(float(metric)))
        assert abs(float(got_metrics[name]) - float(metric)) <= slack, name
    if tokens is not None:
        assert len(got_tokens) == len(tokens)
        assert all(map(torch.equal, got_tokens, tokens))


def test_nothing_scored(installed: Any) -> None:
    """Without scored tokens the loss and its gradients are zeros, and the metrics have the usual
    names."""
    model, named = draft_model("dflash"), {"max_anchors": 6} | losses("dflash", "kl_div")
    theirs = train(model, loss_of, **inputs(scored=0.0), **named)
    ours = installed(model, loss_of, **inputs(scored=0.0), **named)
    assert ours.loss == theirs.loss == 0 and list(ours.out[2]) == list(theirs.out[2])
    assert ours.gradients.keys() == theirs.gradients.keys()
    assert all(g.count_nonzero() == 0 for g in ours.gradients.values())


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_blocks_without_a_supervised_token(installed: Any, kind: str) -> None:
    """Loss, counts and metric keys equal those of speculators if each block of four tokens, except
    one block, has a single scored token: its first token, the anchor."""
    model, named = draft_model(kind), {"max_anchors": 6} | losses(kind, CE_AND_TV)
    batch = inputs()
    batch["loss_mask"] = torch.arange(T)[None] % 5 == 0
    # In the block of tokens 20 to 23, all tokens are scored, not only the first (the anchor).
    batch["loss_mask"][0, 20:24] = True
    theirs = train(model, loss_of, **batch, **named)
    ours = installed(model, loss_of, **batch, **named)
    agree(theirs, ours)
    assert list(ours.out[2]) == list(theirs.out[2])
    for name, metric in theirs.out[2].items():
        assert abs(float(ours.out[2][name]) - float(metric)) <= 1e-6 * max(1.0, abs(metric)), name


def test_a_small_acceptance_has_a_gradient(installed: Any) -> None:
    """A small acceptance probability still has a gradient; speculators clamps it at 1e-5, without
    gradient."""
    model, named = draft_model("peagle"), losses("peagle", "nla")
    with torch.no_grad():
        model.lm_head.weight.mul_(30)
        model.verifier_lm_head.weight.mul_(-30)
    flat = train(model, loss_of, **inputs(), **named)
    ours = installed(model, loss_of, **inputs(), **named)
    assert flat.loss < 11.52 and ours.loss > 2 * flat.loss  # -log 1e-5
    assert flat.gradients["fc.weight"].norm() < 0.5 * ours.gradients["fc.weight"].norm()


def test_autocast(installed: Any) -> None:
    """Under autocast, matmuls are in bfloat16 as in speculators, but logits are not rounded."""
    model, named = draft_model("dflash"), {"max_anchors": 6} | losses("dflash", "kl_div")
    exact = train(model, loss_of, **inputs(), **named)
    with torch.autocast("cpu", torch.bfloat16):
        stock = train(model, loss_of, **inputs(), **named)
        got = installed(model, loss_of, **inputs(), **named)
    assert abs(got.loss - exact.loss) <= 1.1 * abs(stock.loss - exact.loss) + 2e-3
    assert got.gradients["fc.weight"].dtype == torch.float32


def test_other_losses_are_refused(installed: Any) -> None:
    """A user's loss function in the place of speculators's raises ValueError."""
    model, named = draft_model("peagle"), {"loss_config": {"kl_div": (lambda z, q: z, 1.0)}}
    with pytest.raises(ValueError, match=r"loss_config\['kl_div'\]: got .*want speculators' own"):
        installed(model, loss_of, **inputs(), **named)


def test_without_a_verifier_and_after_uninstall(installed: Any) -> None:
    """A call without a verifier, and all calls after `uninstall`, run speculators's forward."""
    model = draft_model("eagle3")
    batch = inputs() | {"verifier_last_hidden_states": None}
    want = model(**batch, ttt_steps=2)
    before = type(model).forward
    adapter.install()
    assert type(model).forward is not before
    assert all(map(torch.equal, model(**batch, ttt_steps=2), want))
    adapter.uninstall()
    assert type(model).forward is before and "forward" not in vars(model.lm_head)


def test_a_changed_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`install()` raises RuntimeError if a function of speculators lacks an argument that headloss
    reads."""
    core = importlib.import_module("speculators.models.dspark.core")
    monkeypatch.setattr(core, "compute_metrics", lambda logits, targets: None)
    with pytest.raises(RuntimeError, match=r"dspark.core.compute_metrics: takes no loss_mask"):
        adapter.install()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the batches with which headloss is called."""
    from headloss.integrations import drafts

    seen = []

    def head_loss(hidden: Tensor, head: Any, batch: Any, *rest: Any) -> Any:
        seen.append(batch)
        return theirs(hidden, head, batch, *rest)

    theirs = drafts.head_loss
    monkeypatch.setattr(drafts, "head_loss", head_loss)
    return seen


def test_all_steps_are_one_call_and_share_the_verifiers_rows(
    installed: Any, calls: list[Any]
) -> None:
    """All unrolled EAGLE-3 steps are one `head_loss` call with one verifier state per position."""
    named = STEPS | losses("eagle3", CE_AND_TV)
    installed(draft_model("eagle3"), loss_of, **inputs(), **named)
    (batch,) = calls
    assert batch.targets.shape == (1, T, 3) and batch.fields["teacher_hidden"].shape == (T, H)
    assert torch.equal(batch.fields["teacher_index"][0, :, 1], torch.arange(T))


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_a_compiled_forward_is_compiled_once(
    installed: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """With torch.compile, as on a GPU, a draft model's forward is compiled once for all steps and
    input values, and gives the results of the uncompiled forward."""
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    more = {} if kind != "dspark" else MARKOV | {"markov_head_type": "gated"}
    model = draft_model(kind, **more)
    named = losses(kind, "kl_div") | (STEPS if kind == "eagle3" else {"max_anchors": 6})
    theirs = train(model, loss_of, **inputs(), **named)
    forward = torch.compile(type(model).forward, backend=backend)
    monkeypatch.setattr(type(model), "forward", forward)
    torch.compiler.reset()
    counts = []
    for _ in range(3):
        agree(theirs, installed(model, loss_of, **inputs(), **named))
        counts.append(len(graphs))
    assert counts == [counts[0]] * 3 and counts[0] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="speculators compiles on a GPU alone")
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_its_own_compilation_on_a_gpu(installed: Any, kind: str) -> None:
    """The forward that speculators compiles on a GPU is compiled once for all steps and input
    values, and gives the same results with headloss's losses as with speculators' own."""
    more = {} if kind != "dspark" else MARKOV | {"markov_head_type": "gated"}
    model = draft_model(kind, **more).cuda()
    batch = {name: value.cuda() for name, value in inputs().items()}
    named = losses(kind, "kl_div") | (STEPS if kind == "eagle3" else {"max_anchors": 6})
    theirs = train(model, loss_of, **batch, **named)
    adapter.install()
    for turn in range(3):
        with torch.compiler.set_stance("fail_on_recompile" if turn else "default"):
            ours = train(model, loss_of, **batch, **named)
        agree(theirs, ours, slack=14)


def test_its_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Four steps of speculators' trainer give the same weights with and without headloss."""
    trainer = pytest.importorskip("speculators.train.trainer")
    monkeypatch.setattr(trainer, "get_local_rank", lambda: "cpu")
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    batches = [inputs() | {"error_records": 0} for _ in range(4)]
    for seed, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(seed)
        batch["hidden_states"] = torch.randn(1, T, 3 * H, generator=generator)

    class Loader(list):
        batch_sampler = None

    def run(name: str) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model = draft_model("eagle3")
        named = losses("eagle3", "nla") | STEPS
        config = trainer.TrainerConfig(
            1e-3, 1, str(tmp_path / name), train_call_kwargs=named, log_freq=2
        )
        trainer.Trainer(model, config, Loader(batches)).train_epoch(0)
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    stock = run("stock")
    adapter.install()
    try:
        ours = run("ours")
    finally:
        adapter.uninstall()
    start = dict(draft_model("eagle3").named_parameters())
    moved = [(stock[n] - start[n]).norm() for n in stock if not torch.equal(stock[n], start[n])]
    assert len(moved) > 5
    for name, weight in stock.items():
        assert (ours[name] - weight).norm() <= 1e-4 * weight.norm(), name
