"""Adapters check the framework functions that they replace, not release numbers.

Stubs with real signatures stand for the frameworks; tests of framework code are in
tests/frameworks.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import headloss as hl
from headloss.integrations import seams
from headloss.integrations.seams import TESTED, Seams, check_signature, fitted
from headloss.testing import doctor

# ---------------------------------------------------------------------- framework signatures


def nemo_rl_06(
    tensor_parallel_hidden_states,
    output_weight_layer,
    output_weight,
    runtime_gather_output,
    target,
    vocab_start_index,
    vocab_end_index,
    tp_group,
    inference_only=False,
    cp_group=None,
    chunk_size=None,
):
    raise AssertionError("stock")


def nemo_rl_07(
    tensor_parallel_hidden_states,
    output_weight_layer,
    runtime_gather_output,
    target,
    vocab_start_index,
    vocab_end_index,
    tp_group,
    inference_only=False,
    cp_group=None,
    chunk_size=None,
):
    raise AssertionError("stock")


def skyrl(
    backend,
    hidden,
    weight,
    target,
    vocab_start_index,
    vocab_end_index,
    chunk_size,
    tp_group,
    inference_only,
):
    raise AssertionError("stock")


def prime_rl_08(self, hidden_states, labels=None, temperature=None):
    raise AssertionError("stock")


def prime_rl(self, hidden_states, labels=None, temperature=None, sampling_mask=None):
    raise AssertionError("stock")


class AgileFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head_w, head_b, target_ids, temperature, cast_to_fp32, chunk_rows):
        raise AssertionError("stock")


def agile_head(self):
    return None, None, None


def agile_chunked(
    hidden, head_w, head_b, target_ids, temperature=1.0, cast_to_fp32=True, *, chunk_rows
):
    raise AssertionError("stock")


def new_argument(theirs: Any, text: str) -> Any:
    """Return a copy of a function with one more argument: `text` is its name, as in "x", or has a
    default, as in "x=None"."""
    function = theirs.forward if isinstance(theirs, type) else theirs
    parameters = list(inspect.signature(function).parameters.values())
    names = [str(p) for p in parameters]
    at = 2 if isinstance(theirs, type) or names[0] == "self" else 1
    if "=" in text:  # put an argument with a default after all positional arguments
        kinds = [p.kind is p.KEYWORD_ONLY for p in parameters]
        at = kinds.index(True) if any(kinds) else len(names)
    if any(p.kind is p.KEYWORD_ONLY for p in parameters):
        keyword = next(i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY)
        names.insert(keyword, "*")
    names.insert(at, text)
    return function_of(theirs, names)


def renamed_argument(theirs: Any, before: str) -> Any:
    function = theirs.forward if isinstance(theirs, type) else theirs
    names = [str(p) for p in inspect.signature(function).parameters.values()]
    names = [n.replace(before, f"{before}_of_another_name") for n in names if n != "*"]
    if not isinstance(theirs, type) and theirs is agile_chunked:
        names.insert(-1, "*")
    return function_of(theirs, names)


def function_of(theirs: Any, parameters: list[str]) -> Any:
    made: dict[str, Any] = {}
    exec(f"def function({', '.join(parameters)}): raise AssertionError('stock')", made)
    if isinstance(theirs, type):
        body = {"forward": staticmethod(made["function"])}
        return type(theirs.__name__, (torch.autograd.Function,), body)
    return made["function"]


CASES: dict[str, tuple[str, str, Any, str]] = {
    # adapter: (distribution, a tested release, stub functions, name of an argument)
    "nemo_rl": ("nemo-rl", "0.7.0", nemo_rl_07, "target"),
    "skyrl": ("skyrl", "0.3.0", skyrl, "target"),
    "prime_rl": ("prime-rl", "0.8.0", prime_rl_08, "labels"),
    "agilerl": ("agilerl", "2.58.0", None, "target_ids"),
}


@pytest.fixture(autouse=True)
def no_notice_yet() -> Iterator[None]:
    seams.announce.cache_clear()
    yield
    seams.announce.cache_clear()


def released(monkeypatch: pytest.MonkeyPatch, release: str, *packages: str) -> None:
    real = importlib.metadata.version

    def version(package: str) -> str:
        return release if package in packages else real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)


def place(monkeypatch: pytest.MonkeyPatch, at: str, name: str, value: Any) -> Any:
    """Install a stub module (and class) with the attribute `name`; return the module or class."""
    module, _, holder = at.partition(":")
    parts = module.split(".")
    for n in range(1, len(parts) + 1):
        path = ".".join(parts[:n])
        if path not in sys.modules:
            stub = ModuleType(path)
            stub.__path__ = []  # an empty `__path__` marks the stub as a package
            monkeypatch.setitem(sys.modules, path, stub)
    owner: Any = sys.modules[module]
    if holder:
        if not hasattr(owner, holder):
            setattr(owner, holder, type(holder, (), {}))
        owner = getattr(owner, holder)
    setattr(owner, name, value)
    return owner


def stubbed(
    monkeypatch: pytest.MonkeyPatch, adapter: str, changed: Callable[[Any], Any] = lambda f: f
) -> tuple[Any, dict[tuple[str, str], Any]]:
    """Install stubs in place of the framework's functions, each altered by `changed`; return the
    adapter and the stubs by place."""
    module = importlib.import_module(f"headloss.integrations.{adapter}")
    standing = {}
    for at, name in module.SEAMS.ours:
        theirs = CASES[adapter][2]
        if adapter == "agilerl":
            theirs = AgileFunction if name.startswith("Fused") else agile_chunked
            theirs = agile_head if name.startswith("_fused") else theirs  # has no tensor arguments
        standing[at, name] = changed(theirs)
        place(monkeypatch, at, name, standing[at, name])
    return module, standing


def here(standing: dict[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    return {at: vars(seams.part("", at[0]))[at[1]] for at in standing}


# ---------------------------------------------------------------------- releases


@pytest.mark.parametrize("release", ["99.0", "0.0.1"])
@pytest.mark.parametrize("adapter", CASES)
def test_an_unknown_release_works_and_is_announced_once(adapter, release, monkeypatch) -> None:
    package, tested = CASES[adapter][:2]
    released(monkeypatch, release, package)
    module, standing = stubbed(monkeypatch, adapter)
    with pytest.warns(UserWarning, match=rf"{package} {release} was not tested.*{tested}.*holds"):
        module.install()
    placed = {inspect.unwrap(getattr(x, "apply", x)) for x in here(standing).values()}
    assert placed == {getattr(x, "apply", x) for x in module.SEAMS.ours.values()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.install()  # a second install changes nothing
        module.uninstall()
        assert here(standing) == standing
        module.install()
    module.uninstall()


@pytest.mark.parametrize("adapter", CASES)
def test_a_tested_release_is_not_announced(adapter, monkeypatch) -> None:
    package, tested = CASES[adapter][:2]
    released(monkeypatch, tested, package)
    module, standing = stubbed(monkeypatch, adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.install()
    module.uninstall()
    assert here(standing) == standing


# ---------------------------------------------------------------------- changed framework functions


@pytest.mark.parametrize("how", ["no function", "no module", "an argument's name", "one more"])
@pytest.mark.parametrize("adapter", CASES)
def test_a_broken_seam(adapter, how, monkeypatch) -> None:
    """A changed framework function gives an error with its name, the release and a remedy; nothing
    is replaced."""
    package, tested, _, argument = CASES[adapter]
    change = {
        "an argument's name": lambda f: renamed_argument(f, argument),
        "one more": lambda f: new_argument(f, "wanted"),
    }
    released(monkeypatch, "99.0", package)
    module, standing = stubbed(monkeypatch, adapter, change.get(how, lambda f: f))
    first = next(iter(standing))
    if how == "no function":
        delattr(seams.part("", first[0]), first[1])
        del standing[first]
    if how == "no module":
        monkeypatch.delitem(sys.modules, first[0].partition(":")[0])
        standing = {at: f for at, f in standing.items() if at[0] != first[0]}
    saying = {"no module": r"\.\w+: is not there", "no function": f"has no {first[1]}"}
    match = saying.get(how, rf"{first[1]}: takes \(.*\), want \(")
    with pytest.raises(RuntimeError, match=rf"^{package} 99.0: .*{match}.*{tested}") as error:
        module.install()
    assert "install a release" in str(error.value) and "do without the adapter" in str(error.value)
    assert here(standing) == standing


@pytest.mark.parametrize("adapter", CASES)
def test_a_new_argument_with_a_default(adapter, monkeypatch) -> None:
    """If a framework's function gets a new argument with a default, `install()` works, and a call
    that passes the argument raises an error with its name."""
    package, tested = CASES[adapter][:2]
    released(monkeypatch, tested, package)
    module, standing = stubbed(monkeypatch, adapter, lambda f: new_argument(f, "fresh=False"))
    calls: list[dict[str, Any]] = []
    for at, ours in module.SEAMS.ours.items():
        function = ours.apply if isinstance(ours, type) else ours
        monkeypatch.setitem(module.SEAMS.ours, at, recorded(function, ours, calls))
    module.install()
    try:
        for at, theirs in standing.items():
            replacement = here(standing)[at]
            call = replacement.apply if isinstance(theirs, type) else replacement
            arguments = {n: f"<{n}>" for n in seams.called(theirs) if n != "fresh"}
            by_position = isinstance(theirs, type)  # autograd functions take no keywords
            call(*arguments.values()) if by_position else call(**arguments)
            assert calls.pop() == arguments
            call(*arguments.values(), False) if by_position else call(**arguments, fresh=False)
            assert calls.pop() == arguments
            with pytest.raises(TypeError, match="^fresh: .* does not know it yet"):
                call(*arguments.values(), True) if by_position else call(**arguments, fresh=True)
    finally:
        module.uninstall()
    assert not calls


def recorded(function: Any, ours: Any, calls: list[dict[str, Any]]) -> Any:
    """Return a function with the signature of `ours` that appends its arguments to `calls`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def record(*args: Any, **kwargs: Any) -> None:
        calls.append(dict(signature.bind(*args, **kwargs).arguments))

    return (
        type("Recorded", (), {"apply": staticmethod(record)}) if isinstance(ours, type) else record
    )


