"""Tensors in place of logits (*followed logits*) that store their formula instead of the values.

B rows, L positions, H hidden width, V vocabulary. In place of logits [.., V], a head's module
returns a `Followed` tensor that stores the head and the hidden states. Row selection, casts,
factors, one tanh and a constant bias keep logits lazy; any other operation computes the logits'
values. `Recipe.hidden` and `Recipe.head_of` give `head_loss` its arguments for `Followed` logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map

from ..head.head import Head
from ..private import refuse_to_be_written
from .sharding import hooked, in_place_of, inside, unsharded, whole

Tensors = tuple[Tensor, ...]

_NAMES = (
    "shape dtype device layout ndim size dim numel nelement stride element_size itemsize nbytes "
    "is_floating_point is_complex is_contiguous is_cuda is_cpu is_meta is_sparse is_quantized "
    "is_nested get_device requires_grad is_leaf grad_fn grad register_hook __len__ __hash__ "
    "_version _base _is_view is_inference output_nr retains_grad _backward_hooks"
)
OF_NO_VALUES = frozenset(_NAMES.split())
WRITES = {"__setitem__", "__imul__", "__itruediv__", "__iadd__", "__isub__", "__ipow__"}
STALE = (
    "logits: cannot be made any more, because {} since the model's call; read them before that, "
    "such as output.logits.argmax(-1) or output.logits.clone() before optimizer.step()"
)


class Steps:
    """Count of optimizer steps, because a fused optimizer does not change a weight's `_version`."""

    count = 0


def _stepped(*_: Any) -> None:
    Steps.count += 1


register_optimizer_step_post_hook(_stepped)


class HeadCall:
    """One call of the model's head with hidden states [.., H].

    Args:
        seam: the `FollowedHead` that replaces the forward of the called module.

    Attributes:
        closed: reason why this call's logits can no longer be computed; "" if they can be.
        written: whether an in-place operation changed computed logits, so that views are invalid.
    """

    def __init__(self, seam: Any, hidden: Tensor) -> None:
        self.seam, self.hidden, self.head = seam, hidden, Head.of(seam.module)
        self.closed, self.written = "", False
        kind = hidden.device.type
        self.autocast = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
        }
        self.steps, self.state = Steps.count, self._state(self.head)

    def logits(self) -> Followed:
        dtype = self.hidden.dtype
        if self.autocast["enabled"] and dtype != torch.float64:
            dtype = self.autocast["dtype"]
        shape = (*self.hidden.shape[:-1], self.head.weight.shape[0])
        recipe = Recipe(self, self.hidden)
        return recipe.followed(shape, dtype, recipe.tensors)

    def tensors(self, head: Head) -> list[Tensor]:
        """Return the call's hidden states and the head's weight, bias and adapters."""
        adapters = [x for lora in head.lora for x in (lora.a, lora.b)]
        return [x for x in (self.hidden, head.weight, head.bias, *adapters) if x is not None]

    def _state(self, head: Head) -> list[Any]:
        versions = [(x.data_ptr(), x.is_inference() or x._version) for x in self.tensors(head)]
        return [*versions, *((lora.scaling, lora.dropout) for lora in head.lora)]

    def draw(self) -> None:
        """Record that the adapters' dropout mask was drawn, since a second draw would differ."""
        if any(lora.dropout for lora in self.head.lora):
            self.closed = self.closed or "dropout of the head's adapter has been drawn"

    def raw(self) -> Tensor:
        """Return the values of the logits, computed by the head module's own forward."""
        stepped = "optimizer.step() has run" if self.steps != Steps.count else ""
        if why := self.closed or self.seam.closed or stepped:
            raise RuntimeError(STALE.format(why))
        with torch.autocast(**self.autocast):
            if self.seam.unit:  # FSDP2's hooks count the calls of their modules.
                return unsharded(self.seam.module, self._unchanged, self.hidden)
            return inside(self.seam.module, self._unchanged, self.hidden)

    def _unchanged(self, hidden: Tensor) -> Tensor:
        gathered = self.seam.external or self.seam.unit  # Gathering the shards makes a new tensor.
        if not gathered and self.state != self._state(Head.of(self.seam.module)):
            what = "the head's weight, its adapters or the hidden states have changed"
            raise RuntimeError(STALE.format(what))
        self.draw()
        return self.seam.own(hidden)


