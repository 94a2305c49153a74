"""NeMo-RL's distillation under Megatron without the student's logits: from a teacher's top k, and
over the whole vocabulary (`opd_full`).

Call `install()` in each policy worker; NeMo-RL still computes losses and metrics. `uninstall()`
restores NeMo-RL's functions.

The student's model returns hidden states only in forwards with a distillation loss. The policy's
log-probs and the teacher's top-k ids are still computed from logits.

B rows, L positions (S on this rank under context parallelism), H hidden width, K ids in a teacher's
top k.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..batch.batch import IGNORE
from ..head.head import Head
from ..losses.teacher import Teacher, teacher
from .megatron_heads import linear_of
from .megatron_hidden import hand_on, latest
from .seams import Seams, part, require_arguments
from .shared import holders, refuse

PACKAGE = "nemo-rl"
TRAIN, MODELS = "nemo_rl.models.megatron.train", "nemo_rl.distributed.model_utils"
FORWARD, TOPK = "forward_with_post_processing_fn", "get_distillation_topk_logprobs_from_logits"
# Sources of NeMo-RL after 0.7 differ in the module and in the name of the function of `opd_full`.
INPUTS, UTILS = "nemo_rl.algorithms.loss.loss_input", "nemo_rl.algorithms.loss.utils"
FULL = ("_prepare_opd_full_loss_input", "prepare_opd_full_loss_input")
# NeMo-RL's module with the names of those batch columns that hold a teacher's data.
FIELDS = "nemo_rl.algorithms.opd"
KINDS = ("DISTILLATION", "OPD_FULL")  # Names in NeMo-RL's enum `LossInputType`.


def install() -> None:
    """Let headloss compute the student's top-k log-probs in this process, and also the divergence
    over the whole vocabulary if NeMo-RL has `opd_full`.

    Raises:
        RuntimeError: a replaced function is missing, or has unexpected arguments.
    """
    if not INSTALLED:
        seams = _seams()
        seams.install()
        INSTALLED.append(seams)


def uninstall() -> None:
    """Undo `install()`."""
    if INSTALLED:
        INSTALLED.pop().uninstall()


INSTALLED: list[Seams] = []


def _seams() -> Seams:
    forward, topk = part(PACKAGE, TRAIN, FORWARD), part(PACKAGE, MODELS, TOPK)
    full = _of_full_vocabulary()
    require_arguments(forward, ("model", "post_processing_fn", "sampling_params"), FORWARD, PACKAGE)

    @functools.wraps(forward)
    def with_hidden_states(
        data_iterator: Any, model: Any, post_processing_fn: Any, *args: Any, **kwargs: Any
    ) -> Any:
        kind = _kind(post_processing_fn)
        if kind not in KINDS:
            return forward(data_iterator, model, post_processing_fn, *args, **kwargs)
        sampling = kwargs.get("sampling_params")
        heat = 1.0 if sampling is None else sampling.temperature
        unsupported = {
            "a temperature in distillation": heat != 1.0,
            "opd_full of this NeMo-RL": kind == "OPD_FULL" and full is None,
        }
        refuse("NeMo-RL without headloss", **unsupported)
        door = hand_on(model)
        try:
            output, finish = forward(data_iterator, model, post_processing_fn, *args, **kwargs)
        finally:
            if door is not None:
                door.close()
        return (output if door is None else _gathered(output)), finish

    ours = {forward: with_hidden_states, topk: topk_logprobs}
    if full is not None:
        names = ("logits", "data", "loss_fn", "context_parallel_group", WEIGHTS)
        require_arguments(full, names, full.__name__, PACKAGE)
        ours[full] = full_divergence
    return Seams({at: new for old, new in ours.items() for at in holders(old)}, PACKAGE)


def _of_full_vocabulary() -> Any:
    """Return NeMo-RL's function of `opd_full`; None if NeMo-RL has no such function."""
    for home, name in itertools.product((INPUTS, UTILS), FULL):
        try:
            function = getattr(import_module(home), name, None)
        except ModuleNotFoundError:
            continue
        if function is not None:
            return function
    return None