def test_an_argument_that_moved_reaches_its_name() -> None:
    def ours(hidden, weight, target, chunk=None):
        return hidden, weight, target, chunk

    def moved(weight, hidden, target, chunk=None):
        raise AssertionError("stock")

    def keywords(hidden, weight, *, chunk=None, target):
        raise AssertionError("stock")

    assert fitted(moved, ours, "f")("w", "h", "t") == ("h", "w", "t", None)
    assert fitted(keywords, ours, "f")("h", "w", target="t", chunk=3) == ("h", "w", "t", 3)

    def between(hidden, fresh=None, weight=None, target=None):
        raise AssertionError("stock")

    assert fitted(between, ours, "f")("h", None, "w", "t") == ("h", "w", "t", None)
    for theirs in (moved, between):  # signatures of positional calls
        with pytest.raises(RuntimeError, match=r"^f: takes \(.*\), want \(hidden, weight"):
            check_signature(theirs, ours, "f")


def test_a_seam_of_several_is_installed_with_all_or_not_at_all(monkeypatch) -> None:
    first, second = (lambda a: a), (lambda a, b: a)
    place(monkeypatch, "a_framework.part", "first", first)
    place(monkeypatch, "a_framework.part", "second", second)
    ours = {("a_framework.part", "first"): lambda a: 1, ("a_framework.part", "second"): lambda a: 1}
    with pytest.raises(RuntimeError, match=r"^a_framework.part.second: takes \(a, b\), want \(a\)"):
        Seams(ours).install()
    assert sys.modules["a_framework.part"].first is first  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- prime-rl


