"""Megatron-Core's multi-token prediction (MTP) without the logits of MTP's depths.

Call `install()` in each process; the loss, its scale and Megatron's log stay unchanged.
`uninstall()` restores Megatron-Core's functions.

    scale / D * sum_k 1 / n_k * sum_t m_kt CE(head(hidden_k)_t, label_kt),
    for D depths k, tokens t, loss mask m_kt and n_k = sum_t m_kt

Depth k predicts labels that lie k positions further on. m_k is the loss mask, shifted like the
labels, and n_k the mask's sum (with `calculate_per_token_loss`, that sum divided by the sum of the
unshifted mask). One `head_loss` call with a weight per row computes the losses of all MTP depths.
Megatron's `MTPLossAutoScaler` adds the gradient of the MTP loss in the backward pass; the value of
the MTP loss is not added to the training loss. The processor `HeadLoss` computes the main
prediction and the MTP losses in one call if the objective's terms are means over tokens.

b sequences of s positions, H hidden width. Hidden states are [(1 + D) s, b, H], or [(1 + D) s / tp,
b, H] under sequence parallelism; the rows of the main prediction come first.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..batch.batch import CURRENT, IGNORE, Batch
from ..batch.reduction import Totals
from ..head.head import Head
from ..head_loss import Output, head_loss
from ..losses import Objective, cross_entropy
from ..options import Options
from .megatron_heads import check_layer, head_of
from .seams import Seams, called, fitted, part
from .shared import holders, needs_segments, per

PACKAGE, HOME = "megatron-core", "megatron.core.transformer.multi_token_prediction"
MODEL = "megatron.core.models.gpt.gpt_model:GPTModel"
NAME = "process_mtp_loss"


def install(options: Options | None = None) -> None:
    """Replace `process_mtp_loss` in every module that has imported the function, until
    `uninstall()`.

    Args:
        options: options of the `head_loss` call for the MTP depths; headloss sets
            `sequence_parallel` and `main_grad`.

    Raises:
        RuntimeError: Megatron-Core lacks the function, or the function has unexpected arguments.
    """
    if not INSTALLED:
        seams = _seams(options or Options())
        seams.install()
        INSTALLED.append(seams)


def uninstall() -> None:
    """Undo `install()`."""
    if INSTALLED:
        INSTALLED.pop().uninstall()


def check() -> str:
    """Return a text that says which Megatron code was checked. RuntimeError as from `install`."""
    return (INSTALLED[0] if INSTALLED else _seams(Options())).check()


INSTALLED: list[Seams] = []


def _seams(options: Options) -> Seams:
    def process(
        hidden_states: Tensor,
        labels: Tensor | None,  # The labels [b, s], already shifted.
        loss_mask: Tensor | None,  # The loss mask [b, s].
        output_layer: Any,
        output_weight: Tensor | None,
        runtime_gather_output: bool | None,
        is_training: bool,
        compute_language_model_loss: Any,
        config: Any,
        cp_group: Any = None,
        tp_group: Any = None,
        packed_seq_params: Any = None,
        scale_logits_fn: Any = None,
        input_ids: Tensor | None = None,  # [b, s]
        sequence_roll_context: Any = None,
    ) -> Tensor:
        """Return the main prediction's hidden states; their backward also adds the MTP depths'
        gradient."""
        main = hidden_states.chunk(1 + config.mtp_num_layers)[0]
        if (labels is None and input_ids is None) or not (is_training or torch.is_grad_enabled()):
            return main
        depths = _depths(
            hidden_states,
            labels,
            loss_mask,
            input_ids,
            config,
            {"cp_group": cp_group, "packed_seq_params": packed_seq_params},
            sequence_roll_context,
        )
        waiting = WAITING.get()
        if waiting is not None and labels is not None and is_training and _is_alike(config):
            waiting.append(depths)
            return main
        check_layer(output_layer, None, config, hidden_states, output_weight)
        detached = getattr(config, "mtp_detach_heads", False)
        head, used = head_of(output_layer, output_weight, config, options, detached=detached)
        return _tied(main, depths, head, replace(used, metrics=is_training))

    theirs, model = part(PACKAGE, HOME, NAME), part(PACKAGE, MODEL)
    ours = fitted(theirs, process, NAME, PACKAGE)

    # Keep the signature of Megatron's function by `functools.wraps`, because verl reads the
    # signature.
    @functools.wraps(theirs)
    def process_mtp_loss(*args: Any, **kwargs: Any) -> Tensor:
        return ours(*args, **kwargs)

    held: dict[tuple[str, str], Any] = dict.fromkeys(holders(theirs), process_mtp_loss)
    return Seams({**held, (MODEL, "forward"): _waited_for(model.forward)}, PACKAGE)


# ---------------------------------------------------------------------- depths in a separate call


@dataclass(frozen=True)
class Depths:
    """Predictions of all MTP depths (one depth per predicted token) in one forward.

    Attributes:
        hidden: hidden states of all rows; the rows of the main prediction come first.
        targets: [D, s, b] int64, for D depths.
        mask: [D, s, b], each depth's loss mask.
        tokens: [D], the sum of each mask.
        factors: [D], the weight of each depth's summed cross-entropy in the loss.
        per_token: Megatron's `calculate_per_token_loss`.
    """

    hidden: Tensor
    targets: Tensor
    mask: Tensor
    tokens: Tensor
    factors: Tensor
    per_token: bool


def _depths(
    hidden: Tensor,
    labels: Tensor | None,
    mask: Tensor | None,
    input_ids: Any,
    config: Any,
    places: dict[str, Any],
    context: Any,
) -> Depths:
    """Return the labels and masks of the MTP depths, shifted across ranks and within documents by
    Megatron's own function."""
    name = "input_ids" if labels is None else "labels"
    roll = functools.partial(_rolled, name, context, {"shifts": -1, "dims": -1, **places})
    ids: Any = input_ids if labels is None else labels
    weights: Any = torch.ones_like(ids) if mask is None else mask
    first = int(labels is None)
    if first:
        ids, weights, _ = roll(0, ids, weights)
    main = weights.sum()
    targets, masks, tokens = [], [], []
    for k in range(first, first + config.mtp_num_layers):
        ids, weights, count = roll(k, ids, weights)
        targets.append(ids.t().masked_fill(weights.t() == 0, IGNORE))
        masks.append(weights.t())
        tokens.append(count)
    counts = torch.stack(tokens).double()
    factors = config.mtp_loss_scaling_factor / config.mtp_num_layers / counts.clamp(min=1)
    if config.calculate_per_token_loss:
        factors = factors * main
    per_token = bool(config.calculate_per_token_loss)
    return Depths(hidden, torch.stack(targets), torch.stack(masks), counts, factors, per_token)


