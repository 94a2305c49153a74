"""Comparison of NeMo-RL's distillation losses, computed from logits, with headloss's, computed from
hidden states.

NeMo-RL's functions, losses and packed-sequence loop come from its sources and run on every rank,
with Megatron-Core's model.
"""

from __future__ import annotations

import enum
import itertools
import math
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed.nn  # used by NeMo-RL's functions
from megatron_ranks import V, config_of, gradients, model_of, parallel, worst
from parity import extracted, file_of
from torch import Tensor

# Number of top-k ids per token; padded and true lengths of the two sequences.
K, PADDED, LENGTHS = 5, (8, 4), (7, 4)
WIDTHS = 12  # Hidden width of the teacher models.
# Folder below .frameworks/ with NeMo-RL's sources that have full on-policy distillation, which no
# release has. `make test-frameworks` skips the comparison, since sources.txt lacks the folder.
OPD = "nemo_rl_opd"
LossInputType = enum.Enum("LossInputType", ["DISTILLATION", "OPD_FULL"])
LossType = enum.Enum("LossType", ["TOKEN_LEVEL", "SEQUENCE_LEVEL"])


class Rows(dict[str, Any]):
    """A replacement for NeMo-RL's `BatchedDataDict`."""

    def slice(self, first: int, last: int) -> Rows:
        return Rows({name: value[first:last] for name, value in self.items()})


class Settings(dict[str, Any]):
    """Settings with keys (NeMo-RL's releases) and attributes (its main branch)."""

    __getattr__ = dict.__getitem__


def stock(tree: str) -> Any:
    """Return NeMo-RL's functions of logits, and its loss over packed sequences."""
    file = file_of(tree, "nemo_rl/distributed/model_utils.py")
    source = file.read_text()
    names = [
        "_compute_distributed_log_softmax", "_compute_distributed_log_softmax_with_grad",
        "_compute_distributed_softmax",
        "_get_tokens_on_this_cp_rank", "AllGatherCPTensor", "allgather_cp_sharded_tensor",
        "_AllReduceSum", "ChunkedDistributedGatherLogprob", "ChunkedDistributedEntropy",
        "gather_logits_at_global_indices", "get_distillation_topk_logprobs_from_logits",
        "DistributedLogprob", "from_parallel_logits_to_logprobs",
        "get_next_token_logprobs_from_logits",
        "ChunkedDistributedCrossEntropyToFixedLogits", "ChunkedDistributedReverseKLToFixedLogits",
        "_entropy_weight", "_cross_entropy_weight", "_reverse_kl_weight",
        "_chunked_distributed_student_teacher_reduction",
        "_chunked_distributed_student_teacher_backward", "_student_teacher_log_softmax_chunk",
        "_validate_student_teacher_logits",
    ]  # fmt: skip
    names = [n for n in names if f"def {n}(" in source or f"class {n}(" in source]
    torch.Tensor.cuda = lambda self, *args, **more: self  # type: ignore[method-assign]
    space: Any = ModuleType("torch")
    vars(space).update(vars(torch))
    # No pinned memory on a CPU.
    space.tensor = lambda *args, pin_memory=False, **more: torch.tensor(*args, **more)
    filtered = {"need_top_k_or_top_p_filtering": lambda settings: False}
    own = extracted(file, *names, Any=Any, Optional=None, torch=space, **filtered)
    wrapper = file_of(tree, "nemo_rl/algorithms/loss/wrapper.py")
    name = "SequencePackingLossWrapper"
    vars(own).update(vars(extracted(wrapper, name, Tensor=Tensor, Callable=Callable)))
    return own


def utilities(tree: str) -> dict[str, Any]:
    file = file_of(tree, "nemo_rl/algorithms/utils.py")
    return vars(extracted(file, "masked_mean", "calculate_kl"))


def installed_as(tree: str, own: Any, **more: Any) -> Any:
    """Install stub modules under NeMo-RL's names, filled with the functions that headloss replaces;
    return the stub that holds the training forward."""
    from headloss.integrations import nemo_rl_distillation as adapter

    home, train = ModuleType(adapter.MODELS), ModuleType(adapter.TRAIN)
    vars(home).update(vars(own))

    def forward(
        data_iterator: Any, model: Any, post_processing_fn: Any, sampling_params: Any = None
    ) -> Any:
        ids = next(data_iterator)
        places = torch.arange(ids.shape[1]).expand(ids.shape)
        return model(ids, places, None), post_processing_fn

    train.forward_with_post_processing_fn = forward  # type: ignore[attr-defined]
    sys.modules.update({adapter.MODELS: home, adapter.TRAIN: train})
    for name, values in more.items():
        module = sys.modules[name.replace("__", ".")] = ModuleType(name)
        vars(module).update(values)
    return train


