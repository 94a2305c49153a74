"""The kernels follow from the GPU's features, and a missing or broken Triton is reported; the tests
need no GPU."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterator

import pytest
import torch
from triton_cases import DEVICE  # import this first: it turns on Triton's interpreter

from headloss import kernels
from headloss.kernels.triton import given, tiles, versions

GPU = torch.device("cuda", 0)
HOPPER, SMALL = 227 << 10, 99 << 10  # bytes of shared memory


@pytest.fixture
def fresh() -> Iterator[None]:
    """Clear the cached answers about the machine (Triton, accelerator) before and after a test."""
    kept = kernels._failure, kernels.load, tiles.has_accelerator
    kept += (versions.overlaps,)
    for known in kept:
        known.cache_clear()
    yield
    for known in kept:
        known.cache_clear()


def on(monkeypatch, capability: tuple[int, int], shared: int = HOPPER, hip: str | None = None):
    """Pretend that a GPU with the given features exists."""
    properties = types.SimpleNamespace(shared_memory_per_block_optin=shared)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(versions.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(versions.triton, "__version__", "3.6.0")


@pytest.mark.parametrize(
    ("name", "capability", "shared", "hip", "fused", "overlaps"),
    [
        ("A100", (8, 0), 163 << 10, None, False, False),
        ("L40S", (8, 9), SMALL, None, False, False),
        ("H100", (9, 0), HOPPER, None, True, True),
        ("B200", (10, 0), HOPPER, None, True, False),
        ("RTX 5090", (12, 0), SMALL, None, False, False),
        ("MI300X", (9, 4), 64 << 10, "6.2", False, False),
        ("MI250X", (9, 0), HOPPER, "6.2", False, False),
    ],
)
def test_kernels_of_a_gpu(
    monkeypatch, fresh, name, capability, shared, hip, fused, overlaps
) -> None:
    on(monkeypatch, capability, shared, hip)
    assert tiles.has_accelerator(GPU) is fused
    assert versions.overlaps(GPU) is overlaps
    wide = given.shape_of(200000, True)
    assert (wide.registers is None) is (hip is not None)


def test_the_tiles_in_flight_fit_the_memory_that_is_asked_for() -> None:
    """The Gluon kernel whose epilogue overlaps with the next product requests enough shared memory
    for its tiles, and no more than Hopper has."""
    ring = tiles.STAGES * (tiles.ROWS + tiles.WIDTH) * tiles.DEPTH * 2
    out = tiles.ROWS * tiles.WIDTH // 2 * 2
    assert ring + out < tiles.SHARED <= HOPPER


@pytest.mark.parametrize("broken", ["missing", "import", "driver"])
def test_a_triton_that_does_not_work(monkeypatch, fresh, broken: str) -> None:
    """If Triton does not work, `backend="auto"` falls back with one warning that gives the reason,
    and `backend="triton"` raises it."""

    def fail() -> None:
        raise RuntimeError("no C compiler was found")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "find_triton_driver", fail if broken == "driver" else lambda: None)
    reason = {
        "missing": "ImportError: triton is not installed",
        "import": "ModuleNotFoundError: import of headloss.kernels.triton halted",
        "driver": "RuntimeError: no C compiler was found",
    }[broken]
    if broken == "missing":
        monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    if broken == "import":
        monkeypatch.setitem(sys.modules, "headloss.kernels.triton", None)
        monkeypatch.delattr(kernels, "triton")
    with pytest.warns(RuntimeWarning, match=reason) as seen:
        found = [kernels.choose("auto", GPU, d) for d in (torch.bfloat16, torch.float32)]
    assert found == ["reference"] * 2 and len(seen) == 1
    with pytest.raises(ValueError, match=f'backend: got "triton".*{reason}'):
        kernels.choose("triton", GPU, torch.bfloat16)


def test_nobody_is_warned_without_need(monkeypatch, fresh) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.choose("auto", torch.device("cpu"), torch.float32) == "reference"
        assert kernels.choose("auto", GPU, torch.float64) == "reference"
        assert kernels.choose("auto", GPU, torch.float32) == "triton"
    assert DEVICE in ("cpu", "cuda")