@dataclass(eq=False)
class Recipe:
    """Formula of logits: `scale * raw` or `factor * tanh(scale * raw)`, raw = head(hidden) + bias.

    Attributes:
        hidden: hidden states [.., H] of the logits' rows.
        parent, step: the logits are `step(logits of parent)`; without parent, the head's output.
        real: the values of the logits, after their first computation.
    """

    call: HeadCall
    hidden: Tensor
    scale: float = 1.0
    factor: float | None = None
    bias: Tensor | None = None  # [V]
    parent: Recipe | None = None
    step: Callable[[Tensor], Tensor] | None = None
    real: Tensor | None = None

    def followed(self, shape: Any, dtype: torch.dtype, inputs: list[Tensor]) -> Followed:
        return _Node.apply(self, torch.Size(shape), dtype, *inputs)  # type: ignore[return-value]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that may get a gradient: hidden states, the head's tensors and the bias."""
        return self.call.tensors(self.call.head) + ([] if self.bias is None else [self.bias])

    def make(self, attached: bool) -> Tensor:
        if self.real is None and self.call.written:
            raise RuntimeError(STALE.format("they have been written to by another name"))
        if self.real is None or (attached and not self.real.requires_grad):
            with torch.set_grad_enabled(attached):
                parent = self.parent
                self.real = self.call.raw() if parent is None else self.step(parent.make(attached))  # type: ignore[misc]
        return self.real

    def head_of(self, head: Head, columns: int) -> Head:
        """Return `head` with bias, scale and soft cap of `self`, cut to `columns` token ids."""
        plain = self.scale == 1 and self.factor is None and self.bias is None
        if plain and columns == len(head.weight):
            return head
        bias, scale = head.bias, self.scale * (self.factor or 1)
        if self.bias is None and (scale, self.factor, columns) == (1, None, head.vocabulary):
            return head
        if self.bias is not None:
            added = self.bias.to(head.weight.dtype)
            bias = added if bias is None else bias + added
        changes = {"softcap": self.factor, "logit_scale": scale, "vocab_size": columns}
        return replace(head, bias=bias, **changes)  # type: ignore[arg-type]


