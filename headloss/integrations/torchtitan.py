"""torchtitan's loss wrapper, with headloss inside the model's `lm_head` and no logits.

    loss=HeadLossWrapper.Config()    # in place of ChunkedLossWrapper.Config(...)
    loss=HeadLossWrapper.Config(objective=hl.dapo(epsilon_high=0.25))

B rows of L positions, H hidden width. The loss is taken in the forward of `lm_head`, where FSDP2's
hooks gather its weight before, and send its gradient on its way after.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from ..batch.batch import IGNORE, Batch
from ..head.head import Head
from ..head_loss import head_loss
from ..losses import Objective, cross_entropy
from ..options import Options
from ..statistics.metrics import Metrics
from .documents import as_documents
from .seams import announce, check_signature, part, require_arguments
from .shared import needs_segments, over_count, refuse

HOME = "torchtitan.components.loss"
ChunkedLossWrapper: Any = part("torchtitan", HOME, "ChunkedLossWrapper")
CrossEntropyLoss: Any = part("torchtitan", HOME, "CrossEntropyLoss")
SPMD = "torchtitan.distributed.spmd_types"
spmd_mesh_size: Any = part("torchtitan", SPMD, "spmd_mesh_size")
FIELDS = {"generator_logprobs": "old_logps"}  # torchtitan's names


class HeadLossWrapper(ChunkedLossWrapper):
    """`(hidden, labels, global_valid_tokens, **loss_inputs)` to the loss and no metrics.

    Terms over the mean of tokens are divided by `global_valid_tokens`, or by 1 without, as
    torchtitan's losses are; other reductions serve a step of one call. `loss_inputs` become fields
    of the batch: `generator_logprobs` is `old_logps`, `loss_mask` chooses positions, documents of
    `positions` that start anew are the segments of terms that ask for segments.

    Attributes:
        metrics: headloss's, of the last call; None before.

    Raises:
        RuntimeError: torchtitan's own wrapper takes other arguments.
        TypeError: an lm_head that is not known.
        ValueError: what is not supported: a `loss_fn` other than cross-entropy without an
            objective, segments under context parallelism, a weight that is sharded by anything but
            rows over "tp"; a reduction that the count of tokens does not serve.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        objective: Any = None
        """A term or an objective; default: cross-entropy."""
        options: Options = field(default_factory=Options)
        """Of `head_loss`; `num_chunks` has no effect."""

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        announce("torchtitan", check())
        super().__init__(config, compile_config=compile_config)
        if config.objective is None and type(self.loss_fn) is not CrossEntropyLoss:
            got = type(self.loss_fn).__name__
            raise ValueError(f"loss_fn: got {got}, want it as objective, a sum of headloss's terms")
        given = cross_entropy() if config.objective is None else config.objective
        self.objective, self.options = Objective.of(given), config.options
        self.metrics: Metrics | None = None

    def __call__(
        self,
        pred: Tensor,  # [B, L, H]
        labels: Tensor,  # [B, L], shifted
        global_valid_tokens: Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        module: Any = self.lm_head
        if module is None:
            raise ValueError("lm_head: is not set, call set_lm_head first")
        given, pred = pred, _replicated(pred)
        labels, global_valid_tokens = _local(labels), _local(global_valid_tokens)
        loss_inputs = {name: _local(value) for name, value in loss_inputs.items()}
        if (mask := loss_inputs.pop("loss_mask", None)) is not None:
            labels = labels.masked_fill(~mask.bool(), IGNORE)
        segments, positions = None, loss_inputs.pop("positions", None)
        if needs_segments(self.objective):
            refuse("ChunkedLossWrapper", context_parallel=_is_cut(given))
            if positions is not None:
                segments = as_documents(positions, labels.shape, targets=labels)
        fields = {FIELDS.get(name, name): value for name, value in loss_inputs.items()}
        batch = Batch(labels, segments, **fields)
        objective = over_count(
            self.objective,
            global_valid_tokens,
            batch,
            name="global_valid_tokens",
            instead="want a mean of tokens, or a headloss.Reduction with a denominator of its own",
        )
        own = vars(module).get("forward")

        def forward(hidden: Tensor) -> Tensor:
            restore()
            out = head_loss(hidden, head_of(module), batch, objective, self.options)
            self.metrics = out.metrics
            return out.loss

        def restore() -> None:
            vars(module).pop("forward", None)
            if own is not None:
                module.forward = own

        module.forward = torch.compiler.disable(forward)
        try:
            return _as_loss(module(pred), given), {}
        finally:
            restore()


def head_of(module: nn.Module) -> Head:
    """The head of torchtitan's linear layers, with the group of tensor parallelism; TypeError for
    one that is not known, ValueError for a weight that is sharded otherwise."""
    kind, more = type(module).forward.__qualname__.split(".")[0], {}
    if kind not in ("Linear", "CastLinear", "SoftCappedLinear"):
        raise TypeError(f"lm_head: got {kind}, want Linear, CastLinear or SoftCappedLinear")
    layer: Any = module
    if kind == "SoftCappedLinear":
        more = {"logit_scale": layer.output_multiplier, "softcap": layer.output_soft_cap_temp}
    weight, group = layer.weight, None
    if isinstance(weight, DTensor):
        weight, group = _rows(weight)
    elif spmd_mesh_size("tp") > 1:  # spmd_types: plain rows
        group = part("torchtitan", SPMD, "current_spmd_mesh")().get_group("tp")
    if group is not None:
        refuse("ChunkedLossWrapper", **{"a bias under tensor parallelism": layer.bias is not None})
    return Head(weight, layer.bias, vocab_group=group, **more)


# ---------------------------------------------------------------------- tensor parallelism


def _rows(weight: DTensor) -> tuple[Tensor, Any]:
    """This rank's rows [V / tp, H] and their group. Over the mesh's other dimensions, which are
    those of data, the ranks' gradients are yet to be added."""
    mesh, names = weight.device_mesh, weight.device_mesh.mesh_dim_names or ()
    placed = dict(zip(names, weight.placements, strict=True))
    split = "tp" in placed and placed["tp"].is_shard(0)
    if not split or any(not p.is_replicate() for name, p in placed.items() if name != "tp"):
        raise ValueError(
            f'lm_head.weight: got a DTensor placed {placed}, want rows sharded over "tp" alone'
        )
    grads = [p if name == "tp" else Partial() for name, p in placed.items()]
    return weight.to_local(grad_placements=grads), mesh.get_group("tp")


def _replicated(hidden: Tensor) -> Tensor:
    """Local hidden states, alike on all ranks of tensor parallelism, as their gradient is."""
    if isinstance(hidden, DTensor):
        return hidden.to_local(grad_placements=hidden.placements)
    ranks = spmd_mesh_size("tp")
    return hidden if ranks == 1 else _Shared.apply(hidden, ranks)


class _Shared(torch.autograd.Function):
    """Replicated hidden states under spmd_types, where the ranks' gradients are added later: each
    gives its share of the whole gradient, which it has."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.ranks, None


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _is_cut(hidden: Tensor) -> bool:
    """Whether context parallelism gives this rank a part of the sequences."""
    if isinstance(hidden, DTensor):
        return any(p.is_shard(1) for p in hidden.placements)
    return spmd_mesh_size("cp") > 1


def _as_loss(loss: Tensor, hidden: Tensor) -> Tensor:
    """Beside hidden states that are sharded over data, as under full_dtensor, a DTensor: the sum
    over their shards."""
    if not isinstance(hidden, DTensor) or all(p.is_replicate() for p in hidden.placements):
        return loss
    placements = [p if p.is_replicate() else Partial() for p in hidden.placements]
    return DTensor.from_local(loss, hidden.device_mesh, placements, run_check=False)


def check() -> str:
    """What holds. RuntimeError where torchtitan's own wrapper takes other arguments."""
    theirs, ours = ChunkedLossWrapper, HeadLossWrapper
    seam = "ChunkedLossWrapper.__call__"
    require_arguments(theirs.__call__, ("global_valid_tokens",), seam, "torchtitan")
    check_signature(theirs.__call__, ours.__call__, seam, "torchtitan")
    set_head = part("torchtitan", f"{HOME}:ChunkedLossWrapper", "set_lm_head")
    require_arguments(set_head, ("lm_head",), "ChunkedLossWrapper.set_lm_head", "torchtitan")
    return f"the signature of {seam}"
