"""A model whose forward ends in headloss, in place of the fused head of TRL's trainers.

B rows, L positions, C scored columns at the end of each row, H hidden width. `add_head` has the
signature of TRL's `add_fused_lm_head`, and replaces it while a trainer is built. After `add_head`:

- `Request(batch=batch, objective=objective).of(model, ...)` computes the loss, in one pass;
- `Request().of(model, ..., labels=labels)` computes log-probs and entropies without a gradient;
- `model(..., labels=labels, fused_lm_head=True)` computes log-probs and entropies for TRL;
- `model(...)` runs the model's own forward.

The head is read in each call, inside the wrappers' forwards, where FSDP has gathered the head and
PEFT has switched adapters.

Wrappers with mixed precision (FSDP2's hooks, accelerate under DDP) cast the tensors that enter and
leave a forward, and rebuild containers and dataclasses. Because wrappers rebuild containers and
dataclasses, a wrapped forward returns only tensors. Values that must not be cast are stored on the
`Request`, which wrappers do not inspect.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from trl.trainer import utils

from ...batch.batch import IGNORE, Batch
from ...head.head import Head
from ...head_loss import Output, head_loss, logits_loss
from ...losses import Objective, Term, entropy
from ...options import Options
from ..followed import is_followed, real
from ..followed_head import FollowedHead, eager
from ..seams import announce, check_signature
from ..sharding import hooked, whole_head
from .common import CHECKED, require
from .support import Row, pairs

require(utils, "FusedCausalLMOutput", "add_fused_lm_head")


class Request:
    """A request to a model's forward to compute a loss or log-probs of the last C tokens of each
    row. The forward stores the results as attributes of the `Request`. Keep `Request` a plain
    class: FSDP would cast the tensors inside a dataclass or container passed to the forward.

    Args:
        batch: targets [B, C] of L positions; column c is predicted at position L - C - 1 + c, or at
            position c if the labels are already shifted (C = L). With `batch=None` the targets are
            the forward's labels [B, C + 1] without the first column.
        objective: the loss; `objective=None` computes the entropy, for passes without gradient.
        options: options of `head_loss`.

    Attributes:
        found: the forward's output before any wrapper casts it; None before the forward.
        result: output of `head_loss`, with a detached loss; None before the forward. Metrics are
            computed on demand.
    """

    def __init__(
        self,
        *,
        batch: Batch | None = None,
        objective: Term | Objective | None = None,
        options: Options | None = None,
    ) -> None:
        self.batch = batch
        self.objective = entropy() if objective is None else objective
        self.options = Options() if options is None else options
        self.found: HeadOutput | None = None
        self.result: Output | None = None

    def of(self, model: Any, **inputs: Any) -> HeadOutput:
        """Call `model` and return the head's output as it was before wrappers like FSDP2 round
        it."""
        passed, output = model(**inputs, headloss=self), self.found
        assert output is not None
        tied = {n: hooked(x, getattr(passed, n)) for n, x in _with_gradient(output).items()}
        return replace(output, **tied)

    def at_head(self, hidden: Tensor, head: Head, batch: Batch, options: Options) -> HeadOutput:
        """Return the output of a forward without logits."""
        out = head_loss(hidden, head, batch, self.objective, options)
        return _output(out, batch, self)


@dataclass
class HeadOutput(utils.FusedCausalLMOutput):
    """TRL's output, plus the critic's values [B, C]. All fields are tensors."""

    critic: Tensor | None = None


def _with_gradient(output: HeadOutput) -> dict[str, Tensor]:
    values = {n: getattr(output, n) for n in ("loss", "log_probs", "aux_loss", "critic")}
    return {n: x for n, x in values.items() if x is not None and x.requires_grad}


def add_head(
    model: PreTrainedModel,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = (),
    switches: Switches | None = None,
    resolved: list[Paths] | None = None,
) -> None:
    """Let the forward of `model` compute a passed `Request`, with logits divided by `temperature`.

    The list `resolved` gets the `Paths` (ways to compute log-probs) chosen for the model.

    Raises:
        ValueError, TypeError: as from `Head.of`, if the head cannot be read.
    """
    if cast_lm_head_to_fp32:
        raise ValueError(
            "cast_lm_head_to_fp32: is not supported; log-probs come from float32 logits already"
        )
    paths = (switches or Switches(use_fused_loss=True)).resolve(model)
    if resolved is not None:
        resolved.append(paths)
    original = _of_any_model(model)

    @eager(recursive=False)
    @functools.wraps(type(model).forward)
    def forward(
        self, *args, headloss: Request | None = None, fused_lm_head=False, labels=None, **kwargs
    ):
        if headloss is None and not fused_lm_head:
            return original(self, *args, **kwargs, **({} if labels is None else {"labels": labels}))
        kwargs = {**_router(self, kwargs), "use_cache": False}
        request = Request() if headloss is None else headloss
        path, batch = paths.loss, request.batch
        if batch is None:
            assert labels is not None
            path, batch = paths.logprobs, Batch(labels[:, 1:])
        if path.findable:
            with FollowedHead(self) as head:
                model_output = original(self, *args, **kwargs)
            hidden = head.hidden
        else:
            model_output = original(self, *args, **{**kwargs, "output_hidden_states": True})
            hidden = model_output.hidden_states[-1]
        columns = batch.targets.shape[1]
        places = slice(None) if columns == hidden.shape[1] else slice(-columns - 1, -1)
        output = path.of(model_output.logits[:, places], self, temperature, batch, request)
        if kwargs.get("output_router_logits"):
            output.aux_loss = model_output.aux_loss
        if hasattr(self, "value_head"):
            hidden = hidden[:, places].to(self.value_head.weight.dtype)
            output.critic = self.value_head(hidden).squeeze(-1)
        request.found = replace(output)
        return output

    model.forward = types.MethodType(forward, model)


def _of_any_model(model: Any) -> Callable[..., Any]:
    """Return the model's forward as a function of a model, so that a copy of the model (an average
    of weights, a frozen reference) runs with the copy's weights."""
    forward = model.forward
    return getattr(forward, "__func__", lambda self, *args, **kwargs: forward(*args, **kwargs))


