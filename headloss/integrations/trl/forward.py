"""A model whose forward ends in headloss, in place of the fused head of TRL's trainers.

B rows, L positions, C scored columns at the end of each row, H hidden width. `add_head` has the
signature of the function that TRL's trainers use for theirs, and takes its place while one of them
is built. From then on

    model(..., headloss=Request(batch, objective))   the loss, in one pass
    model(..., labels=labels, fused_lm_head=True)    log-probs and entropies, as TRL asks for them
    model(...)                                       the model's own forward

The head is read at each call, inside the forward of whatever wraps the model, where FSDP has
gathered it and PEFT has switched its adapters.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput

from ...batch import IGNORE, Batch
from ...engine import Output, head_loss
from ...head import Head
from ...losses import Objective, Term
from ...options import Options
from ...stats_op import head_stats


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """What a forward is to compute at its last C predicting positions.

    Attributes:
        batch: targets [B, C]: column c of a row is predicted at position L - C - 1 + c.
        objective: the loss.
        options: of `head_loss`.
    """

    batch: Batch
    objective: Term | Objective
    options: Options = field(default_factory=Options)


@dataclass
class HeadOutput(FusedCausalLMOutput):
    """TRL's output, with what `head_loss` returned."""

    head: Output | None = None


def add_head(
    model: PreTrainedModel,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = (),
) -> None:
    """Let `model`'s forward end in headloss on request; the logits are divided by `temperature`.

    Raises:
        ValueError, TypeError: as `Head.of_model`, where the head cannot be read.
    """
    if cast_lm_head_to_fp32:
        raise ValueError(
            "cast_lm_head_to_fp32: is not supported; log-probs come from float32 logits already"
        )
    Head.of_model(model)
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        self, *args, headloss: Request | None = None, fused_lm_head=False, labels=None, **kwargs
    ):
        if headloss is None and not fused_lm_head:
            return original(*args, **kwargs, **({} if labels is None else {"labels": labels}))
        found = self.base_model(*args, **{**_router(self, kwargs), "use_cache": False})
        hidden = found.last_hidden_state
        head = _whole(Head.of_model(self, temperature=temperature))
        if headloss is None:
            output = _statistics(hidden, head, labels)
        else:
            output = _loss(hidden, head, headloss)
        output.aux_loss = _aux_loss(self, found, kwargs)
        return output

    model.forward = types.MethodType(forward, model)


def _loss(hidden: Tensor, head: Head, request: Request) -> HeadOutput:
    columns = request.batch.targets.shape[1]
    hidden = hidden[:, -columns - 1 : -1]
    options = replace(request.options, metrics=True)  # TRL's metrics need the entropy
    out = head_loss(hidden, head, request.batch, request.objective, options)
    return HeadOutput(
        loss=out.loss,
        log_probs=out.logps,
        entropy=out.entropies,
        label_mask=request.batch.targets != IGNORE,
        head=out,
    )


def _statistics(hidden: Tensor, head: Head, labels: Tensor) -> HeadOutput:
    targets = labels[:, 1:]
    stats = head_stats(hidden[:, :-1], head, targets)
    return HeadOutput(log_probs=stats.logp, entropy=stats.entropy, label_mask=targets != IGNORE)


def _whole(head: Head) -> Head:
    """FSDP2 and tensor parallelism shard a head into DTensors: gather it, with a gradient."""

    def gathered(tensor: Any) -> Any:
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    lora = tuple(replace(x, a=gathered(x.a), b=gathered(x.b)) for x in head.lora)
    return replace(head, weight=gathered(head.weight), bias=gathered(head.bias), lora=lora)


# ---------------------------------------------------------------------- mixtures of experts


def _router(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Ask for router logits where the config does."""
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    return kwargs


def _aux_loss(model: PreTrainedModel, found: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The load-balancing loss of the routers, [], where their logits were asked for."""
    if not kwargs.get("output_router_logits"):
        return None
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = model.config.get_text_config()
    return load_balancing_loss_func(  # type: ignore[return-value]
        found.router_logits,
        config.num_experts,
        config.num_experts_per_tok,
        kwargs.get("attention_mask"),
    )


# ---------------------------------------------------------------------- inside TRL


class _NoLayer:
    """A class that nothing is an instance of."""


@contextlib.contextmanager
def installed(module: types.ModuleType) -> Iterator[None]:
    """Trainers of TRL's `module` are built with `add_head` for their head, and with adapters on it.

    TRL's own fused head would leave such adapters out, so TRL refuses them; ours does not.
    """
    names = {"add_fused_lm_head": add_head, "BaseTunerLayer": _NoLayer}
    before = {name: getattr(module, name) for name in names if hasattr(module, name)}
    for name in before:
        setattr(module, name, names[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


class Measured:
    """Stands for the model where TRL's loss method only measures a pass that has been made."""

    def __init__(self, output: HeadOutput) -> None:
        self.output = output

    def __call__(self, *args: Any, **kwargs: Any) -> HeadOutput:
        return self.output
