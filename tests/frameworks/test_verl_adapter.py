"""headloss inside verl agrees with verl's fused head, losses, and FSDP engine.

verl's engine is built and run on a CPU (see `verl_case`).
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import ROOT

import headloss as hl

pytest.importorskip("verl", reason="`make test-frameworks` compares with verl")
import verl_case
from transformers import LlamaForCausalLM
from verl.models.transformers import monkey_patch
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.utils.experimental import torch_functional
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl_case import alone, engine_of, installed, loss_of, saved, step, trained  # noqa: F401

import headloss.integrations.verl as adapter
from headloss.integrations import seams
from headloss.integrations.verl.losses import OF_VERL

N, H, V = 13, 6, 29
Engines = Callable[..., Any]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Return engines by (backend, family, options), each built once."""
    paths: dict[Any, str] = {}

    @functools.cache
    def get(backend: str | None, family: str = "llama", tied: bool = False, **more: Any) -> Any:
        if (family, tied) not in paths:
            folder = tmp_path_factory.mktemp(family)
            paths[family, tied] = saved(folder, family, tied)
        return engine_of(paths[family, tied], backend, **more)

    return get


def close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    """Check the relative norm of the difference of two tensors or lists of tensors."""
    pairs = zip(got, want, strict=True) if isinstance(want, list) else [(got, want)]
    for a, b in pairs:
        assert a.shape == b.shape
        assert (a - b).norm() <= tolerance * b.norm() + 1e-6, (a, b)


def same(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    """Check that two engines' outputs and gradients for a batch agree in norm."""
    (mine, my_gradients), (theirs, their_gradients) = got, want
    close(torch.tensor(mine["loss"]), torch.tensor(theirs["loss"]), tolerance)
    for name, value in theirs["metrics"].items():
        a, b = (getattr(x, "values", x) for x in (mine["metrics"][name], value))
        close(torch.tensor(a), torch.tensor(b), tolerance)
    assert my_gradients.keys() == their_gradients.keys()
    a, b = (torch.cat([x.flatten() for x in g.values()]) for g in (my_gradients, their_gradients))
    assert (a - b).norm() <= tolerance * b.norm() and b.norm() > 0


# ---------------------------------------------------------------------- FusedLinearForPPO


@pytest.mark.parametrize("shape", [(N,), (3, 5)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.6, -0.3)])
def test_fused_linear(shape: tuple[int, ...], temperature: float, weights: Any) -> None:
    """verl's fused linear layer with headloss agrees with its PyTorch version in log-probs and
    entropies, and in the gradients of a loss of log-probs, of entropies or of both."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*s, H, generator=generator) for s in (shape, (V,)))
    ids = torch.randint(V, shape, generator=generator)
    slopes = [w * torch.randn(shape, generator=generator) for w in weights]
    found = []
    for backend in ("torch", "headloss"):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        head = torch_functional.FusedLinearForPPO(impl_backend=backend)
        out = head.forward(*leaves, ids, temperature=temperature)
        assert [x.shape for x in out] == [shape, shape]
        loss = sum((s * x).sum() for s, x in zip(slopes, out, strict=True))
        found.append([*out, *torch.autograd.grad(loss, leaves)])
    close(found[1], found[0])


def test_a_temperature_per_token() -> None:
    """Log-probs and entropies with one temperature per token agree with verl's fused layer called
    once per token."""
    hidden, weight = torch.randn(N, H), torch.randn(V, H)
    ids, temperature = torch.randint(V, (N,)), 0.5 + torch.rand(N)
    got = torch_functional.FusedLinearForPPO(impl_backend="headloss").forward(
        hidden, weight, ids, temperature
    )
    for i in range(N):
        want = torch_functional.FusedLinearForPPO().forward(
            hidden[i : i + 1], weight, ids[i : i + 1], temperature[i].item()
        )
        close([x[i] for x in got], [x[0] for x in want])


@pytest.mark.parametrize("mode", [*OF_VERL, "geo_mean"])
def test_losses_of_core_algos(mode: str) -> None:
    """verl's policy losses have the same value and head gradient, whether verl's torch backend or
    headloss computes the log-probs."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(4, 5, H, generator=generator), torch.randn(V, H)
    ids = torch.randint(V, (4, 5), generator=generator)
    mask = torch.arange(5) < torch.tensor([[5], [2], [4], [1]])
    old, advantages = -3 + 0.3 * torch.randn(4, 5), torch.randn(4, 5)
    config = loss_of(mode, policy_loss={"dro_beta": 0.3, "kl_cov_ratio": 0.2}).keywords["config"]
    found = []
    for backend in ("torch", "headloss"):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        head = torch_functional.FusedLinearForPPO(impl_backend=backend)
        logp, entropy = head.forward(*leaves, ids, temperature=0.9)
        function = core_algos.get_policy_loss_fn(mode)
        loss, _ = function(old, logp, advantages, mask, "token-mean", config)
        loss = loss - 0.1 * core_algos.agg_loss(entropy, mask, "token-mean")
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    close(found[1], found[0])


