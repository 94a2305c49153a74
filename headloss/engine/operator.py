"""`head_stats` inside a compiled graph, as a registered operator without a graph break.

N positions, T scored positions, V vocabulary, K candidates. Schedule: recompute. The product of
hidden states with LoRA's A is part of the graph. The forward and the backward operator have these
operands:

    factors: matrices whose products sum to the raw logits, alternately features [N, r] and weights
        [V, r]; then the head's bias [V], if any;
    constants: targets [N], temperature [N] or None, candidate_ids [N, K] or None; if each
        position's softmax has allowed ids, support_ids [N, K], or [P] with offsets [N + 1];
    sizes: the vocabulary size V, chunk_tokens and memory_budget (0 for an option that is None);
    numbers: logit scale, soft cap (0: none), the temperature if it is a single number,
        gradient_tolerance;
    spelt: the text of a Python literal that holds all other options.

Each custom operator constructs a `Head` and a `Batch` from its arguments, which are plain tensors,
numbers and text.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..batch.batch import IGNORE, Batch
from ..head.head import Head, Lora, autocast_dtype
from ..kernels.interface import Measured
from ..objective.external import CANDIDATE_STATISTICS, HEAD_STATISTICS, external_loss
from ..options import DEFAULT, Options
from ..statistics.softmax import CANDIDATES, Normalizer, Statistics
from .autograd import backward_of_slopes, refuse_second_derivatives
from .call import Call, call_of
from .checks import Arguments, check_targets
from .loop import ForwardResult, sweep

PASSED = ("backend", "static", "skip_rows", "gradient_tolerance", "chunk_tokens", "memory_budget")
REFUSED = ("logits_dtype", "accumulate_dtype", "sequence_parallel", "main_grad", "batch_invariant")
REFUSED += ("upstream",)
OPERANDS = "Tensor[] factors, Tensor?[] constants, int[] sizes, float[] numbers, str spelt"
# Operands that the operator `head_stats_backward` has in addition to `OPERANDS`: outputs of the
# forward operator (`measured`), and upstream gradients of logp, lse, entropy and of the candidates'
# log-probs (`upstream`).
MORE = "Tensor[] measured, Tensor[] upstream, bool[] wanted"
operator = partial(torch.library.custom_op, mutates_args=())


def in_graph(
    hidden: Tensor, head: Head, scored: object, options: Options, gradients: frozenset[str]
) -> list[Tensor]:
    """Return logp, lse and entropy of every position, and, if the batch has `candidate_ids`, [.., K
    + 1] log-probs: of K candidates and of all other columns together. ValueError for an option that
    the compiled operator `headloss::head_stats` does not support."""
    compute = autocast_dtype(hidden)
    head.validate(hidden, compute_dtype=compute)
    ids: list[Any] = [None]
    if isinstance(scored, Batch):
        ids = [scored.fields.get("candidate_ids")]
        ids += () if scored.support is None else scored.support.tensors
        scored = scored.targets
    targets = check_targets(scored, hidden, options).targets
    x = hidden.reshape(-1, hidden.shape[-1]).to(compute or hidden.dtype)
    # Set the hidden states of unscored positions to 0, so that a NaN in these hidden states cannot
    # reach the gradients of the low-rank adapters.
    if head.lora:
        x = torch.where((targets.reshape(-1) != IGNORE).unsqueeze(1), x, 0)
    pairs = [(f, w if compute is None else w.to(compute)) for f, w in head.factors(x)]
    factors = [t for pair in pairs for t in pair]
    number = head.temperature
    per_token = None
    if isinstance(number, Tensor):
        number, per_token = 1.0, number.expand(targets.shape).flatten()
    ids = [t if t is None or t.dim() == 1 else t.flatten(0, -2) for t in ids]
    if (schedule := options.schedule) not in ("auto", "recompute"):
        raise ValueError(f'schedule: got "{schedule}", but a compiled graph is served by recompute')
    for name in REFUSED:
        if getattr(options, name) is not getattr(DEFAULT, name):
            raise ValueError(f"{name}: got {getattr(options, name)}, which no compiled graph takes")
    tail = CANDIDATE_STATISTICS[1] in gradients
    measured = _head_stats(
        factors if head.bias is None else [*factors, head.bias],
        [targets.reshape(-1), per_token, *ids],
        [head.vocabulary, options.chunk_tokens or 0, options.memory_budget or 0],
        [head.logit_scale, head.softcap or 0.0, float(number), options.gradient_tolerance],
        f"{tail}, {[getattr(options, name) for name in PASSED[:3]]}",
    )
    named = zip(HEAD_STATISTICS, measured, strict=False)
    stats = [(t if name in gradients else t.detach()).view(targets.shape) for name, t in named]
    return [*stats, *(t.unflatten(0, targets.shape) for t in measured[5:6])]


def _open(operands: Sequence[Any], wanted: Sequence[bool]) -> tuple[Call, list[Tensor | None]]:
    """Return the `Call` described by an operator's operands, and the tensors from which its logits
    are computed; `wanted` has a flag for
    each factor that requires a gradient."""
    factors, (targets, temperature, chosen, *support), sizes, numbers, spelt = operands
    tail, values = ast.literal_eval(spelt)
    vocabulary, *sizes = sizes
    scale, softcap, number, tolerance = numbers
    values += [tolerance, *(size or None for size in sizes)]
    options = Options(schedule="recompute", **dict(zip(PASSED, values, strict=True)))
    leaves = [t.detach().requires_grad_(w) for t, w in zip(factors, wanted, strict=True)]
    *pairs, bias = leaves if len(leaves) % 2 else [*leaves, None]
    features = pairs[::2]
    weights = pairs[1::2]
    lora = []
    for inner, b in zip(features[1:], weights[1:], strict=True):
        # LoRA's matrix A was multiplied with the hidden states before this operator was called, so
        # that the placeholder `a` needs only the shape and `requires_grad` of A.
        a = b.new_empty(b.shape[1], features[0].shape[1]).requires_grad_(inner.requires_grad)
        lora.append(Lora(a=a, b=b, scaling=1.0))
    head = Head(
        weights[0],
        bias,
        number if temperature is None else temperature,
        softcap or None,
        scale,
        vocabulary,
        lora=tuple(lora),
    )
    names = (
        HEAD_STATISTICS if chosen is None else (*HEAD_STATISTICS, *CANDIDATE_STATISTICS[: 1 + tail])
    )
    objective = external_loss(frozenset(names), candidates=chosen is not None)
    with torch.set_grad_enabled(any(wanted)):
        ids: Any = tuple(support) or None
        batch = Batch(targets, candidate_ids=chosen, support_ids=ids)
        arguments = Arguments.of_head("head_stats", features[0], head, batch, objective, options)
        call = call_of(arguments)
    pairs[::2] = map(call.scored.gather, features)
    return call, [None if t is None else t.detach() for t in (*pairs, bias)]


@operator("headloss::head_stats", schema=f"({OPERANDS}) -> Tensor[]")
def _head_stats(*operands: Any) -> list[Tensor]:
    """Return logp, lse, entropy, maximum and log-sum of the softmax, [N] each. If `candidate_ids`
    are given, return two more tensors as well: the log-probs [N, K + 1] of each token's K
    candidates and of the tail (all other columns together), and the log-sum-exp of the tail's
    logits as two numbers [N, 2], the maximum and the logarithm of the sum."""
    call, of_logits = _open(operands, [False] * len(operands[0]))
    measured = sweep(call, of_logits).measured
    outputs = [*(getattr(measured.stats, name) for name in HEAD_STATISTICS), *measured.normalizer]
    outputs += measured.stats.extras.values()
    return [call.scored.scatter(t) for t in outputs]


@_head_stats.register_fake
def _(factors, constants, *_):
    hidden, *_ = factors
    targets, _, chosen, *_ = constants
    count = targets.shape[0]
    shapes = [(count,)] * 5
    if chosen is not None:
        shapes += [(count, chosen.shape[1] + 1), (count, 2)]
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return [hidden.new_empty(shape, dtype=dtype) for shape in shapes]


@operator("headloss::head_stats_backward", schema=f"({OPERANDS}, {MORE}) -> Tensor[]")
def _head_stats_backward(*operands: Any) -> list[Tensor]:
    """Return the gradients of those `factors` (feature and weight matrices of the head, and the
    bias) whose flag in `wanted` is True, in the order of `factors`."""
    *of_call, measured, upstream, wanted = operands
    call, of_logits = _open(of_call, wanted)
    scored = call.scored
    logp, _, entropy, peak, log_sum, *beside = map(scored.gather, measured)
    keys: list[object] = [CANDIDATES, (CANDIDATES, "vjp")]
    stats = Statistics(logp=logp, entropy=entropy, extras=dict(zip(keys, beside, strict=False)))
    result = ForwardResult(Measured(stats, Normalizer(peak, log_sum)), [])
    slopes = dict(zip((*HEAD_STATISTICS, CANDIDATES), upstream, strict=False))
    gradients = backward_of_slopes(call, call.open(of_logits), result, slopes)
    if scored.index is not None:
        gradients[:-1:2] = [t if t is None else scored.scatter(t) for t in gradients[:-1:2]]
    return [g for g, want in zip(gradients, wanted, strict=False) if want and g is not None]


@_head_stats_backward.register_fake
def _(factors, *operands):
    return [t.new_empty(t.shape) for t, want in zip(factors, operands[-1], strict=True) if want]


def _setup_context(ctx, inputs, output) -> None:
    factors, constants, *ctx.numbers = inputs
    ctx.mark_non_differentiable(*output[3:5], *output[6:])
    ctx.save_for_backward(*factors, *constants, *output)
    ctx.wanted = [t.requires_grad for t in factors]
    ctx.count = len(constants)


def _backward(ctx, upstream):
    refuse_second_derivatives("head_stats")
    saved = list(ctx.saved_tensors)
    first = len(ctx.wanted)
    last = first + ctx.count
    tensors = (saved[:first], saved[first:last])
    upstream = [*upstream[:3], *upstream[5:6]]
    of_call = (*tensors, *ctx.numbers)
    gradients = iter(_head_stats_backward(*of_call, saved[last:], upstream, ctx.wanted))
    of_factors = [next(gradients) if wanted else None for wanted in ctx.wanted]
    # Autograd expects a list of gradients for an argument that is a list of tensors, but one None
    # (not a list) if the argument's list contains None.
    of_constants = None if any(t is None for t in tensors[1]) else [None] * ctx.count
    return of_factors, of_constants, None, None, None


_head_stats.register_autograd(_backward, setup_context=_setup_context)
