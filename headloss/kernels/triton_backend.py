"""The Triton backend: the two acts of reference.py, both of them on given logits in one launch, and
the product that holds softmax terms; the last two only it has. float64 is left to the reference."""

from __future__ import annotations

from .triton_cast import scaled
from .triton_given import Rows, given_rows, scale_rows_
from .triton_gradient import logit_gradient_, narrowed
from .triton_held import held_gradient_, held_multiple_, is_multiple
from .triton_order import Order, dense_order, move_rows_, scaled_rows
from .triton_partials import partials
from .triton_product import Held, can_fuse, product_partials
from .triton_slab import product_gradient

__all__ = [
    "Held",
    "Order",
    "Rows",
    "can_fuse",
    "dense_order",
    "given_rows",
    "held_gradient_",
    "held_multiple_",
    "is_multiple",
    "logit_gradient_",
    "move_rows_",
    "narrowed",
    "partials",
    "product_gradient",
    "product_partials",
    "scale_rows_",
    "scaled",
    "scaled_rows",
]
