"""What happens to raw logits before the softmax, and its pull-back."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Transform:
    """raw -> * scale -> soft cap -> / temperature.

    `bias` [v], of any float dtype, is added first by acts that make raw logits by a product of
    their own; tiles of raw logits have it already.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0  # or [n]
    bias: Tensor | None = None

    def rows(self, rows: slice | Tensor) -> Transform:
        """The transform of some of the tokens."""
        if not isinstance(self.temperature, Tensor):
            return self
        return replace(self, temperature=self.temperature[rows])

    @property
    def _divisor(self) -> float | Tensor:
        t = self.temperature
        return t.unsqueeze(1) if isinstance(t, Tensor) else t

    def __call__(self, raw: Tensor) -> Tensor:
        """z = softcap * tanh(raw * scale / softcap) / temperature, as a new tensor."""
        if self.softcap is None:
            return raw * (self.scale / self._divisor)
        return raw.mul(self.scale / self.softcap).tanh_().mul_(self.softcap / self._divisor)

    def read(self, raw: Tensor) -> Tensor:
        """z, which may be raw itself."""
        known = self.softcap is None and not isinstance(self.temperature, Tensor)
        return raw if known and self.scale == self.temperature else self(raw)

    def pull_back_(self, gradient: Tensor, z: Tensor) -> Tensor:
        """In place: d/dz to d/draw, at z = self(raw)."""
        factor = self.scale / self._divisor
        if self.softcap is not None:
            tanh = z * (self._divisor / self.softcap)
            gradient.mul_(1 - tanh.square_())
        return gradient if isinstance(factor, float) and factor == 1 else gradient.mul_(factor)
