"""headloss's classes with Liger's names agree with Liger in return values and gradients.

Liger computes log-probs and sums in float32, so values agree to 1e-4 of the norm.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import headloss.integrations.liger as ours

theirs = pytest.importorskip("liger_kernel.chunked_loss")
import liger_kernel.ops.fused_linear_scaled_cross_entropy as scaled  # noqa: E402
import liger_kernel.transformers as modules  # noqa: E402
from liger_kernel.transformers import functional  # noqa: E402

B, T, V, H = 6, 7, 23, 5
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


MASK = torch.arange(T) < torch.tensor([7, 4, 3, 5, 1, 6])[:, None]
IDS = torch.randint(V, (B, T), generator=GENERATOR)
LABELS = IDS.where(MASK, -100)
HIDDEN, WEIGHT, BIAS = normal(B, T, H), normal(V, H), normal(V)
REFERENCE = (normal(B, T, H), normal(V, H), normal(V))
ADVANTAGES, OLD, REF = normal(B), -3 + normal(B, T) / 2, -3 + normal(B, T) / 2


def flat(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    if hasattr(found, "predicted_tokens"):
        found = (found.loss, found.z_loss, found.token_accuracy)
    return [] if found is None else [x for part in found for x in flat(part)]


def compare(name: str, options: dict[str, Any], call: Any, module: Any = theirs) -> None:
    """Compare all return values, and the gradients of the loss."""
    found = []
    for place, more in ((module, {}), (ours, {})):
        kind = getattr(place, name)
        given = {"compiled": False} if "compiled" in inspect.signature(kind).parameters else {}
        leaves = [x.clone().requires_grad_() for x in (HIDDEN, WEIGHT, BIAS)]
        out = flat(call(kind(**given, **options, **more), *leaves))
        found.append([x.detach() for x in out] + list(torch.autograd.grad(out[0], leaves)))
    want, got = found
    assert len(want) == len(got)
    for a, b in zip(want, got, strict=True):
        # Compare norms: where the KL of large log-ratios cancels, both Liger and headloss have
        # errors of 2e-5 to 5e-5.
        assert a.shape == b.shape and float((b - a).norm()) <= 1e-4 * float(a.norm()) + 1e-6


def test_signatures() -> None:
    """The Liger-compatible classes have the same arguments, order and defaults as Liger's."""
    names = [n for n in ours.__all__ if n.endswith("Loss")]
    assert len(names) == 8
    for name in names:
        kind = getattr(theirs, name, None) or getattr(modules, name)
        for method in ("__init__", "forward"):
            want = inspect.signature(getattr(kind, method)).parameters
            got = inspect.signature(getattr(getattr(ours, name), method)).parameters
            assert list(got) == list(want), name
            assert [p.default for p in got.values()] == [p.default for p in want.values()], name
    function = "liger_fused_linear_cross_entropy"
    want = inspect.signature(getattr(functional, function)).parameters
    assert list(inspect.signature(getattr(ours, function)).parameters) == list(want)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"label_smoothing": 0.1},
        {"lse_square_scale": 1e-2, "return_z_loss": True},
        {"use_token_scaling": True},
        {"return_token_accuracy": True},
        {"ignore_index": 3},
    ],
    ids=str,
)
def test_cross_entropy(options: dict[str, Any]) -> None:
    """The class for cross-entropy agrees with Liger's fused linear cross-entropy, for each
    option."""
    def call(loss: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        labels = IDS if "ignore_index" in options else LABELS
        return loss(weight, hidden.flatten(0, 1), labels.flatten(), bias)

    compare("LigerFusedLinearCrossEntropyLoss", options, call, modules)


@pytest.mark.parametrize("entropy", [False, True])
def test_scaled_cross_entropy(entropy: bool) -> None:
    """The autograd function for scaled cross-entropy agrees with Liger's in per-token results and
    gradients, with and without entropies."""
    found = []
    for place in (scaled, ours):
        hidden = HIDDEN.flatten(0, 1).clone().requires_grad_()
        weight = WEIGHT.clone().requires_grad_()
        out = place.LigerFusedLinearScaledCrossEntropyFunction.apply(
            hidden, weight, LABELS.flatten(), 0.7, -100, 1, entropy
        )
        parts = flat(out)
        loss = sum((i + 1) * (x * torch.arange(B * T)).sum() for i, x in enumerate(parts))
        found.append([*parts, *torch.autograd.grad(loss, (hidden, weight))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


POLICIES: list[dict[str, Any]] = [
    *({"loss_type": t} for t in ("grpo", "bnpo", "dapo", "sapo", "vespo")),
    {"loss_type": "dr_grpo", "max_completion_length": 9, "temperature": 0.7},
    {"loss_type": "cispo", "epsilon_high": 1.5},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_high": 0.05},
    {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.0},
    {"loss_type": "grpo", "delta": 1.3, "use_bias_correction_kl": True, "beta": 0.5},
    {"loss_type": "dapo", "beta": 0.0, "use_ref_model": False},
    {"loss_type": "dapo", "beta": 0.3, "use_ref_model": False},
]


@pytest.mark.parametrize("options", POLICIES, ids=str)
@pytest.mark.parametrize("more", ["old", "on policy", "ratio", "rows", "count", "reference"])
def test_policy(options: dict[str, Any], more: str) -> None:
    """The class for policy losses agrees with Liger's fused GRPO loss: on policy, with importance
    weights of vLLM per token or row, and with a reference model."""
    given: dict[str, Any] = {"old_per_token_logps": OLD, "ref_per_token_logps": REF}
    if more == "on policy":
        del given["old_per_token_logps"]
    if more in ("ratio", "rows"):
        ratio = normal(B, T).exp() if more == "ratio" else normal(B, 1).exp()
        given["vllm_is_ratio"] = ratio
        if options["loss_type"] == "luspo":  # per row only
            given["vllm_is_ratio"] = ratio[:, :1]
        if options["loss_type"] == "vespo":  # Liger's VESPO also sums ratios at padding positions
            if more == "rows":
                with pytest.raises(ValueError, match="vllm_is_ratio"):
                    ours.LigerFusedLinearGRPOLoss(**options)(
                        HIDDEN, WEIGHT, IDS, MASK, ADVANTAGES, **given
                    )
                return
            given["vllm_is_ratio"] = ratio.where(MASK, 1)
    if more == "count":
        given["num_items_in_batch"] = 53
    if more == "reference" and options.get("use_ref_model", True):
        del given["ref_per_token_logps"]
        given |= dict(zip(("ref_input", "ref_weight", "ref_bias"), REFERENCE, strict=True))

    def call(loss: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return loss(hidden, weight, IDS, MASK.float(), ADVANTAGES, bias, **given)

    compare("LigerFusedLinearGRPOLoss", options, call)


DPO = ("sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero")
PAIRS = [
    *(("DPO", {"loss_type": t, "label_smoothing": 0.1 * (t in ("exo_pair", "robust"))})
      for t in (*DPO, "apo_down", "discopop")),
    ("DPO", {"compute_nll_loss": True, "alpha": 0.4, "beta": 0.3}),
    ("DPO", {"use_ref_model": False}),
    ("CPO", {"alpha": 0.4, "label_smoothing": 0.1}),
    ("CPO", {"compute_nll_loss": False}),
    ("SimPO", {"gamma": 0.6, "beta": 0.4, "label_smoothing": 0.1}),
    ("ORPO", {"beta": 0.3}),
    ("ORPO", {"compute_nll_loss": False}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), PAIRS, ids=str)
def test_pairs(name: str, options: dict[str, Any]) -> None:
    """The classes for losses on preference pairs agree with Liger's fused losses."""
    reference = REFERENCE if name == "DPO" and options.get("use_ref_model", True) else ()

    def call(loss: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return loss(weight, hidden, LABELS, bias, *reference)

    compare(f"LigerFusedLinear{name}Loss", options, call)


@pytest.mark.parametrize("kl", [None, 0.7])
@pytest.mark.parametrize("use_ref_model", [False, True])
def test_kto(kl: float | None, use_ref_model: bool) -> None:
    """The class for KTO agrees with Liger's, with and without a given KL divergence and a reference
    model."""
    desirable = torch.tensor([1, 1, 0, 1, 0, 0]).bool()
    reference = REFERENCE if use_ref_model else (None, None, None)
    given = None if kl is None else torch.tensor(kl)

    def call(loss: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return loss(hidden, weight, LABELS, bias, desirable, *reference, given)

    compare("LigerFusedLinearKTOLoss", {"use_ref_model": use_ref_model}, call)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_jsd(beta: float, temperature: float) -> None:
    """The class for distillation agrees with Liger's fused Jensen-Shannon loss."""
    teacher = (normal(B * T, 2 * H), normal(V, 2 * H))

    def call(loss: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return loss(hidden.flatten(0, 1), weight, *teacher, LABELS.flatten(), bias)

    options = {"beta": beta, "temperature": temperature, "return_soft_hard_loss": True}
    compare("LigerFusedLinearJSDLoss", options, call)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ours.LigerFusedLinearDPOLoss(average_log_prob=True), "average_log_prob"),
        (lambda: ours.LigerFusedLinearGRPOLoss(loss_type="luspo"), "loss_type"),
        (
            lambda: ours.LigerFusedLinearCrossEntropyLoss(ce_weight=torch.ones(V))(
                WEIGHT, HIDDEN.flatten(0, 1), LABELS.flatten()
            ),
            "ce_weight",
        ),
    ],
)
def test_unsupported_arguments_are_refused_by_name(make: Any, named: str) -> None:
    with pytest.raises(ValueError, match=f"{named}: is not supported"):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ours.liger_fused_linear_cross_entropy(
                HIDDEN.flatten(0, 1), WEIGHT, LABELS.flatten(), reduction="total"
            ),
            "reduction: got 'total', want one of 'mean', 'sum', 'none'",
        ),
        (lambda: ours.LigerFusedLinearGRPOLoss(loss_type="kl"), "loss_type: got 'kl', want one of"),
        (
            lambda: ours.LigerFusedLinearGRPOLoss(loss_type="dr_grpo"),
            "max_completion_length: got None",
        ),
        (
            lambda: ours.LigerFusedLinearGRPOLoss()(
                HIDDEN, WEIGHT, LABELS.clamp_min(0), LABELS != -100, torch.ones(B)
            ),
            "ref_per_token_logps: got None",
        ),
        (
            lambda: ours.LigerFusedLinearDPOLoss()(WEIGHT, HIDDEN[:1], LABELS[:1]),
            r"target: got shape \(1, ",
        ),
    ],
)
def test_bad_input_is_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
