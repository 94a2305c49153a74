"""Every test starts from one thread and one seed."""

from __future__ import annotations

import gc
import os
import platform
import types
from collections.abc import Iterator

import hypothesis
import pytest

# NumPy, which torch loads, multiplies for Triton's interpreter. In OpenBLAS's kernels for Haswell
# and Zen a row's bits depend on its place in the tile, as they do on no GPU.
if platform.machine() in ("x86_64", "AMD64"):
    os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():  # before anything imports Triton: its kernels then run on a CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

gc.disable()  # until all is imported and `frozen`

import covering  # noqa: E402
import overhead  # noqa: E402

from headloss.engine import plan  # noqa: E402

overhead.spare()
plan.CPU_SKIP_WORTH = 0  # small tests see what large calls do: rows without gradient are left out


class _TorchRandom:
    """Lets hypothesis seed torch before each example, so that a found example can be replayed."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_torch_random = _TorchRandom()  # hypothesis holds only a weak reference
hypothesis.register_random(_torch_random)

# `--hypothesis-profile=full` chooses the other one.
hypothesis.settings.register_profile("quick", max_examples=10, deadline=None, derandomize=True)
hypothesis.settings.register_profile("full", max_examples=100, deadline=None, derandomize=True)
hypothesis.settings.load_profile("quick")


def pytest_make_parametrize_id(val: object) -> str | None:
    """A function's name, so that every process that runs tests gives one test one name."""
    return val.__name__ if isinstance(val, types.FunctionType) else None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", covering.MARK)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
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
    """What a new tensor holds before it is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