# ---------------------------------------------------------------------- fused and dense paths


@dataclass(frozen=True, kw_only=True)
class Path:
    """Settings by which log-probs are computed: with or without making logits, and in which dtype.
    A trainer has one `Path` for the loss and one for log-probs computed without gradient.

    Attributes:
        fused: whether the logits are never made.
        exact: whether logits are float32; else logits have the model's compute dtype.
        findable: whether headloss can read the model's head (its weight and formula).
        required: name of the user's option that asks for `fused`; "" if no option does.
    """

    fused: bool
    exact: bool
    findable: bool
    required: str = ""

    def of(
        self, logits: Tensor, model: Any, temperature: float, batch: Batch, request: Request
    ) -> HeadOutput:
        """Compute a `HeadOutput` from logits [B, C, V], lazy ones if the head's formula is known.

        Raises:
            ValueError: an option asks for `fused`, but headloss does not know the head's formula.
        """
        options = replace(request.options, metrics=True)  # TRL's metrics need the entropy.
        outputs: list[HeadOutput] = []

        def of_logits(logits: Tensor) -> HeadOutput:
            dense = replace(options, schedule="auto")
            out = logits_loss(
                logits, batch, request.objective, temperature=temperature, options=dense
            )
            return _output(out, batch, request)

        def act(hidden: Tensor, head: Head) -> tuple[Tensor, ...]:
            dtype = _compute_dtype(hidden)
            rounded = not self.exact and dtype.itemsize == 2
            how = replace(options, logits_dtype=dtype) if rounded else options
            outputs.append(
                request.at_head(hidden, replace(head, temperature=temperature), batch, how)
                if self.fused
                else of_logits(head.logits(hidden))
            )
            return tuple(_with_gradient(outputs[0]).values())

        if is_followed(logits) and (self.fused or self.exact):
            tensors = logits.through(model, act)
            return replace(
                outputs[0], **dict(zip(_with_gradient(outputs[0]), tensors, strict=True))
            )
        if self.required:
            raise ValueError(
                f"{self.required}: got True, but {type(model).__name__}.forward does more to its "
                "logits than rows, a factor, one soft cap and a constant bias, want False"
            )
        return of_logits(real(logits))