# ---------------------------------------------------------------------- the engine


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.8, "of each sample"])
@pytest.mark.parametrize("tied", [False, True])
def test_engine(engines: Engines, packed: bool, temperature: Any, tied: bool) -> None:
    """verl's engine with headloss agrees with its logits path, on two micro-batches of PPO with
    entropy and KL."""
    if isinstance(temperature, str):
        temperature = torch.tensor([0.7, 1.3, 0.9, 1.0])
    loss = loss_of("vanilla", entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.2)
    found = []
    for backend in (None, "headloss"):
        data = step(temperature=temperature, use_fused_kernels=bool(backend))
        tu.assign_non_tensor(data, use_remove_padding=packed)
        found.append(trained(engines(backend, tied=tied, packed=packed), data, loss))
    same(found[1], found[0])
    outputs = [out["model_output"] for out, _ in found]
    # leave out the last position of each row: its label differs between packed and padded batches
    for name in ("log_probs", "entropy"):
        got, want = ([row[:-1] for row in out[name].unbind()] for out in reversed(outputs))
        close(got, want)


def test_verls_fused_engine(engines: Engines) -> None:
    """verl's engine with headloss agrees with verl's own fused head in the one setup that verl's
    fused head supports under FSDP2: tied embeddings and one temperature for all samples."""
    loss = loss_of("gspo", entropy_coeff=0.1)
    kind = LlamaForCausalLM
    own = kind.forward
    theirs = engines("torch", tied=True)
    try:
        want = trained(theirs, step(), loss)
    finally:
        # restore the class: verl monkey-patches the model class's forward for good
        kind.forward = own
    same(trained(engines("headloss", tied=True), step(), loss), want)


@pytest.mark.parametrize("family", ["gemma2", "cohere", "qwen3"])
def test_families(engines: Engines, family: str) -> None:
    """Model families agree with their own logits, including soft cap and logit scale, which verl's
    fused head ignores."""
    for mode in ("vanilla", "headloss_vanilla"):
        got = trained(engines("headloss", family), step(), loss_of(mode, entropy_coeff=0.1))
        data = step(use_fused_kernels=False)
        want = trained(engines(None, family), data, loss_of("vanilla", entropy_coeff=0.1))
        same(got, want)


def test_log_probs_alone(engines: Engines) -> None:
    """Log-probs computed without gradients, as for verl's old policy and reference policy, agree
    between headloss and verl's own head."""
    found = []
    for backend in (None, "headloss"):
        data = step(use_fused_kernels=bool(backend))
        out = engines(backend).infer_batch(data)["model_output"]
        found.append([out[name].values() for name in ("log_probs", "entropy")])
    close(found[1], found[0])


def test_two_steps(tmp_path: Path) -> None:
    """Two steps with verl's AdamW and clipping agree in parameters and gradient norms."""
    found, path = [], saved(tmp_path)
    loss = {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2}
    for backend, mode in [(None, "gspo"), ("headloss", "gspo"), ("headloss", "headloss_gspo")]:
        engine = engine_of(path, backend)
        norms = [
            engine.train_batch(
                step(seed, use_fused_kernels=bool(backend)), loss_of(mode, **loss)
            )["metrics"]["grad_norm"]
            for seed in (0, 1)
        ]
        weights = [p.detach().full_tensor() for p in engine.module.parameters()]
        found.append([torch.tensor(norms), *weights])
    for got in found[1:]:
        close(got, found[0], 1e-4)


