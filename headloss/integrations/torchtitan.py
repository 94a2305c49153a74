"""torchtitan's loss wrapper with headloss inside the model's `lm_head`, without logits.

    loss=HeadLossWrapper.Config()    # in place of ChunkedLossWrapper.Config(...)
    loss=HeadLossWrapper.Config(objective=hl.dapo(epsilon_high=0.25))

B rows of L positions, T = B L flat positions, H hidden width, D depths of multi-token prediction.
The loss is computed inside the forward of `lm_head`: FSDP2's hooks gather the weight before that
forward, and reduce the weight's gradient after the backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from ..batch.batch import IGNORE, Batch
from ..batch.segments import Segments
from ..head.head import Head
from ..head_loss import Output, head_loss
from ..losses import Objective, cross_entropy
from ..options import Options
from ..statistics.metrics import Metrics
from .documents import as_documents
from .seams import announce, check_signature, part, require_arguments, watch_of
from .shared import needs_segments, over_count, per, refuse

HOME = "torchtitan.components.loss"
ChunkedLossWrapper: Any = part("torchtitan", HOME, "ChunkedLossWrapper")
CrossEntropyLoss: Any = part("torchtitan", HOME, "CrossEntropyLoss")
SPMD = "torchtitan.distributed.spmd_types"
spmd_mesh_size: Any = part("torchtitan", SPMD, "spmd_mesh_size")
MTP = "torchtitan.models.deepseek_v3.mtp"
FIELDS = {"generator_logprobs": "old_logps"}  # Maps torchtitan's field names to headloss's.
# Mesh dimensions whose ranks hold different sequences, not parts of one sequence.
DATA = ("dp", "dp_replicate", "dp_shard")


class HeadLossWrapper(ChunkedLossWrapper):
    """Loss called as `(hidden, labels, global_valid_tokens, **loss_inputs)`, which returns the loss
    and an empty dict.

    `hidden` is [B, L, H] or [T, H]. For multi-token prediction, `hidden` is a tuple as accepted by
    `MTPLoss._build_loss_terms`, or a list of the main hidden states and D depths [B, L, H] together
    with `positions`; one `head_loss` call computes all 1 + D predictions.

    A term that is a mean over tokens is divided by `global_valid_tokens`, as in torchtitan's
    losses; without `global_valid_tokens` the divisor is 1. A term whose reduction is not the mean
    of tokens needs an optimizer step that makes one loss call. `loss_inputs` become fields of the
    batch: `generator_logprobs` becomes `old_logps`, and `loss_mask` chooses positions. A new
    document begins where `positions` restart at 0, and each document is one segment of the batch.

    A one-pass call holds the weight's gradient until the call's backward. While the weight gradient
    of one call waits in memory for its backward pass, later calls with `options.schedule` "auto"
    use the schedule "recompute". A pipeline that runs several forwards before the first backward,
    such as GPipe, holds only one weight gradient.

    Attributes:
        metrics: headloss's metrics of the last call; None before the first call.

    Raises:
        RuntimeError: torchtitan's own wrapper has unexpected arguments.
        TypeError: the class of `lm_head` is unknown.
        ValueError: an unsupported setting: a `loss_fn` other than `CrossEntropyLoss` and `MTPLoss`
            without an objective, several predictions with an objective, segments under context
            parallelism, a weight whose shards are not blocks of rows over "tp", or a reduction that
            cannot use the count of tokens.
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
        kind = type(self.loss_fn)
        of_depths = (kind.__module__, kind.__name__) == (MTP, "MTPLoss")
        if config.objective is None and kind is not CrossEntropyLoss and not of_depths:
            got = kind.__name__
            raise ValueError(f"loss_fn: got {got}, want it as objective, a sum of headloss's terms")
        objective = cross_entropy() if config.objective is None else config.objective
        self.objective, self.options = Objective.of(objective), config.options
        # Whether a call has multi-token prediction's depths in addition to the main prediction.
        self.several = of_depths and config.objective is None
        self.output: Output | None = None
        self.held: WeakSet[_Held] = WeakSet()
        watch_of("torchtitan").start()

    @property
    def metrics(self) -> Metrics | None:
        return None if self.output is None else self.output.metrics

    def __call__(
        self,
        pred: Any,  # Hidden states [B, L, H] or [T, H], or several predictions' hidden states.
        labels: Tensor,  # The labels [B, L] or [T], already shifted.
        global_valid_tokens: Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        watch_of("torchtitan").called = True
        module: Any = self.lm_head
        if module is None:
            raise ValueError("lm_head: is not set, call set_lm_head first")
        count = _local(global_valid_tokens)
        if isinstance(pred, Tensor) == self.several:
            want = "main rows and depths of" if self.several else "one tensor without"
            raise ValueError(f"pred: got {type(pred).__name__}, want {want} MTPLoss")
        if not self.several:
            like, hidden = pred, _replicated(pred)
            batch, objective = self._of_one(pred, labels, count, loss_inputs)
        else:
            like, hidden, batch, objective = self._of_several(pred, labels, count, loss_inputs)
        own, options = vars(module).get("forward"), self.options
        if self.held and options.schedule == "auto":
            options = replace(options, schedule="recompute")

        def forward(hidden: Tensor) -> Tensor:
            restore()
            out = head_loss(hidden, head_of(module), batch, objective, options)
            self.output = replace(out, loss=out.loss.detach())  # Metrics are computed on demand.
            return out.loss

        def restore() -> None:
            vars(module).pop("forward", None)
            if own is not None:
                module.forward = own

        module.forward = torch.compiler.disable(forward)
        try:
            loss = module(hidden)
        finally:
            restore()
        if loss.requires_grad:
            loss.register_hook(_releasing(self.held))
        return _as_loss(loss, like), {}

    def _of_one(
        self, pred: Tensor, labels: Any, count: Any, inputs: dict[str, Any]
    ) -> tuple[Batch, Objective]:
        labels = _local(labels)
        inputs = {name: _local(value) for name, value in inputs.items()}
        if (mask := inputs.pop("loss_mask", None)) is not None:
            labels = labels.masked_fill(~mask.bool(), IGNORE)
        segments, positions = None, inputs.pop("positions", None)
        if needs_segments(self.objective):
            refuse("ChunkedLossWrapper", context_parallel=_is_cut(pred))
            if positions is not None:
                rows = labels.view(-1, labels.shape[-1])  # Flat tokens [T] are treated as one row.
                documents = as_documents(positions, rows.shape, targets=rows)
                segments = Segments.from_ids(documents.ids.view(labels.shape), documents.count)
        fields = {FIELDS.get(name, name): value for name, value in inputs.items()}
        batch = Batch(labels, segments, **fields)
        objective = over_count(
            self.objective,
            count,
            batch,
            name="global_valid_tokens",
            instead="want a mean of tokens, or a headloss.Reduction with a denominator of its own",
        )
        return batch, objective

    def _of_several(
        self, pred: Any, labels: Any, count: Any, inputs: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Batch, Objective]:
        """Return the concatenated rows of the main prediction and of the depths of multi-token
        prediction, with a weight for each row."""
        if hasattr(self.loss_fn, "_build_loss_terms"):
            terms = self.loss_fn._build_loss_terms(pred, labels, **inputs)
            parts = [(term.pred, term.labels, term.weight) for term in terms]
        else:
            parts = _depths(pred, labels, inputs.get("positions"), self.loss_fn.mtp_scale)
        hidden = torch.cat([_replicated(x).flatten(0, -2) for x, _, _ in parts])
        targets = [_local(x).flatten() for _, x, _ in parts]
        weights = [
            torch.full(x.shape, float(weight), device=x.device)
            for x, (_, _, weight) in zip(targets, parts, strict=True)
        ]
        batch = Batch(torch.cat(targets), prediction_weights=torch.cat(weights))
        over = per(1 if count is None else count + (count == 0))
        objective = Objective.of(cross_entropy().over(over).weighted("prediction_weights"))
        return parts[0][0], hidden, batch, objective


class _Held:
    """Marker object that exists while a weight gradient waits in memory for the loss's backward."""


def _releasing(held: WeakSet[_Held]) -> Any:
    """Add a `_Held` marker, which says that a weight gradient waits in memory, to the weak set
    `held`; return a backward hook that removes the marker.

    The backward hook holds the only reference to the `_Held` marker, so if no backward pass runs,
    the marker leaves the `WeakSet` `held` when autograd frees the loss's graph.
    """
    gradient = _Held()
    held.add(gradient)
    return lambda _: held.discard(gradient)


def _depths(
    pred: Any, labels: Any, positions: Any, scale: float
) -> list[tuple[Tensor, Tensor, float]]:
    """Return predictions, labels and weights as in torchtitan 0.3's `MTPLoss`.

    The label at prediction depth k is the token k positions after the main prediction's label;
    torchtitan's `roll_mtp_sequence` shifts the labels within documents.
    """
    if positions is None:
        raise ValueError("positions: got None with several predictions, want [B, L]")
    roll = part("torchtitan", MTP, "roll_mtp_sequence")
    parts = [(pred[0], labels[:, : pred[0].shape[1]], 1.0)]
    for depth, hidden in enumerate(pred[1:], 1):
        length = hidden.shape[1]
        shifted = roll(
            labels[:, :length], shift=depth, fill_value=IGNORE, positions=positions[:, :length]
        )
        parts.append((hidden, shifted, scale / (len(pred) - 1)))
    return parts


def head_of(module: nn.Module) -> Head:
    """Return the `Head` of a torchtitan linear layer, with the layer's tensor-parallel group.

    TypeError for an unknown class of layer, ValueError for a weight with unsupported sharding.
    """
    kind, more = type(module).forward.__qualname__.split(".")[0], {}
    if kind not in ("Linear", "CastLinear", "SoftCappedLinear"):
        raise TypeError(f"lm_head: got {kind}, want Linear, CastLinear or SoftCappedLinear")
    layer: Any = module
    if kind == "SoftCappedLinear":
        more = {"logit_scale": layer.output_multiplier, "softcap": layer.output_soft_cap_temp}
    weight, bias, group = layer.weight, layer.bias, None
    if isinstance(weight, DTensor):
        weight, group = _rows(weight)
        bias = None if bias is None else _rows(bias)[0]
    elif spmd_mesh_size("tp") > 1:
        # Under torchtitan's spmd_types, `weight` is a plain tensor with the rows of this rank.
        group = part("torchtitan", SPMD, "current_spmd_mesh")().get_group("tp")
    if group is not None:
        refuse("ChunkedLossWrapper", **{"a bias under tensor parallelism": bias is not None})
    return Head(weight, bias, vocab_group=group, **more)


# ---------------------------------------------------------------------- tensor parallelism


def _rows(weight: DTensor) -> tuple[Tensor, Any]:
    """Return this rank's rows [V / tp, H] and the tensor-parallel group, or None without a group.

    Over the data dimensions of the mesh, the rank's gradient is a partial sum.
    """
    mesh, names = weight.device_mesh, weight.device_mesh.mesh_dim_names or ()
    placed = dict(zip(names, weight.placements, strict=True))
    others = [placement for name, placement in placed.items() if name != "tp"]
    split = "tp" not in placed or placed["tp"].is_shard(0)
    if not split or not placed or any(not placement.is_replicate() for placement in others):
        raise ValueError(
            f'lm_head.weight: got a DTensor placed {placed}, want rows sharded over "tp" alone'
        )
    grads = [p if name == "tp" else Partial() for name, p in placed.items()]
    group = mesh.get_group("tp") if "tp" in placed else None
    return weight.to_local(grad_placements=grads), group


def _replicated(hidden: Tensor) -> Tensor:
    """Return local hidden states that are equal on all tensor-parallel ranks, and have equal
    gradients."""
    if isinstance(hidden, DTensor):
        return hidden.to_local(grad_placements=hidden.placements)
    ranks = spmd_mesh_size("tp")
    return hidden if ranks == 1 else _Shared.apply(hidden, ranks)


class _Shared(torch.autograd.Function):
    """Return the hidden states unchanged, and divide their gradient by the number of
    tensor-parallel ranks.

    Under torchtitan's spmd_types each rank computes the whole gradient, but torchtitan sums the
    gradients over all ranks.
    """

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
    """Return whether context parallelism splits the sequences over ranks."""
    if not isinstance(hidden, DTensor):
        return spmd_mesh_size("cp") > 1
    along, placements = hidden.dim() - 2, hidden.placements
    names = hidden.device_mesh.mesh_dim_names or ("",) * len(placements)
    # Flat tokens are sharded along dimension 0 by both data and context parallelism.
    return any(
        placement.is_shard(along) and (along == 1 or name not in DATA)
        for name, placement in zip(names, placements, strict=True)
    )


def _as_loss(loss: Tensor, hidden: Tensor) -> Tensor:
    """Return the loss as a DTensor, a sum over data shards, if the hidden states are a sharded
    DTensor.

    torchtitan's full_dtensor mode shards hidden states over the data-parallel ranks.
    """
    if not isinstance(hidden, DTensor) or all(p.is_replicate() for p in hidden.placements):
        return loss
    placements = [p if p.is_replicate() else Partial() for p in hidden.placements]
    return DTensor.from_local(loss, hidden.device_mesh, placements, run_check=False)


def check() -> str:
    """Return a text that says which torchtitan code was checked.

    RuntimeError if torchtitan's wrapper has unexpected arguments.
    """
    theirs, ours = ChunkedLossWrapper, HeadLossWrapper
    seam = "ChunkedLossWrapper.__call__"
    require_arguments(theirs.__call__, ("global_valid_tokens",), seam, "torchtitan")
    check_signature(theirs.__call__, ours.__call__, seam, "torchtitan")
    set_head = part("torchtitan", f"{HOME}:ChunkedLossWrapper", "set_lm_head")
    require_arguments(set_head, ("lm_head",), "ChunkedLossWrapper.set_lm_head", "torchtitan")
    return f"the signature of {seam}"