def _rolled(
    name: str, context: Any, places: dict[str, Any], depth: int, ids: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and weights shifted by one position, and the sum of the shifted weights.

    On Megatron's dev branch `roll_tensor` also needs the fields' names and the microbatch's
    context.
    """
    roll = part(PACKAGE, HOME, "roll_tensor")
    if "roll_context" not in called(roll):
        return roll(ids, **places)[0], *roll(weights, **places)
    fields = {"sequence_fields": [name, "loss_mask"], "roll_depth": depth}
    ids, weights = roll([ids, weights], roll_context=context, **fields, **places)
    return ids, weights, weights.sum()


def _tied(main: Tensor, depths: Depths, head: Head, options: Options) -> Tensor:
    """Return the main prediction's hidden states; their backward also adds the MTP loss's
    gradient."""
    out, _ = _run(depths, depths.hidden[len(main) :], head, options)
    return part(PACKAGE, HOME, "MTPLossAutoScaler").apply(main, out.loss[None])


def _run(
    depths: Depths,
    hidden: Tensor,
    head: Head,
    options: Options,
    main: Batch | None = None,
    objective: Objective | None = None,
) -> tuple[Output, list[str]]:
    """Run one `head_loss` for all MTP depths; with `objective`, also for the main prediction.

    Returns:
        the output, with log-probs [blocks, s, b]; the names of the terms, one for each MTP depth.
    """
    targets, count = depths.targets, len(depths.targets)
    if main is not None:
        targets = torch.cat([main.targets[None], targets])
    blocks, first = len(targets), len(targets) - count
    ranks = head.vocab_group.size() if options.sequence_parallel and head.vocab_group else 1

    def rows(values: Tensor, at: int) -> Tensor:
        """Return one value per row of the hidden states, which have one block of rows for each
        prediction (main and MTP depths). `values` [n, s, b, ..] are the values of n consecutive
        blocks of rows, from block number `at` on; rows of other blocks get 0."""
        spread = values.new_zeros(blocks, *values.shape[1:])
        spread[at : at + len(values)] = values
        return spread.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 2)

    weights = depths.mask * depths.factors[:, None, None]
    fields: dict[str, Any] = {WEIGHTS: rows(weights, first)}
    for k in range(blocks):
        fields[_block(k)] = rows(torch.ones_like(targets[:1], dtype=torch.bool), k)
    terms = _terms(first, count)
    if main is not None and objective is not None:
        given = main.fields.items()
        fields |= {n: rows(x[None], 0) if isinstance(x, Tensor) else x for n, x in given}
        fields["totals"] = None if main.totals is None else _totals(main.totals, blocks)
        parts = ((c, term.where(_block(0))) for c, term in objective.parts)
        terms = Objective((*parts, *terms.parts))
    batch = Batch(rows(targets, 0), **fields)
    found = head_loss(hidden, head, batch, terms, options)
    names = [name for name, _, _ in terms.named()][-count:]

    def by_block(values: Tensor | None) -> Any:
        if values is None:
            return None
        return values.unflatten(0, (ranks, blocks, -1)).transpose(0, 1).flatten(1, 2)

    out = replace(found)  # `found` stays unchanged.
    vars(out).update(logps=by_block(found.logps), entropies=by_block(found.entropies))
    if options.metrics:
        _log(depths, out, names)
    return out, names


WEIGHTS = "mtp_weights"


def _block(k: int) -> str:
    return f"mtp_block_{k}"


@functools.cache
def _terms(first: int, count: int) -> Objective:
    """Return an objective with one term per MTP depth: a weighted sum of the cross-entropies of the
    depth's rows, so that each depth has its own metrics."""
    term = cross_entropy().over(per(1)).weighted(WEIGHTS)
    return Objective(tuple((1.0, term.where(_block(first + k))) for k in range(count)))


def _totals(totals: Totals, blocks: int) -> Totals:
    """Return a copy of `totals` whose dict `kept` maps the name of each row mask (one mask for the
    main prediction, one per MTP depth) to the counts in `totals`. `Term.where(name)` restricts a
    term to rows of the mask `name`, and the term's denominator is then read from
    `Totals.kept[name]`."""
    counts = (totals.tokens, totals.segments)
    counts += () if totals.prompts is None else (totals.prompts,)
    return replace(totals, kept={_block(k): counts for k in range(blocks)})


def _log(depths: Depths, out: Output, names: list[str]) -> None:
    """Log each depth's mean loss and top-1 accuracy by Megatron's helper."""
    count = len(names)
    helper = part(PACKAGE, HOME, "MTPLossLoggingHelper")
    state = import_module("megatron.core.parallel_state")
    over = state.get_data_parallel_group(with_context_parallel=True)
    sums = -(depths.mask * out.logps[-count:]).sum((1, 2))
    losses = sums / depths.tokens.clamp(min=1)
    collects = getattr(helper, "should_collect_acceptance", lambda: True)()
    save = getattr(helper, "save_loss_to_tracker", None)
    # The log function of Megatron's dev branch has parameters for the sum of losses and the number
    # of tokens.
    of_sums = save is not None and "num_tokens" in called(save)
    for k, name in enumerate(names):
        top1: Any = out.metrics[f"{name}/top1"]
        hits = top1.sum.float(), depths.mask[k].bool().sum().float()
        more: dict[str, Any] = {}
        if of_sums:
            more = {"correct": hits[0], "total": hits[1]} if collects else {}
            more["calculate_per_token_loss"] = depths.per_token
            save, values = helper.save_loss_to_tracker, (sums[k].float(), depths.tokens[k].float())
        elif hasattr(helper, "save_metrics_to_tracker"):
            save, values = helper.save_metrics_to_tracker, (losses[k].float(), *hits)
        else:  # Megatron-Core 0.18 logs only the loss.
            save, values = helper.save_loss_to_tracker, (losses[k].float(),)
        save(*values, k, count, avg_group=over, **more)


# ---------------------------------------------------------------------- depths and main prediction

WAITING: ContextVar[list[Depths] | None] = ContextVar("waiting", default=None)


def _waited_for(theirs: Any) -> Any:
    """Return a model's forward that passes the model's MTP depths to an `output_processor` whose
    attribute `takes_depths` is True."""

    @functools.wraps(theirs)
    def forward(*args: Any, output_processor: Any = None, **kwargs: Any) -> Any:
        takes = getattr(output_processor, "takes_depths", False)
        token = WAITING.set([] if takes else None)
        try:
            return theirs(*args, output_processor=output_processor, **kwargs)
        finally:
            WAITING.reset(token)

    return forward


def handed_on() -> Depths | None:
    """Return the MTP depths of the model's current call, for the model's output processor."""
    waiting = WAITING.get()
    return waiting.pop() if waiting else None


def _is_alike(config: Any) -> bool:
    """Return whether Megatron scales the main loss and the MTP losses by one factor, so that one
    gradient pass serves all of these losses.

    A detached head (`mtp_detach_heads`) always needs two gradient passes, one for the main loss and
    one for the MTP losses.
    """
    return not (
        config.calculate_per_token_loss
        or config.context_parallel_size > 1
        or getattr(config, "mtp_grad_scale_func", None) is not None
        or getattr(config, "mtp_detach_heads", False)
    )


def with_depths(
    depths: Depths, main: Tensor, head: Head, batch: Batch, objective: Objective, options: Options
) -> Output:
    """Return the main prediction's `head_loss`; its backward also adds the MTP depths' gradient.

    If all terms of `objective` are token means, one pass over the head serves the main prediction
    and the MTP depths; else two passes run.
    """
    if not _is_of_tokens(head, batch, objective):
        plain = replace(head, temperature=1.0, vocab_size=None)
        main = _tied(main, depths, plain, replace(options, metrics=True))
        return head_loss(main, head, batch, objective, options)
    options = replace(options, metrics=True)
    out, names = _run(depths, depths.hidden, head, options, batch, objective)
    terms = {name: value for name, value in out.terms.items() if name not in names}
    value: Any = sum(c * terms[name] for name, c, _ in objective.named())
    # `loss` has the value of the main loss, and the gradient of main loss plus MTP losses.
    loss = value + (out.loss - out.loss.detach())
    entropies = None if out.entropies is None else out.entropies[0]
    result = replace(out, loss=loss, terms=terms)
    vars(result).update(logps=out.logps[0], entropies=entropies)
    return result


def _is_of_tokens(head: Head, batch: Batch, objective: Objective) -> bool:
    """Return whether one `head_loss` can compute the rows of MTP depths and main prediction."""
    shape, heat = batch.targets.shape, head.temperature
    return (
        not isinstance(heat, Tensor)
        and (heat, head.vocab_size, batch.support) == (1.0, None, None)
        and not needs_segments(objective)
        and all(t.kept_field is None and t.teacher is None for _, t in objective.parts)
        and "candidate_ids" not in batch.fields
        and all(x is CURRENT or x.shape[:2] == shape for x in batch.fields.values())  # type: ignore[union-attr]
    )