def layer(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(weight=torch.randn(33, 8, requires_grad=True), **more)


def test_prime_rl_without_gemma(monkeypatch) -> None:
    """headloss installs into a prime-rl release that has no Gemma layer."""
    released(monkeypatch, "0.8.0", "prime-rl")
    module, standing = stubbed(monkeypatch, "prime_rl", lambda f: prime_rl)
    monkeypatch.delitem(sys.modules, module.GEMMA[0].partition(":")[0])
    module.install()
    assert list(module.SEAMS.theirs) == [at for at in standing if at != module.GEMMA]
    module.uninstall()


def test_prime_rl_without_a_temperature() -> None:
    """prime-rl's `forward` without a temperature returns the sum of the cross-entropy over labels
    other than -100, with correct gradients."""
    from headloss.integrations.prime_rl import forward

    torch.manual_seed(0)
    made, ids = layer(), torch.randint(33, (2, 5))
    ids[0, :2] = -100
    hidden = torch.randn(2, 5, 8, requires_grad=True)
    logits = hidden @ made.weight.T
    want = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids.flatten(), ignore_index=-100, reduction="sum"
    )
    output = forward(made, hidden, ids)
    assert set(output) == {"loss"}
    torch.testing.assert_close(output["loss"], want)
    leaves = (hidden, made.weight)
    theirs = torch.autograd.grad(want / 3, leaves)
    for got, right in zip(torch.autograd.grad(output["loss"] / 3, leaves), theirs, strict=True):
        torch.testing.assert_close(got, right)
    nothing = forward(made, hidden, torch.full_like(ids, -100))["loss"]
    assert float(nothing.detach()) == 0 and not torch.autograd.grad(nothing, hidden)[0].any()
    with pytest.raises(ValueError, match="labels: got None"):
        forward(made, hidden, None)


