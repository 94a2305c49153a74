"""Framework losses written as sums of terms, as docs/losses.md lists them, agree with formulas.

Loss, dX and dW are compared with formulas on materialised float64 logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import headloss as hl
from headloss.testing import trained_looking

T, H, V, K = 14, 6, 31, 5
LENGTHS = (5, 0, 6, 3)
Formula = Callable[[Tensor], Tensor]  # from log-probs [T, V] to losses [T]


class Data:
    """Random inputs of the tested loss expressions: hidden states, weight and targets of T tokens
    (three are not scored), advantages, old and sampling log-probs, and a teacher."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.hidden, self.weight, targets = trained_looking(T, H, V, torch.float64, seed=seed)
        self.hidden = self.hidden / 2
        self.y = targets
        self.scored = torch.ones(T, dtype=torch.bool)
        self.scored[[2, 6, 13]] = False
        self.log_p = (self.hidden @ self.weight.t()).log_softmax(-1)
        self.logp = self.log_p.gather(1, targets[:, None])[:, 0]
        self.advantages, self.old = normal(T), self.logp + 0.4 * normal(T)
        self.sampling, self.teacher = self.old + 0.4 * normal(T), self.logp + 0.5 * normal(T)
        self.teacher_logits = 2 * normal(T, V)
        self.log_q = self.teacher_logits.log_softmax(-1)
        ids = torch.rand(T, V, generator=generator).argsort(1)[:, :K]
        ids[::2, 0] = torch.where(
            (ids[::2] == targets[::2, None]).any(1), ids[::2, 0], targets[::2]
        )
        self.ids, self.top = ids, self.log_q.gather(1, ids)
        self.outside = (ids != targets[:, None]).all(1).double()

    def at(self, log_p: Tensor, ids: Tensor) -> Tensor:
        return log_p.gather(1, ids)

    def chosen(self, log_p: Tensor) -> Tensor:
        return log_p.gather(1, self.y[:, None])[:, 0]

    def ours(self, objective: Any, totals: hl.Totals | None = None, **fields: Any) -> list[Tensor]:
        leaves = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        targets = self.y.masked_fill(~self.scored, -100)
        segments = hl.Segments.from_lengths(LENGTHS)
        batch = hl.Batch(targets, segments, totals=totals, **fields)
        out = hl.head_loss(leaves[0], hl.Head(leaves[1]), batch, objective)
        return [out.loss.detach(), *torch.autograd.grad(out.loss, leaves)]

    def theirs(self, formula: Formula, divisor: float | None = None) -> list[Tensor]:
        """Return the sum of `formula` over scored tokens, divided by their number or by `divisor`,
        and its gradients."""
        leaves = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        values = formula((leaves[0] @ leaves[1].t()).log_softmax(-1))
        loss = values[self.scored].sum() / (divisor or int(self.scored.sum()))
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.fixture(params=range(2))
def data(request: pytest.FixtureRequest) -> Data:
    return Data(request.param)


def test_score_centering(data: Data) -> None:
    """Score centering without weights has the gradient of centred scores, but a different value."""
    rest = 1 - data.top.exp().sum(1)

    def formula(log_p: Tensor) -> Tensor:
        p = data.at(log_p, data.ids)
        rho = rest / (1 - p.exp().sum(1))
        centred = (data.top.exp() - rho[:, None] * p.exp()).detach()
        return data.advantages * ((centred * p).sum(1) - data.chosen(log_p))

    got = data.ours(
        hl.reinforce() - hl.distillation().weighted("advantages"),
        advantages=data.advantages,
        teacher_topk_ids=data.ids,
        teacher_topk_logps=data.top,
    )
    want = data.theirs(formula)
    same(got[1:], want[1:])
    assert (got[0] - want[0]).abs() > 1e-3


def test_sampled_tail(data: Data) -> None:
    def formula(log_p: Tensor) -> Tensor:
        p, n = data.at(log_p, data.ids), data.chosen(log_p)
        inside = (p.exp() * (p - data.top)).sum(1)
        return inside + data.outside * (1 + n - data.teacher).detach() * n

    objective = (
        hl.distillation(divergence="reverse_kl", tail="truncated")
        + hl.on_policy_distillation().weighted("outside")
        - hl.cross_entropy().weighted("outside")
    )
    fields = {"teacher_topk_ids": data.ids, "teacher_topk_logps": data.top}
    fields |= {"teacher_logps": data.teacher, "outside": data.outside}
    assert 0 < data.outside.sum() < T
    same(data.ours(objective, **fields), data.theirs(formula))