def groups() -> dict[str, Any]:
    from megatron.core import mpu

    return {
        "vocab_parallel_rank": mpu.get_tensor_model_parallel_rank(),
        "vocab_parallel_group": mpu.get_tensor_model_parallel_group(),
        "context_parallel_group": mpu.get_context_parallel_group(),
    }


def measured(
    train: Any, model: Any, own: Any, rows: list[Tensor], data: Rows, loss_fn: Any, prepare: Any
) -> tuple[dict[str, float], list[Tensor]]:
    """Return loss and metrics of packed sequences and the model's gradients, by NeMo-RL's loop."""
    group = groups()["context_parallel_group"]
    cp, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    local = [own._get_tokens_on_this_cp_rank(x[None], rank, cp) for x in rows]
    kind = SimpleNamespace(loss_fn=loss_fn)
    output, _ = train.forward_with_post_processing_fn(iter([torch.cat(local, 1)]), model, kind)
    ends = (itertools.accumulate(sizes, initial=0) for sizes in (data["lengths"], PADDED))
    cut = own.SequencePackingLossWrapper(
        loss_fn, prepare, *(torch.tensor([*x]) for x in ends), **groups()
    )
    loss, metrics = cut(output, data, torch.tensor(2.0), torch.tensor(9.0))
    loss.backward()
    return {**metrics, "total": float(loss)}, gradients(model)


def batch(rows: list[Tensor], lengths: tuple[int, ...] = LENGTHS, **fields: list[Tensor]) -> Rows:
    """Return a NeMo-RL batch of padded rows, with masked prompts and padding."""
    mask = torch.zeros(len(rows), max(lengths))
    for row, length in zip(mask, lengths, strict=True):
        row[2:length] = 1

    def padded(values: list[Tensor]) -> Tensor:
        cut = [x[:n] for x, n in zip(values, lengths, strict=True)]
        return torch.nn.utils.rnn.pad_sequence(cut, batch_first=True)

    return Rows(
        input_ids=padded(rows),
        token_mask=mask,
        sample_mask=torch.ones(len(rows)),
        lengths=torch.tensor(lengths),
        **{name: padded(values) for name, values in fields.items()},
    )


def compared(found: list[tuple[dict[str, float], list[Tensor]]]) -> dict[str, float]:
    (want, grads), (got, our_grads) = found
    assert list(got) == list(want)
    apart = {name: abs(got[name] - x) / max(1, abs(x)) for name, x in want.items()}
    assert all(map(math.isfinite, apart.values())), (got, want)
    return apart | {"gradient": worst(our_grads, grads)}


# ---------------------------------------------------------------------- a teacher's top k


def topk(tree: str, size: int, spread: bool) -> dict[str, float]:
    """Compare six of NeMo-RL's top-k distillation losses with headloss's over two packed sequences,
    under tensor (`size` 2) or context parallelism (`size` 1)."""
    from headloss.integrations import nemo_rl_distillation as adapter

    parallel(size, context_parallel_size=2 // size)
    own = stock(tree)
    file = file_of(tree, "nemo_rl/algorithms/loss/loss_functions.py")
    kinds = {"LossFunction": object, "LossType": LossType, "LossInputType": LossInputType}
    kind = extracted(file, "DistillationLossFn", Any=Any, **kinds, **utilities(tree))
    train = installed_as(tree, own)
    model = model_of(config_of(size, sequence_parallel=spread), attention=False, length=32)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(V, (n,), generator=generator) for n in PADDED]
    likeliest = [(4 * torch.randn(n, V, generator=generator)).topk(K) for n in PADDED]
    logits, ids = ([getattr(x, name) for x in likeliest] for name in ("values", "indices"))
    # Under tensor parallelism a backward pass of NeMo-RL fails if a sequence ends in padding.
    lengths = PADDED if size == 2 else LENGTHS
    data = batch(rows, lengths, teacher_topk_logits=logits, teacher_topk_indices=ids)

    def prepare(logits: Tensor, data: Rows, loss_fn: Any, **groups: Any) -> Any:
        """Run the distillation branch of NeMo-RL's `prepare_loss_input`."""
        home = sys.modules[adapter.MODELS]
        student, teacher, entropy = home.get_distillation_topk_logprobs_from_logits(
            student_logits=logits,
            teacher_topk_logits=data["teacher_topk_logits"],
            teacher_topk_indices=data["teacher_topk_indices"],
            zero_outside_topk=loss_fn.zero_outside_topk,
            calculate_entropy=loss_fn.zero_outside_topk and loss_fn.kl_type != "forward",
            **groups,
        )
        names = "student_topk_logprobs", "teacher_topk_logprobs", "H_all"
        return dict(zip(names, (student, teacher, entropy), strict=True)), data

    apart: dict[str, float] = {}
    for divergence, outside in itertools.product(("forward", "reverse", "mixed"), (True, False)):
        settings = Settings(kl_type=divergence, mixed_kl_weight=0.3, zero_outside_topk=outside)
        arguments = train, model, own, rows, data, kind.DistillationLossFn(settings), prepare
        found = []
        for ours in (False, True):
            if ours:
                adapter.install()
            found.append(measured(*arguments))
        adapter.uninstall()
        assert "forward" not in vars(model.output_layer)
        apart |= {f"{divergence}/{outside}/{n}": x for n, x in compared(found).items()}
    return apart


