"""Preference terms agree with TRL's loss methods, run on a stub whose model is a tensor of
log-probs.

Rows are segments: row 2k is chosen, row 2k + 1 rejected. Values and gradients are float64.
"""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from folds import fold
from losses_case import assert_same, reduced, value_and_gradient
from torch import Tensor

from headloss import losses as h
from headloss.batch.batch import Batch
from headloss.batch.packing import pack
from headloss.batch.segments import Segments
from headloss.losses.term import Objective, Term
from headloss.statistics.softmax import COLLISION, Statistics

pytest.importorskip("trl", reason="TRL is the peer that these terms are compared with")
from trl import DPOTrainer, KTOTrainer
from trl.experimental.a2po import A2POTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.experimental.tpo import TPOTrainer

B, T = 8, 6
LENGTHS = {
    "random": (6, 4, 3, 5, 2, 6, 4, 1),
    "one_token": (1, 1, 1, 1, 1, 1, 1, 1),
    "empty_answer": (4, 0, 0, 3, 6, 2, 1, 5),
}


class Step:
    """Log-probs [B, T] of a policy and a reference; the first `lengths` tokens of each row
    count."""

    def __init__(self, name: str = "random", far: float = 0.5, dtype: Any = torch.float64) -> None:
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        noise = torch.randn(3, B, T, generator=generator, dtype=torch.float64)
        self.lengths = torch.tensor(LENGTHS.get(name, LENGTHS["random"]))
        self.mask = torch.arange(T) < self.lengths[:, None]
        self.logps = (-0.3 - noise[0].abs()).to(dtype)
        self.ref = (self.logps + far * noise[1]).to(dtype)
        self.chosen = torch.arange(B) % 2 == 0
        self.desirable = torch.tensor([1, 0, 0, 1, 1, 1, 0, 1]).bool()
        self.leaf = self.logps.clone().requires_grad_()

    def theirs(self, loss: Tensor) -> list[Tensor]:
        value, gradient = value_and_gradient(loss, self.leaf)
        return [value, gradient[self.mask]]

    def batch(self, packed: bool = False, **fields: Tensor) -> Any:
        fields = {"ref_logps": self.ref, "chosen": self.chosen, **fields}
        targets, segments = torch.where(self.mask, 0, -100), None
        if packed:
            ends = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
            segments = Segments.from_cu_seqlens(ends)
            targets = targets[self.mask]
            fields["ref_logps"] = self.ref[self.mask]
        made = Batch(targets, segments, **fields)  # type: ignore[arg-type]
        return pack(made, vocabulary=1, dtype=self.logps.dtype)

    def ours(self, objective: Term | Objective, packed: bool = False, **fields) -> list[Tensor]:
        leaf = self.logps[self.mask].clone().requires_grad_()
        batch = self.batch(packed, **fields)
        return value_and_gradient(_reduced(objective, Statistics(logp=leaf), batch), leaf)

    def check(self, objective: Term | Objective, want: list[Tensor], tolerance=1e-12, **fields):
        for packed in (False, True):
            assert_same(self.ours(objective, packed, **fields), want, tolerance)


def _reduced(objective: Term | Objective, stats: Statistics, batch: Any) -> Tensor:
    """Return the reduced objective; a term restricted by a mask is a mean over the mask's
    tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for coefficient, term in Objective.of(objective).parts:
        if term.kept_field is None:
            total = total + coefficient * reduced(term, stats, batch)
        else:
            kept = getattr(batch, term.kept_field)
            total = total + coefficient * term(stats, batch)[kept].mean()
    return total


def row_order(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return TRL's order of rows (all chosen, then all rejected), and the completion mask in that
    order with a column for the prompt."""
    order = torch.cat([torch.arange(0, B, 2), torch.arange(1, B, 2)])
    return order, torch.cat([torch.zeros(B, 1, dtype=torch.int64), mask[order].long()], 1)


def model() -> torch.nn.Module:
    """Return a model stub for TRL's trainers."""
    made = torch.nn.Identity().eval()
    made.is_gradient_checkpointing = False  # type: ignore[assignment]
    return made