def _kind(post_processing_fn: Any) -> str | None:
    """Return the name of the loss's member of NeMo-RL's enum `LossInputType`."""
    kind = getattr(getattr(post_processing_fn, "loss_fn", None), "input_type", None)
    return getattr(kind, "name", None)


def _gathered(hidden: Tensor) -> Tensor:
    """Return hidden states [B, S, H] gathered from [B, S / tp, H].

    NeMo-RL slices packed sequences out of rows of S positions, so the S / tp positions of each
    tensor-parallel rank are gathered first.
    """
    if latest().ranks == 1:
        return hidden
    gather = import_module("megatron.core.tensor_parallel").gather_from_sequence_parallel_region
    rows = gather(hidden.transpose(0, 1).contiguous(), tensor_parallel_output_grad=False)
    return rows.transpose(0, 1)


# ---------------------------------------------------------------------- context parallelism


def _ranks(group: Any) -> int:
    return 1 if group is None else distributed.get_world_size(group)


def _here(value: Tensor, length: int, group: Any, fill: float) -> Tensor:
    """Return this rank's slice [B, S, ..] of a value [B, L, ..], under context parallelism.

    Before slicing, `value` is padded with `fill` to `length` positions per rank of the group.
    """
    ranks = _ranks(group)
    missing = length * ranks - value.shape[1]
    if missing < 0 and ranks == 1:
        return value[:, :length]
    value = nn.functional.pad(value, (0, 0) * (value.dim() - 2) + (0, missing), value=fill)
    if ranks == 1:
        return value
    cut = import_module(MODELS)._get_tokens_on_this_cp_rank
    return cut(value, distributed.get_rank(group), ranks, seq_dim=1)


def _everywhere(value: Tensor, width: int, group: Any) -> Tensor:
    """Return the first `width` positions of the values [B, S, ..] gathered from all ranks."""
    if _ranks(group) > 1:
        value = import_module(MODELS).allgather_cp_sharded_tensor(value, group, seq_dim=1)
    return value[:, :width]


# ---------------------------------------------------------------------- a teacher's top k