def test_bfloat16(engines: Engines) -> None:
    """In bfloat16, temperatures and batch fields stay float32, although FSDP casts the model's
    inputs."""
    temperature = torch.tensor([0.701, 1.303, 0.907, 1.001])
    found = []
    for mode in ("vanilla", "headloss_vanilla"):
        engine = engines("headloss", dtype="bf16")
        data = step(temperature=temperature)
        found.append(trained(engine, data, loss_of(mode, entropy_coeff=0.1))[0])
    values = [found[i]["model_output"]["log_probs"].unbind() for i in (0, 1)]
    for ours, theirs, prompt, response in zip(
        *reversed(values), verl_case.PROMPTS, verl_case.RESPONSES, strict=True
    ):
        scored = ours[prompt - 1 : prompt + response - 1] != 0
        pair = (x[prompt - 1 : prompt + response - 1][scored] for x in (ours, theirs))
        close(*pair, 1e-5)
    close(torch.tensor(found[1]["loss"]), torch.tensor(found[0]["loss"]), 1e-4)


def test_lora_on_the_head(tmp_path: Path) -> None:
    """LoRA on the head is trained, unlike in verl's fused head, which reads only the base
    weight."""
    path, found = saved(tmp_path, tied=True), []
    loss = loss_of("vanilla", entropy_coeff=0.1)
    for backend in (None, "headloss"):
        torch.manual_seed(3)
        engine = engine_of(
            path, backend, lora_rank=2, lora_alpha=4, target_modules=["lm_head", "q_proj"]
        )
        named = dict(engine.module.named_parameters())
        with torch.no_grad():
            for name, parameter in named.items():
                if "lora_B" in name:
                    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                    local.copy_(torch.linspace(-1, 1, local.numel()).view_as(local))
        engine.optimizer_zero_grad()
        out = engine.forward_backward_batch(step(use_fused_kernels=bool(backend)), loss, False)
        gradients = {n: p.grad.full_tensor() for n, p in named.items() if p.requires_grad}
        found.append((out, gradients))
    assert any("lm_head" in name for name in found[0][1])
    same(found[1], found[0])


# ---------------------------------------------------------------------- one pass

MODES = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)  # fmt: skip


@pytest.mark.parametrize("mode", OF_VERL)
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("over", MODES)
def test_one_pass(engines: Engines, mode: str, weights: bool, over: str) -> None:
    """The loss mode `headloss_NAME` computes verl's loss NAME in one pass over the vocabulary, with
    the same loss, metrics and gradients."""
    options: dict[str, Any] = {"dro_beta": 0.3, "kl_cov_ratio": 0.4}
    config = {
        "loss_agg_mode": over, "entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2,
        "policy_loss": options, "tau_neg": 1.5,
    }  # fmt: skip
    data = step(weights=weights, use_fused_kernels=False)
    want = trained(engines(None), data, loss_of(mode, **config))
    data = step(weights=weights)
    got = trained(engines("headloss"), data, loss_of(f"headloss_{mode}", **config))
    same(got, want)
    log_probs = got[0]["model_output"]["log_probs"]
    assert not log_probs.unbind()[2][: verl_case.PROMPTS[2] - 1].any()  # zeros at prompt tokens


KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


