"""Misuse gives a one-line error that names the unsupported input."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_calls import H, T, V, batch, head, hidden, term
from torch import Tensor

import headloss as hl
from headloss.integrations import liger

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# ---------------------------------------------------------------------- wrong functions and modules


class LanguageModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(H, V)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head


def plainly(stats: Any, batch: Any) -> Tensor:
    return -stats.logp


def flattened() -> torch.nn.Linear:
    """Return a head as left by FSDP1 outside its forward."""
    linear = torch.nn.Linear(H, V)
    linear.weight = torch.nn.Parameter(torch.zeros(11))
    return linear


def tensor_parallel() -> torch.nn.Linear:
    """Return a head under transformers' tensor parallelism."""
    styles = pytest.importorskip("transformers.integrations.tensor_parallel")
    linear = torch.nn.Linear(H, V)
    styles.ColwiseParallel().install_forward(linear, None)
    return linear


def with_parameter() -> hl.Term:
    scale = torch.nn.Parameter(torch.ones(()))
    return term(lambda stats, batch: -stats.logp * scale)


WRONG_DOORS: dict[str, Callable[[], Any]] = {
    r"module: got .*LanguageModel, want .*: headloss.Head.of_model reads": lambda: hl.Head.of(
        LanguageModel()
    ),
    r"head: got LanguageModel, want headloss.Head .*Head.of_model\(model\)": lambda: hl.head_loss(
        hidden(), LanguageModel(), batch(), hl.cross_entropy()  # type: ignore[arg-type]
    ),
    r"hidden: got shape \(6, 9\), want \[.., 4\] \(logits\? headloss.logits_loss takes": (
        lambda: hl.head_loss(torch.randn(T, V), head(), batch(), hl.cross_entropy())
    ),
    r"weight: got shape \(11,\), a piece of what FSDP1 .*want \[V, H\]: .*root.*FSDP2": (
        lambda: hl.Head.of(flattened())
    ),
    r"module: got .*Linear, .*tensor parallelism \(tp_plan\) .*vocab_group=mesh.get_group": (
        lambda: hl.Head.of(tensor_parallel())
    ),
    r"term: got a function of \(stats, batch\), want a Term: hl.term\(function\)\(\)": (
        lambda: hl.check_term(plainly)  # type: ignore[arg-type]
    ),
    r"objective: got function, want terms .*hl.term\(function\)\(\)": lambda: hl.head_loss(
        hidden(), head(), batch(), plainly  # type: ignore[arg-type]
    ),
    r"term mine: a tensor .* is caught .* or train it by headloss.head_function": (
        lambda: hl.head_loss(hidden(), head(), batch(), with_parameter())
    ),
}


