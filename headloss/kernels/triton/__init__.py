"""The Triton backend implements every function of `interface.Kernels`, on a GPU or in Triton's
interpreter.

float64 tensors run on the reference backend.
"""

from __future__ import annotations

from .chosen import chosen_gradient_, chosen_logits
from .fixed import fixed_product
from .given import given_rows
from .gradient import exp_gradient_, exp_multiple_, logit_gradient_
from .likeliest import best
from .merge import finish
from .narrow import can_sweep, narrow_hidden, narrow_partials, narrow_weight_
from .order import dense_order
from .pair import divergence, part_gradient_
from .product import can_fuse, product_gradient, product_partials, product_statistics
from .rows import scale_rows_, scaled, scaled_rows
from .statistics import partials
from .support import support_gradient, support_logits, support_partials, support_sums
