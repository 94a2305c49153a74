"""The promises of docs/library.md to callers of `head_stats` hold: signatures, imports, one
warning."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import warnings

import pytest
import torch

import headloss as hl
from headloss import kernels


def test_signatures_that_will_not_change() -> None:
    names = list(inspect.signature(hl.head_stats).parameters)
    assert names[:5] == ["hidden", "head", "targets_or_batch", "options", "gradients"]
    head = inspect.signature(hl.Head).parameters
    assert list(head)[:2] == ["weight", "bias"]
    assert {"temperature": 1.0, "softcap": None, "logit_scale": 1.0}.items() <= {
        name: parameter.default for name, parameter in head.items()
    }.items()
    assert next(iter(inspect.signature(hl.Batch).parameters)) == "targets"
    for callable in (hl.head_stats, hl.Head, hl.Batch):  # new arguments have defaults
        added = list(inspect.signature(callable).parameters.values())[3:]
        empty, fields = inspect.Parameter.empty, inspect.Parameter.VAR_KEYWORD
        assert all(p.default is not empty or p.kind == fields for p in added), callable


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_results_that_will_not_change(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 8, dtype=dtype, requires_grad=True)
    targets = torch.randint(20, (2, 5)).index_fill(1, torch.tensor([1]), -100)
    stats = hl.head_stats(hidden, hl.Head(torch.randn(20, 8, dtype=dtype)), targets)
    want = torch.float64 if dtype == torch.float64 else torch.float32
    for value in (stats.logp, stats.lse, stats.entropy):
        assert value.dtype == want and value.shape == targets.shape
        assert not value[:, 1].any() and value.requires_grad
    assert tuple(stats) == (stats.logp, stats.lse, stats.entropy) and stats.plan is not None
    sum(value.sum() for value in stats).backward()
    assert hidden.grad is not None and not hidden.grad[:, 1].any() and hidden.grad[:, 0].all()


def test_import_loads_torch_and_headloss_alone() -> None:
    code = (
        "import json, sys, torch; before = set(sys.modules); import headloss; "
        "print(json.dumps([sorted(set(sys.modules) - before), torch.cuda.is_initialized()]))"
    )
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded, on_gpu = json.loads(ran.stdout)
    others = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert others == {"headloss"} and not on_gpu


def test_a_broken_triton_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(backend: str) -> None:
        raise ImportError("no compiler")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "load", broken)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: object())
    kernels._failure.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            chosen = [
                kernels.choose("auto", torch.device("cuda"), torch.bfloat16) for _ in range(3)
            ]
    finally:
        kernels._failure.cache_clear()
    assert chosen == ["reference"] * 3 and len(caught) == 1
    assert "the reference serves (ImportError: no compiler)" in str(caught[0].message)
