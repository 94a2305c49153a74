"""Matmuls of the head with a number of vocabulary columns that is no multiple of 8."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from headloss.head import products

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (5, 8, 21, 48)


class OnGpu(Tensor):
    """CPU tensor that takes the branch for GPU tensors."""

    is_cuda = True  # type: ignore[assignment]


def dtype_out(total: Tensor, a: Tensor, b: Tensor, wide: torch.dtype, out: Tensor, beta: int = 1):
    """Compute the GPU operation `aten.addmm.dtype_out` on a CPU."""
    assert out is total and a.dtype == b.dtype and total.dtype == wide
    return total.addmm_(a.to(wide), b.to(wide), beta=beta)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch):
    """Return a function that moves a tensor to the GPU, or wraps a CPU tensor in `OnGpu`."""
    if DEVICE == "cuda":
        return lambda x: x.to(DEVICE)
    addmm = SimpleNamespace(addmm=SimpleNamespace(dtype_out=dtype_out))
    monkeypatch.setattr(products, "aten", addmm)
    return lambda x: x.as_subclass(OnGpu)


@pytest.mark.parametrize("v", SIZES)
def test_hidden_gradient_of_any_number_of_columns(v: int, place) -> None:
    """The hidden gradient of v columns has the error of one rounding in each output dtype."""
    torch.manual_seed(0)
    gradient = place(torch.randn(6, 8 * -(-v // 8)).bfloat16())[:, :v]
    weight = place(torch.randn(v, 16).bfloat16())
    want = gradient.double() @ weight.double()
    for dtype in torch.float32, torch.bfloat16:
        if dtype == torch.float32 and v % 8 == 0 and DEVICE == "cpu":
            continue  # A CPU has no matmul of bfloat16 inputs with a float32 output.
        got = products.PLAIN.input_gradient(gradient, weight, dtype)
        rounding = (want.to(dtype).double() - want).norm()
        assert got.dtype == dtype
        assert (got.double() - want).norm() <= 1.5 * rounding + 2e-6 * want.norm()


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("total_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v", SIZES)
def test_weight_gradient_of_any_number_of_columns(v, total_dtype, fresh, place) -> None:
    """Each row of the weight gradient is written or added to; a fresh sum's memory is not read."""
    torch.manual_seed(0)
    gradient = place(torch.randn(6, 8 * -(-v // 8)).bfloat16())[:, :v]
    features = place(torch.randn(6, 16).bfloat16())
    start = torch.full((v, 16), torch.nan) if fresh else torch.randn(v, 16)
    total = place(start.to(total_dtype))
    want = gradient.double().t() @ features.double() + (0 if fresh else total.double())
    products.add_weight_gradient_(total, gradient, features, fresh)
    rounding = (want.to(total_dtype).double() - want).norm()
    assert (total.double() - want).norm() <= 2 * rounding + 2e-6 * want.norm()
