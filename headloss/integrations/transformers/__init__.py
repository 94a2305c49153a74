"""Causal language models of Hugging Face Transformers whose loss comes from headloss.

    apply(model)                        model(input_ids, labels=...) has a loss without logits
    apply(model, hl.cross_entropy(label_smoothing=0.1) + 1e-4 * hl.z_loss())
    remove(model)                       the model is as it was
    HeadLossCallback()                  applies it to the model of a Trainer that others build
    Trainer(model, ...)                 each term is divided by the totals of the optimizer step
    record_support(model)               what `generate` drew its tokens from

The model's own forward runs. In a call with labels its head returns followed logits, which have no
memory, and its loss function, or a cross-entropy of such logits, is the objective. Any other
operation on them runs on real logits. Calls without labels, generation among them, are the model's
own.
"""

from .apply import Applied, apply, remove
from .callback import HeadLossCallback
from .log import install as _log_terms
from .recorder import SupportRecorder, record_support
from .seams import check
from .subclass import STATE
from .totals import TotalsMixin, Trainer

_log_terms()

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
