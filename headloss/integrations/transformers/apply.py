"""What `apply` does to a model: its head computes the loss, and its loss function hands it on."""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...batch.batch import IGNORE, Batch
from ...batch.packing import NOT_GIVEN
from ...head.head import Head
from ...head_loss import head_loss
from ...losses import Objective, Term, cross_entropy
from ...options import DEFAULT, Options
from ...statistics.metrics import Metrics
from ..families import causal_of, learn
from ..seams import announce
from ..sharding import Carried, externals, hooked, is_fsdp2, whole, whole_head
from .batch import CALL, batch_of
from .denominators import Step, nan_where_nothing, over_step
from .logits import LazyLogits, with_logits
from .seams import broken, check_after_head, check_loss_function, trial

STATE = "_headloss"
# Families that do to their hidden states, before the head, what `Head.of_model` does to the logits.
BEFORE_THE_HEAD: dict[str, dict[str, Any]] = {"minicpm3": {"logit_scale": 1.0}}


def apply(
    model: nn.Module,
    terms: Term | Objective | None = None,
    options: Options | None = None,
    fields: tuple[str, ...] = (),
) -> Applied:
    """Let calls of `model` with labels end in headloss; wrapped models and PEFT's are looked into.

    Labels are given as Transformers wants them, the ids themselves: they are shifted by one here.
    Terms over the mean of tokens are divided by `num_items_in_batch` where the call has it; other
    reductions serve a step of one call, and `TotalsMixin` all of `Trainer`'s. Packed documents,
    told by `position_ids` that start anew, are the segments of terms that ask for segments.

    Args:
        model: a causal language model. One of a family that `Head.of_model` does not know is run
            once on a few tokens, see `headloss.integrations.families.learn`.
        terms: the objective; default: cross-entropy.
        options: of `head_loss`.
        fields: arguments of a call that go to the batch: [B, L] or [B, L, ..] ones lie beside the
            labels and are shifted with them, others are taken as they are.

    Returns:
        What was done, with `.metrics` of the last call; `.remove()` undoes it, and so does the end
        of a `with` block.

    Raises:
        ValueError, TypeError: a head that cannot be read, a model that has been applied to already
            or has a loss function of its own.
        RuntimeError: a release of Transformers in which something is not what headloss takes the
            place of; what a model does after its head is seen in its first call with labels.
    """
    if isinstance(fields, str):
        raise TypeError(f"fields: got {fields!r}, want a tuple of names")
    causal: Any = _causal(model)
    if STATE in vars(causal):
        raise ValueError("model: headloss is applied to it already; call remove(model) first")
    transform = transform_of(causal)
    with whole_head(causal):
        Head.of_model(causal, **transform)
    if "mc_labels" in inspect.signature(causal.forward).parameters:
        raise ValueError(f"model: got {type(causal).__name__}, want a model with one head")
    check_loss_function(causal)
    objective = Objective.of(cross_entropy() if terms is None else terms)
    options = DEFAULT if options is None else options
    return Applied(causal, objective, options, tuple(fields), transform)


def transform_of(causal: nn.Module) -> dict[str, Any]:
    """Arguments of `Head.of_model`, for the hidden states that the head's module is given."""
    return {**learn(causal, "head"), **BEFORE_THE_HEAD.get(_family(causal), {})}


def remove(model: nn.Module) -> None:
    """Undo `apply`.

    Raises:
        ValueError: a model to which headloss is not applied, or whose forward others have wrapped
            since: what they hold cannot be taken from them.
    """
    applied_to(model).remove()


def applied_to(model: nn.Module) -> Applied:
    """What `apply` made of a model; ValueError where it was not called."""
    causal = _causal(model)
    if STATE not in vars(causal):
        raise ValueError("model: headloss is not applied to it")
    return vars(causal)[STATE]


