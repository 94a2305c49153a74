"""Logits in plain PyTorch, for timed implementations and for reference values.

n tokens, H hidden width, V vocabulary, K columns, r the rank of an adapter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SCALING = 2.0  # Low-rank adapters multiply their output by `SCALING`.


def plain_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None
) -> Tensor:
    """Return logits [n, V] in the inputs' dtype, like a model's own head."""
    return adapted(F.linear(x, weight, bias), x, lora_a, lora_b)


def adapted(z: Tensor, x: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
    """Return the logits plus the output of an adapter, if any."""
    return z if a is None or b is None else z + F.linear(SCALING * F.linear(x, a), b)


NEVER = -1e30  # a logit whose probability is 0, with a finite p log p


def restricted(z: Tensor, columns: Tensor) -> Tensor:
    """Return logits [n, V] with all but the given columns [n, K] removed from the softmax."""
    return torch.full_like(z, NEVER).scatter(1, columns, z.gather(1, columns))


def with_the_rest(log_p: Tensor, columns: Tensor) -> Tensor:
    """Return [n, K + 1]: log-probs of the columns [n, K], and of all other columns together."""
    rest = log_p.scatter(1, columns, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([log_p.gather(1, columns), rest], 1)
