"""Causal language models of Hugging Face Transformers whose loss comes from headloss.

    apply(model)                        model(input_ids, labels=...) has a loss without logits
    apply(model, hl.cross_entropy(label_smoothing=0.1) + 1e-4 * hl.z_loss())
    remove(model)                       restores the model
    HeadLossCallback()                  applies headloss in a Trainer built by other code
    Trainer(model, ...)                 divides each term by the totals of the optimizer step
    record_support(model)               records the ids that `generate` drew its tokens from

The model's own forward runs. In a call with labels, the model's head returns *followed logits*, a
tensor subclass without memory that remembers its formula. The model's loss function, or a
cross-entropy of the followed logits, is replaced by the objective. Operations that followed logits
do not support run on real logits. Calls without labels, such as generation, are unchanged.
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
