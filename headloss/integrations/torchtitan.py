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
spmd_mesh_size: Any = part("torchtitan", "torchtitan.distributed.spmd_types", "spmd_mesh_size")
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
            objective, tensor parallelism, segments under context parallelism; a reduction that the
            count of tokens does not serve.
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
        refuse(
            "ChunkedLossWrapper",
            tensor_parallel=spmd_mesh_size("tp") > 1,
            DTensor=any(hasattr(given, "full_tensor") for given in (pred, labels)),
        )
        if (mask := loss_inputs.pop("loss_mask", None)) is not None:
            labels = labels.masked_fill(~mask.bool(), IGNORE)
        segments, positions = None, loss_inputs.pop("positions", None)
        if needs_segments(self.objective):
            refuse("ChunkedLossWrapper", context_parallel=spmd_mesh_size("cp") > 1)
            if positions is not None:
                segments = as_documents(positions, labels.shape, targets=labels)
        fields = {FIELDS.get(name, name): value for name, value in loss_inputs.items()}
        batch = Batch(labels, segments, **fields)
        objective = over_count(
            self.objective, global_valid_tokens, batch, name="global_valid_tokens",
            instead="want a mean of tokens, or a headloss.Reduction with a denominator of its own",
        )  # fmt: skip
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
            return module(pred), {}
        finally:
            restore()


def head_of(module: nn.Module) -> Head:
    """The head of torchtitan's linear layers; TypeError for one that is not known."""
    kind, more = type(module).forward.__qualname__.split(".")[0], {}
    if kind not in ("Linear", "CastLinear", "SoftCappedLinear"):
        raise TypeError(f"lm_head: got {kind}, want Linear, CastLinear or SoftCappedLinear")
    layer: Any = module
    refuse("ChunkedLossWrapper", tensor_parallel=hasattr(layer.weight, "full_tensor"))
    if kind == "SoftCappedLinear":
        more = {"logit_scale": layer.output_multiplier, "softcap": layer.output_soft_cap_temp}
    return Head(layer.weight, layer.bias, **more)


def check() -> str:
    """What holds. RuntimeError where torchtitan's own wrapper takes other arguments."""
    theirs, ours = ChunkedLossWrapper, HeadLossWrapper
    seam = "ChunkedLossWrapper.__call__"
    require_arguments(theirs.__call__, ("global_valid_tokens",), seam, "torchtitan")
    check_signature(theirs.__call__, ours.__call__, seam, "torchtitan")
    set_head = part("torchtitan", f"{HOME}:ChunkedLossWrapper", "set_lm_head")
    require_arguments(set_head, ("lm_head",), "ChunkedLossWrapper.set_lm_head", "torchtitan")
    return f"the signature of {seam}"
