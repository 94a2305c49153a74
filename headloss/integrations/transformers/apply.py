"""`apply`: replacement of a model's loss function by headloss's objective, in calls with labels."""

from __future__ import annotations

import inspect
import math
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...batch.batch import Batch
from ...batch.segments import Segments
from ...head.head import Head
from ...head.reading import causal_of
from ...head_loss import Output
from ...losses import Objective, Term, cross_entropy
from ...options import DEFAULT, Options
from ...private import break_graph
from ...statistics.metrics import Metrics
from ..followed_head import BREAKS, eager
from ..logged import Logged
from ..seams import announce
from ..sharding import whole_head
from .batch import CALL, batch_of
from .call import Call
from .denominators import Step
from .seams import check_loss_function
from .subclass import STATE, enter, leave

PLAIN = Objective.of(cross_entropy())
_warn: Any = eager(warnings.warn)  # typed


def apply(
    model: nn.Module,
    terms: Term | Objective | None = None,
    options: Options | None = None,
    fields: tuple[str, ...] = (),
) -> Applied:
    """Let calls of `model` with labels compute their loss by headloss; wrappers and PEFT are
    unwrapped.

    A call with labels runs the model's own code with the objective in place of the model's loss
    function, and returns the loss and the logits. In a model without a loss function, headloss
    replaces `torch.nn.functional.cross_entropy` of the logits. Labels, the labels' shift and the
    token count are read from the loss function's arguments. A term that is a mean over tokens is
    divided by the call's argument `num_items_in_batch`, if present. A term that is not a mean over
    tokens needs all tokens of the optimizer step in one call of the model; in a `Trainer` with
    `TotalsMixin`, a step may make several calls, whatever the reductions of the terms.
    Documents that `position_ids` mark in packed rows are the segments of terms.

    Calls without labels may run in several threads at once. A call with labels during another call
    with labels raises RuntimeError.

    Args:
        model: a language model with output embeddings that `Head.of` can read.
        terms: the objective; default: cross-entropy.
        options: options of `head_loss`.
        fields: names of call arguments to put into the batch. Tensors [B, L] or [B, L, ..] are
            shifted with the labels; other values are passed unchanged.

    Returns:
        An `Applied`, with `.metrics` of the last call. `Applied.remove()`, or the end of a `with`
        block, restores the model.

    Raises:
        ValueError, TypeError: the head cannot be read, headloss is already applied to the model, or
            the model has a loss function of the user's.
    """
    if isinstance(fields, str):
        raise TypeError(f"fields: got {fields!r}, want a tuple of names")
    causal: Any = _causal(model)
    if STATE in vars(causal):
        raise ValueError("model: headloss is applied to it already; call remove(model) first")
    head = getattr(causal, "get_output_embeddings", lambda: None)()
    if head is None:
        kind = getattr(getattr(causal, "config", None), "model_type", None)
        got = f"{type(causal).__name__} of model_type {kind!r}"
        raise ValueError(f"model: got {got} without output embeddings, want a language model")
    with whole_head(causal):
        Head.of(head)
    objective = PLAIN if terms is None else Objective.of(terms)
    return Applied(causal, objective, DEFAULT if options is None else options, tuple(fields))


def remove(model: nn.Module) -> None:
    """Undo `apply`; ValueError for a model to which headloss is not applied."""
    applied_to(model).remove()


def applied_to(model: nn.Module) -> Applied:
    """Return the `Applied` of a model; ValueError if headloss is not applied to the model."""
    causal = _causal(model)
    if STATE not in vars(causal):
        raise ValueError("model: headloss is not applied to it")
    return vars(causal)[STATE]


