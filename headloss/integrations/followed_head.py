"""Context in which a model's head returns lazy logits, a tensor without storage."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..engine.checks import check_eager
from .followed import HeadCall
from .sharding import externals, in_place_of, is_unit

BREAKS = (
    "headloss.integrations.transformers.apply breaks the graph at the head and at the loss: "
    "compile the model with fullgraph=False, or call headloss.head_stats, which breaks none"
)
eager: Any = torch.compiler.disable  # typed


class FollowedHead:
    """Context in which a model's head returns `Followed`, a tensor that stores the logits' formula.

    Args:
        model: a model with output embeddings.

    Attributes:
        module: the module of the model's output embeddings.
        external: whether ZeRO-3 gathers the module's weights only around the module's forward.
        unit: whether FSDP2 shards the module as a unit, alone or in a group.
        hidden: [.., H], hidden states of the module's last call; None before the first call.
        closed: reason why the logits' values can no longer be computed; "" if they can be.
    """

    hidden: Tensor | None = None
    closed = ""
    # Called in place of `torch.nn.functional.cross_entropy` if the input is lazy logits
    # (`Followed`); None: `torch.nn.functional.cross_entropy` runs on the logits' values.
    cross_entropy: Callable[..., Any] | None = None

    def __init__(self, model: Any) -> None:
        check_eager("head_loss")
        self.module, self.thread = _product(model), threading.get_ident()
        self.external, self.unit = externals(self.module), is_unit(self.module)

    @eager
    def __enter__(self) -> Self:
        own = vars(self.module).get("forward")
        self.own = own or functools.partial(type(self.module).forward, self.module)
        self.replaced = in_place_of(self.module, self.at_head)
        self.replaced.__enter__()
        return self

    @eager
    def __exit__(self, *error: object) -> None:
        self.cross_entropy = None
        self.replaced.__exit__(None, None, None)

    @eager(reason=BREAKS)
    def at_head(self, hidden: Tensor, **more: Any) -> Tensor:
        """Replace the head's forward: return logits without storage (`Followed`), which remember
        how to compute their values.

        With extra arguments, such as PEFT's `adapter_names`, the head returns usual logits.
        """
        if more or self.thread != threading.get_ident() or not hidden.is_floating_point():
            return self.own(hidden, **more)
        self.hidden = hidden
        with in_place_of(self.module):
            return HeadCall(self, hidden).logits()


def _product(model: Any) -> nn.Module:
    """Return the module that computes logits: the model's output embeddings, or, if the output
    embeddings are an `nn.Embedding` (as in FSMT), the last `nn.Linear` with one output per token
    id."""
    named = model.get_output_embeddings()
    if not isinstance(named, nn.Embedding):
        return named  # type: ignore[no-any-return]
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return [named, *(m for m in linear if m.out_features == named.num_embeddings)][-1]
