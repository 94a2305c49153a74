"""Transform of raw logits before the softmax, and its vector-Jacobian product."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Transform:
    """Transform of logits: raw logits are multiplied by `scale`, soft-capped, and divided by
    `temperature`.

    Kernels that compute the raw logits by a matmul add `bias` [v], of any float dtype, to the
    matmul's result; existing tiles of raw logits already include the bias.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0  # A number or [n].
    bias: Tensor | None = None

    def rows(self, rows: slice | Tensor) -> Transform:
        """Return the transform restricted to the tokens `rows`."""
        if not isinstance(self.temperature, Tensor):
            return self
        return replace(self, temperature=self.temperature[rows])

    @property
    def _divisor(self) -> float | Tensor:
        t = self.temperature
        return t.unsqueeze(1) if isinstance(t, Tensor) else t

    def __call__(self, raw: Tensor) -> Tensor:
        """Return z = softcap * tanh(raw * scale / softcap) / temperature, as a new tensor."""
        if self.softcap is None:
            return raw * (self.scale / self._divisor)
        return raw.mul(self.scale / self.softcap).tanh_().mul_(self.softcap / self._divisor)

    def read(self, raw: Tensor) -> Tensor:
        """Return the transformed logits z, which may be the tensor `raw` itself."""
        plain = self.softcap is None and not isinstance(self.temperature, Tensor)
        return raw if plain and self.scale == self.temperature else self(raw)

    def vjp_(self, gradient: Tensor, at: Tensor, is_z: bool = False) -> Tensor:
        """Turn `gradient`, the gradient with respect to the transformed logits z, into the gradient
        with respect to the raw logits, in place. The tensor `at` holds the raw logits. With `is_z`,
        the tensor `at` holds the transformed logits z, and the computed gradient has fewer correct
        digits where |z| is close to the soft cap."""
        factor = self.scale / self._divisor
        if self.softcap is not None and is_z:
            cap = self.softcap / self._divisor
            size = at.abs()
            gradient.mul_((cap - size).clamp_min_(0).mul_(size.add_(cap)).div_(cap * cap))
        # The soft cap's derivative 1 - tanh(x)^2 is computed from exp(-2 |x|), to be accurate where
        # tanh(x) rounds to 1.
        elif self.softcap is not None:
            u = at.to(gradient.dtype).abs().mul_(-2 * abs(self.scale) / self.softcap).exp_()
            gradient.mul_(u.mul(4).div_(u.add_(1).square_()))
        return gradient if isinstance(factor, float) and factor == 1 else gradient.mul_(factor)