def test_opd_of_the_sampled_token(data: Data) -> None:
    """MOPD is on-policy distillation with the teacher's log-ratio as advantage, and a mask on the
    ratio to the sampler."""
    advantages = data.teacher - data.old
    w = (data.old - data.sampling).exp()
    w = torch.where((w >= 0.5) & (w <= 2.0), w, 0)
    term = hl.reinforce().corrected("token_mask", min=0.5, max=2.0)
    fields = {"advantages": advantages, "old_logps": data.old, "sampling_logps": data.sampling}
    assert (w == 0).any() and (w != 0).any()
    same(data.ours(term, **fields), data.theirs(lambda p: -w * advantages * data.chosen(p)))


def test_opd_beside_rewards(data: Data) -> None:
    """ms-swift adds teacher_kl_coef (teacher - old) to the advantages of the policy term."""
    advantages = data.advantages + 0.3 * (data.teacher - data.old)

    def formula(log_p: Tensor) -> Tensor:
        r = (data.chosen(log_p) - data.old).exp()
        return -torch.min(r * advantages, r.clamp(0.8, 1.2) * advantages)

    term = hl.grpo().over("token_mean")
    same(data.ours(term, advantages=advantages, old_logps=data.old), data.theirs(formula))


def test_several_teachers(data: Data) -> None:
    """A batch may have two teachers of different hidden widths in one field: the narrower hidden
    states are padded."""
    generator = torch.Generator().manual_seed(9)
    wide, narrow = (torch.randn(V, n, generator=generator).double() for n in (5, 3))
    states = torch.randn(T, 5, generator=generator).double()
    first = (torch.arange(T) % 3 == 0).double()
    states[first == 0, 3:] = 0
    heads = hl.Head(wide), hl.Head(torch.nn.functional.pad(narrow, (0, 2)))

    def formula(log_p: Tensor) -> Tensor:
        of_wide = (states @ wide.t()).log_softmax(-1)
        of_narrow = (states[:, :3] @ narrow.t()).log_softmax(-1)
        log_q = torch.where(first[:, None] > 0, of_wide, of_narrow)
        return (log_p.exp() * (log_p - log_q)).sum(1)

    terms = [
        hl.distillation(divergence="reverse_kl", teacher_head=head).weighted(name)
        for head, name in zip(heads, ("first", "second"), strict=True)
    ]
    fields = {"teacher_hidden": states, "first": first, "second": 1 - first}
    same(data.ours(terms[0] + terms[1], **fields), data.theirs(formula))


def test_rlsd_by_advantages(data: Data) -> None:
    a, mix, epsilon = data.advantages, 0.5, 0.2
    w = (a.sign() * (data.teacher - data.old)).exp().clamp(1 - epsilon, 1 + epsilon)
    shaped = a * ((1 - mix) + mix * w)

    def formula(log_p: Tensor) -> Tensor:
        r = (data.chosen(log_p) - data.old).exp()
        return -torch.min(r * shaped, r.clamp(0.8, 1.2) * shaped)

    term = hl.grpo().over("token_mean")
    same(data.ours(term, advantages=shaped, old_logps=data.old), data.theirs(formula))


def test_the_rest_as_one_outcome(data: Data) -> None:
    """`distillation()` agrees with verl's `forward_kl_topk_tail`: all tokens outside the teacher's
    top k count as one outcome."""

    def formula(log_p: Tensor) -> Tensor:
        p, q = data.at(log_p, data.ids), data.top
        tails = [torch.log1p(-x.exp().sum(1)) for x in (p, q)]
        return (q.exp() * (q - p)).sum(1) + tails[1].exp() * (tails[1] - tails[0])

    fields = {"teacher_topk_ids": data.ids, "teacher_topk_logps": data.top}
    same(data.ours(hl.distillation(), **fields), data.theirs(formula))


def test_kdrl(data: Data) -> None:
    """AReaL's teacher_logp adds the mean of log p minus the teacher's log-prob to the policy
    loss."""

    def formula(log_p: Tensor) -> Tensor:
        n, a = data.chosen(log_p), data.advantages
        r = (n - data.old).exp()
        return -torch.min(r * a, r.clamp(0.8, 1.2) * a) + 0.005 * (n - data.teacher)

    fields = {"advantages": data.advantages, "old_logps": data.old, "ref_logps": data.teacher}
    same(data.ours(hl.ppo() + 0.005 * hl.kl(), **fields), data.theirs(formula))


def test_importance_sampling(data: Data) -> None:
    """tinker's importance_sampling sums ratio times advantage, with the sampler's log-probs as
    old_logps."""
    term = hl.dppo(delta_low=1.0, delta_high=1.0, ratio_max=None, surrogate="ratio")
    fields = {"advantages": data.advantages, "old_logps": data.sampling}

    def formula(log_p: Tensor) -> Tensor:
        return -(data.chosen(log_p) - data.sampling).exp() * data.advantages

    same(data.ours(term, hl.Totals(1, 1), **fields), data.theirs(formula, 1))


