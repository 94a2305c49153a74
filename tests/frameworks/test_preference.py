"""Terms agree with the preference losses and the distillation losses of OpenRLHF, AgileRL and
NeMo-RL, whose functions are extracted from the source files of these frameworks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
from parity import extracted, file_of
from torch import Tensor, nn

import headloss as hl
from headloss.batch.packing import pack
from headloss.objective.weighted import bind
from headloss.statistics.softmax import Statistics

B, C = 6, 7
LENGTHS = {"random": (7, 4, 3, 5, 1, 6), "one token": (1,) * 6, "empty answer": (4, 0, 0, 3, 6, 2)}


class Pairs:
    """Log-probs [B, C] of a policy and a reference; row 2k is chosen, row 2k + 1 rejected."""

    def __init__(self, edge: str, far: float = 0.5) -> None:
        generator = torch.Generator().manual_seed(len(edge))
        noise = torch.randn(2, B, C, generator=generator, dtype=torch.float64)
        self.mask = torch.arange(C) < torch.tensor(LENGTHS[edge])[:, None]
        self.leaf = (-0.3 - noise[0].abs()).requires_grad_()
        self.ref = self.leaf.detach() + far * noise[1]

    def sums(self, values: Tensor) -> tuple[Tensor, Tensor]:
        of_rows = (values * self.mask).sum(1)
        return of_rows[::2], of_rows[1::2]

    def check(self, objective: hl.Term | hl.Objective, want: Tensor, tolerance=1e-12) -> None:
        """Check the loss value and gradient of padded and of packed rows."""
        (gradient,) = torch.autograd.grad(want, self.leaf)
        chosen = torch.arange(B) % 2 == 0
        for keep in (..., self.mask):
            segments = None if keep is ... else hl.Segments.from_lengths(self.mask.sum(1))
            fields: dict[str, Any] = {"ref_logps": self.ref[keep], "chosen": chosen}
            batch = hl.Batch(torch.where(self.mask, 0, -100)[keep], segments, **fields)
            packed = pack(batch, 1, torch.float64)
            stats = Statistics(logp=self.leaf.detach()[self.mask])
            objective = hl.losses.Objective.of(objective)
            bound = bind(objective, packed, hl.Totals.of(batch), 1, torch.float64)
            found = bound.coefficients(stats, packed, None)
            got = (bound.total(found.shares, stats), found.softmax.target)
            for a, b in zip(got, (want, gradient[self.mask]), strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("edge", LENGTHS)
@pytest.mark.parametrize("ipo", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_openrlhf(label_smoothing: float, ipo: bool, edge: str) -> None:
    """OpenRLHF's DPO agrees; its IPO variant uses sums of log-probs and no label smoothing."""
    if ipo and label_smoothing:
        return
    file = file_of("openrlhf", "models/loss.py")
    loss = extracted(file, "DPOLoss", nn=nn, torch=torch, F=F, Tuple=tuple).DPOLoss
    pairs = Pairs(edge)
    given = (*pairs.sums(pairs.leaf), *pairs.sums(pairs.ref))
    want, *_ = loss(0.3, label_smoothing, ipo)(*given)
    kind: dict[str, Any] = {"loss_type": "ipo", "average_log_prob": False} if ipo else {}
    pairs.check(hl.dpo(beta=0.3, label_smoothing=label_smoothing, **kind), want)


@pytest.mark.parametrize("edge", LENGTHS)
def test_agilerl(edge: str) -> None:
    """AgileRL's DPO agrees, including the likelihood of chosen answers (`nll_alpha`)."""
    file = file_of("agilerl", "algorithms/dpo.py")
    names = ("DPO._dpo_loss_standard", "DPO._compute_implicit_reward")
    found = extracted(file, *names, torch=torch, F=F)
    trainer = SimpleNamespace(beta=0.3, nll_alpha=0.7)
    trainer._compute_implicit_reward = lambda *a: found._compute_implicit_reward(trainer, *a)
    pairs = Pairs(edge)
    values = (pairs.leaf[::2], pairs.leaf[1::2], pairs.ref[::2], pairs.ref[1::2])
    mask = pairs.mask.double()
    want, *_ = found._dpo_loss_standard(trainer, *values, mask[::2], mask[1::2])
    pairs.check(hl.dpo(beta=0.3) + 0.7 * hl.cross_entropy().where("chosen"), want)


@pytest.mark.parametrize("edge", LENGTHS)
@pytest.mark.parametrize("average", [False, True])
def test_nemo_rl(average: bool, edge: str) -> None:
    """NeMo-RL's DPO agrees with preference_average_log_probs; its log-probs have no column for the
    first token."""
    utils = file_of("nemo_rl", "nemo_rl/algorithms/utils.py")
    mean = extracted(utils, "masked_mean", torch=torch, Tensor=Tensor, Optional=None).masked_mean
    file = file_of("nemo_rl", "nemo_rl/algorithms/loss/loss_functions.py")
    methods = ("split_output_tensor", "_preference_loss")
    names = [f"PreferenceLossFn.{name}" for name in methods] + ["DPOLossFn._dpo_loss"]
    found = extracted(file, *names, torch=torch, Tensor=Tensor, masked_mean=mean)
    loss = SimpleNamespace(reference_policy_kl_penalty=0.3, preference_average_log_probs=average)
    loss.split_output_tensor = lambda *a: found.split_output_tensor(loss, *a)
    loss._preference_loss = lambda *a: found._preference_loss(loss, *a)
    pairs = Pairs(edge)
    column = torch.zeros(B, 1, dtype=torch.float64)
    data = {
        "token_mask": torch.cat([column, pairs.mask], 1),
        "sample_mask": torch.ones(B, dtype=torch.float64),
        "reference_policy_logprobs": torch.cat([pairs.ref, column], 1),
    }
    want, *_ = found._dpo_loss(loss, pairs.leaf, data, torch.tensor(float(B)))
    # NeMo-RL adds 1e-8 to the denominator.
    pairs.check(hl.dpo(beta=0.3, average_log_prob=average), want, 1e-7)