# ---------------------------------------------------------------------- the whole vocabulary


def of_full_vocabulary(own: Any, level: str, payload: str, penalty: float) -> tuple[Any, Any]:
    """Return NeMo-RL's full-vocabulary loss, and the module that prepares the loss inputs."""
    helpers = {"LossType": LossType, "KL_PENALTY_KEY": "kl_penalty", **utilities(OPD)}
    folder = "nemo_rl/algorithms/loss"
    names = {"Any": Any, "Optional": None, "Tensor": Tensor, **helpers}
    call = "ClippedPGLossFn._opd_full_call"
    loss = extracted(file_of(OPD, f"{folder}/loss_functions.py"), call, **names)._opd_full_call
    config = {
        "teacher_payload": payload, "chunk_size": 3, "validate_decomposition": True,
    }  # fmt: skip
    given = {
        "input_type": LossInputType.OPD_FULL, "loss_type": LossType[level],
        "opd_full": SimpleNamespace(**config), "reference_policy_kl_penalty": penalty,
        "reference_policy_kl_type": "k3", "kl_input_clamp_value": 20.0,
        "kl_output_clamp_value": 10.0,
    }  # fmt: skip

    class Loss:
        def __call__(self, **inputs: Any) -> Any:
            return loss(self, **{"next_token_logprobs": None, **inputs})

    loss_fn = Loss()
    vars(loss_fn).update(given)
    functions = ("_project_hidden_states_per_teacher", "reconstruct_opd_full_teacher_logits")
    rebuilt = extracted(file_of(OPD, f"{folder}/utils.py"), *functions, **names, **vars(own))
    inputs = file_of(OPD, f"{folder}/loss_input.py")
    full = "_prepare_opd_full_loss_input"
    prepared = extracted(inputs, full, **names, **vars(own), **vars(rebuilt))
    return loss_fn, vars(prepared)


def full(size: int, spread: bool, level: str, payload: str, penalty: float) -> dict[str, float]:
    """Compare loss, metrics and gradients of NeMo-RL's full on-policy distillation (`opd_full`) on
    packed rows, taught by two teachers' hidden states or by logits."""
    from megatron.core import mpu

    from headloss.integrations import nemo_rl_distillation as adapter

    parallel(size, context_parallel_size=2 // size)
    own = stock(OPD)
    loss_fn, prepared = of_full_vocabulary(own, level, payload, penalty)
    fields = {
        "opd_full_payload_field": lambda config: "payload",
        "opd_full_teacher_index_field": lambda config: "teacher",
    }
    inputs = adapter.INPUTS.replace(".", "__")
    train = installed_as(OPD, own, **{inputs: prepared, adapter.FIELDS.replace(".", "__"): fields})
    model = model_of(config_of(size, sequence_parallel=spread), attention=False, length=32)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(V, (n,), generator=generator) for n in PADDED]
    width = WIDTHS if payload == "hidden_states" else V
    data = batch(
        rows,
        payload=[2 * torch.randn(n, width, generator=generator) for n in PADDED],
        reference_policy_logprobs=[-torch.rand(n, generator=generator) for n in PADDED],
    )
    tensor_rank, columns = mpu.get_tensor_model_parallel_rank(), V // size
    heads = {}
    if payload == "hidden_states":
        whole = {number: torch.randn(V, WIDTHS, generator=generator) for number in (7, 3)}
        heads = {n: x.split(columns)[tensor_rank].contiguous() for n, x in whole.items()}
        data["teacher"] = torch.tensor([3, 7])

    def prepare(**given: Any) -> Any:
        of_all = {"sampling_params": None, "chunk_size": None, adapter.WEIGHTS: heads}
        return sys.modules[adapter.INPUTS]._prepare_opd_full_loss_input(**given, **of_all), given[
            "data"
        ]

    found = []
    for ours in (False, True):
        if ours:
            adapter.install()
        found.append(measured(train, model, own, rows, data, loss_fn, prepare))
    adapter.uninstall()
    assert len(found[0][0]) == 10, found[0][0]  # compare the loss and all its metrics
    return compared(found)