def test_of_roll(data: Data) -> None:
    """ROLL's losses kimi15 and tis agree with their formulas."""
    fields = {"advantages": data.advantages, "old_logps": data.old}

    def kimi15(log_p: Tensor) -> Tensor:
        n = data.chosen(log_p)
        return -(data.advantages * n - 0.3 / 2 * (n - data.old) ** 2)

    def tis(log_p: Tensor) -> Tensor:
        n = data.chosen(log_p)
        return -(n - data.old).exp().clamp(0, 1).detach() * data.advantages * n

    same(data.ours(hl.dro(beta=0.3), **fields), data.theirs(kimi15))
    term = hl.cispo(epsilon_low=1.0, epsilon_high=0.0)
    same(data.ours(term, **fields), data.theirs(tis))


def test_kl_estimators(data: Data) -> None:
    """The KL estimators k1, k2, k3 and abs agree with formulas, also with k3's value and k2's
    gradient, and with importance ratios."""
    fields = {"ref_logps": data.teacher, "old_logps": data.old}

    def estimate(name: str, log_p: Tensor) -> Tensor:
        d = data.teacher - data.chosen(log_p)
        return {"k1": -d, "k2": d * d / 2, "k3": d.exp() - d - 1, "abs": d.abs()}[name]

    for name in ("k1", "k2", "k3", "abs"):
        term: Any = hl.kl(estimator=name)  # type: ignore[arg-type]
        same(data.ours(term, **fields), data.theirs(lambda p, n=name: estimate(n, p)))

    def through(log_p: Tensor) -> Tensor:
        pulls = estimate("k2", log_p)
        return estimate("k3", log_p).detach() + pulls - pulls.detach()

    term = hl.kl(estimator="k3", straight_through=True)
    same(data.ours(term, **fields), data.theirs(through))

    def corrected(log_p: Tensor) -> Tensor:
        return estimate("k3", log_p) * (data.chosen(log_p) - data.old).exp()

    term = hl.kl(estimator="k3", bias_corrected=True)
    same(data.ours(term, **fields), data.theirs(corrected))


def test_dft_and_asft(data: Data) -> None:
    def dft(log_p: Tensor) -> Tensor:
        n = data.chosen(log_p)
        return -n.exp().detach() * n

    def asft(log_p: Tensor) -> Tensor:
        return dft(log_p) + 0.1 * (data.log_q.exp() * (data.log_q - log_p)).sum(1)

    same(data.ours(hl.dft()), data.theirs(dft))
    objective = hl.dft() + 0.1 * hl.distillation()
    same(data.ours(objective, teacher_logits=data.teacher_logits), data.theirs(asft))


@pytest.mark.parametrize("scale", [3.0, 1.0])
def test_eaft_of_the_likeliest(data: Data, scale: float) -> None:
    """EAFT uses the entropy of the 20 likeliest tokens, divided by 3 (LLaMA-Factory) or unscaled
    (Axolotl)."""
    alpha = 1.5
    top = hl.head_topk(data.hidden, hl.Head(data.weight), 20).logps.log_softmax(-1)
    weights = (-(top.exp() * top).sum(-1) / scale) ** alpha

    def formula(log_p: Tensor) -> Tensor:
        likeliest = log_p.detach().topk(20).values.log_softmax(-1)
        entropy = -(likeliest.exp() * likeliest).sum(-1)
        return -((entropy / scale) ** alpha) * data.chosen(log_p)

    term = hl.cross_entropy().weighted("weights")
    same(data.ours(term, weights=weights), data.theirs(formula))


def test_a_report_of_channels(data: Data) -> None:
    """A term with coefficient 0 reports its mean over the tokens of a mask and changes no
    gradient."""
    channel = torch.arange(T) % 2 == 0
    batch = hl.Batch(data.y.masked_fill(~data.scored, -100), channel=channel)
    objective = hl.cross_entropy() + 0.0 * hl.cross_entropy().where("channel")
    out = hl.head_loss(data.hidden, hl.Head(data.weight), batch, objective)
    torch.testing.assert_close(
        out.terms["cross_entropy_2"], -data.logp[data.scored & channel].mean()
    )
    same(data.ours(objective, channel=channel), data.ours(hl.cross_entropy()))


def test_outliers_by_a_weight(data: Data) -> None:
    """SkyRL drops sequences with a token ratio outside two bounds, and does not change the
    denominator."""
    low, high = 0.55, 1.6
    ratio = (data.old - data.sampling).exp()
    inside = ((ratio >= low) & (ratio <= high)) | ~data.scored
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    kept = torch.tensor([bool(inside[ids == i].all()) for i in range(len(LENGTHS))])

    def formula(log_p: Tensor) -> Tensor:
        r, a = (data.chosen(log_p) - data.old).exp(), data.advantages
        return -torch.min(r * a, r.clamp(0.8, 1.2) * a) * kept[ids]

    term = hl.ppo().weighted("inside")
    fields = {"advantages": data.advantages, "old_logps": data.old, "inside": kept.double()}
    same(data.ours(term, **fields), data.theirs(formula))
    assert not kept.all()