def test_prime_rl_sampling_mask() -> None:
    from headloss.integrations.prime_rl import forward

    torch.manual_seed(0)
    made, ids, heat = layer(), torch.randint(33, (2, 5)), 0.5 + torch.rand(2, 5)
    hidden = torch.randn(2, 5, 8)
    want = forward(made, hidden, ids, heat)
    for empty in (None, torch.empty(2, 5, 0, dtype=torch.int32), torch.full((2, 5, 3), -1)):
        output = forward(made, hidden, ids, heat, sampling_mask=empty)
        assert output.keys() == want.keys()
        assert all(output[name].equal(want[name]) for name in want)
    made.return_mask_logprobs = True
    output = forward(made, hidden, ids, heat, sampling_mask=torch.full((2, 5, 3), -1))
    assert output["mask_logprobs"].shape == (2, 5, 3) and not output["mask_logprobs"].any()
    with pytest.raises(ValueError, match="sampling_mask: has ids, want a temperature"):
        forward(made, hidden, ids, sampling_mask=ids[..., None])
    for wrong in (ids, ids[:1, :, None], ids[:, :4, None]):
        with pytest.raises(ValueError, match=r"sampling_mask: got shape .*, want \(2, 5, 'K'\)"):
            forward(made, hidden, ids, heat, sampling_mask=wrong)
    for wrong in (3, ids[..., None].float(), ids[..., None] > 0, [[[1]]]):
        with pytest.raises(TypeError, match="sampling_mask: got .*, want integers"):
            forward(made, hidden, ids, heat, sampling_mask=wrong)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_prime_rl_replays_a_sampling_mask(cap: float | None) -> None:
    """Values and gradients under prime-rl's sampling mask equal those of masked logits.

    A token whose mask is empty or lacks the label is scored over the whole vocabulary; kept ids are
    int32 between unused entries (-1).
    """
    from headloss.integrations.prime_rl import forward

    torch.manual_seed(1)
    made, ids, heat = layer(), torch.randint(33, (2, 6)), 0.5 + torch.rand(2, 6)
    made.softcap, made.return_mask_logprobs = cap, True
    hidden = torch.randn(2, 6, 8, requires_grad=True)
    mask = torch.rand(2, 6, 33).topk(7).indices.to(torch.int32)
    mask[torch.rand(2, 6, 7) < 0.3] = -1
    mask[..., 3] = ids
    mask[..., :3][mask[..., :3] == ids[..., None]] = -1
    mask[..., 4:][mask[..., 4:] == ids[..., None]] = -1
    mask[0, 0] = -1
    mask[1, 2] = torch.tensor([(int(ids[1, 2]) + 1) % 33, *[-1] * 6])
    ids[1, 5] = -100
    whole = torch.zeros(2, 6).bool()
    whole[0, 0] = whole[1, 2] = whole[1, 5] = True
    z = hidden @ made.weight.T
    z = (z if cap is None else cap * torch.tanh(z / cap)) / heat[..., None]
    inside = torch.zeros(2, 6, 34).scatter_(2, mask.long() % 34, 1.0)[..., :33].bool()
    log_p = z.masked_fill(~(inside | whole[..., None]), -1e4).log_softmax(-1)
    scored = ids >= 0
    logp = log_p.gather(2, ids.clamp_min(0)[..., None])[..., 0] * scored
    entropy = -(log_p.exp() * log_p).sum(-1) * scored
    usable = (mask >= 0) & ~whole[..., None]
    of_mask = torch.where(usable, log_p.gather(2, mask.long().clamp_min(0)), 0.0)
    want = {"logprobs": logp, "entropy": entropy, "mask_logprobs": of_mask}
    got = forward(made, hidden, ids, heat, sampling_mask=mask)
    assert got.keys() == want.keys()
    weights = {name: torch.randn(x.shape) for name, x in want.items()}
    leaves = (hidden, made.weight)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5, msg=name)
    totals = [sum((x[n] * w).sum() for n, w in weights.items()) for x in (got, want)]
    ours, theirs = (torch.autograd.grad(total, leaves) for total in totals)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    made.return_mask_logprobs = False
    assert "mask_logprobs" not in forward(made, hidden, ids, heat, sampling_mask=mask)


