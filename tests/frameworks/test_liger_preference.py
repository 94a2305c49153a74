"""Preference terms agree with Liger's fused preference losses, run on a CPU.

Liger always computes log-probs and sums in float32, so values agree to 1e-5. Liger's rows are all
chosen answers, then all rejected answers; headloss's rows are pairs.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headloss as hl

chunked = pytest.importorskip("liger_kernel.chunked_loss")
B, T, V, H = 6, 7, 23, 5
LENGTHS = {"random": (7, 4, 3, 5, 1, 6), "one_token": (1,) * 6}
ORDER = torch.cat([torch.arange(0, B, 2), torch.arange(1, B, 2)])


class Step:
    """Hidden states [B, T, H] of a policy and a reference, with pairs in consecutive rows."""

    def __init__(self, shape: str, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        mask = torch.arange(T) < torch.tensor(LENGTHS[shape])[:, None]
        self.labels = torch.randint(V, (B, T), generator=generator).where(mask, -100)
        self.hidden, self.weight = normal(B, T, H).requires_grad_(), normal(V, H).requires_grad_()
        self.bias = normal(V).requires_grad_()
        self.ref_hidden, self.ref_weight = normal(B, T, H), normal(V, H)
        self.desirable = torch.tensor([1, 1, 0, 1, 0, 0]).bool()

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.hidden, self.weight, self.bias

    def check(self, objective: hl.Term | hl.Objective, want: Tensor, **fields: Tensor) -> None:
        wanted = (want, *torch.autograd.grad(want, self.leaves))
        ref = hl.head_stats(self.ref_hidden, hl.Head(self.ref_weight), self.labels).logp
        for keep in (..., self.labels != -100):
            segments = None
            if keep is not ...:
                segments = hl.Segments.from_lengths(keep.sum(1))
            batch = hl.Batch(
                self.labels[keep],
                segments,
                ref_logps=ref.detach()[keep],
                chosen=torch.arange(B) % 2 == 0,
                **fields,  # type: ignore[arg-type]
            )
            out = hl.head_loss(self.hidden[keep], hl.Head(self.weight, self.bias), batch, objective)
            found = (out.loss, *torch.autograd.grad(out.loss, self.leaves))
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b.double(), rtol=2e-5, atol=2e-6)

    def fused(self, loss: torch.nn.Module, reference: bool = False) -> Tensor:
        """Return the loss of one of Liger's pairwise classes."""
        more = (self.ref_hidden[ORDER], self.ref_weight) if reference else ()
        found, *_ = loss(self.weight, self.hidden[ORDER], self.labels[ORDER], self.bias, *more)
        return found


NLL = hl.cross_entropy().where("chosen")
SMOOTHING = {"robust": 0.2, "exo_pair": 1e-2}
LOSS_TYPES = ("sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard")
LOSS_TYPES = (*LOSS_TYPES, "apo_zero", "apo_down", "discopop")


@pytest.mark.parametrize("shape", LENGTHS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_dpo(loss_type: str, shape: str) -> None:
    """DPO agrees with Liger's for each loss type and label smoothing."""
    smoothing = SMOOTHING.get(loss_type, 0.0)
    step = Step(shape)
    loss = chunked.LigerFusedLinearDPOLoss(
        beta=0.3, loss_type=loss_type, label_smoothing=smoothing, compiled=False
    )
    term = hl.dpo(beta=0.3, loss_type=loss_type, label_smoothing=smoothing)
    step.check(term, step.fused(loss, True))


@pytest.mark.parametrize("shape", LENGTHS)
def test_dpo_with_likelihood(shape: str) -> None:
    """DPO plus cross-entropy of chosen answers agrees with Liger's."""
    step = Step(shape)
    loss = chunked.LigerFusedLinearDPOLoss(
        beta=0.3, compute_nll_loss=True, alpha=0.4, compiled=False
    )
    step.check(hl.dpo(beta=0.3) + 0.4 * NLL, step.fused(loss, True))


@pytest.mark.parametrize("shape", LENGTHS)
def test_cpo(shape: str) -> None:
    """CPO with label smoothing plus cross-entropy of chosen answers agrees with Liger's."""
    step = Step(shape)
    loss = chunked.LigerFusedLinearCPOLoss(
        beta=0.3, alpha=0.4, label_smoothing=0.1, compiled=False
    )
    step.check(hl.cpo(beta=0.3, label_smoothing=0.1) + 0.4 * NLL, step.fused(loss))


@pytest.mark.parametrize("shape", LENGTHS)
def test_simpo(shape: str) -> None:
    """SimPO with label smoothing plus cross-entropy of chosen answers agrees with Liger's."""
    step = Step(shape)
    loss = chunked.LigerFusedLinearSimPOLoss(
        beta=0.3, alpha=0.4, gamma=0.6, label_smoothing=0.1, compiled=False
    )
    term = hl.simpo(beta=0.3, gamma=0.6, label_smoothing=0.1)
    step.check(term + 0.4 * NLL, step.fused(loss))


@pytest.mark.parametrize("shape", LENGTHS)
def test_orpo(shape: str) -> None:
    """ORPO plus cross-entropy of chosen answers agrees with Liger's."""
    step = Step(shape)
    loss = chunked.LigerFusedLinearORPOLoss(beta=0.3, compiled=False)
    step.check(hl.orpo(beta=0.3) + NLL, step.fused(loss))


@pytest.mark.parametrize("shape", LENGTHS)
def test_kto(shape: str) -> None:
    """KTO agrees with Liger's; Liger uses the reference KL unchanged, while headloss clamps it to
    at least 0."""
    step = Step(shape)
    loss = chunked.LigerFusedLinearKTOLoss(beta=0.3, use_ref_model=True, compiled=False)
    reference = (step.ref_hidden, step.ref_weight, None)
    given = (step.hidden, step.weight, step.labels, step.bias, step.desirable, *reference)
    kl = torch.full((B,), 0.7, dtype=torch.float64)
    want, *_ = loss(*given, torch.tensor(0.7))
    step.check(hl.kto(beta=0.3), want, desirable=step.desirable, reference_kl=kl)
    want, *_ = loss(*given, None)
    term = hl.kto(beta=0.3, loss_type="apo_zero_unpaired")
    step.check(term, want, desirable=step.desirable)