def direct(step: Step, loss_type: str | list[str], beta: float, **options: Any) -> list[Tensor]:
    """Return the loss of DPOTrainer._compute_loss with its gradients."""
    order, with_prompt = row_order(step.mask)
    zero = torch.zeros(B, T, dtype=step.logps.dtype)
    outputs = SimpleNamespace(
        log_probs=step.leaf[order] * step.mask[order],
        log_sum_sq_probs=options.pop("log_sum_sq_probs", zero)[order] * step.mask[order],
        entropy=zero,
        mean_logits=zero,
        is_top1=zero.bool(),
    )
    reference = SimpleNamespace(log_probs=step.ref[order] * step.mask[order])
    trainer = SimpleNamespace(
        model=model(),
        accelerator=SimpleNamespace(
            device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x
        ),
        args=SimpleNamespace(discopop_tau=0.05, gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        ref_model=lambda **kwargs: reference,
        loss_types=[loss_type] if isinstance(loss_type, str) else loss_type,
        beta=beta,
        _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
        **{
            "ld_alpha": None,
            "f_divergence_type": "reverse_kl",
            "f_alpha_divergence_coef": 0.5,
            "label_smoothing": 0.0,
            "use_weighting": False,
            "loss_weights": [1.0, 0.3],
            **options,
        },
    )
    if isinstance(loss_type, str):
        trainer.loss_weights = [1.0]
    batch = {"completion_mask": with_prompt, "input_ids": with_prompt}
    return step.theirs(DPOTrainer._compute_loss(trainer, lambda **kwargs: outputs, batch, False))


SMOOTHING = {"robust": 0.2, "exo_pair": 1e-2}
OURS = {
    **{
        name: lambda beta, name=name: h.dpo(
            beta=beta, loss_type=name, label_smoothing=SMOOTHING.get(name, 0.0)
        )
        for name in (
            *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair"),
            *("sppo_hard", "apo_zero", "apo_down", "discopop", "sigmoid_norm"),
        )
    },
    "aot": lambda beta: h.aot(beta=beta, label_smoothing=0.1),
    "aot_unpaired": lambda beta: h.aot(beta=beta, label_smoothing=0.1, paired=False),
    "sft": lambda beta: h.cross_entropy().where("chosen"),
}


@pytest.mark.parametrize("shape", LENGTHS)
@pytest.mark.parametrize("loss_type", OURS)
def test_direct_preference(loss_type: str, shape: str) -> None:
    smoothing = {"aot": 0.1, "aot_unpaired": 0.1, **SMOOTHING}.get(loss_type, 0.0)
    for beta, far in ((0.1, 0.5), (0.7, 3.0)):
        step = Step(shape, far)
        want = direct(step, loss_type, beta, label_smoothing=smoothing)
        # TRL's epsilon is float32.
        step.check(OURS[loss_type](beta), want, 1e-6 if loss_type == "exo_pair" else 1e-12)


@pytest.mark.parametrize("loss_type", [*OURS, "kto"])
def test_far_from_the_reference_stays_finite(loss_type: str) -> None:
    """All losses are finite far from the reference, where exponentials overflow."""
    for far in (300.0, 1e4):
        step = Step("far", far, torch.float32)
        make = OURS.get(loss_type, lambda beta: h.kto(beta=beta))
        fields = {"desirable": step.desirable, "reference_kl": torch.full((B,), far)}
        for divergence in ("reverse_kl", "forward_kl", "alpha_divergence", "js_divergence"):
            term = make(1.0)
            if divergence != "reverse_kl":
                if loss_type not in ("sigmoid", "hinge", "exo_pair", "discopop"):
                    continue
                smoothing = SMOOTHING.get(loss_type, 0.0)
                options = {"loss_type": loss_type, "f_divergence_type": divergence}
                term = h.dpo(beta=1.0, label_smoothing=smoothing, **options)
            assert all(x.isfinite().all() for x in step.ours(term, **fields))


DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
F_LOSSES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop")


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("loss_type", F_LOSSES)
def test_f_divergences(loss_type: str, divergence: str) -> None:
    # TRL computes the alpha divergence in float32 only.
    single = divergence == "alpha_divergence"
    step = Step(dtype=torch.float32 if single else torch.float64)
    smoothing = SMOOTHING.get(loss_type, 0.0)
    options = {"f_divergence_type": divergence, "f_alpha_divergence_coef": 0.7}
    want = direct(step, loss_type, 0.4, label_smoothing=smoothing, **options)
    term = h.dpo(beta=0.4, loss_type=loss_type, label_smoothing=smoothing, **options)
    step.check(term, want, 2e-5 if single or loss_type == "exo_pair" else 1e-12)


@pytest.mark.parametrize("shape", ["random", "empty_answer"])
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "apo_zero"])
def test_length_desensitization(loss_type: str, shape: str) -> None:
    for alpha in (0.0, 0.4, 1.0):
        step = Step(shape)
        want = direct(step, loss_type, 0.3, ld_alpha=alpha)
        step.check(h.dpo(beta=0.3, loss_type=loss_type, ld_alpha=alpha), want)