# ---------------------------------------------------------------------- NeMo-RL


class Alone:
    """A process group of one rank."""

    def size(self) -> int:
        return 1


@pytest.mark.parametrize("signature", [nemo_rl_06, nemo_rl_07])
def test_nemo_rl_as_each_release_calls_it(signature, monkeypatch) -> None:
    """NeMo-RL 0.6 passes a second weight by position; a tied head has only the second weight."""
    released(monkeypatch, "0.6.0" if signature is nemo_rl_06 else "0.7.0", "nemo-rl")
    module, standing = stubbed(monkeypatch, "nemo_rl", lambda f: signature)
    module.install()
    try:
        function = next(iter(here(standing).values()))
    finally:
        module.uninstall()
    torch.manual_seed(0)
    hidden, weight, ids = torch.randn(5, 2, 8), torch.randn(33, 8), torch.randint(33, (2, 5))
    want = (hidden.transpose(0, 1) @ weight.T).log_softmax(-1)[:, :-1]
    want = want.gather(2, ids[:, 1:, None])[..., 0]
    more: dict[str, Any] = {"vocab_start_index": 0, "vocab_end_index": 33, "inference_only": False}
    more |= {"tp_group": Alone(), "cp_group": None, "chunk_size": 3}
    weights: list[tuple[Tensor | None, ...]] = [(weight,)]
    if signature is nemo_rl_06:
        weights = [(weight, weight), (None, weight)]
    for passed in weights:
        torch.testing.assert_close(function(hidden, *passed, False, ids, **more), want)


# ---------------------------------------------------------------------- adapters that subclass


def automodel_forward(
    self,
    hidden_states,
    labels,
    lm_weight,
    num_label_tokens=None,
    grad_reduce_group=None,
    loss_weights=None,
):
    raise AssertionError("stock")


def materialize(lm_weight, *, grad_reduce_group=None):
    return lm_weight


def torchtitan_call(self, pred, labels, global_valid_tokens=None, **loss_inputs):
    raise AssertionError("stock")


def megatron_forward(self, input_ids, *, output_processor=None, output_processor_context=None):
    raise AssertionError("stock")


def fake_automodel(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str, str]:
    home = "nemo_automodel.components.loss"
    place(
        monkeypatch,
        f"{home}.linear_ce_base",
        "LinearCrossEntropy",
        type("L", (torch.nn.Module,), {}),
    )
    at = f"{home}.linear_ce_base:LinearCrossEntropy"
    place(monkeypatch, at, "materialize_lm_weight", staticmethod(materialize))
    place(monkeypatch, f"{home}.linear_ce:FusedLinearCrossEntropy", "forward", automodel_forward)
    return lambda m: m.HeadLossCrossEntropy(), "nemo-automodel", "nemo_automodel"


def fake_megatron(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str, str]:
    at = "megatron.core.models.gpt.gpt_model:GPTModel"
    place(monkeypatch, at, "forward", megatron_forward)
    return lambda m: m.TokenLosses(), "megatron-core", "megatron"


def fake_torchtitan(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str, str]:
    from dataclasses import dataclass

    class CrossEntropyLoss:
        pass

    class ChunkedLossWrapper:
        @dataclass(kw_only=True, slots=True)
        class Config:
            num_chunks: int = 8

        def __init__(self, config: Any, *, compile_config: Any = None) -> None:
            self.loss_fn, self.lm_head = CrossEntropyLoss(), None

        def set_lm_head(self, lm_head: Any) -> None:
            self.lm_head = lm_head

        __call__ = torchtitan_call

    home = "torchtitan.components.loss"
    place(monkeypatch, home, "ChunkedLossWrapper", ChunkedLossWrapper)
    place(monkeypatch, home, "CrossEntropyLoss", CrossEntropyLoss)
    place(monkeypatch, "torchtitan.distributed.spmd_types", "spmd_mesh_size", lambda name: 1)
    return lambda m: m.HeadLossWrapper(m.HeadLossWrapper.Config()), "torchtitan", "torchtitan"