@pytest.mark.parametrize("match", WRONG_DOORS)
def test_an_error_names_the_right_function(match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        WRONG_DOORS[match]()


def test_head_function_trains_the_parameter_that_a_term_may_not_hold() -> None:
    x, h, scale = hidden(), head(), torch.nn.Parameter(torch.tensor(2.0))
    loss = hl.head_function(x, h, batch(), lambda logps, _: -(scale * logps).sum())
    loss.backward()
    logps = hl.head_loss(x, h, batch(), hl.cross_entropy()).logps
    torch.testing.assert_close(scale.grad, -logps.sum())


# ---------------------------------------------------------------------- invalid numbers


def of_numbers(half: Any) -> list[Tensor]:
    """Set every numeric option of several calls to `half`, a number of any numeric type, and
    return the losses and one gradient."""
    torch.manual_seed(0)
    x, fields = hidden(), {f"{name}_logps": -torch.rand(T) for name in ("old", "ref", "sampling")}
    given = batch(advantages=torch.randn(T), teacher_logits=torch.randn(T, V), **fields)
    lora = hl.Lora(a=torch.randn(2, H), b=torch.randn(V, 2), scaling=half)
    own = head(temperature=half, softcap=half, logit_scale=half, lora=(lora,))
    objective = half * hl.grpo(epsilon_low=half).corrected("token_mask", min=half, max=1 + half)
    objective += hl.kl(estimator="k3", clamp=half, clamp_difference=half) / half
    objective += hl.cross_entropy(label_smoothing=half) - hl.grpo().top_entropy(threshold=half)
    objective += hl.distillation(divergence="js", beta=half, temperature=half)
    objective += hl.grpo().rejected("k3", max=half)
    out = hl.head_loss(x, own, given, objective, hl.Options(upstream=half))
    (float(half) * out.loss).backward()
    call = {"temperature": half, "softcap": half, "logit_scale": half}
    logits = hl.logits_loss(torch.randn(T, V, requires_grad=True), given, objective, **call)
    assert x.grad is not None
    return [out.loss.detach(), x.grad, logits.loss.detach()]


@pytest.mark.parametrize("kind", [Fraction, np.float16, np.float32, np.float64])
def test_a_number_may_be_of_any_real_kind(kind: Callable) -> None:
    for found, want in zip(of_numbers(kind(0.5)), of_numbers(0.5), strict=True):
        assert torch.equal(found, want)


def test_a_number_that_no_float_holds_is_refused_by_name() -> None:
    huge: Any = Fraction(10) ** 400
    for make, name in (
        (lambda: hl.Options(upstream=huge), "upstream"),
        (lambda: hl.Options(gradient_tolerance=huge), "gradient_tolerance"),
        (lambda: hl.cross_entropy(label_smoothing=huge), "label_smoothing"),
        (lambda: hl.Head(torch.zeros(V, H), softcap=huge), "softcap"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"{name}: got"):
            make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hl.fixed_length(np.float32(3)), hl.Totals(np.float32(3), 2)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["targets", "get", "slice", "index", "_fields", "_dtype", ""])
def test_a_weight_is_a_field_and_nothing_else_of_the_batch(name: str) -> None:
    match = f"term z_loss: reads batch.{name}, which was not given"
    for call in (
        lambda: hl.head_loss(hidden(), head(), batch(), hl.z_loss().weighted(name)),
        lambda: hl.plan(hidden(), head(), batch(), hl.z_loss().weighted(name)),
        lambda: hl.logits_loss(torch.randn(T, V), batch(), hl.z_loss().weighted(name)),
    ):
        with pytest.raises(ValueError, match=match):
            call()


@pytest.mark.parametrize(
    ("name", "want"),
    [("logps", "did you mean logp?"), ("entropies", "did you mean entropy?"), ("foo", "want one")],
)
def test_a_statistic_of_another_name(name: str, want: str) -> None:
    def observe(stats: Any, batch: Any) -> dict[str, hl.Observed]:
        return {"name": hl.Observed(getattr(stats, name))}

    match = re.escape(f"term mine: reads stats.{name}, {want}")
    for wrong in (
        term(lambda stats, batch: getattr(stats, name)),
        term(lambda stats, batch: stats.logp, observe=observe),
    ):
        with pytest.raises(ValueError, match=match):
            hl.head_loss(hidden(), head(), batch(), wrong)
        if wrong.observe is None:
            with pytest.raises(ValueError, match=match):
                hl.check_term(wrong)
    wrong = term(lambda stats, batch: stats.logp.foo)  # errors raised inside a term keep their text
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'foo'"):
        hl.head_loss(hidden(), head(), batch(), wrong)


def test_what_is_no_term_is_refused_where_it_is_written() -> None:
    """An invalid term raises an error when `hl.term` defines the term, not when the term is first
    used."""
    with pytest.raises(ValueError, match="reduction: got 'mean', want one of"):
        hl.term(reduction="mean")(lambda stats, batch: stats.logp)
    for function in (lambda: None, lambda stats: stats.logp, lambda stats, *, batch: stats.logp):
        with pytest.raises(TypeError, match=r"function: got mine\(.*\), want a function of"):
            hl.term(function, name="mine")
    hl.term(lambda *both: both[0].logp)


def test_a_mask_function_names_itself_and_the_missing_field() -> None:
    for make in (hl.second_moment_mask, lambda data: hl.rejection_mask(data, "ratio", max=2.0)):
        name = "second_moment_mask" if make is hl.second_moment_mask else "rejection_mask"
        with pytest.raises(ValueError, match=f"{name}: reads batch.old_logps, which was not given"):
            make(batch())
        with pytest.raises(ValueError, match=f"{name}: reads batch.sampling_logps, which was not"):
            make(batch(old_logps=torch.zeros(T)))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: hl.grpo().off_policy_masked("x"), "off_policy_masked: threshold: got 'x'"),
        (lambda: hl.kl_shaped(hl.grpo(), beta="x"), "kl_shaped: beta: got 'x'"),
        (lambda: hl.simpo(alpha="x"), "simpo: alpha: got 'x'"),
        (lambda: hl.dpo(f_alpha_divergence_coef="x"), "dpo: f_alpha_divergence_coef: got 'x'"),
        (lambda: hl.clip_cov(low="x"), "clip_cov: low: got 'x'"),
    ],
)
def test_errors_about_numbers_ask_for_a_number_once(make: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"^{text}, want a (finite )?number$"):
        make()