@pytest.mark.parametrize("shape", LENGTHS)
@pytest.mark.parametrize("loss_type", ["sigmoid", "apo_zero", "ipo"])
def test_weighting(loss_type: str, shape: str) -> None:
    """WPO's weighting agrees, from the log of sum p^2 at each position."""
    step = Step(shape)
    squares = torch.lerp(step.logps.exp().square(), torch.tensor(1.0).double(), 0.3)
    options = {"use_weighting": True, "log_sum_sq_probs": squares.log()}
    want = direct(step, loss_type, 0.3, **options)
    term = h.dpo(beta=0.3, loss_type=loss_type, use_weighting=True)
    leaf = step.logps[step.mask].clone().requires_grad_()
    stats = Statistics(logp=leaf, extras={COLLISION: squares[step.mask]})
    for packed in (False, True):
        got = value_and_gradient(reduced(term, stats, step.batch(packed)), leaf)
        assert_same(got, want)


def test_several_loss_types_are_a_sum() -> None:
    """TRL's weighted sum of several loss types, here `["sigmoid", "sft"]` with the weights 1 and
    0.3, agrees with a weighted sum of headloss's terms."""
    step = Step()
    want = direct(step, ["sigmoid", "sft"], 0.2)
    step.check(h.dpo(beta=0.2) + 0.3 * h.cross_entropy().where("chosen"), want)


# ---------------------------------------------------------------------- without pairs


def unpaired(step: Step, loss_type: str, kl: float) -> tuple[list[Tensor], dict[str, list]]:
    """Return KTOTrainer's loss and metrics, with a KL estimate from separate answers."""
    ids = torch.cat([torch.zeros(B, 1, dtype=torch.int64), step.mask.long()], 1)
    outputs = SimpleNamespace(
        log_probs=step.leaf * step.mask, entropy=step.logps, mean_logits=step.logps
    )
    of_model = iter([torch.full((B,), kl), torch.zeros(B)])
    trainer = SimpleNamespace(
        model=model(),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        ref_model=lambda **kwargs: SimpleNamespace(log_probs=step.ref * step.mask),
        calculate_KL=loss_type == "kto",
        loss_type=loss_type,
        beta=0.3,
        desirable_weight=1.5,
        undesirable_weight=0.8,
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        _compute_kl_logps=lambda *args: next(of_model) if loss_type == "kto" else None,
        _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    batch = {"input_ids": ids, "completion_mask": ids, "label": step.desirable}
    loss = KTOTrainer._compute_loss(trainer, lambda **kwargs: outputs, batch, False)
    return step.theirs(loss), trainer._metrics["eval"]


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("shape", ["random", "one_token"])
def test_unpaired(loss_type: str, shape: str) -> None:
    for kl in (0.7, -0.4):
        step = Step(shape)
        want, metrics = unpaired(step, loss_type, kl)
        options = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.8}
        term = h.kto(loss_type=loss_type, **options)
        fields = {"desirable": step.desirable, "reference_kl": torch.full((B,), kl)}
        step.check(term, want, 1e-7, **fields)  # TRL's KL is float32
        assert term.observe is not None
        stats = Statistics(logp=step.logps[step.mask])
        found = term.observe(stats, step.batch(**fields))
        for own in ("chosen", "rejected"):
            value = float(fold(found[f"{own}_rewards"]).value)
            assert value == pytest.approx(metrics[f"rewards/{own}"][0], rel=1e-6)


# ---------------------------------------------------------------------- without a reference


def contrastive(step: Step, loss_type: str, beta: float, **options: Any) -> Tensor:
    """Return CPOTrainer.cpo_loss of log-prob sums, or of means for losses that use means."""
    score = (step.leaf * step.mask).sum(1)
    if loss_type in ("ipo", "simpo"):
        score = score / step.mask.sum(1)
    trainer = SimpleNamespace(
        loss_type=loss_type,
        beta=beta,
        accelerator=SimpleNamespace(device="cpu"),
        **{"alpha": 0.0, "label_smoothing": 0.0, "simpo_gamma": 0.7, **options},
    )
    return CPOTrainer.cpo_loss(trainer, score[::2], score[1::2])[0].mean()


NLL = 0.5


@pytest.mark.parametrize(
    ("loss_type", "options", "term"),
    [
        ("sigmoid", {"label_smoothing": 0.1}, h.cpo(beta=0.3, label_smoothing=0.1)),
        ("hinge", {}, h.cpo(beta=0.3, loss_type="hinge")),
        ("ipo", {}, h.cpo(beta=0.3, loss_type="ipo")),
        ("simpo", {"label_smoothing": 0.1}, h.simpo(beta=0.3, gamma=0.7, label_smoothing=0.1)),
        ("simpo", {"alpha": 0.25}, h.simpo(beta=0.3, gamma=0.7, alpha=0.25)),
    ],
)
def test_contrastive(loss_type: str, options: dict[str, float], term: Term) -> None:
    """Contrastive losses agree, including the chosen answers' likelihood (cpo_alpha)."""
    step = Step()
    nll = -step.leaf[step.mask & step.chosen[:, None]].mean()
    want = step.theirs(contrastive(step, loss_type, 0.3, **options) + NLL * nll)
    step.check(term + NLL * h.cross_entropy().where("chosen"), want)