def fake_axolotl(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str, str]:
    class BasePlugin:
        def get_input_args(self) -> None: ...

        def post_model_load(self, cfg: Any, model: Any) -> None: ...

    place(monkeypatch, "axolotl.integrations.base", "BasePlugin", BasePlugin)

    def use(module: Any) -> None:
        monkeypatch.setattr(module, "apply", lambda model, terms: None)
        config = SimpleNamespace(headloss=True, headloss_label_smoothing=None, headloss_z_loss=None)
        module.HeadlossPlugin().post_model_load(config, None)

    return use, "axolotl", "axolotl"


FAKES = {f.__name__[5:]: f for f in (fake_automodel, fake_megatron, fake_torchtitan, fake_axolotl)}
BROKEN: dict[tuple[str, str], tuple[str, str, Any, str]] = {
    ("automodel", "a name"): (
        "nemo_automodel.components.loss.linear_ce:FusedLinearCrossEntropy",
        "forward",
        renamed_argument(automodel_forward, "lm_weight"),
        r"FusedLinearCrossEntropy.forward: takes \(.*lm_weight_of_another_name",
    ),
    ("automodel", "the gather"): (
        "nemo_automodel.components.loss.linear_ce_base:LinearCrossEntropy",
        "materialize_lm_weight",
        staticmethod(lambda lm_weight: lm_weight),
        "takes no grad_reduce_group",
    ),
    ("automodel", "one more"): (
        "nemo_automodel.components.loss.linear_ce:FusedLinearCrossEntropy",
        "forward",
        new_argument(automodel_forward, "wanted"),
        r"takes \(self, hidden_states, wanted",
    ),
    ("megatron", "no processor"): (
        "megatron.core.models.gpt.gpt_model:GPTModel",
        "forward",
        lambda self, input_ids: None,
        "GPTModel.forward: takes no output_processor, output_processor_context",
    ),
    ("torchtitan", "a name"): (
        "torchtitan.components.loss:ChunkedLossWrapper",
        "__call__",
        renamed_argument(torchtitan_call, "global_valid_tokens"),
        "ChunkedLossWrapper.__call__: takes no global_valid_tokens",
    ),
    ("torchtitan", "one more"): (
        "torchtitan.components.loss:ChunkedLossWrapper",
        "__call__",
        lambda self, pred, labels, wanted, global_valid_tokens=None, **loss_inputs: None,
        r"ChunkedLossWrapper.__call__: takes \(self, pred, labels, wanted",
    ),
    ("torchtitan", "the head"): (
        "torchtitan.components.loss:ChunkedLossWrapper",
        "set_lm_head",
        lambda self, module: None,
        "ChunkedLossWrapper.set_lm_head: takes no lm_head",
    ),
    ("axolotl", "moved"): (
        "axolotl.integrations.base:BasePlugin",
        "post_model_load",
        lambda self, model, cfg: None,
        r"BasePlugin.post_model_load: takes \(self, model, cfg\)",
    ),
}


def fresh(monkeypatch: pytest.MonkeyPatch, adapter: str) -> Any:
    """Import the adapter with the stubs installed."""
    name = f"headloss.integrations.{adapter}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return module


