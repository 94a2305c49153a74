"""Liger's preference losses, fused with the output layer (the linear head)."""

# The constructor sets attributes by name from its arguments, which pyright cannot see.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import losses
from ...batch.batch import IGNORE, Batch
from ...batch.segments import Segments
from ...head.head import Head
from ...head_loss import Output, head_loss
from ...head_stats import head_stats
from ...losses import Objective, Term
from .cross_entropy import refuse


class _Pairs(nn.Module):
    """Losses of answer pairs: the first half of the rows is chosen answers, the second half
    rejected answers.

    Returns the loss and a tuple: chosen and rejected log-probs, mean logits of chosen and rejected
    answers, the chosen answers' negative log-likelihood, rewards, and further values that depend on
    the loss.
    """

    average = False
    with_reference = False

    def __init__(self, **given: Any) -> None:
        super().__init__()
        refuse(average_log_prob=bool(given.get("average_log_prob", False)))
        vars(self).update({"ignore_index": -100, "beta": 0.1, "alpha": 1.0, **given})

    def term(self) -> Term:
        raise NotImplementedError

    def run(
        self,
        tensors: tuple[Tensor, Tensor, Tensor | None],  # Weight, hidden states, bias.
        target: Tensor,
        reference: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        weight, hidden, bias = tensors
        if target.dim() != 2 or len(target) % 2:
            got = tuple(target.shape)
            raise ValueError(f"target: got shape {got}, want [B, T] of B / 2 chosen, then rejected")
        pairs = torch.arange(len(target) // 2, device=target.device)
        rows = torch.cat([2 * pairs, 2 * pairs + 1])[:, None].expand(target.shape)
        segments = Segments.from_ids(rows, len(target))
        fields: dict[str, Tensor] = {}
        if self.with_reference:
            use = self.use_ref_model
            fields["ref_logps"] = reference_logps(target, self.ignore_index, use, *reference)
        chosen = torch.arange(len(target), device=target.device) % 2 == 0
        batch = Batch(target, segments, ignore_index=self.ignore_index, chosen=chosen, **fields)
        objective = Objective.of(self.term())
        if self.compute_nll_loss:
            objective += self.alpha * losses.cross_entropy().where("chosen")
        out = head_loss(hidden, Head(weight, bias), batch, objective)
        with torch.no_grad():
            return out.loss, self._report(out, tensors, batch)

    def _report(
        self, out: Output, tensors: tuple[Tensor, Tensor, Tensor | None], batch: Batch
    ) -> tuple[Tensor, ...]:
        weight, hidden, bias = tensors
        scored, half = batch.targets != IGNORE, len(hidden) // 2
        lengths = scored.sum(1) if self.average else 1
        logps = out.logps.sum(1) / lengths
        rewards = logps
        if self.with_reference:
            ref = batch.fields["ref_logps"]
            rewards = logps - ref.where(scored, 0).sum(1)  # type: ignore[union-attr]
        mean = hidden.flatten(1, -2).mean(1) @ weight.mean(0) + (0 if bias is None else bias.mean())
        nll = out.terms.get("cross_entropy", out.loss.new_zeros(()))
        logits = mean[:half].mean(), mean[half:].mean()
        reward = self.beta * rewards
        pair = logps[:half], logps[half:]
        return (*pair, *logits, nll, reward[:half], reward[half:], *self.more(*pair))

    def more(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, ...]:
        return ()


def reference_logps(
    target: Tensor,
    ignore_index: int,
    use: bool,
    hidden: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Return the reference model's log-probs [B, T]; zeros if no reference is used."""
    if not use:
        return target.new_zeros(target.shape, dtype=torch.float32)
    if hidden is None or weight is None:
        raise ValueError("ref_input: got None, or no ref_weight, want both or use_ref_model=False")
    with torch.no_grad():
        return head_stats(hidden, Head(weight, bias), Batch(target, ignore_index=ignore_index)).logp


class LigerFusedLinearDPOLoss(_Pairs):
    with_reference = True

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
    ) -> None:
        super().__init__(**{k: v for k, v in locals().items() if k not in ("self", "__class__")})
        self.made = losses.dpo(
            beta=beta,
            loss_type=loss_type,
            label_smoothing=label_smoothing,
            discopop_tau=discopop_tau,
        )

    def term(self) -> Term:
        return self.made

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.run((lin_weight, _input, bias), target, (ref_input, ref_weight, ref_bias))


class LigerFusedLinearCPOLoss(_Pairs):
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> None:
        super().__init__(**{k: v for k, v in locals().items() if k not in ("self", "__class__")})

    def term(self) -> Term:
        return losses.cpo(beta=self.beta, label_smoothing=self.label_smoothing)

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.run((lin_weight, _input, bias), target)


class LigerFusedLinearSimPOLoss(LigerFusedLinearCPOLoss):
    average = True

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        _Pairs.__init__(self, **given)

    def term(self) -> Term:
        smoothing = self.label_smoothing
        return losses.simpo(beta=self.beta, gamma=self.gamma, label_smoothing=smoothing)


class LigerFusedLinearORPOLoss(_Pairs):
    average = True

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        chunk_size: int = 1,
    ) -> None:
        super().__init__(**{k: v for k, v in locals().items() if k not in ("self", "__class__")})

    def term(self) -> Term:
        return losses.orpo(beta=self.beta)

    def more(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, ...]:
        def odds(logp: Tensor) -> Tensor:
            return logp - torch.log1p(-logp.exp())

        ratio = odds(chosen) - odds(rejected)
        return nn.functional.logsigmoid(ratio).mean(), ratio.mean()

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        refuse(nll_target=nll_target is not None)
        return self.run((lin_weight, _input, bias), target)


class LigerFusedLinearKTOLoss(nn.Module):
    """Liger's KTO loss; returns the loss and sums of log-probs, logits and rewards over desirable
    and undesirable rows."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = False,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        refuse(average_log_prob=average_log_prob)
        self.ignore_index, self.beta, self.use_ref_model = ignore_index, beta, use_ref_model

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if preference_labels is None:
            raise ValueError("preference_labels: got None, want [B] bool")
        given = self.use_ref_model, ref_input, ref_weight, ref_bias
        ref = reference_logps(target, self.ignore_index, *given)
        desirable = preference_labels.bool()
        fields, kind = {"desirable": desirable, "ref_logps": ref}, "apo_zero_unpaired"
        if kl is not None:
            fields["reference_kl"], kind = kl.expand(len(target)), "kto"
        batch = Batch(target, ignore_index=self.ignore_index, **fields)
        term = losses.kto(beta=self.beta, loss_type=kind)
        out = head_loss(_input, Head(lin_weight, bias), batch, term)
        with torch.no_grad():
            logps = out.logps.sum(1)
            logits = _input.sum(1) @ lin_weight.sum(0)
            logits = logits if bias is None else logits + _input.shape[1] * bias.sum()
            rewards = self.beta * (logps - ref.where(batch.targets != IGNORE, 0).sum(1))
            found = [v[m].sum() for v in (logps, logits, rewards) for m in (desirable, ~desirable)]
            return out.loss, tuple(found)
