"""Models of Transformers whose forwards change logits, labels or loss in different ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
from transformers.models.llama.modeling_llama import LlamaForCausalLM as Llama  # noqa: E402

OTHERS = torch.randint(2, 37, (2, 7), generator=torch.Generator().manual_seed(1))
CE = nn.functional.cross_entropy


class Forward(Llama):
    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids)[0]
        loss, logits = self.after(hidden, labels, **kwargs)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    def after(self, hidden: Tensor, labels: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def forward(after: Any) -> Any:
    return type(after.__name__, (Forward,), {"after": after, "__module__": __name__})


@forward
def Beside(self, hidden, labels, **kwargs):
    """A forward like Florence-2's."""
    logits = self.lm_head(hidden)
    return self.loss_function(logits, labels, 37, shift_labels=labels), logits


@forward
def LabelsOfItsOwn(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden)
    return self.loss_function(logits, labels.roll(1, 1), 37, **kwargs), logits


@forward
def CountOfItsOwn(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden)
    return self.loss_function(logits, labels, 37, num_items_in_batch=torch.tensor(29)), logits


@forward
def Ignores(self, hidden, labels, **kwargs):
    labels = labels.masked_fill(labels == -100, 5)
    logits = self.lm_head(hidden)
    return self.loss_function(logits, labels, 37, ignore_index=5), logits


@forward
def LeavesOut(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden)
    return self.loss_function(logits[:, 1:-1].contiguous(), labels[:, 1:-1], 37), logits


@forward
def LastRows(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden)
    return self.loss_function(logits[..., -3:, :].contiguous(), labels[:, -3:], 37), logits


@forward
def Halves(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden) / 2
    return self.loss_function(logits, labels, 37), logits


@forward
def HalvesInPlace(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden).mul_(0.5)
    return self.loss_function(logits, labels, 37), logits


@forward
def Pads(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden)
    logits[..., 35:] = -1e4
    return self.loss_function(logits, labels.clamp(max=34), 37), logits


@forward
def Clamps(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden).clamp(-3, 3)
    return self.loss_function(logits, labels, 37), logits


@forward
def Caps(self, hidden, labels, **kwargs):
    logits = 3 * torch.tanh(0.7 * self.lm_head(hidden).float() / 3) * 1.5
    return self.loss_function(logits, labels, 37), logits


@forward
def CapsBackwards(self, hidden, labels, **kwargs):
    logits = torch.tanh(self.lm_head(hidden)) * -2
    return self.loss_function(logits, labels, 37), logits


@forward
def Biased(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden) + torch.linspace(-1, 1, 37)
    return self.loss_function(logits, labels, 37), logits


@forward
def BiasTrained(self, hidden, labels, **kwargs):
    """A forward like ESM's, which adds a trained bias that is not `lm_head.bias`."""
    logits = self.lm_head(hidden) + torch.linspace(-1, 1, 37) + self.lm_head.weight[:, 0]
    return self.loss_function(logits, labels, 37), logits


@forward
def BiasAlone(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden).detach() + self.lm_head.weight[:, 0]
    return self.loss_function(logits, labels, 37), logits


@forward
def Columns(self, hidden, labels, **kwargs):
    """A forward like Inkling's, with a padded vocabulary."""
    logits = self.lm_head(hidden)[:, 1:, :35].contiguous()
    return self.loss_function(logits, labels[:, 1:].clamp(max=34), 35), logits


@forward
def ReadsTheWeight(self, hidden, labels, **kwargs):
    logits = hidden @ self.lm_head.weight.T
    return self.loss_function(logits, labels, 37), logits


@forward
def ZLoss(self, hidden, labels, **kwargs):
    """A forward like Bamba's."""
    logits = self.lm_head(hidden)
    loss = self.loss_function(logits, labels, 37)
    return loss + 0.1 * logits.float().logsumexp(-1).pow(2).mean(), logits


@forward
def EntropyBonus(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden)
    logp = logits[:, :-1].log_softmax(-1)
    bonus = (logp.exp() * logp).sum(-1).mean()
    return self.loss_function(logits, labels, 37) + 0.3 * bonus, logits


@forward
def Teacher(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden)
    teacher = torch.linspace(-1, 1, 37).expand_as(logits)
    distance = nn.functional.mse_loss(logits, teacher)
    return distance + self.loss_function(logits, labels, 37), logits


@forward
def Accuracy(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden)
    with torch.no_grad():
        hits = (logits[:, :-1].argmax(-1) == labels[:, 1:]).float().mean()
        CE(logits[:, :-1].reshape(-1, 37), labels[:, 1:].reshape(-1))
    return self.loss_function(logits, labels, 37) * (1 + hits), logits


@forward
def Twice(self, hidden, labels, **kwargs):
    logits, again = self.lm_head(hidden), self.lm_head(hidden * 0.5)
    loss = self.loss_function(logits, labels, 37) + self.loss_function(again, labels, 37)
    return loss, logits


@forward
def AndAnother(self, hidden, labels, **kwargs):
    """A forward that adds to its loss a second cross-entropy, with different targets."""
    logits = self.lm_head(hidden)
    loss = self.loss_function(logits, labels, 37)
    return loss + CE(logits.view(-1, 37), OTHERS.view(-1)), logits


@forward
def Flat(self, hidden, labels, **kwargs):
    logits = self.lm_head(hidden)
    return self.loss_function(logits.view(-1, 37), labels.view(-1), 37, **kwargs), logits


FORWARDS = [
    Beside, LabelsOfItsOwn, CountOfItsOwn, Ignores, LeavesOut, LastRows, Halves, HalvesInPlace,
    Pads, Clamps, Caps, CapsBackwards, Biased, BiasTrained, BiasAlone, Columns, ReadsTheWeight,
    ZLoss, EntropyBonus, Teacher, Accuracy, Twice, AndAnother, Flat,
]  # fmt: skip
# Model forwards whose loss can only be computed from materialised logits.
DENSE = {HalvesInPlace, Pads, Clamps, CapsBackwards, BiasAlone, ReadsTheWeight}
