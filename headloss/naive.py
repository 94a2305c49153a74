"""The algorithm of `head_loss` in plain PyTorch, as an introduction to the library's code.

The head of a language model turns hidden vectors x [T, H] into logits z = x W^T [T, V], and a loss
is a function of their softmax p. The T x V logits are too many to store, and need not be stored:

- A loss reads a few *statistics* of each token, never the token's logits. The gradient of the loss
  with respect to the statistics becomes four *coefficients* per token, from which the gradient of
  every logit of the token is computed.
- Statistics of the whole vocabulary can be merged from the statistics of slices of columns.
- A mean of losses l_t over tokens or over sequences is sum_t w_t l_t with *weights* w_t of tokens.
- `recompute` is for losses whose gradient needs all tokens' statistics, `one_pass` for all others.

`headloss.head_loss` is faster and more general than `naive`, whose inputs must be float32 or
float64, with finite logits and a target at every position.

T tokens, H hidden width, V vocabulary, y a token's target; n tokens of a chunk, v of V columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Statistics(NamedTuple):
    """Statistics of each token, [T] each."""

    logp: Tensor  # Log-prob, z_y - lse.
    lse: Tensor  # Log-sum-exp, log sum exp z.
    entropy: Tensor  # Entropy, -sum p log p.
    mean_logit: Tensor  # Mean of a token's logits, sum_j z_j / V.


Batch = dict[str, Tensor]  # [T] vectors by name: "targets", weights, and fields that a loss reads.
Objective = Callable[[Statistics, Batch], Tensor]  # Weighted losses w_t l_t, [T].
Result = tuple[Tensor, Tensor, Tensor]  # Loss, dL/dx [T, H] and dL/dW [V, H].


def grpo(stats: Statistics, batch: Batch, epsilon: float = 0.2) -> Tensor:
    """[T] the clipped surrogate -min(r A, clip(r) A), with a token's r = exp(logp - old_logp)."""
    ratio, advantages = (stats.logp - batch["old_logps"]).exp(), batch["advantages"]
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages)


def gspo(stats: Statistics, batch: Batch, low: float = 3e-4, high: float = 4e-4) -> Tensor:
    """[T] the clipped surrogate loss with one ratio per sequence, r = exp(mean of logp - old_logp
    over the sequence's tokens). A token's gradient needs the log-probs of its whole sequence."""
    ids, advantages, d = batch["segment_ids"], batch["advantages"], stats.logp - batch["old_logps"]
    means = d.new_zeros(len(d)).scatter_reduce(0, ids, d, "mean", include_self=False)
    ratio = means.exp()[ids]
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


class SoftmaxState(NamedTuple):
    """Online-softmax state of n tokens' logits z_j in a slice; e_j = exp(z_j - m), m = max z."""

    m: Tensor  # Maximum, max z.
    sum_e: Tensor  # Sum of exp(z_j - m), m = max z.
    sum_ez: Tensor  # Sum of e_j (z_j - m), e_j = exp(z_j - m) and m = max z.
    sum_z: Tensor
    target: Tensor  # Logit z_y of the target y; -inf if y is not in this slice.


def measure(z: Tensor, columns: Tensor, targets: Tensor) -> SoftmaxState:
    """Return the online-softmax state of logits z [n, v], with vocabulary ids columns [v]."""
    m = z.amax(1)
    shifted = z - m[:, None]
    e = shifted.exp()
    target = z.masked_fill(columns != targets[:, None], -torch.inf).amax(1)
    return SoftmaxState(m, e.sum(1), (e * shifted).sum(1), z.sum(1), target)


def merge(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """Return the online-softmax state of the union of two vocabulary slices: tiles or shards."""
    m = torch.maximum(a.m, b.m)
    sum_e, sum_ez = torch.zeros_like(m), torch.zeros_like(m)
    for part in (a, b):
        shift = part.m - m
        sum_e += shift.exp() * part.sum_e
        sum_ez += shift.exp() * (part.sum_ez + shift * part.sum_e)
    return SoftmaxState(m, sum_e, sum_ez, a.sum_z + b.sum_z, torch.maximum(a.target, b.target))


def finish(partials: SoftmaxState, vocabulary: int) -> Statistics:
    """Return the statistics from the online-softmax state of the whole vocabulary."""
    log_sum = partials.sum_e.log()
    lse, entropy = partials.m + log_sum, log_sum - partials.sum_ez / partials.sum_e
    return Statistics(partials.target - lse, lse, entropy, partials.sum_z / vocabulary)


def coefficients(
    objective: Objective, stats: Statistics, batch: Batch, vocabulary: int
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the coefficients of each token; autograd runs on [n] vectors alone."""
    leaves = Statistics(*(statistic.detach().requires_grad_() for statistic in stats))
    with torch.enable_grad():
        loss = objective(leaves, batch).sum()
    logp, lse, entropy, mean = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return loss.detach(), [logp, lse - logp - entropy * stats.entropy, -entropy, mean / vocabulary]


def logit_gradient(
    z: Tensor, columns: Tensor, targets: Tensor, lse: Tensor, c: list[Tensor]
) -> Tensor:
    """dL/dz_j [n, v] from `c`: c_target [j = y] + p_j (c_prob + c_entropy log p_j) + c_uniform.

    The formula for dL/dz_j follows from dlogp/dz_j = [j = y] - p_j, dlse/dz_j = p_j,
    dentropy/dz_j = -p_j (log p_j + entropy) and dmean_logit/dz_j = 1/V.
    """
    c_target, c_prob, c_entropy, c_uniform = (x[:, None] for x in c)
    log_p = z - lse[:, None]
    dz = log_p.exp() * (c_prob + c_entropy * log_p) + c_uniform
    return dz + c_target * (columns == targets[:, None])


@torch.no_grad()
def one_pass(x: Tensor, weight: Tensor, batch: Batch, objective: Objective, chunk: int) -> Result:
    """Run three matmuls per chunk of tokens. A chunk must hold all tokens that its loss reads."""
    loss, dx, dw = x.new_zeros(()), torch.empty_like(x), torch.zeros_like(weight)
    columns = torch.arange(len(weight), device=x.device)
    for rows in torch.arange(len(x), device=x.device).split(chunk):
        part = {name: values[rows] for name, values in batch.items()}
        z = x[rows] @ weight.T
        stats = finish(measure(z, columns, part["targets"]), len(weight))
        share, c = coefficients(objective, stats, part, len(weight))
        dz = logit_gradient(z, columns, part["targets"], stats.lse, c)
        loss += share
        dx[rows] = dz @ weight
        dw += dz.T @ x[rows]
    return loss, dx, dw


@torch.no_grad()
def recompute(x: Tensor, weight: Tensor, batch: Batch, objective: Objective, slab: int) -> Result:
    """Run four matmuls per block of `slab` vocabulary columns, with the logits of one block
    at a time, for any loss: one loop for the statistics of all tokens, one for the gradient."""
    dx, dw = torch.zeros_like(x), torch.empty_like(weight)
    slabs, targets = torch.arange(len(weight), device=x.device).split(slab), batch["targets"]
    sweep = (measure(x @ weight[columns].T, columns, targets) for columns in slabs)
    stats = finish(functools.reduce(merge, sweep), len(weight))
    loss, c = coefficients(objective, stats, batch, len(weight))
    for columns in slabs:
        dz = logit_gradient(x @ weight[columns].T, columns, targets, stats.lse, c)
        dx += dz @ weight[columns]
        dw[columns] = dz.T @ x
    return loss, dx, dw
