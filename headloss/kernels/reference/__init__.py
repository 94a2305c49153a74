"""The reference backend: the functions of `interface.Acts` in plain PyTorch, on any device and in
any dtype.

Tests compare each function of the triton backend with the reference function of the same name.
"""

from __future__ import annotations

from .pair import divergence, part_gradient_
from .rows import scaled, scaled_rows
from .support import support_gradient, support_logits, support_partials, support_sums
from .tile import best, finish, logit_gradient_, partials