# ---------------------------------------------------------------------- transforms, meta, compile


def verbs() -> dict[str, Callable[[Tensor, Tensor], Any]]:
    b = batch()
    return {
        "head_loss": lambda x, w: hl.head_loss(x, hl.Head(w), b, hl.cross_entropy()).loss,
        "logits_loss": lambda x, w: hl.logits_loss(x @ w.T, b, hl.cross_entropy()).loss,
        "head_stats": lambda x, w: hl.head_stats(x, hl.Head(w), b.targets).logp.sum(),
        "head_topk": lambda x, w: hl.head_topk(x, hl.Head(w), 2).logps.sum(),
    }


@pytest.mark.parametrize("verb", verbs())
def test_transforms_of_torch_func_are_refused_by_name(verb: str) -> None:
    f, x, w = verbs()[verb], torch.randn(T, H), torch.randn(V, H)
    transforms: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(f)(x, w),
        "vjp": lambda: torch.func.vjp(f, x, w),
        "jvp": lambda: torch.func.jvp(f, (x, w), (x, w)),
        "jacrev": lambda: torch.func.jacrev(f)(x, w),
        "hessian": lambda: torch.func.hessian(f)(x, w),
        "vmap": lambda: torch.func.vmap(f, in_dims=(0, None))(x.expand(3, T, H), w),
    }
    for name, run in transforms.items():
        with pytest.raises(RuntimeError, match=rf"headloss.{verb}: got called inside .*torch.func"):
            run()
        assert f(x, w).isfinite(), name


@pytest.mark.parametrize("verb", ["head_loss", "logits_loss", "head_stats"])
def test_forward_mode_is_refused_by_name(verb: str) -> None:
    f, x, w = verbs()[verb], torch.randn(T, H), torch.randn(V, H)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match=f"headloss.{verb}: got a dual tensor"):
            f(dual, w)
        assert f(x, w).isfinite()


def test_meta_tensors_are_refused_by_name() -> None:
    def empty(*shape: int, **given: Any) -> Tensor:
        return torch.empty(*shape, device="meta", **given)

    ids = empty(T, dtype=torch.int64)
    x, w, b = empty(T, H), hl.Head(empty(V, H)), hl.Batch(ids)
    static, ce = hl.Options(static=True), hl.cross_entropy()
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("head_loss", lambda: hl.head_loss(x, w, b, ce)),
        ("head_loss", lambda: hl.head_loss(x, w, b, ce, static)),
        ("head_loss", lambda: hl.head_loss(x, w, batch(), ce)),
        ("logits_loss", lambda: hl.logits_loss(empty(T, V), b, ce)),
        ("head_stats", lambda: hl.head_stats(x, w, ids)),
        ("head_topk", lambda: hl.head_topk(x, w, 2)),
        ("plan", lambda: hl.plan(x, w, b, ce)),
    ]
    for verb, call in calls:
        with pytest.raises(ValueError, match=f"headloss.{verb}: got a tensor .* meta device"):
            call()
    mixed: list[tuple[str, Callable[[], Any]]] = [
        ("batch: got targets on meta", lambda: hl.head_loss(hidden(), head(), b, ce)),
        ("batch: got targets on meta", lambda: hl.head_loss(hidden(), head(), b, ce, static)),
        ("weight: got device meta", lambda: hl.head_loss(hidden(), w, batch(), ce)),
        ("targets: got device meta", lambda: hl.head_stats(hidden(), head(), ids)),
    ]
    for match, call in mixed:
        with pytest.raises(ValueError, match=match):
            call()
    assert "no logits" not in str(hl.plan(x, w, batch(), ce))  # the supported way