@pytest.mark.parametrize("framework", FAKES)
def test_an_unknown_release_of_a_class(framework, monkeypatch) -> None:
    use, package, adapter = FAKES[framework](monkeypatch)
    released(monkeypatch, "99.0", package)
    module = fresh(monkeypatch, adapter)
    holds = re.escape(module.check())
    with pytest.warns(UserWarning, match=rf"{package} 99.0 was not tested.*{holds}"):
        use(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(module)
    if framework == "axolotl":  # axolotl before 0.21 has no plugin search
        assert "plugins: [headloss.integrations.axolotl.HeadlossPlugin] has to be" in module.check()
        base = sys.modules["axolotl.integrations.base"]
        monkeypatch.setattr(base, "PLUGIN_ENTRY_POINT_GROUP", "axolotl.plugins", raising=False)
        assert "plugins:" not in module.check()


@pytest.mark.parametrize(("framework", "how"), BROKEN)
def test_a_broken_seam_of_a_class(framework, how, monkeypatch) -> None:
    use, package, adapter = FAKES[framework](monkeypatch)
    at, name, value, match = BROKEN[framework, how]
    place(monkeypatch, at, name, value)
    released(monkeypatch, "99.0", package)
    module = fresh(monkeypatch, adapter)
    with pytest.raises(RuntimeError, match=rf"^{package} 99.0: .*{match}.*; install a release"):
        use(module)


@pytest.mark.parametrize("framework", ["automodel", "torchtitan", "axolotl"])
def test_a_class_that_is_gone(framework, monkeypatch) -> None:
    _, package, adapter = FAKES[framework](monkeypatch)
    at, name = {
        "automodel": ("nemo_automodel.components.loss.linear_ce_base", "LinearCrossEntropy"),
        "torchtitan": ("torchtitan.components.loss", "ChunkedLossWrapper"),
        "axolotl": ("axolotl.integrations.base", "BasePlugin"),
    }[framework]
    delattr(sys.modules[at], name)
    released(monkeypatch, "99.0", package)
    with pytest.raises(RuntimeError, match=rf"^{package} 99.0: {at}: has no {name}; install"):
        fresh(monkeypatch, adapter)


def test_a_megatron_layer_without_gtp(monkeypatch) -> None:
    """A Megatron output layer without the attribute `gtp_remat_size`, as in Megatron-Core 0.18, is
    supported."""
    from headloss.integrations import megatron_heads

    tensors = "megatron.core.tensor_parallel"
    kind = type("ColumnParallelLinear", (torch.nn.Module,), {})
    place(monkeypatch, tensors, "ColumnParallelLinear", kind)
    linear: Any = kind()
    linear.weight, linear.bias = torch.nn.Parameter(torch.ones(3, 2)), None
    linear.tp_group, linear.sequence_parallel = None, False
    linear.disable_grad_reduce = False
    config = SimpleNamespace(defer_embedding_wgrad_compute=False)
    hidden = torch.ones(1, 1, 2)
    megatron_heads.check_layer(linear, None, config, hidden)
    linear.gtp_remat_size = 2
    with pytest.raises(ValueError, match="gtp_remat: is not supported here"):
        megatron_heads.check_layer(linear, None, config, hidden)


# ---------------------------------------------------------------------- headloss doctor


def lines_of(monkeypatch: pytest.MonkeyPatch, **releases: str) -> dict[str, str]:
    monkeypatch.setattr(seams, "release", lambda package: releases.get(package.replace("-", "_")))
    packages = {name for name in seams.ADAPTERS if name.replace("-", "_") in releases}
    lines = [line.split(None, 1) for line in doctor.report()[10:]]
    assert {name for name, _ in lines} == packages
    return dict(lines)  # type: ignore[arg-type]


def test_doctor_knows_tested_releases_without_an_import(monkeypatch) -> None:
    newest = {name.replace("-", "_"): releases[-1] for name, releases in TESTED.items()}
    loaded = set(sys.modules)
    lines = lines_of(monkeypatch, **newest)
    assert lines == {name: f"{releases[-1]}, tested" for name, releases in TESTED.items()}
    assert not {m for m in set(sys.modules) - loaded if m.startswith("headloss.integrations.")}


def test_doctor_checks_other_releases(monkeypatch) -> None:
    stubbed(monkeypatch, "skyrl")
    stubbed(monkeypatch, "nemo_rl", lambda f: new_argument(f, "wanted"))
    lines = lines_of(monkeypatch, skyrl="99.0", nemo_rl="99.0", prime_rl="99.0")
    name = "_fused_lm_head_logprob_apply"
    assert lines["skyrl"] == f"99.0, not tested; the signature of {name} was checked and holds"
    assert lines["nemo-rl"].startswith("99.0: nemo_rl.distributed.model_utils.from_parallel")
    assert "takes (tensor_parallel_hidden_states, wanted" in lines["nemo-rl"]
    assert lines["prime-rl"].startswith("99.0, does not import here: ModuleNotFoundError")


def test_doctor_where_an_adapter_has_no_check(monkeypatch) -> None:
    name = "headloss.integrations.trl"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    lines = lines_of(monkeypatch, trl="99.0")
    assert lines["trl"] == f"99.0, not tested (tested: {', '.join(TESTED['trl'])})"


def test_every_adapter_is_known() -> None:
    assert seams.ADAPTERS.keys() == TESTED.keys()
    for adapter in seams.ADAPTERS.values():
        assert importlib.util.find_spec(f"headloss.integrations.{adapter}") is not None


def test_the_table_of_versions() -> None:
    """The documentation lists exactly the framework releases in `headloss.integrations`' table
    `TESTED`."""
    page = Path(__file__).parents[1] / "docs" / "integrations" / "README.md"
    row = r"^\| \[(.+?)\]\(\S+?\)(?:, promised)? \| ([\d., ]+) \|"
    rows = re.findall(row, page.read_text(), re.M)
    table = {name.lower(): tuple(releases.split(", ")) for name, releases in rows}
    # Liger's page has no tested release, since that adapter monkey-patches nothing
    del table["liger's api"]
    assert table == {n.replace("nemo-automodel", "automodel"): r for n, r in TESTED.items()}


# ---------------------------------------------------------------------- unused adapters


def stepped() -> list[str]:
    """Return the warnings of an adapter in two optimizer steps."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            weight.sum().backward()
            optimizer.step()
    return [str(w.message) for w in caught if "framework-with-a-loss" in str(w.message)]


class Fused:
    @staticmethod
    def apply(x: int) -> int:
        return x


@pytest.mark.parametrize("kind", ["function", "class"])
def test_an_adapter_that_was_never_called_says_so(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter without calls warns once, after the first step; a called or uninstalled adapter
    does not warn."""
    framework = ModuleType("framework_with_a_loss")
    theirs: Any = type("Theirs", (), {"apply": staticmethod(lambda x: -x)})
    framework.loss = theirs if kind == "class" else theirs.apply
    monkeypatch.setitem(sys.modules, framework.__name__, framework)
    ours = Fused if kind == "class" else Fused.apply
    adapter = Seams({(framework.__name__, "loss"): ours}, "framework-with-a-loss")
    adapter.install(quiet=True)
    (said,) = stepped()
    assert said.startswith("framework-with-a-loss: headloss's adapter was put in place, and by the")
    assert stepped() == []
    adapter.uninstall()
    adapter.install(quiet=True)
    loss = framework.loss
    assert (loss.apply if kind == "class" else loss)(3) == 3
    assert stepped() == []
    adapter.uninstall()
    adapter.install(quiet=True)
    adapter.uninstall()
    assert stepped() == [] and framework.loss is (theirs if kind == "class" else theirs.apply)


# ---------------------------------------------------------------------- adapters that say so


def test_agilerl_says_that_its_loss_is_liger_s() -> None:
    from headloss.integrations import agilerl

    layer = SimpleNamespace(base_layer=None, weight=torch.ones(3, 2), bias=None)
    agent = SimpleNamespace(use_liger_loss=True, _get_lm_head=lambda: layer)
    with pytest.warns(UserWarning, match=r"use_liger_loss: is True, .* want use_liger_loss=False"):
        agilerl.fused_logprob_fn_and_head(agent)
    agent.use_liger_loss = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agilerl.fused_logprob_fn_and_head(agent)


def test_ms_swift_refuses_a_trainer_and_not_its_loss_type() -> None:
    """`swift rlhf` sets a `loss_type` by itself."""
    pytest.importorskip("transformers")
    from headloss.integrations.ms_swift import Callback
    from headloss.losses import Objective

    class GRPOTrainer:
        __module__ = "swift.rlhf_trainers.grpo_trainer"

    with pytest.raises(ValueError, match="callbacks: got headloss with GRPOTrainer, .*swift sft"):
        Callback(SimpleNamespace(loss_type="grpo"), GRPOTrainer(), Objective.of(hl.cross_entropy()))


def test_trl_install_that_nothing_calls_says_so() -> None:
    trl = pytest.importorskip("trl")
    assert trl
    from headloss.integrations.trl import install, uninstall

    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    install()
    try:
        with pytest.warns(UserWarning, match="trl: headloss's adapter was put in place, and by"):
            torch.optim.SGD([weight], 0.1).step()
    finally:
        uninstall()