def _causal(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, want a causal language model")
    return causal_of(model)


def _replaced(model: Any) -> bool:
    """Return whether the model's loss function is Transformers' mean cross-entropy of shifted
    labels, which the objective replaces.

    If the model has one of Transformers' special loss functions, the loss function still runs, with
    the objective in place of its `cross_entropy` call.

    Raises:
        ValueError: the loss function is the user's own.
    """
    stock = getattr(model, "loss_function", None)
    why, own = "", vars(model).get("_loss_function")
    try:
        check_loss_function(stock)
    except Exception as error:
        why = f"; {error}"
    foreign = [f for f in (own, why and stock) if f and not _is_transformers(f)]
    if foreign:
        got = getattr(foreign[0], "__qualname__", foreign[0])
        raise ValueError(f"model.loss_function: got {got}, want Transformers' own; pass terms{why}")
    if not why:
        announce("transformers", "its loss function")
    return not why


def _is_transformers(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("transformers.")


class Applied:
    """A model to which headloss is applied: objective, last output and logged values.

    Attributes:
        objective, options, fields: arguments of `apply`; may be changed between calls.
        output: output of `head_loss` in the last call, its loss without a gradient; None before.
        log_terms: whether a `Trainer` logs each term and metric, under the key "headloss/NAME".
        logged: sums of terms and metrics since the last log entry, for training (key True) and
            evaluation; None without `Trainer`.
        in_log: whether the current step is logged, so that its metrics are measured.
    """

    def __init__(
        self, model: Any, objective: Objective, options: Options, fields: tuple[str, ...]
    ) -> None:
        self.model, self.objective, self.options, self.fields = model, objective, options, fields
        self.is_shifted_mean = _replaced(model)
        # The model's own loss function, in whose place the objective is computed.
        self.loss_function = getattr(model, "loss_function", None)
        self.output: Output | None = None
        self.log_terms = True
        self.logged: dict[bool, Logged] | None = None
        self.in_log = True
        # Names of the forward's positional arguments, without `self`.
        self.names = list(inspect.signature(type(model).forward).parameters)[1:]
        # The optimizer step that the next calls of the model are part of.
        self.step: Step | None = None
        # One element for each forward of the model that is running; the backbone must not run
        # outside of a forward of the whole model. A list, because `+=` of threads may lose a count.
        self.running: list[None] = []
        # The value that other code had assigned to `model.forward`, or None.
        self.own_forward = enter(model)
        setattr(model, STATE, self)
        base = getattr(model, "base_model", model)
        hook = None if base is model else base.register_forward_pre_hook(self._outside)
        self.hook = hook

    def __repr__(self) -> str:
        return f"Applied({type(self.model).__name__}, {self.objective!r}, fields={self.fields})"

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "running": [], "logged": None}
        state.pop("call", None)
        return state

    @property
    def metrics(self) -> Metrics | None:
        """Metrics of the last call; None before the first call."""
        return None if self.output is None else self.output.metrics

    @property
    def plain(self) -> bool:
        """True if the objective is only cross-entropy."""
        return self.objective == PLAIN

    def record(self, out: Output, step: Step | None, counted: bool) -> None:
        """Store the output of a model's call, and add its loss terms and metrics to the values that
        the Trainer logs next."""
        self.output = replace(out, loss=out.loss.detach())
        if self.logged is not None and self.log_terms:
            parts, ranks = (1, None if counted else 1) if step is None else (step.parts, step.ranks)
            logged = self.logged.setdefault(self.model.training, Logged())
            measured = self.in_log or not self.model.training
            logged.add(out.terms, self.output.metrics if measured else {}, parts, ranks)

    def remove(self) -> None:
        """Restore the model, like `remove(model)`."""
        delattr(self.model, STATE)
        leave(self.model)
        if self.own_forward is not None:
            self.model.forward = self.own_forward
        if self.hook is not None:
            self.hook.remove()

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    # ------------------------------------------------------------------ a call

    def run(self, model: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of the model: headloss's forward, which calls the model's own forward.

        `own` is the model's original forward, the only part that torch.compile compiles.
        """
        own = self.own_forward or own
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        fields = {name: kwargs.pop(name) for name in self.fields if name in kwargs}
        self.running.append(None)
        try:
            if arguments.get("labels") is None:
                self._without_labels(model, "num_items_in_batch" in kwargs)
                return own(*args, **kwargs)
            # `setdefault` is atomic: of several threads, one stores its arguments.
            if vars(self).setdefault("call", arguments) is not arguments:
                raise RuntimeError(
                    "model: got a call with labels during another call with labels, want calls one "
                    "after another: a call replaces the loss function and the head's forward"
                )
            own_loss = getattr(model, "loss_function", None) != self.loss_function
            if own_loss:
                _warn("model.loss_function: was set after apply(), and is used in its place")
            with Call(self, model, arguments, fields, own_loss) as call:
                output = own(*args, **kwargs)
            if not call.losses and not own_loss:
                self._unreached(
                    "its forward calls no loss function, and no cross-entropy of its logits and "
                    "the call's labels without weights, smoothing or reduction='none'"
                )
            return call.end(output)
        finally:
            self.running.pop()
            if vars(self).get("call") is arguments:
                del vars(self)["call"]

    # torch.compile fails once to trace `run`, and skips `run` in later calls. If `run` were
    # decorated by torch.compiler.disable(recursive=False), each call would run the compiler.
    break_graph(run, BREAKS)

    @eager
    def _without_labels(self, model: Any, counted: bool) -> None:
        if counted:
            raise ValueError(
                "labels: are missing beside num_items_in_batch, as the trainer computes its loss "
                "from logits: by label_smoothing_factor, compute_loss_func, use_dft_loss, "
                "use_eaft_loss or use_asft_loss (LLaMA-Factory) or loss_scale (ms-swift), "
                "whichever is set; pass terms such as headloss.dft() in its place, or call "
                "remove(model)"
            )
        if model.training and torch.is_grad_enabled():
            self._unreached("the call has no labels")

    def _outside(self, backbone: nn.Module, _: Any) -> None:
        if backbone.training and not self.running and torch.is_grad_enabled():
            self._unreached("its backbone runs by itself, as under TRL's trainers")

    def _unreached(self, why: str) -> None:
        """Warn that a training call of the model did not compute the objective.

        RuntimeError if the objective is more than cross-entropy.
        """
        text = (
            f"headloss is applied to {type(self.model).__name__}, but {why}: its loss is not the "
            "objective of apply(). "
        )
        remedy = "Call remove(model), or run the model in eval mode or under torch.no_grad()"
        if not self.plain or self.step is not None:
            raise RuntimeError(f"{text}{remedy}")
        _warn(f"{text}{remedy}, if that is meant")

    @property
    def _decodes(self) -> bool:
        """True for encoder-decoders, whose labels are aligned with the decoder's logits."""
        return bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))

    def shift_labels(self, call: dict[str, Any]) -> Tensor | None:
        """Return labels [B, L] aligned with the logits, or None if the call's labels need a
        shift."""
        beside = call.get("labels") if self._decodes else None
        return beside if call.get("shift_labels") is None else call["shift_labels"]

    def batch_of(self, call: dict[str, Any], device: torch.device) -> Batch:
        """Return the batch of a call with labels, before the call runs."""
        fields = {name: call[name] for name in self.fields if name in call}
        arguments = {name: call.get(name) for name in CALL}
        arguments["shift_labels"] = self.shift_labels(call)
        if self._decodes:  # In an encoder-decoder, positions and masks belong to the encoder.
            *rows, length = call["labels"].shape
            own = Segments.rows(math.prod(rows), length, device=device)
            fields.setdefault("segments", own)
        return batch_of(arguments, fields, self.objective, device)