def test_fullgraph_says_why_not() -> None:
    x, w, b = torch.randn(T, H), torch.randn(V, H), batch()
    functions = {name: f for name, f in verbs().items() if name.endswith("loss")}
    functions["plan"] = lambda x, w: hl.plan(x, hl.Head(w), b, hl.cross_entropy()).schedule
    for name, f in functions.items():
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"headloss: this verb .* breaks the graph.*head_stats"):
            torch.compile(f, backend="eager", fullgraph=True)(x, w)
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.compile(f, backend="eager")(x, w) == f(x, w), name
    torch._dynamo.reset()


# ---------------------------------------------------------------------- head_stats, segments


def test_targets_of_head_stats_are_a_tensor() -> None:
    for given, got in ((batch, "function, want an int64 tensor .*headloss.Batch"), ([1], "list")):
        with pytest.raises(TypeError, match=f"targets: got {got}"):
            hl.head_stats(hidden(), head(), given)  # type: ignore[arg-type]


def test_negative_ids_are_in_no_segment() -> None:
    segments = hl.Segments.from_ids(torch.tensor([1, -1, 0, 1, -7, 1]), count=3)
    assert segments.lengths.tolist() == [1, 3, 0]
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0], requires_grad=True)
    assert segments.sum(values).tolist() == [4, 41, 0]
    assert segments.mean(values).tolist() == [4, pytest.approx(41 / 3), 0]
    weighted = segments.sum(values) * torch.tensor([2.0, 3.0, 5.0])
    (gradient,) = torch.autograd.grad(weighted.sum(), values)
    assert gradient.tolist() == [3, 0, 2, 3, 0, 3]
    per_segment = torch.tensor([10.0, 20.0, 30.0], requires_grad=True)
    assert segments.expand(per_segment).tolist() == [20, 0, 10, 20, 0, 20]
    (gradient,) = torch.autograd.grad(segments.expand(per_segment).sum(), per_segment)
    assert gradient.tolist() == [1, 3, 0]
    none = hl.Segments.from_ids(torch.tensor([-1, -1]))
    assert none.count == 0 and none.lengths.tolist() == []
    assert none.expand(torch.zeros(0)).tolist() == [0, 0]


def test_an_unscored_token_may_be_in_no_segment() -> None:
    x, h = hidden(), head()
    targets = torch.tensor([3, -100, 5, 1, -100, 2])
    ids = torch.tensor([1, -1, 0, 1, -7, 1])
    segments = hl.Segments.from_ids(ids, count=2)
    given = hl.Batch(targets, segments, advantages=torch.tensor([1.0, -2.0]))
    out = hl.head_loss(x, h, given, hl.reinforce().over("sequence_sum"))
    logp = (x @ h.weight.T).log_softmax(-1)[torch.arange(T), targets.clamp_min(0)]
    torch.testing.assert_close(out.loss, (-logp[2] + 2 * logp[[0, 3, 5]].sum()) / 2)
    assert float(hl.Totals.of(given).tokens) == 4


# ---------------------------------------------------------------------- distance to a clip


def test_trls_cap_as_cispos_epsilon_high_warns() -> None:
    with pytest.warns(UserWarning, match=r"epsilon_high: got 1.28, .* TRL's 1.28 is 0.28 here"):
        hl.cispo(epsilon_high=1.28)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for distance in (0.0, 0.28, 1.0, 4.0):
            hl.cispo(epsilon_high=distance)


def test_a_distance_as_trls_epsilon_high_is_refused(tmp_path) -> None:
    pytest.importorskip("trl")
    from headloss import rl

    common: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    for given in ({"epsilon_high": 0.28}, {"epsilon_high": None}):
        with pytest.raises(ValueError, match=r"epsilon_high: got 0.2.*, want the cap .* >= 1"):
            rl.CISPOConfig(**common, **given)
    assert rl.CISPOConfig(**common).epsilon_high == 1.28
    assert rl.CISPOConfig(**common, epsilon_high=5.0).epsilon_high == 5.0


