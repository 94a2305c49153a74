"""verl's FSDP engine with a temperature per sample, losses in one pass, and distillation from a
teacher's top k or a teacher's hidden states.

B sequences of at most R response tokens, N packed positions, T scored tokens, H hidden width.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss

from ...batch.batch import Batch
from ...batch.reduction import Totals
from ...batch.segments import Segments
from ...head.head import Head
from ...head_loss import head_loss
from ...losses import Objective
from ...options import Options
from ..seams import misfit
from . import losses
from .asked import DIVERGENCE
from .fused import fused_of
from .scored import Scored
from .teacher import Teacher, TopK, distillation_of
from .whole import RUNNING, WholeVocabulary

FIELDS = {
    "old_log_probs": "old_logps",
    "advantages": "advantages",
    "ref_log_prob": "ref_logps",
    "rollout_is_weights": "rollout_is_weights",
}


class Engine(FSDPEngineWithLMHead):
    """`FSDPEngineWithLMHead` for models with `impl_backend: headloss`."""

    # The actor's configuration during a step whose policy loss is one of headloss's.
    _config: Any = None
    # verl's distillation settings during a step whose loss is `distillation_ppo_loss`.
    _distillation: Any = None

    def _build_module(self) -> Any:
        module = super()._build_module()
        options = dict(self.model_config.fused_kernel_options)
        options.pop("impl_backend")
        fused_of(module).options = Options(**options)
        return module

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the model inputs and output arguments that verl prepares without fused kernels.

        verl accepts a temperature per sample only in the code path without fused kernels.
        """
        if not tu.get_non_tensor_data(micro_batch, "use_fused_kernels", False):
            return super().prepare_model_inputs(micro_batch)
        topk = tu.get_non_tensor_data(micro_batch, "distillation_use_topk", False)
        if topk and (self._distillation is None or "support_ids" in micro_batch):
            got = "support_ids" if self._distillation else "another loss function"
            raise ValueError(
                f"impl_backend: got top-k distillation with {got}, want verl's "
                "distillation_ppo_loss over the whole vocabulary; or use_fused_kernels=False"
            )
        fused = fused_of(self.module)
        tu.assign_non_tensor(micro_batch, use_fused_kernels=False)
        inputs, args = super().prepare_model_inputs(micro_batch)
        tu.assign_non_tensor(micro_batch, use_fused_kernels=True)
        inputs["return_dict"] = True
        packed, temperature = "temperature_rmpad" in args, micro_batch["temperature"]
        if packed:
            inputs["shift_labels"] = args["input_ids_rmpad_rolled"].unsqueeze(0)
        shape = inputs["shift_labels" if packed else "input_ids"].shape
        # FSDP would round a temperature tensor passed as a model input.
        if isinstance(temperature, Tensor):
            each = args["temperature_rmpad"] if packed else args["temperature"].unsqueeze(1)
            fused.temperature = each.clamp(min=1e-8).expand(shape)
        else:
            fused.temperature, inputs["temperature"] = None, temperature
        fused.support = fused.request = None
        if self._config is not None:
            fused.request = self._request(micro_batch, Scored(self, micro_batch, shape, packed))
        elif topk:
            scored = Scored(self, micro_batch, shape, packed)
            alone = tu.get_non_tensor_data(micro_batch, "distillation_only", False)
            if (mode := self._distillation.loss_mode).startswith(DIVERGENCE):
                kind = mode.removeprefix(DIVERGENCE)
                fused.request = WholeVocabulary(scored, micro_batch, kind, alone)
            else:
                floor = self._distillation.log_prob_min_clamp
                fused.request = Teacher(scored, micro_batch, floor, alone)
        elif "support_ids" in micro_batch:
            fused.support = Scored(self, micro_batch, shape, packed).everywhere(micro_batch)
        return inputs, args

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Any]:
        """Return verl's outputs, and add the distillation losses if the batch has padded rows.

        For padded rows, verl itself does not read the distillation losses of a model's output.
        """
        given = output, output_args, micro_batch, logits_processor_func
        outputs = super().prepare_model_outputs(*given)
        topk = getattr(output, "fused_linear_aux", None)
        if isinstance(topk, TopK) and "distillation_losses" not in outputs:
            if "temperature_rmpad" in output_args:
                seam = "FSDPEngineWithLMHead.prepare_model_outputs"
                raise misfit("verl", f"{seam}: does not read fused_linear_aux")
            offsets = micro_batch["input_ids"].offsets()
            columns = torch.arange(topk.teacher_mass.shape[1], device=offsets.device)
            real = columns < offsets.diff().unsqueeze(1)
            for name, value in topk.items():
                outputs[name] = torch.nested.nested_tensor_from_jagged(value[real], offsets)
        return outputs

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        config = _config_of(loss_function)
        fused, self._config = fused_of(self.module), config
        if config is None:
            self._distillation = distillation_of(loss_function)
            RUNNING.append(getattr(self._distillation, "loss_mode", ""))
            try:
                return super().forward_step(micro_batch, loss_function, forward_only)
            finally:
                RUNNING.pop()
                self._distillation = fused.request = None

        def measure(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, Any]:
            """Return the one-pass loss, with the metrics of verl's loss function and headloss's
            metrics."""
            losses.measured.append(fused.request)
            try:
                with torch.no_grad():
                    given = {"model_output": model_output, "data": data, "dp_group": dp_group}
                    _, metrics = loss_function(**given)
            finally:
                losses.measured.pop()
            return fused.request.loss, metrics | fused.request.metrics

        try:
            return super().forward_step(micro_batch, measure, forward_only)
        finally:
            self._config = fused.request = None

    def _request(self, data: Any, scored: Scored) -> Request:
        """Return the `Request` to compute the loss of a micro-batch, packed or in rows, at this
        rank's scored positions."""
        config, mask, here = self._config, scored.mask, scored.here
        names = [name for name in FIELDS if name in data]
        padded = data.select("response_mask", *names).to_padded_tensor()
        given = {FIELDS[name]: padded[name][here] for name in names}
        ranks, tokens = data["dp_size"], data["batch_num_tokens"]
        sequences = data["global_batch_size"]
        tokens = mask.sum() if tokens is None else tokens
        sequences = mask.any(1).sum() if sequences is None else sequences
        over = losses.reduction(config, mask.shape[1], ranks)
        entropy = tu.get_non_tensor_data(data, "calculate_entropy", False)
        fields = {**given, "totals": Totals(tokens / ranks, sequences / ranks)}
        if (support := scored.support(data)) is not None:
            fields["support_ids"] = support
        return Request(
            losses.objective(config, over, given, entropy),
            scored.at,
            Segments.from_ids(scored.rows[here], len(mask), group=scored.group),
            fields,
        )