def _causal(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, want a causal language model")
    return causal_of(model)


def _family(model: Any) -> Any:
    return getattr(getattr(model, "config", None), "model_type", None)


def _eagerly(recursive: bool = True) -> Callable[[Callable[..., Any]], Any]:
    """Not compiled under `torch.compile`; `recursive`: nor what it calls."""
    return lambda function: torch.compiler.disable(function, recursive=recursive)  # type: ignore[call-arg]


class Applied:
    """What `apply` did to a model.

    Attributes:
        objective, options, fields: as they were given; they may be changed between calls.
        metrics: of the last call; None before.
    """

    def __init__(
        self,
        model: Any,
        objective: Objective,
        options: Options,
        fields: tuple[str, ...],
        transform: dict[str, Any],
    ) -> None:
        self.model, self.objective, self.options, self.fields = model, objective, options, fields
        self.transform = transform  # of the logits, where the table of families does not say it
        self.metrics: Metrics | None = None
        self.step: Step | None = None  # that the next calls are parts of
        self.own_forward = vars(model).get("forward")  # on the instance, where somebody set one
        self.original = model.forward
        self.labels: Tensor | None = None  # of the call, as the next two
        self.batch: Batch | None = None
        self.count: Any = None  # of tokens in the optimizer step, where the call says it
        self.loss: Tensor | None = None
        self.logits: Tensor | None = None
        self.asked = False  # for the loss, in this call
        self.trial: tuple[Head, Tensor] | None = None  # the logits of the first call with labels
        self.checked = False  # what the model does after its head
        self.sharded = False
        self.caller: list[int]  # the thread that is in a call with labels, if any
        self.own_head: Callable[[Tensor], Tensor]  # the head's forward before it
        setattr(model, STATE, self)
        vars(model).pop("forward", None)  # which `__setstate__` wants behind its own
        model.forward = types.MethodType(_forward_like(self.original), model)

    def __repr__(self) -> str:
        return f"Applied({type(self.model).__name__}, {self.objective!r}, fields={self.fields})"

    def remove(self) -> None:
        """As `remove(model)`."""
        if not hasattr(getattr(self.model.forward, "__func__", None), STATE):
            raise ValueError("model.forward: others have wrapped it since; unwrap the model first")
        delattr(self.model, STATE)
        del self.model.forward
        if self.own_forward is not None:
            self.model.forward = self.own_forward

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy or a pickle, of which the model is a part. Pickle finds bound methods by their
        name: so the model has ours before it looks for its `forward`."""
        vars(self).update(state)
        forward = types.MethodType(_forward_like(self.original), self.model)
        vars(self.model).update({STATE: self, "forward": forward})  # in this order, once more

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    # ------------------------------------------------------------------ a call

    @_eagerly(recursive=False)  # the model's own forward is compiled
    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = inspect.signature(self.original).parameters
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        fields = {name: kwargs.pop(name) for name in self.fields if name in kwargs}
        if call.get("labels") is None:
            if "num_items_in_batch" in kwargs:
                raise ValueError(
                    "labels: are missing beside num_items_in_batch: label_smoothing_factor and "
                    "compute_loss_func take the loss from logits; pass terms to apply() in their "
                    "place, or call remove(model)"
                )
            return self.original(*args, **kwargs)
        if kwargs.get("return_dict", self.model.config.return_dict) is False:
            raise ValueError("return_dict: got False, want True, as there are no logits to return")
        head = self.model.get_output_embeddings()
        self.sharded = externals(head) or is_fsdp2(self.model)
        me = [threading.get_ident()]  # a list of its own
        if vars(self).setdefault("caller", me) is not me:
            raise RuntimeError(
                "model: got a call with labels during another one, want one at a time: they share "
                "the head"
            )
        before = vars(head).get("forward"), vars(self.model).get("_loss_function")
        try:
            # Before the model's forward: what packing asks of the device is there at the head.
            batch = self.step and self.step.batch
            self.batch = batch or self.batch_of({**call, **fields}, call["labels"].device)
            self.labels, self.count = call["labels"], call.get("num_items_in_batch")
            self.own_head = before[0] or functools.partial(type(head).forward, head)
            head.forward, self.model._loss_function = self.at_head, self.at_loss
            output = self._forward(args, kwargs)
            return with_logits(output, self.logits)
        finally:
            for owner, name, value in zip(
                (head, self.model), ("forward", "_loss_function"), before, strict=True
            ):
                vars(owner).pop(name, None)
                if value is not None:
                    setattr(owner, name, value)
            self.batch = self.count = self.labels = self.loss = self.logits = self.trial = None
            self.asked = False
            del self.caller

    @_eagerly(recursive=False)
    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's own, which must ask for its loss."""
        seam, never = f"{type(self.model).__name__}.forward", "it asks for no loss_function"
        try:
            output = self.original(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if self.loss is None or self.asked:
                raise
            raise broken(seam, f"{never}, and ends in {type(error).__name__}") from error
        if not self.asked:
            raise broken(seam, never)
        return output

    @_eagerly()
    def at_head(self, hidden: Tensor, **more: Any) -> Tensor:
        """In place of the head's forward: whoever gathers its weight has gathered it here."""
        if more:  # such as the adapter_names of PEFT, which give each row a head of its own
            raise ValueError(f"{', '.join(more)}: got them at the head, want one head for all rows")
        if vars(self).get("caller") != [threading.get_ident()]:  # a call without labels
            return self.own_head(hidden)
        vars(self.model.get_output_embeddings()).pop("forward", None)
        head = whole(Head.of_model(self.model, **self.transform), self.model, hidden.dtype)
        if hidden.dtype != head.weight.dtype and is_fsdp2(self.model):
            hidden = hidden.to(head.weight.dtype)  # as FSDP2 does where a module is called
        hidden = hidden.to(head.weight.device)
        batch, count = self.batch, self.count
        assert batch is not None
        if batch.targets.device != hidden.device:
            batch = batch.to(hidden.device)
        objective = over_step(self.objective, batch, self.step, count)
        try:
            out = head_loss(hidden, head, batch, objective, self.options)
        except ValueError as error:
            if NOT_GIVEN not in str(error):
                raise
            how = "apply(model, terms, fields=(names,)) hands arguments of the call to the batch"
            raise ValueError(f"{error}; {how}") from None
        self.loss, self.metrics = out.loss, out.metrics
        if self.step is not None and self.step.parts > 1:
            self.loss = self.loss * self.step.parts
        if not self.model.training:
            self.loss = nan_where_nothing(self.loss, batch, count)
        self.logits = LazyLogits(head, hidden, not self.model.training)
        if self.sharded:  # afterwards the weight is gone
            self.logits = None if self.model.training else head.logits(hidden)
            handed: Any = Carried.apply(self.loss, hidden.detach())
        else:
            handed = hidden.new_empty((*hidden.shape[:-1], 0))
        if self.checked or hidden.is_meta:
            return handed
        handed = trial(head, handed)
        self.trial = head, handed.detach().clone()  # a model may change its logits in place
        return handed

    @_eagerly()
    def at_loss(
        self, logits: Tensor, labels: Any = None, *_: Any, ignore_index: int = IGNORE, **__: Any
    ) -> Tensor:
        """In place of the model's loss function."""
        seam = f"{type(self.model).__name__}.forward"
        if self.loss is None:
            raise broken(seam, "it makes its logits without a call of its output embeddings")
        if self.asked:
            raise broken(seam, "it asks for a second loss")
        self.asked = True
        if ignore_index != IGNORE:
            raise broken(
                seam, f"it asks for a loss with ignore_index={ignore_index}, want {IGNORE}"
            )
        if self.trial is not None:
            head, raw = self.trial
            check_after_head(self.model, head, raw, logits, labels, self.labels)
            self.checked = True
            announce("transformers", "its loss function and what its models do after their head")
        return hooked(self.loss, logits) if self.sharded else self.loss

    def batch_of(self, call: dict[str, Any], device: torch.device) -> Batch:
        """The batch of a call with labels, before it is made."""
        fields = {name: call[name] for name in self.fields if name in call}
        arguments = {name: call.get(name) for name in CALL}
        return batch_of(arguments, fields, self.objective, device)


def _forward_like(original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of the same signature, which trainers read to choose columns."""

    @_eagerly(recursive=False)
    @functools.wraps(getattr(original, "__func__", original))
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[STATE].run(args, kwargs)

    setattr(forward, STATE, True)
    return forward