# ---------------------------------------------------------------------- hooks, float16


@pytest.mark.parametrize(
    ("module", "name", "hook"),
    [
        ("grpo_trainer", "GRPOTrainer", "_compute_loss"),
        ("dpo_trainer", "DPOTrainer", "_compute_loss"),
        ("grpo_trainer", None, "add_fused_lm_head"),
        ("sft_trainer", None, "add_fused_lm_head"),
        ("dpo_trainer", None, "add_fused_lm_head"),
    ],
)
def test_a_hook_that_trl_has_renamed_fails_when_built(module, name, hook, monkeypatch) -> None:
    pytest.importorskip("trl")
    from importlib import import_module

    from headloss.integrations import trl

    stock = import_module(f"trl.trainer.{module}")
    kind = {"grpo": "GRPOTrainer", "dpo": "DPOTrainer", "sft": "SFTTrainer"}[module.split("_")[0]]
    monkeypatch.delattr(stock if name is None else getattr(stock, name), hook)
    owner = f"trl.trainer.{module}" if name is None else name
    match = rf"{re.escape(owner)}.{hook}: is not in the installed TRL"
    with pytest.raises(RuntimeError, match=match):
        getattr(trl, kind)(model=SimpleNamespace())


def test_float16_says_that_its_gradient_is_a_tensor_of_its_own() -> None:
    logits = torch.randn(T, V, dtype=torch.float16, requires_grad=True)
    leaf = logits * 1
    before = leaf.detach().clone()
    hl.logits_loss(leaf, batch(), hl.cross_entropy(), inplace=True).loss.backward()
    assert torch.equal(leaf.detach(), before)  # unchanged
    assert "float16" in (hl.logits_loss.__doc__ or "").partition("inplace:")[2]


def test_expanded_logits_are_not_overwritten() -> None:
    """Expanded logits are not overwritten, since rows share memory."""
    logits = torch.randn(1, V, requires_grad=True)
    with pytest.raises(ValueError, match="inplace: got expanded logits"):
        hl.logits_loss((logits * 1).expand(T, V), batch(), hl.cross_entropy(), inplace=True)
    windows = torch.randn(T + V, requires_grad=True).mul(1).as_strided((T, V), (1, 1))
    with pytest.raises(ValueError, match="inplace: got .* whose elements share memory"):
        hl.logits_loss(windows, batch(), hl.cross_entropy(), inplace=True)
    for shared in (torch.zeros(1, H).expand(V, H), torch.zeros(V + H).as_strided((V, H), (1, 1))):
        with pytest.raises(ValueError, match="main_grad: got expanded memory, or others"):
            hl.Options(main_grad=shared)
    for own in (logits.expand(T, V).mul(1).t().contiguous().t(), torch.randn(T, 2 * V)[:, ::2]):
        given = own.detach().requires_grad_() * 1
        hl.logits_loss(given, batch(), hl.cross_entropy(), inplace=True).loss.backward()
    one = hl.Batch(torch.zeros(1, dtype=torch.int64))
    hl.logits_loss((logits * 1).expand(T, V)[:1], one, hl.z_loss(), inplace=True).loss.backward()
    (want,) = torch.autograd.grad(logits.logsumexp(-1).square().sum(), logits)
    torch.testing.assert_close(logits.grad, want)


CLIPPED = [hl.grpo(), hl.ppo(dual_clip=2.0), hl.dapo(delta=1.5)]


@pytest.mark.parametrize("objective", CLIPPED, ids=repr)
def test_current_log_probs_beside_given_logits_on_triton(objective: hl.Term) -> None:
    """With old_logps=CURRENT and logits passed in by the caller, the ratio is 1, the loss -A and
    the gradient that of -A log p."""
    pytest.importorskip("triton")
    logits = torch.randn(T, V, device=DEVICE, requires_grad=True)
    targets, advantages = torch.arange(T, device=DEVICE), torch.randn(T, device=DEVICE)
    given = hl.Batch(targets, advantages=advantages, old_logps=hl.CURRENT)
    for inplace in (False, True):
        options = hl.Options(backend="triton")
        out = hl.logits_loss(1 * logits, given, objective, inplace=inplace, options=options)
        (gradient,) = torch.autograd.grad(out.loss, logits)
        logps = logits.log_softmax(-1)[torch.arange(T), targets]
        (want,) = torch.autograd.grad(-(advantages * logps).mean(), logits)
        torch.testing.assert_close(out.loss, -advantages.mean())
        torch.testing.assert_close(gradient, want)