class Followed(Tensor):
    """Logits [.., V] without storage; the `recipe` can compute the logits' values."""

    own: Recipe

    @property
    def node(self) -> Any:
        """The autograd node that made the logits, below any nodes of DeepSpeed's hooks."""
        node: Any = self.grad_fn
        while node is not None and type(node).__name__.startswith("PreBackwardFunction"):
            node = node.next_functions[0][0]
        return node

    @property
    def recipe(self) -> Recipe:
        return getattr(self.node, "recipe", self.own)

    def make(self) -> Tensor:
        attached = self.requires_grad and torch.is_grad_enabled()
        if attached and not hasattr(self.node, "recipe"):  # from an autograd function
            return _Bridge.apply(self, self.own.make(False))  # type: ignore[return-value]
        return self.recipe.make(attached)

    def through(self, model: nn.Module, act: Callable[[Tensor, Head], Tensors]) -> Tensors:
        """Return `act(hidden, head)`, differentiable, with the hidden states and the head stored in
        the lazy logits `self`. `act` runs with the autocast settings under which the model called
        its head; sharded head weights are gathered in forward and backward."""
        node = self.node  # Each read of a tensor attribute takes ten microseconds.
        recipe = getattr(node, "recipe", self.own)
        seam, exact = recipe.call.seam, list[Tensor]()

        def of_hidden(hidden: Tensor) -> Tensors:
            read = recipe.call.head
            if seam.external or seam.unit:
                with in_place_of(seam.module):
                    read = Head.of(seam.module)
            head = recipe.head_of(whole(read, model, hidden.dtype), self.shape[-1])
            exact[:] = act(hidden.to(head.weight.device), head)
            return tuple(exact)

        recipe.call.draw()
        trains = (node is not None or self.requires_grad) and torch.is_grad_enabled()
        with torch.set_grad_enabled(trains), torch.autocast(**recipe.call.autocast):
            if seam.unit:  # FSDP2's backward hook on the logits gathers the weights.
                return tuple(hooked(x, self, zeros=False) for x in of_hidden(recipe.hidden))
            if not seam.external:
                return of_hidden(recipe.hidden)
            return tuple(map(hooked, exact, inside(seam.module, of_hidden, recipe.hidden)))

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if name == "__get__":  # An attribute's getter.
            name = getattr(func.__self__, "__name__", "")
        if name in OF_NO_VALUES:
            return super().__torch_function__(func, types, args, kwargs)
        first = args[0] if args else None
        if (rule := RULES.get(name)) and is_followed(first):
            if (result := rule(first, func, *args[1:], **kwargs)) is not None:
                return result
        elif isinstance(first, Followed) and (
            name in WRITES or (name[-1] == "_" and name[-2:] != "__")
        ):
            with torch.set_grad_enabled(first.requires_grad):
                first.make()  # Later reads of the logits must see what `func` writes.
            first.recipe.call.written = True
        args, kwargs = tree_map(real, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(real, (args, kwargs or {}))
        return func(*args, **kwargs)


def is_followed(logits: object) -> TypeGuard[Followed]:
    """Return whether `logits` are `Followed` logits that can still be computed with a gradient."""
    if not isinstance(logits, Followed):
        return False
    node = logits.node
    call = getattr(node, "recipe", logits.own).call
    ours = hasattr(node, "recipe") or not logits.requires_grad
    return ours and not call.closed and not call.written


def real(value: Any) -> Any:
    """Return lazy logits (`Followed`) as a plain tensor of their values; else `value` itself."""
    return value.make() if isinstance(value, Followed) else value


class _Node(torch.autograd.Function):
    """Autograd node of lazy logits (`Followed`), with hidden states and head parameters as inputs.
    `_Node.backward` runs if an autograd function has used the lazy logits like a usual tensor."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, shape: Any, dtype: Any, *tensors: Tensor) -> Followed:
        ctx.recipe = recipe
        ctx.set_materialize_grads(False)
        logits: Any = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Followed, shape, dtype=dtype, device=recipe.call.head.weight.device
        )
        refuse_to_be_written(logits)
        logits.own = recipe
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        needed = ctx.needs_input_grad
        if gradients[0] is None:
            return (None,) * len(needed)
        tensors = ctx.recipe.tensors
        before = len(needed) - len(tensors)  # Number of leading inputs without a gradient.
        with torch.enable_grad():
            logits = ctx.recipe.make(True)
        wanted = [x for x, need in zip(tensors, needed[before:], strict=True) if need]
        keeping = {"allow_unused": True, "retain_graph": True}
        ready = iter(torch.autograd.grad(logits, wanted, gradients[0], **keeping))
        return *(None,) * before, *(next(ready) if need else None for need in needed[before:])


class _Bridge(torch.autograd.Function):
    """Copy the values of lazy logits (`Followed`) and pass the copy's gradient on to the logits."""

    @staticmethod
    def forward(ctx: Any, passed: Followed, logits: Tensor) -> Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


# ---------------------------------------------------------------------- rules of operations


def _then(
    x: Followed,
    step: Callable[[Tensor], Tensor],
    shape: Any = None,
    dtype: torch.dtype | None = None,
    attached: bool = True,
    **changes: Any,
) -> Followed:
    recipe = replace(x.recipe, parent=x.recipe, step=step, real=None, **changes)
    inputs = [x, *recipe.tensors] if attached and x.requires_grad else []
    return recipe.followed(x.shape if shape is None else shape, dtype or x.dtype, inputs)


def _times(x: Followed, func: Any, other: Any) -> Any:
    number = other if isinstance(other, int | float) else 0
    if not math.isfinite(number) or number == 0:
        return None
    if "div" in func.__name__:
        number = 1 / number
    if (factor := x.recipe.factor) is None:
        return _then(x, lambda t: func(t, other), scale=x.recipe.scale * number)
    return None if number < 0 else _then(x, lambda t: func(t, other), factor=factor * number)


def _tanh(x: Followed, func: Any) -> Any:
    return _then(x, torch.tanh, factor=1.0) if x.recipe.factor is None else None


def _plus(x: Followed, func: Any, bias: Any, **options: Any) -> Any:
    recipe, bias = x.recipe, real(bias)
    columns = recipe.call.head.weight.shape[:1]
    if not isinstance(bias, Tensor) or options or bias.shape[-1:] != columns:
        return None
    if bias.numel() != bias.shape[-1] or bias.dim() > x.dim() or bias.dtype != x.dtype:
        return None
    trained = bias.requires_grad and (recipe.call.seam.external or not x.requires_grad)
    if trained or recipe.factor is not None or recipe.scale != 1:
        return None
    added = bias.reshape(-1).clone()
    total = added if recipe.bias is None else recipe.bias + added
    return _then(x, lambda t: t + added, bias=total)


def _cast(x: Followed, func: Any, *args: Any, **options: Any) -> Any:
    """Return `Followed` logits after a cast or a copy; None if the result is a plain tensor."""
    like = func(torch.empty(0, dtype=x.dtype, device=x.device), *args, **options)
    if not isinstance(like, Tensor) or not like.is_floating_point() or like.device != x.device:
        return None
    attached = func is not Tensor.detach
    return _then(x, lambda t: func(t, *args, **options), dtype=like.dtype, attached=attached)


def _item(x: Followed, func: Any, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    kinds = (int, slice, Tensor, type(...))
    if not parts or any(not isinstance(p, kinds) or isinstance(p, bool | Followed) for p in parts):
        return None
    masks = [p.dim() if isinstance(p, Tensor) and p.dtype == torch.bool else 1 for p in parts]
    last, columns = parts[-1], x.shape[-1]
    if sum(masks) >= x.dim() or any(p is ... for p in parts):  # `parts[-1]` indexes the vocabulary.
        stop = last.stop if isinstance(last, slice) and last == slice(last.stop) else 0
        columns = min(columns, columns if stop is None else stop)
        parts = (*parts[:-1], slice(None))
    if columns < 1:
        return None
    rows = x.recipe.hidden[parts]
    return _then(x, lambda t: t[index], (*rows.shape[:-1], columns), hidden=rows)


def _view(x: Followed, func: Any, *args: Any, **options: Any) -> Any:
    like = func(torch.empty(x.shape, dtype=x.dtype, device="meta"), *args, **options)
    if like.shape[-1:] != x.shape[-1:] or like.dtype != x.dtype:
        return None
    rows = x.recipe.hidden.reshape(*like.shape[:-1], x.recipe.hidden.shape[-1])
    return _then(x, lambda t: func(t, *args, **options), like.shape, hidden=rows)


def _cross_entropy(x: Followed, func: Any, *args: Any, **options: Any) -> Any:
    take = x.recipe.call.seam.cross_entropy
    return None if take is None else take(x, *args, **options)


def _refused(*_: Any) -> Any:
    raise RuntimeError("logits: retain_grad() has no gradient to keep, as the loss bypasses them")


RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), _times),
    **dict.fromkeys(("div", "__truediv__"), _times),
    **dict.fromkeys(("add", "__add__", "__radd__"), _plus),
    **dict.fromkeys(("float", "to", "clone", "contiguous", "detach"), _cast),
    **dict.fromkeys(("view", "reshape", "flatten"), _view),
    "tanh": _tanh,
    "__getitem__": _item,
    "cross_entropy": _cross_entropy,
    "retain_grad": _refused,
}
