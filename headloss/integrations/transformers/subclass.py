"""A subclass of a model's class, of the same name, with another forward: wrappers of the forward,
put on or taken off, leave that one innermost. FSDP2 makes such a class, too."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from ..followed_head import eager

STATE = "_headloss"  # of the model; its `run` is called in place of the forward
BASE = "_headloss_base"  # of the class


@functools.cache
def applied_class(base: Any) -> Any:
    """A subclass of `base`, one for each."""

    @eager(recursive=False)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state, own = vars(self).get(STATE), functools.partial(base.forward, self)
        return own(*args, **kwargs) if state is None else state.run(self, own, args, kwargs)

    vars(forward).pop("__wrapped__", None)  # through which accelerate would go to the model's own
    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    forward.__doc__ = base.forward.__doc__

    def reduce(self: Any, protocol: Any) -> Any:
        return _new, (base,), self.__dict__

    names = {"forward": forward, "__reduce_ex__": reduce, "__doc__": base.__doc__, BASE: base}
    names |= {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base)(base.__name__, (base,), names)


def _new(base: Any) -> Any:
    kind = applied_class(base)
    return kind.__new__(kind)


def enter(model: Any) -> Any:
    """Give the model its subclass, and the forwards of it that wrappers keep. The forward that
    others have put on the instance, if it does not call one of these, is taken off and returned.

    Raises:
        ValueError: a forward that accelerate has wrapped already, which would put it back.
    """
    base, own = type(model), vars(model).get("forward")
    if "_original_forward" in vars(model):
        raise ValueError(
            "model.forward: accelerate's mixed precision has wrapped it; call apply(model) before "
            "accelerator.prepare(model)"
        )
    _swap(model, base, applied_class(base))
    if own is None or "_old_forward" in vars(model):  # accelerate's hooks call the latter
        return None
    del model.forward
    return None if getattr(own, "__func__", None) is base.forward else own


def leave(model: Any) -> None:
    """Undo `enter`. Where FSDP2's class is around the subclass, that stays and does nothing."""
    kind = type(model)
    if BASE in vars(kind):
        _swap(model, kind, vars(kind)[BASE])


def _swap(model: Any, old: Any, new: Any) -> None:
    model.__class__ = new
    for name, value in list(vars(model).items()):
        if isinstance(value, types.MethodType) and value.__func__ is old.forward:
            vars(model)[name] = types.MethodType(new.forward, model)
