"""Causal language models of Hugging Face Transformers whose loss comes from headloss.

    apply(model)                        model(input_ids, labels=...) has a loss and no logits
    apply(model, hl.cross_entropy(label_smoothing=0.1) + 1e-4 * hl.z_loss())
    remove(model)                       the model is as it was
    HeadLossCallback()                  applies it to the model of a Trainer that others build
    Trainer(model, ...)                 each term is divided by the totals of the optimizer step
    record_support(model)               what `generate` drew its tokens from

B rows, L positions, H hidden width, V vocabulary. The model's own forward runs. In a call with
labels its head computes the loss in place of logits, and returns logits of no columns [B, L, 0],
which pass through whatever the model does to its logits. Its loss function returns that loss.
Calls without labels, generation among them, are the model's own.
"""

from .apply import STATE, Applied, apply, remove
from .callback import HeadLossCallback
from .recorder import SupportRecorder, record_support
from .seams import check
from .totals import TotalsMixin, Trainer

__all__ = [
    "STATE",
    "Applied",
    "HeadLossCallback",
    "SupportRecorder",
    "TotalsMixin",
    "Trainer",
    "apply",
    "check",
    "record_support",
    "remove",
]