@pytest.mark.parametrize("shape", ["random", "one_token"])
def test_odds_ratio(shape: str) -> None:
    step = Step(shape)
    means = (step.leaf * step.mask).sum(1) / step.mask.sum(1)
    trainer = SimpleNamespace(beta=0.4, accelerator=SimpleNamespace(device="cpu"))
    losses, chosen, rejected, *_ = ORPOTrainer.odds_ratio_loss(trainer, means[::2], means[1::2])
    # TRL computes in float32.
    step.check(h.orpo(beta=0.4), step.theirs(-losses.mean()), 1e-6)
    observe = h.orpo(beta=0.4).observe
    assert observe is not None
    found = observe(Statistics(logp=step.logps[step.mask]), step.batch())
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        got = float(fold(found[f"{name}_rewards"]).value)
        assert got == pytest.approx(float(value.mean()), rel=1e-6)


def test_odds_of_nearly_certain_answers() -> None:
    """Odds of nearly certain answers agree with TRL until TRL's gradient becomes NaN."""
    step = Step("one_token")
    step.logps = -torch.logspace(-29, -4, B).double()[:, None].expand(B, T)
    means = step.logps[:, 0]
    trainer = SimpleNamespace(beta=0.4, accelerator=SimpleNamespace(device="cpu"))
    losses, *_ = ORPOTrainer.odds_ratio_loss(trainer, means[::2], means[1::2])
    value, _ = step.ours(h.orpo(beta=0.4))
    assert float(value) == pytest.approx(-float(losses.mean()), rel=1e-6)


def test_odds_of_certain_answers() -> None:
    """ORPO's loss is finite for answers with probability p = 1, although log(1 - p) is -inf in TRL
    and TRL's loss is NaN."""
    step = Step("one_token")
    step.logps = torch.zeros(B, T)
    means = step.logps[:, 0]
    trainer = SimpleNamespace(beta=0.4, accelerator=SimpleNamespace(device="cpu"))
    losses, *_ = ORPOTrainer.odds_ratio_loss(trainer, means[::2], means[1::2])
    assert losses.isnan().all()
    value, gradient = step.ours(h.orpo(beta=0.4))
    assert float(value) == pytest.approx(0.4 * math.log(2))
    assert gradient.isfinite().all()


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo", "tpo-l"])
def test_triple(loss_type: str) -> None:
    """TPOTrainer's loss without the gold answer agrees; the gold answer is
    `cross_entropy().where(...)`."""
    step = Step()
    order, with_prompt = row_order(step.mask)
    # Make logits of a two-token vocabulary; after log-softmax, the target's log-prob is exactly
    # the tensor `step.leaf`.
    other = torch.log1p(-step.leaf.exp())
    logits = torch.stack([other, step.leaf], 2)[order]
    logits = torch.cat([logits, logits[:, :1]], 1)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        loss_type=loss_type,
        beta=0.3,
        label_smoothing=0.0,
        tpo_l_gamma=0.7,
        tpo_alpha=0.0,
        _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    batch = {"completion_mask": with_prompt, "input_ids": with_prompt}
    output = SimpleNamespace(logits=logits)
    loss = TPOTrainer._compute_loss(trainer, lambda **kwargs: output, batch, False)
    simpo = h.simpo(beta=0.3, gamma=0.7)
    term = simpo if loss_type == "tpo-l" else h.cpo(beta=0.3, loss_type=loss_type)
    step.check(term, step.theirs(loss), 1e-9)


@pytest.mark.parametrize("shape", ["random", "one_token"])
def test_advantage_regression(shape: str) -> None:
    """Advantage regression agrees with A2POTrainer.compute_loss on given sums of log-probs."""
    step = Step(shape)
    rewards = step.desirable.double()
    values = torch.linspace(0.1, 0.9, B, dtype=torch.float64)
    trainer: Any = SimpleNamespace(
        model=model(),
        args=SimpleNamespace(beta2=0.7),
        _get_sequence_logps=lambda *args: (step.leaf * step.mask).sum(1),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = dict.fromkeys(("input_ids", "attention_mask", "logits_to_keep"))
    inputs |= {"ref_logps": (step.ref * step.mask).sum(1), "rewards": rewards, "v_star": values}
    want = step.theirs(A2POTrainer.compute_loss(trainer, None, inputs))
    step.check(h.a2po(beta=0.7), want, advantages=rewards - values)
    term, stats = h.a2po(beta=0.7), Statistics(logp=step.logps[step.mask])
    batch = step.batch(advantages=rewards - values)
    assert term.observe is not None
    found = fold(term.observe(stats, batch)["rewards"])
    assert float(found.value) == pytest.approx(trainer._metrics["eval"]["implicit_reward"][0])
