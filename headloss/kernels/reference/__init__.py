"""The reference backend: every act in plain PyTorch, on any device and in any dtype.

Each act is the plain twin of the kernels' act of the same name, which the tests hold to it.
"""

from __future__ import annotations

from .fused import (
    can_fuse,
    chosen_gradient_,
    chosen_logits,
    finish,
    fixed_product,
    held_gradient_,
    held_multiple_,
    product_gradient,
    product_partials,
    product_statistics,
)
from .pair import divergence, part_gradient_, readable, teacher_product
from .rows import dense_order, given_rows, scale_rows_, scaled, scaled_rows
from .support import support_gradient, support_logits, support_partials, support_sums
from .tile import logit_gradient_, partials
