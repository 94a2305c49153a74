"""Causal language models of Hugging Face Transformers whose loss comes from headloss.

    apply(model)             # model(input_ids, labels=...) now computes its loss without logits.
    apply(model, hl.cross_entropy(label_smoothing=0.1) + 1e-4 * hl.z_loss())
    remove(model)            # Restores the model.
    HeadLossCallback()       # Calls apply(model) in a Trainer built by code of another package.
    Trainer(model, ...)      # Divides each term by the totals of the optimizer step.
    record_support(model)    # Records the ids from which `generate` draws its tokens.

After `apply(model)` the model's own forward still runs. In a call with labels, the model's head
returns *followed logits*: a lazy tensor that stores its formula, not its values. headloss's
objective replaces the model's loss function, or `cross_entropy` if it is called on the lazy logits.
Row selection, casts, factors, one tanh and a constant bias keep logits lazy; any other operation on
lazy logits first computes the logits' values. Calls without labels, such as generation, are
unchanged.
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