def _output(out: Output, batch: Batch, request: Request) -> HeadOutput:
    request.result = replace(out, loss=out.loss.detach())
    return HeadOutput(
        loss=out.loss,
        log_probs=out.logps,
        entropy=out.entropies,
        label_mask=batch.targets != IGNORE,
    )


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Settings (`Path`) for the loss, and for log-probs of passes without gradient (old and
    reference log-probs)."""

    loss: Path
    logprobs: Path


@dataclass(frozen=True, kw_only=True)
class Switches:
    """User options: whether losses and log-probs are computed without logits, and their precision.

    Attributes:
        use_fused_loss: False: the loss is computed from logits; None: without logits if the head
            can be read.
        use_fused_linear_logprobs: compute old and reference log-probs without logits; None follows
            `use_fused_loss`.
        cast_logprobs_to_fp32: True: log-probs come from float32 logits; False: from logits in the
            model's compute dtype; None follows `use_fused_loss`.
    """

    use_fused_loss: bool | None = None
    use_fused_linear_logprobs: bool | None = None
    cast_logprobs_to_fp32: bool | None = None

    def resolve(self, model: PreTrainedModel) -> Paths:
        """Return the code paths for loss and log-probs of `model` that the options choose.

        Raises:
            ValueError, TypeError: an option needs the model's head, which headloss cannot read.
        """
        try:
            with whole_head(model):
                Head.of_model(model, softcap=None, logit_scale=1.0)
            findable = True
        except (ValueError, TypeError) as error:
            for name in ("use_fused_loss", "use_fused_linear_logprobs"):
                if getattr(self, name):
                    raise type(error)(f"{name}: got True, but {error}") from None
            findable = False
        loss = findable if self.use_fused_loss is None else self.use_fused_loss
        logprobs = self.use_fused_linear_logprobs
        logprobs = loss if logprobs is None else logprobs
        exact = loss if self.cast_logprobs_to_fp32 is None else self.cast_logprobs_to_fp32
        if exact and not findable and model.dtype.itemsize == 2:
            raise ValueError(
                f"cast_logprobs_to_fp32: got True for {model.dtype} logits of a model whose head "
                "cannot be read, want False or None"
            )
        names = "use_fused_loss", "use_fused_linear_logprobs"
        asked, other = (name if getattr(self, name) else "" for name in names)
        if self.use_fused_linear_logprobs is None:
            other = asked
        return Paths(
            loss=Path(fused=loss, exact=exact, findable=findable, required=asked),
            logprobs=Path(fused=logprobs, exact=exact, findable=findable, required=other),
        )


# ---------------------------------------------------------------------- mixtures of experts


def _router(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Request router logits if the model's config requests them."""
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    return kwargs


# ---------------------------------------------------------------------- inside TRL


class _NoLayer:
    """A class without instances, so that `isinstance` is always False."""


@contextlib.contextmanager
def installed(
    module: types.ModuleType,
    switches: Switches | None = None,
    resolved: list[Paths] | None = None,
) -> Iterator[None]:
    """Replace `add_fused_lm_head` of TRL's `module` by `add_head` while the `with` block runs.

    TRL's own fused head ignores adapters on the head, so TRL refuses such adapters; headloss
    allows adapters on the head.
    """
    head = functools.partial(add_head, switches=switches, resolved=resolved)
    require(module, "add_fused_lm_head")
    check_signature(module.add_fused_lm_head, add_head, f"{module.__name__}.add_fused_lm_head")
    names = {"add_fused_lm_head": head, "BaseTunerLayer": _NoLayer}
    # TRL imports and uses `BaseTunerLayer` only if PEFT is installed.
    before = {name: getattr(module, name) for name in names if hasattr(module, name)}
    for name in before:
        setattr(module, name, names[name])
    announce("trl", CHECKED)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


class Unrounded:
    """Callable that TRL runs in place of the model in passes without gradient, and that returns the
    head's unrounded log-probs.

    TRL reads log-probs from the output of the model's wrappers, and FSDP2 under bf16 rounds that
    output. TRL calls this object with consecutive chunks of a batch's rows.

    Args:
        support: for each row, the ids that its last C tokens were drawn from.
        columns: the number C of completion tokens.
    """

    def __init__(self, model: Any, support: list[Row] | None = None, columns: int = 0) -> None:
        self.model, self.support, self.columns = model, support, columns
        self.done = 0  # Number of rows that TRL has passed so far.

    def __call__(self, *, fused_lm_head: bool, labels: Tensor, **inputs: Any) -> HeadOutput:
        rows = slice(self.done, self.done + len(labels))
        self.done = rows.stop
        if self.support is None:
            return Request().of(self.model, labels=labels, **inputs)
        support = pairs(self.support[rows], self.columns)
        batch = Batch(labels[:, -self.columns :], support_ids=support)
        return Request(batch=batch).of(self.model, **inputs)


class Measured:
    """Callable passed to TRL's loss method in place of the model: returns the output of a forward
    that has already run, from which TRL computes metrics."""

    def __init__(self, output: HeadOutput) -> None:
        self.output = output

    def __call__(self, *args: Any, **kwargs: Any) -> HeadOutput:
        return self.output


class Asked(Measured):
    """Callable passed to TRL's loss method in place of the model: calls the model with a `Request`
    to headloss; gradients are on if they were on when `Asked(...)` was created."""

    def __init__(self, model: Any, request: Request) -> None:
        self.model, self.request, self.gradient = model, request, torch.is_grad_enabled()

    def __call__(self, *, fused_lm_head: bool, labels: Tensor, **inputs: Any) -> HeadOutput:
        with torch.set_grad_enabled(self.gradient):
            self.output = self.request.of(self.model, **inputs)
        return self.output
