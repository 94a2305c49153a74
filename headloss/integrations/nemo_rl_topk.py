"""NeMo-RL's distillation from a teacher's top k without the student's logits, under Megatron.

    install()       in each policy worker; `DistillationLossFn` and its metrics stay NeMo-RL's
    uninstall()     NeMo-RL is as it was

The student's model hands on hidden states in the forward of a step with that loss, and nowhere
else: log-probs of a policy, and a teacher's own top k, are made of logits as before.

B rows of L positions, S of them on this rank under context parallelism, H hidden width, K ids.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from torch import Tensor, distributed, nn

from ..batch.batch import IGNORE
from .megatron_hidden import hand_on, latest
from .seams import Seams, part, require_arguments
from .shared import holders, refuse

PACKAGE = "nemo-rl"
TRAIN, MODELS = "nemo_rl.models.megatron.train", "nemo_rl.distributed.model_utils"
FORWARD, TOPK = "forward_with_post_processing_fn", "get_distillation_topk_logprobs_from_logits"


def install() -> None:
    """Put headloss in place of the student's top-k log-probs, in this process.

    Raises:
        RuntimeError: NeMo-RL has no such functions, or they take other arguments.
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
    require_arguments(forward, ("model", "post_processing_fn", "sampling_params"), FORWARD, PACKAGE)

    @functools.wraps(forward)
    def with_hidden_states(
        data_iterator: Any, model: Any, post_processing_fn: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not _distils(post_processing_fn):
            return forward(data_iterator, model, post_processing_fn, *args, **kwargs)
        sampling = kwargs.get("sampling_params")
        heat = 1.0 if sampling is None else sampling.temperature
        refuse("NeMo-RL without headloss", **{"a temperature in distillation": heat != 1.0})
        door = hand_on(model)
        try:
            output, finish = forward(data_iterator, model, post_processing_fn, *args, **kwargs)
        finally:
            if door is not None:
                door.close()
        return (output if door is None else _gathered(output)), finish

    ours = {forward: with_hidden_states, topk: topk_logprobs}
    return Seams({at: new for old, new in ours.items() for at in holders(old)}, PACKAGE)


def _distils(post_processing_fn: Any) -> bool:
    kind = getattr(getattr(post_processing_fn, "loss_fn", None), "input_type", None)
    return getattr(kind, "name", None) == "DISTILLATION"


def _gathered(hidden: Tensor) -> Tensor:
    """[B, S, H] of [B, S / tp, H]: packed sequences are cut out of whole rows."""
    if latest().ranks == 1:
        return hidden
    gather = import_module("megatron.core.tensor_parallel").gather_from_sequence_parallel_region
    rows = gather(hidden.transpose(0, 1).contiguous(), tensor_parallel_output_grad=False)
    return rows.transpose(0, 1)


def topk_logprobs(
    student_logits: Tensor,  # [B, S, H] hidden states, maybe of one packed sequence
    teacher_topk_logits: Tensor,  # [B, L, K]
    teacher_topk_indices: Tensor,  # [B, L, K]
    zero_outside_topk: bool,
    calculate_entropy: bool,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: Any = None,
    context_parallel_group: Any = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """In place of `get_distillation_topk_logprobs_from_logits`: log-probs of student and teacher
    [B, L - 1, K], over the whole vocabulary or (`zero_outside_topk` off) over the K; the sum of
    p log p of all tokens [B, L - 1], where it is asked for."""
    ids, length = teacher_topk_indices.to(student_logits.device).long(), student_logits.shape[1]
    cp = 1 if context_parallel_group is None else distributed.get_world_size(context_parallel_group)
    whole = ids.shape[1]
    if cp > 1:
        utils = import_module(MODELS)
        ids = nn.functional.pad(ids, (0, 0, 0, length * cp - whole), value=-1)
        rank = distributed.get_rank(context_parallel_group)
        ids = utils._get_tokens_on_this_cp_rank(ids, rank, cp, seq_dim=1)
    names = ("candidate_logps", "entropy") if calculate_entropy else ("candidate_logps",)
    hidden = student_logits[:, : ids.shape[1]]  # a packed sequence has its padding
    targets = ids[..., 0].masked_fill(ids[..., 0] < 0, IGNORE)
    stats = latest().stats(hidden, targets, gradients=names, gathered=True, candidate_ids=ids)
    values: list[Any] = [stats.candidate_logps]
    if calculate_entropy:
        values.append(-stats.entropy)
    if cp > 1:
        gather = import_module(MODELS).allgather_cp_sharded_tensor
        values = [gather(value, context_parallel_group, seq_dim=1)[:, :whole] for value in values]
    student = values[0] if zero_outside_topk else values[0].log_softmax(-1)
    teacher = teacher_topk_logits.to(student.device, student.dtype).log_softmax(-1)
    entropy = values[1][:, :-1] if calculate_entropy else None
    return student[:, :-1], teacher[:, :-1], entropy