# ---------------------------------------------------------------------- tensors without strides

LAYOUTS = {
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "nested": lambda t: torch.nested.as_nested_tensor([t[:2], t[2:]]),
}
STATES, WEIGHT, LOGITS = torch.randn(T, H), torch.randn(V, H), torch.randn(T, V)
TAKERS: dict[str, Callable] = {
    "hidden": lambda of: hl.head_loss(of(STATES), head(), batch(), hl.cross_entropy()),
    "hidden of head_stats": lambda of: hl.head_stats(of(STATES), head(), torch.arange(T)),
    "hidden of head_topk": lambda of: hl.head_topk(of(STATES), head(), 2),
    "logits": lambda of: hl.logits_loss(of(LOGITS), batch(), hl.cross_entropy()),
    "weight": lambda of: hl.Head(of(WEIGHT)),
    "teacher_logits": lambda of: batch(teacher_logits=of(LOGITS)),
    "main_grad": lambda of: hl.Options(main_grad=of(WEIGHT)),
}


@pytest.mark.filterwarnings("ignore:.*beta state", "ignore:.*prototype stage")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("taker", TAKERS)
def test_a_tensor_without_strides_is_refused(taker, layout) -> None:
    match = f"^{taker.partition(' ')[0]}: got a tensor of layout .*{layout}.*, want a dense one"
    with pytest.raises(TypeError, match=match):
        TAKERS[taker](LAYOUTS[layout])


@pytest.mark.parametrize("name", ["targets", "bias", "temperature", "support_ids"])
def test_sparse_vectors_are_refused(name) -> None:
    takers: dict[str, Callable] = {
        "targets": lambda: hl.Batch(torch.arange(T).to_sparse()),
        "bias": lambda: head(bias=torch.randn(V).to_sparse()),
        "temperature": lambda: head(temperature=torch.ones(T).to_sparse()),
        "support_ids": lambda: batch(support_ids=torch.arange(T)[:, None].to_sparse()),
    }
    with pytest.raises(TypeError, match=f"^{name}: got a tensor of layout torch.sparse_coo"):
        takers[name]()


# ---------------------------------------------------------------------- classes with Liger's names


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_a_reference_model_that_was_not_given(kind: str) -> None:
    """A preference loss without reference log-probs raises an error, since it would use log-probs
    in place of log-ratios."""
    loss = getattr(liger, f"LigerFusedLinear{kind}Loss")
    x, w, labels = torch.randn(2, T, H), torch.randn(V, H), torch.arange(2 * T).view(2, T) % V
    given = (w, x, labels) if kind == "DPO" else (x, w, labels, None, torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="ref_input: got None, .* use_ref_model=False"):
        loss(use_ref_model=True)(*given)
    with pytest.raises(ValueError, match="ref_input: got None, or no ref_weight"):
        loss(use_ref_model=True)(*given, ref_input=x)
    without = loss(use_ref_model=False)(*given)[0]
    same = loss(use_ref_model=True)(*given, ref_input=x, ref_weight=w)[0]
    assert without.isfinite() and (without - same).abs() > 1e-3


def test_the_clipped_share_of_advantages_per_token() -> None:
    x, w, ids = torch.randn(2, T, H), torch.randn(V, H), torch.arange(2 * T).view(2, T) % V
    mask, advantages = torch.ones(2, T), torch.tensor([1.0, -2.0])
    old = x.matmul(w.t()).log_softmax(-1).gather(2, ids[..., None])[..., 0] + torch.randn(2, T)
    loss = liger.LigerFusedLinearGRPOLoss(beta=0.0)
    found = [
        loss(x, w, ids, mask, a, old_per_token_logps=old)
        for a in (advantages, advantages[:, None].expand(2, T))
    ]
    torch.testing.assert_close(found[0], found[1])
    assert 0 < found[0][1][0] < 1
    none = loss(x[:0], w, ids[:0], mask[:0], advantages[:0], old_per_token_logps=old[:0])
    assert none[0] == 0 and none[1][0] == 0


