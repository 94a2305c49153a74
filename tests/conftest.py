"""Set-up of all tests: one thread, a fixed seed, fresh memory filled with NaN on request, and the
choice of fast tests."""

from __future__ import annotations

import gc
import os
import platform
import types
from collections.abc import Iterator

import hypothesis
import pytest

# Triton's interpreter multiplies with NumPy, whose BLAS is configured at import. On Haswell and Zen
# CPUs, OpenBLAS rounds a matrix row differently depending on the row's index in the matmul tile;
# GPU matmuls do not.
if platform.machine() in ("x86_64", "AMD64"):
    os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Let Triton interpret its kernels on the CPU. Triton reads this variable when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# keep Python's garbage collector off during the imports; `overhead.freeze` turns it on
gc.disable()

import covering  # noqa: E402
import overhead  # noqa: E402

from headloss.engine import plan  # noqa: E402

overhead.spare()


class _TorchRandom:
    """Seed torch before each hypothesis example, so that a failing example can be replayed."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


# keep a reference: hypothesis registers random generators by weak reference only
_torch_random = _TorchRandom()
hypothesis.register_random(_torch_random)

# `--hypothesis-profile=full` selects the profile "full".
hypothesis.settings.register_profile("quick", max_examples=10, deadline=None, derandomize=True)
hypothesis.settings.register_profile("full", max_examples=100, deadline=None, derandomize=True)
hypothesis.settings.load_profile("quick")


def pytest_make_parametrize_id(val: object) -> str | None:
    """Return a function's name as a test id, so that all test processes use identical ids."""
    return val.__name__ if isinstance(val, types.FunctionType) else None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", covering.MARK)


# tryfirst: items must be marked slow before pytest applies `-m "not slow"`
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    covering.mark_slow(items)


def pytest_collection_finish() -> None:
    overhead.spare_interpreter()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    overhead.freeze()


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """Fill new tensors with NaN, so that elements left unwritten are visible."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def skip_small_rows() -> Iterator[None]:
    """Skip token rows with a negligible gradient in small CPU matmuls too, which the library does
    only in large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "CPU_SKIP_WORTH", 0)
        yield