@pytest.mark.parametrize("kind", [*KINDS, *(f"{kind}+" for kind in KINDS)])
def test_kl_of_the_configuration(engines: Engines, kind: str) -> None:
    """A KL penalty in verl's configuration gives equal metrics and gradients with verl's and
    headloss's loss mode."""
    config = {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": kind}
    want = trained(engines(None), step(use_fused_kernels=False), loss_of("gpg", **config))
    same(trained(engines("headloss"), step(), loss_of("headloss_gpg", **config)), want)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("scale", [None, 11])
def test_one_pass_of_other_batches(
    engines: Engines, packed: bool, entropy: bool, scale: int | None
) -> None:
    """Loss modes named `headloss_...` agree with verl's own modes for padded rows, for one
    temperature per sample, without an entropy term, and without token totals of the step."""
    temperature = torch.tensor([0.7, 1.3, 0.9, 1.0])
    config = {"entropy_coeff": 0.1, "loss_agg_mode": MODES[-1], "loss_scale_factor": scale}
    found = []
    for backend, mode in ((None, "gspo"), ("headloss", "headloss_gspo")):
        data = step(temperature=temperature, use_fused_kernels=bool(backend))
        tu.assign_non_tensor(
            data, use_remove_padding=packed, calculate_entropy=entropy, global_batch_size=None
        )
        found.append(trained(engines(backend, packed=packed), data, loss_of(mode, **config)))
    same(found[1], found[0])


def test_an_objective_of_ones_own(engines: Engines) -> None:
    """A custom objective of three named terms works, with their sum as verl's policy loss."""
    adapter.register("calm", lambda config: hl.ppo(epsilon_low=config.clip_ratio_low,
        epsilon_high=config.clip_ratio_high, dual_clip=3.0).over("sequence_mean")
        + 0.5 * hl.z_loss())  # fmt: skip
    got, mine = trained(engines("headloss"), step(), loss_of("calm", entropy_coeff=0.1))
    without = loss_of("headloss_vanilla", loss_agg_mode="seq-mean-token-mean")
    want, theirs = trained(engines("headloss"), step(), without)
    z = squared_lse(engines)
    entropy = got["metrics"]["actor/entropy_loss"].values
    total = [a + 0.5 * b - 0.1 * e for a, b, e in zip(want["loss"], z, entropy, strict=True)]
    assert got["loss"] == pytest.approx(total, rel=2e-5)
    policy = [a + 0.5 * b for a, b in zip(want["loss"], z, strict=True)]
    assert got["metrics"]["actor/pg_loss"].values == pytest.approx(policy, rel=2e-5)
    assert any((mine[name] - theirs[name]).abs().max() > 1e-3 for name in mine)


def squared_lse(engines: Engines) -> list[float]:
    """Return each micro-batch's sum of lse^2 over the global number of tokens, from logits."""
    engine, found = engines(None), []
    module, data = engine.module, step()
    tokens = data["loss_mask"].values().sum()
    for rows in (slice(0, 2), slice(2, 4)):
        total = torch.zeros(())
        for row in range(*rows.indices(verl_case.B)):
            ids, prompt = data["input_ids"].unbind()[row], verl_case.PROMPTS[row]
            logits = module(input_ids=ids[None], use_cache=False).logits[0, prompt - 1 : -1] / 0.8
            mask = data["response_mask"].unbind()[row].bool()
            total = total + (logits.logsumexp(1) ** 2)[mask].sum()
        found.append((total / tokens).item())
    return found


def test_options(tmp_path: Path) -> None:
    """Options that verl's configuration lists next to `impl_backend` are passed to headloss."""
    engine = engine_of(saved(tmp_path), "headloss", options={"schedule": "recompute"})
    want = engine_of(saved(tmp_path), "headloss")
    loss = loss_of("headloss_gspo", entropy_coeff=0.1)
    same(trained(engine, step(), loss), trained(want, step(), loss))
    with pytest.raises(TypeError, match="memory"):
        engine_of(saved(tmp_path), "headloss", options={"memory": 3})


# ---------------------------------------------------------------------- invalid input


def test_refused(engines: Engines) -> None:
    """Top-k distillation and a KL penalty of a kind that headloss lacks raise ValueError."""
    engine = engines("headloss")
    with pytest.raises(ValueError, match="top-k distillation"):
        engine.forward_backward_batch(step(distillation_use_topk=True), None, True)
    with pytest.raises(ValueError, match="kl_loss_type: got 'full'"):
        trained(engine, step(), loss_of("headloss_gpg", use_kl_loss=True, kl_loss_type="full"))


def test_losses_outside_of_the_engine(engines: Engines) -> None:
    """A `headloss_...` loss mode raises an error without headloss's fused kernels, and after
    `uninstall()`."""
    with pytest.raises(RuntimeError, match="loss_mode: headloss_gspo is computed with the log-pr"):
        trained(engines(None), step(use_fused_kernels=False), loss_of("headloss_gspo"))
    adapter.uninstall()
    with pytest.raises(ValueError, match="Unsupported loss mode: headloss_gspo"):
        trained(engines(None), step(use_fused_kernels=False), loss_of("headloss_gspo"))


def test_other_engines_and_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsupported engine strategies, Megatron releases and model types raise an error that names
    them."""
    config = engine_of(saved(tmp_path), "headloss").model_config
    with pytest.raises(ValueError, match="headloss under strategy 'fsdp_turbo' is not supported"):
        EngineRegistry.new("language_model", "fsdp_turbo", model_config=config)
    with monkeypatch.context() as patched:
        home = pytest.importorskip("megatron.core.transformer.multi_token_prediction")
        patched.delattr(home, "process_mtp_loss")
        with pytest.raises(RuntimeError, match="multi_token_prediction: has no process_mtp_loss"):
            EngineRegistry.new("language_model", "megatron", model_config=config)
    model = engine_of(saved(tmp_path), "headloss").module
    model.config.model_type = "somebodys"
    with pytest.raises(ValueError, match="model_type 'somebodys'"):
        monkey_patch.patch_forward_with_backends(model, True, "headloss")


def released(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(seams, "release", lambda package: release)
    seams.announce.cache_clear()


def test_other_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Untested verl releases work with one warning if all functions that headloss replaces have the
    known signatures."""
    adapter.uninstall()
    released(monkeypatch, "99.0")
    with pytest.warns(UserWarning, match=r"verl 99.0 was not tested .* \(tested: 0\.9\.1\)"):
        adapter.install()
    assert torch_functional.FusedLinearForPPO.__module__.startswith("headloss.")
    seams.announce.cache_clear()


@pytest.mark.parametrize(
    ("owner", "name", "theirs"),
    [
        (torch_functional, "FusedLinearForPPO", lambda chunk_size, backend: None),
        (monkey_patch, "patch_forward_with_backends", lambda model, fused, backend: None),
        (EngineRegistry, "new", staticmethod(lambda kind, backend, **options: None)),
        (FSDPEngineWithLMHead, "forward_step", lambda self, batch, loss_function: None),
        (FSDPEngineWithLMHead, "prepare_model_inputs", lambda self, micro_batch, more: None),
        (torch_functional, "FusedLinearForPPO", None),
    ],
)
def test_seams_that_do_not_hold(
    owner: Any, name: str, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`install()` raises RuntimeError and replaces nothing if a function of verl is missing or has
    other arguments."""
    adapter.uninstall()
    released(monkeypatch, "99.0")
    if theirs is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, theirs)
    with pytest.raises(RuntimeError, match=rf"^verl 99.0: .*{name}.*; install a release.*0\.9\.1"):
        adapter.install()
    assert not any(n.startswith("headloss") for n in core_algos.POLICY_LOSS_REGISTRY)
    kept = {monkey_patch.patch_forward_with_backends, EngineRegistry.new}
    assert not any(function.__module__.startswith("headloss.") for function in kept)


def test_uninstall() -> None:
    """`uninstall()` restores each of verl's functions, and a second `install()` changes nothing."""
    adapter.install()  # a second `install()` changes nothing
    owners = [
        (torch_functional, "FusedLinearForPPO"), (monkey_patch, "patch_forward_with_backends"),
        (EngineRegistry, "new"),
    ]  # fmt: skip
    ours = [getattr(owner, name) for owner, name in owners]
    adapter.uninstall()
    theirs = [getattr(owner, name) for owner, name in owners]
    assert all(x.__module__.startswith("headloss.") for x in ours)
    assert all(x.__module__.startswith("verl.") for x in theirs)
    assert not any(name.startswith("headloss") for name in core_algos.POLICY_LOSS_REGISTRY)
    with pytest.raises(ValueError, match="Unsupported FusedLinearForPPO backend: headloss"):
        torch_functional.FusedLinearForPPO(impl_backend="headloss")


# ---------------------------------------------------------------------- discovery by verl

FOUND = """
import sys, verl
assert "headloss.integrations.verl" in sys.modules, "verl has not found it"
assert "verl.workers.engine" not in sys.modules
from verl.workers.config import HFModelConfig
def config(**options):
    return HFModelConfig(path=sys.argv[1], load_tokenizer=False, **options)
config()
config(use_fused_kernels=True, fused_kernel_options={"impl_backend": "torch"})
assert "headloss.integrations.verl.seams" not in sys.modules
config(use_fused_kernels=True, fused_kernel_options={"impl_backend": "headloss"})
from verl.utils.experimental.torch_functional import FusedLinearForPPO
print(type(FusedLinearForPPO(impl_backend="headloss")).__name__)
"""


@pytest.mark.parametrize("how", ["entry point", "external module"])
def test_found_by_verl(tmp_path: Path, how: str) -> None:
    """`import verl` loads headloss, which does nothing until a configuration requests it."""
    path = saved(tmp_path / "model")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (name, module), = project["entry-points"]["verl.plugins"].items()
    places = [str(ROOT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VERL_USE_EXTERNAL_PLUGINS": name}
    if how == "entry point":
        info = tmp_path / "plugins" / "headloss_plugins-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headloss-plugins\nVersion: 1")
        (info / "entry_points.txt").write_text(f"[verl.plugins]\n{name} = {module}\n")
        places.append(str(info.parent))
    else:
        environment["VERL_USE_EXTERNAL_PLUGINS"] = "none"
        environment["VERL_USE_EXTERNAL_MODULES"] = module
    environment["PYTHONPATH"] = os.pathsep.join(places)
    done = subprocess.run(
        [sys.executable, "-c", FOUND, path], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "Fused"