def _config_of(loss_function: Any) -> Any:
    """Return the actor's configuration if the loss is verl's `ppo_loss` with a policy loss of
    headloss, else None."""
    if getattr(loss_function, "func", None) is not ppo_loss:
        return None
    config = loss_function.keywords["config"]
    return config if losses.known(config.policy_loss.loss_mode) else None


class Request:
    """Request that a model's forward compute a policy loss; also stores the forward's results.

    A `Request` must not become a dataclass or a container: FSDP would cast the fields.

    Args:
        objective: the objective, and how many of its first terms make up the policy loss.
        places: [T] indices of the positions that predict scored tokens, in the flattened batch.
        segments: the sequences of the scored tokens.
        fields: fields [T] of the batch, and the batch's totals.

    Attributes:
        loss, policy: [], the objective's value and the policy loss's value.
    """

    def __init__(
        self, objective: tuple[Objective, int], places: Tensor, segments: Segments, fields: Any
    ) -> None:
        (self.objective, self.count), self.places = objective, places
        self.segments, self.fields = segments, fields
        self.loss: Any = None
        self.policy: Any = None
        self.metrics: dict[str, float] = {}

    def run(
        self, hidden: Tensor, head: Head, labels: Tensor, options: Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, and log-probs and entropies in the labels' shape with 0 at unscored
        positions."""
        places = self.places

        def scored(values: Tensor) -> Tensor:
            return values.reshape(labels.numel(), *values.shape[labels.dim() :])[places]

        if isinstance(head.temperature, Tensor):
            head = replace(head, temperature=scored(head.temperature))
        batch = Batch(scored(labels).to(torch.int64), self.segments, **self.fields)
        options = replace(options, metrics=True)  # verl's policy metrics read the entropy metric.
        out = head_loss(scored(hidden), head, batch, self.objective, options)
        parts = list(zip(self.objective.parts, out.terms.values(), strict=True))[: self.count]
        policy: Any = sum(c * value.detach() for (c, _), value in parts)
        loss, metrics, group = out.loss, out.metrics, self.segments.group
        # Each rank's loss is a part of a sum over ranks, but verl averages the ranks' losses.
        if group is not None:
            metrics = metrics.all_reduce(group)
            whole = torch.stack([loss.detach(), policy])
            torch.distributed.all_reduce(whole, group=group)
            loss = loss * torch.distributed.get_world_size(group)
            loss, policy = loss + (whole[0] - loss.detach()), whole[1]
        self.loss, self.policy = loss, policy
        found = metrics.compute().items()
        self.metrics = {f"headloss/{name}": x for name, x in found if math.isfinite(x)}

        def spread(values: Tensor) -> Tensor:
            whole = values.new_zeros(labels.numel())
            return whole.index_copy_(0, places, values).view(labels.shape)

        assert out.entropies is not None
        return spread(out.logps), spread(out.entropies), out.loss

    def put(self, output: Any) -> Any:
        """Return the model's output with the loss as an entry: FSDP puts its hooks on output
        tensors."""
        output["loss"] = self.loss
        return output