def topk_logprobs(
    student_logits: Tensor,  # Hidden states [B, S, H]; under packing one row of all sequences.
    teacher_topk_logits: Tensor,  # The teacher's logits [B, L, K].
    teacher_topk_indices: Tensor,  # The teacher's ids [B, L, K].
    zero_outside_topk: bool,
    calculate_entropy: bool,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: Any = None,
    context_parallel_group: Any = None,
    cp_sharder: Any = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probs of student and teacher [B, L - 1, K], and the sum of p log p per token.

    Replaces `get_distillation_topk_logprobs_from_logits`. The student's log-probs of the teacher's
    top-K ids are normalised over the whole vocabulary, or over the K ids if `zero_outside_topk` is
    off; the teacher's log-probs are normalised over the K ids. The sum of p log p, [B, L - 1], is
    over the whole vocabulary; None unless `calculate_entropy` is set.
    """
    refuse("Automodel's worker without headloss", cp_sharder=cp_sharder is not None)
    group, width = context_parallel_group, teacher_topk_indices.shape[1] - 1
    ids = teacher_topk_indices.to(student_logits.device).long()
    ids = _here(ids, student_logits.shape[1], group, -1)
    names = ("candidate_logps", "entropy") if calculate_entropy else ("candidate_logps",)
    targets = ids[..., 0].masked_fill(ids[..., 0] < 0, IGNORE)
    stats = latest().stats(
        student_logits, targets, gradients=names, gathered=True, candidate_ids=ids
    )
    assert stats.candidate_logps is not None
    student = _everywhere(stats.candidate_logps, width, group)
    student = student if zero_outside_topk else student.log_softmax(-1)
    likeliest = teacher_topk_logits.to(student.device, student.dtype).log_softmax(-1)
    entropy = _everywhere(-stats.entropy, width, group) if calculate_entropy else None
    return student, likeliest[:, :-1], entropy


# ---------------------------------------------------------------------- the whole vocabulary

WEIGHTS = "teacher_output_layer_weight_by_index"


def full_divergence(
    logits: Tensor,  # Hidden states [B, S, H], possibly of one packed sequence.
    data: Any,
    loss_fn: Any,
    *,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: Any = None,
    context_parallel_group: Any = None,
    # For each teacher, the shard [V / tp, H'] of its output weight, with hidden width H'.
    teacher_output_layer_weight_by_index: dict[int, Tensor] | None = None,
    **settings: Any,
) -> dict[str, Tensor | None]:
    """Return KL(student || teacher), [B, L - 1], of the tokens in NeMo-RL's mask, and 0 elsewhere.

    Replaces `prepare_opd_full_loss_input`. The result also has entropies and cross-entropies if
    `validate_decomposition` is set, and log-probs for `reference_policy_kl_penalty`. The
    cross-entropy is computed as divergence plus entropy, so NeMo-RL's
    `opd_full_decomposition_error` is 0 up to rounding.

    Raises:
        ValueError: `data` lacks the field with the teacher's outputs, or a row names a teacher head
            that is not in `heads`.
    """
    group, config, ids = context_parallel_group, loss_fn.opd_full, data["input_ids"]
    length, width = logits.shape[1], ids.shape[1] - 1
    mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
    targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORE).to(logits.device).long()
    targets = _here(targets, length, group, IGNORE)
    penalised = getattr(loss_fn, "reference_policy_kl_penalty", 0) != 0
    names = ("reverse_kl", "logp") if penalised else ("reverse_kl",)
    vocab_group = vocab_parallel_group if _ranks(vocab_parallel_group) > 1 else None
    heads = teacher_output_layer_weight_by_index or {}
    rows, parts = [], []
    for of_teacher, measured, payload in _teachers(data, config, heads, vocab_group):
        chosen = of_teacher.to(logits.device)
        fields: dict[str, Any] = {
            name: _here(value, length, group, 0).contiguous().to(logits.device)
            for name, value in payload.items()
        }
        stats = latest().stats(
            logits[chosen],
            targets[chosen],
            gradients=names,
            gathered=True,
            teacher=measured,
            divergences=("reverse_kl",),
            **fields,
        )
        rows.append(chosen)
        parts.append((stats.divergences["reverse_kl"], stats.entropy, stats.logp))
    order = torch.cat(rows).argsort()
    of_rows = (torch.cat(part)[order] for part in zip(*parts, strict=True))
    divergence, entropy, logp = (_everywhere(value, width, group) for value in of_rows)
    checked = config.validate_decomposition
    values: dict[str, Tensor | None] = {
        "opd_full_divergence": divergence,
        "opd_full_entropy": -entropy.detach() if checked else None,
        "opd_full_cross_entropy": (divergence + entropy).detach() if checked else None,
    }
    return values | ({"next_token_logprobs": logp} if penalised else {})


def _teachers(
    data: Any, config: Any, heads: dict[int, Tensor], vocab_group: Any
) -> Iterator[tuple[Tensor, Teacher, dict[str, Tensor]]]:
    """Yield row numbers of the batch, the rows' teacher, and the teacher's data [rows, L, ..] by
    field name."""
    fields = import_module(FIELDS)
    name, of_index = (
        fields.opd_full_payload_field(config),
        fields.opd_full_teacher_index_field(config),
    )
    if name not in data:
        raise ValueError(f"data: got no {name!r}, want the teacher's payload under opd_full")
    payload = data[name]
    rows = torch.arange(len(payload), device=payload.device)
    if config.teacher_payload == "logits":
        layer = linear_of(latest().layer)
        columns = layer.output_size_per_partition
        first = columns * layer.tp_group.rank()
        yield rows, teacher(), {"teacher_logits": payload[..., first : first + columns]}
        return
    index = data[of_index] if of_index is not None and of_index in data else None
    if index is None:
        if len(heads) != 1:
            raise ValueError(f"{WEIGHTS}: got {len(heads)} heads, want 1, or rows with an index")
        index = rows.new_full((len(rows),), next(iter(heads)))
    for number in index.unique().tolist():
        if number not in heads:
            raise ValueError(f"{WEIGHTS}: got {sorted(heads)}, want {number}, which a row names")
        weight, chosen = heads[number], (index.to(rows.device) == number).nonzero().squeeze(1)
        hidden = payload[chosen].to(weight.dtype)
        yield chosen, teacher(Head(weight, vocab_group=vocab_group)), {"teacher_hidden": hidden}
