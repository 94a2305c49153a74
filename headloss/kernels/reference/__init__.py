"""The reference backend: `interface.Acts` in plain PyTorch, on any device and in any dtype.

Each act is the plain twin of the kernels' act of the same name, which the tests hold to it.
"""

from __future__ import annotations

from .pair import divergence, part_gradient_
from .rows import scaled, scaled_rows
from .support import support_gradient, support_logits, support_partials, support_sums
from .tile import best, finish, logit_gradient_, partials
