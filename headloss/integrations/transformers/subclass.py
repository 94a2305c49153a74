"""Subclasses that have the name of a model's class and run headloss in their forward.

headloss's forward stays innermost when wrappers are set on the instance's forward or removed.
FSDP2 also works by assigning a subclass to a module's `__class__`.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

STATE = "_headloss"  # Name of the model's attribute with the result of `apply(model)`.
BASE = "_headloss_base"  # Name of the subclass's attribute that holds the model's original class.


@functools.cache
def applied_class(base: Any) -> Any:
    """Return the subclass of the model class `base` with headloss's forward; cached, so that each
    class has one subclass."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state, own = vars(self).get(STATE), functools.partial(base.forward, self)
        return own(*args, **kwargs) if state is None else state.run(self, own, args, kwargs)

    # accelerate follows a forward's attribute `__wrapped__` to the model's own forward, and would
    # so bypass headloss's forward.
    vars(forward).pop("__wrapped__", None)
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
    """Change the model's class to `applied_class(type(model))`. Attributes of the model in which
    wrappers stored the old class's `forward` get the new class's `forward`.

    If the instance has a `forward` attribute of its own, the attribute is removed and returned. A
    `forward` attribute that accelerate's hooks have set stays, because the hooks call headloss's
    forward.

    Raises:
        ValueError: accelerate has wrapped the forward, and would later restore the old forward.
    """
    base, own = type(model), vars(model).get("forward")
    if "_original_forward" in vars(model):
        raise ValueError(
            "model.forward: accelerate's mixed precision has wrapped it; call apply(model) before "
            "accelerator.prepare(model)"
        )
    _swap(model, base, applied_class(base))
    if own is None or "_old_forward" in vars(model):  # accelerate's hooks call `_old_forward`.
        return None
    del model.forward
    return None if getattr(own, "__func__", None) is base.forward else own


def leave(model: Any) -> None:
    """Undo `enter`. If FSDP2 has derived a class from headloss's subclass of the model's class, the
    subclass stays but has no effect."""
    kind = type(model)
    if BASE in vars(kind):
        _swap(model, kind, vars(kind)[BASE])


def _swap(model: Any, old: Any, new: Any) -> None:
    model.__class__ = new
    for name, value in list(vars(model).items()):
        if isinstance(value, types.MethodType) and value.__func__ is old.forward:
            vars(model)[name] = types.MethodType(new.forward, model)
