"""Any loss at the head of a language model: one pass, float32 log-probs, a memory budget."""

from . import losses as _losses
from .batch.batch import CURRENT, Batch
from .batch.reduction import (
    Reduction,
    Totals,
    fixed_length,
    prompt_mean,
    sequence_mean,
    sequence_sum,
    token_mean,
)
from .batch.segments import Segments
from .batch.support_forms import support_from_counts, support_from_lists, support_from_scores
from .check_term import TermReport, check_term
from .engine.plan import Plan
from .head.head import Head, Lora
from .head_function import head_function
from .head_loss import Output, head_loss, logits_loss, plan
from .head_stats import HeadStats, head_stats
from .head_topk import HeadTopk, head_topk
from .losses import *  # noqa: F403
from .objective.reads import clear_cache
from .options import Options
from .statistics.metrics import Max, Mean, Metrics, Min, Observed, Sum

__version__ = "0.1.0.dev0"
__all__ = [
    "head_loss",
    "logits_loss",
    "head_stats",
    "head_function",
    "head_topk",
    "plan",
    "check_term",
    "clear_cache",
    "Head",
    "Lora",
    "Batch",
    "CURRENT",
    "support_from_scores",
    "support_from_lists",
    "support_from_counts",
    "Segments",
    "Totals",
    "Reduction",
    "token_mean",
    "sequence_mean",
    "sequence_sum",
    "prompt_mean",
    "fixed_length",
    "Options",
    "Plan",
    "Output",
    "HeadStats",
    "HeadTopk",
    "TermReport",
    "Metrics",
    "Observed",
    "Mean",
    "Sum",
    "Max",
    "Min",
    *_losses.__all__,
]


def __dir__() -> list[str]:
    """Return the public names without submodules, some of whose names differ from a public name
    only in case (`head` and `Head`)."""
    return __all__