@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed"])
@pytest.mark.parametrize("outside", [False, True])
def test_nemo_rl_distillation(outside: bool, kind: str) -> None:
    """NeMo-RL's distillation agrees, from renormalised top-k log-probs or, with
    `zero_outside_topk`, over the whole vocabulary."""
    # in NeMo-RL the teacher has probability e^-100 outside the top k
    if outside and kind != "forward":
        return
    utils = file_of("nemo_rl", "nemo_rl/algorithms/utils.py")
    mean = extracted(utils, "masked_mean", torch=torch, Tensor=Tensor, Optional=None).masked_mean
    file = file_of("nemo_rl", "nemo_rl/algorithms/loss/loss_functions.py")
    given = {"torch": torch, "Any": Any, "masked_mean": mean}
    call = extracted(file, "DistillationLossFn.__call__", **given).__call__
    loss = SimpleNamespace(
        kl_type=kind, mixed_kl_weight=0.3, zero_outside_topk=outside, log_infinitesimal=-100
    )
    generator = torch.Generator().manual_seed(1)
    hidden, weight, teacher = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(i < 2)
        for i, shape in enumerate(((10, 4), (17, 4), (10, 17)))
    )
    ids = teacher.topk(5).indices
    log_q, log_p = (
        z.log_softmax(1).gather(1, ids) if outside else z.gather(1, ids).log_softmax(1)
        for z in (teacher, hidden @ weight.t())
    )
    data = {"input_ids": torch.zeros(1, 11)}
    want, _ = call(loss, log_p[None], log_q[None], None, data, None, None)
    tail = "truncated" if outside else "renormalized"
    terms = {k: hl.distillation(divergence=f"{k}_kl", tail=tail) for k in ("forward", "reverse")}  # type: ignore[arg-type]
    mixed = 0.3 * terms["forward"] + 0.7 * terms["reverse"]
    fields = {"teacher_topk_ids": ids, "teacher_topk_logps": teacher.log_softmax(1).gather(1, ids)}
    batch = hl.Batch(torch.zeros(10, dtype=torch.int64), **fields)  # type: ignore[arg-type]
    out = hl.head_loss(hidden, hl.Head(weight), batch, terms.get(kind, mixed))
    leaves = (hidden, weight)
    got = (out.loss, *torch.autograd.grad(out.loss, leaves))
    torch.testing.assert_close(got, (want, *torch.autograd.grad(want, leaves)))


# ---------------------------------------------------------------------- likelihood losses


@pytest.mark.parametrize("edge", LENGTHS)
@pytest.mark.parametrize("per_token", [True, False])
def test_openrlhf_sft(per_token: bool, edge: str) -> None:
    """OpenRLHF's SFTLoss agrees; with a mean per sample, rows without scored tokens do not
    count."""
    utils = file_of("openrlhf", "models/utils.py")
    mean = extracted(utils, "masked_mean", torch=torch, Optional=Optional).masked_mean
    file = file_of("openrlhf", "models/loss.py")
    given = {"nn": nn, "torch": torch, "Optional": Optional, "masked_mean": mean}
    loss = extracted(file, "aggregate_loss", "SFTLoss", **given).SFTLoss
    pairs = Pairs(edge)
    want = loss(per_token)(pairs.leaf, pairs.mask.double())
    term = hl.cross_entropy().over("token_mean" if per_token else "sequence_mean")
    if not per_token:
        want = want * pairs.mask.any(1).double().mean()  # OpenRLHF also counts rows without tokens.
    pairs.check(term, want, 1e-7)  # OpenRLHF adds 1e-8 to the denominator


@pytest.mark.parametrize("edge", LENGTHS)
def test_nemo_rl_likelihood(edge: str) -> None:
    """NeMo-RL's NLLLossFn agrees alone, and as DPOLossFn's sft part with sums or means of chosen
    answers."""
    utils = file_of("nemo_rl", "nemo_rl/algorithms/utils.py")
    mean = extracted(utils, "masked_mean", torch=torch, Tensor=Tensor, Optional=None).masked_mean
    file = file_of("nemo_rl", "nemo_rl/algorithms/loss/loss_functions.py")
    call = extracted(file, "NLLLossFn.__call__", torch=torch, masked_mean=mean, Any=Any).__call__
    pairs = Pairs(edge)
    column = torch.zeros(B, 1, dtype=torch.float64)
    ones = torch.ones(B, dtype=torch.float64)
    data = {"token_mask": torch.cat([column, pairs.mask], 1), "sample_mask": ones}
    tokens = pairs.mask.sum()
    want, _ = call(None, pairs.leaf, data, None, tokens)
    pairs.check(hl.cross_entropy(), want, 1e-7)
    for average, over in ((False, "sequence_sum"), (True, "sequence_mean")):
        of_rows, _ = call(None, pairs.leaf, data, None, tokens, True, average)
        term = hl.cross_entropy().over(over).where("chosen")
        pairs.check(term, of_rows[::2].mean(), 1e-7)