# ---------------------------------------------------------------------- error texts


def message(call: Callable[[], object]) -> str:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
        call()
    return str(error.value)


def test_the_nearest_name_is_offered() -> None:
    mine: Any = hl.term(lambda stats, batch, tau=1.0: stats.logp, name="mine")
    # Types are checked elsewhere.
    gspo, grpo, entropy, options = hl.gspo, hl.grpo, hl.entropy, hl.Options
    for call, want in {
        lambda: gspo(0.2, 0.2): "gspo: got 2 options by position, want them by name: epsilon_low, ",
        lambda: mine(2.0): "mine: got 1 options by position, want them by name: tau",
        lambda: grpo(epsilon=0.1): "grpo: got an unexpected option 'epsilon', did you mean eps",
        lambda: grpo(clip=0.1): "grpo: got an unexpected option 'clip', want one of epsilon_low, ",
        lambda: entropy(x=1): "entropy: got an unexpected option 'x', want none",
        lambda: mine(taus=2.0): "mine: got an unexpected option 'taus', did you mean tau?",
        lambda: options(chunk_size=3): "chunk_size: is no argument of Options, did you mean chunk",
    }.items():  # type: ignore[call-arg]
        assert message(call).startswith(want)
    assert hl.Options(chunk_tokens=3) == hl.Options(chunk_tokens=3)


def test_errors_speak_of_what_was_passed() -> None:
    def number(stats, batch):
        return stats.logp * batch.beta.item()

    x, h = hidden(), head()
    given = batch(beta=torch.ones(1), old_logp=torch.zeros(T))
    found = message(lambda: hl.head_loss(x, h, given, term(number)))
    assert found.startswith("term mine: ") and "it was tried on 2; pass numbers" in found
    for objective in (hl.grpo(), hl.z_loss().weighted("old_logps"), hl.z_loss().where("old_logps")):
        found = message(lambda o=objective: hl.head_loss(x, h, given, o))
        assert found.endswith("batch.old_logps, which was not given; it has beta, old_logp")
    out = hl.head_loss(x, h, batch(), hl.cross_entropy() + hl.entropy())
    for value in out.terms.values():
        assert not value.requires_grad and "out.terms: carry no gradient" in message(value.backward)


def test_reprs_say_what_a_thing_is() -> None:
    for code in (
        "entropy().top_entropy(quantile=0.2)",
        "entropy().top_entropy(threshold=1.5)",
        "z_loss().over('sequence_mean').weighted('w').where('kept')",
        "z_loss().over(fixed_length(8))",
        "reinforce().corrected(mode='token_mask', min=0.5, max=None, live=True)",
        "reinforce().rejected(measure='k3', level='token', min=0, max=0.1)",
        "reinforce().off_policy_masked(threshold=0.3).over('sequence_sum')",
    ):
        made = eval(f"hl.{code}".replace("fixed", "hl.fixed"), {"hl": hl})
        assert repr(made) == code and eval(f"hl.{made!r}".replace("fixed", "hl.fixed")) == made
    assert repr(hl.z_loss().over("token_mean")) == "z_loss()"
    assert repr(1 * hl.z_loss().where("kept")) == "1 * z_loss().where('kept')"
    out = hl.head_loss(hidden(), head(), batch(), hl.cross_entropy() + hl.entropy())
    assert len(repr(out).splitlines()) == 3 and f"loss={out.loss.item():.6g}" in repr(out)
    for part in ("cross_entropy ", "entropy ", "logps=[6] float32", "plan: one_pass", "perplexity"):
        assert part in repr(out)
    given = batch(advantages=torch.zeros(T), old_logps=hl.CURRENT)
    assert repr(given) == (
        "Batch(targets=[6] int64, advantages=[6] float32, old_logps=headloss.CURRENT, 1 segments, "
        "on cpu)"
    )
    assert repr(head(softcap=30.0)) == "Head(weight=[9, 4] float32, softcap=30.0)"
