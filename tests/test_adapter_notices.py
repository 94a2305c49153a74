"""`headloss doctor` lists the state of each adapter, and an adapter says if it was never called.

Stubs with real signatures stand for the frameworks; tests of framework code are in
tests/frameworks.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from framework_stubs import (
    new_argument,
    no_notice_yet,  # noqa: F401
    stubbed,
)

import headloss as hl
from headloss.integrations import seams
from headloss.integrations.seams import TESTED, Seams
from headloss.testing import doctor

# ---------------------------------------------------------------------- headloss doctor


def lines_of(monkeypatch: pytest.MonkeyPatch, **releases: str) -> dict[str, str]:
    monkeypatch.setattr(seams, "release", lambda package: releases.get(package.replace("-", "_")))
    packages = {name for name in seams.ADAPTERS if name.replace("-", "_") in releases}
    lines = [line.split(None, 1) for line in doctor.report()[10:]]
    assert {name for name, _ in lines} == packages
    return dict(lines)  # type: ignore[arg-type]


def test_doctor_knows_tested_releases_without_an_import(monkeypatch) -> None:
    newest = {name.replace("-", "_"): releases[-1] for name, releases in TESTED.items()}
    loaded = set(sys.modules)
    lines = lines_of(monkeypatch, **newest)
    assert lines == {name: f"{releases[-1]}, tested" for name, releases in TESTED.items()}
    assert not {m for m in set(sys.modules) - loaded if m.startswith("headloss.integrations.")}


def test_doctor_checks_other_releases(monkeypatch) -> None:
    stubbed(monkeypatch, "skyrl")
    stubbed(monkeypatch, "nemo_rl", lambda f: new_argument(f, "wanted"))
    lines = lines_of(monkeypatch, skyrl="99.0", nemo_rl="99.0", prime_rl="99.0")
    name = "_fused_lm_head_logprob_apply"
    assert lines["skyrl"] == f"99.0, not tested; the signature of {name} was checked and holds"
    assert lines["nemo-rl"].startswith("99.0: nemo_rl.distributed.model_utils.from_parallel")
    assert "takes (tensor_parallel_hidden_states, wanted" in lines["nemo-rl"]
    assert lines["prime-rl"].startswith("99.0, does not import here: ModuleNotFoundError")


def test_doctor_where_an_adapter_has_no_check(monkeypatch) -> None:
    name = "headloss.integrations.trl"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    lines = lines_of(monkeypatch, trl="99.0")
    assert lines["trl"] == f"99.0, not tested (tested: {', '.join(TESTED['trl'])})"


def test_every_adapter_is_known() -> None:
    assert seams.ADAPTERS.keys() == TESTED.keys()
    for adapter in seams.ADAPTERS.values():
        assert importlib.util.find_spec(f"headloss.integrations.{adapter}") is not None


def test_the_table_of_versions() -> None:
    """The documentation lists exactly the framework releases in `headloss.integrations`' table
    `TESTED`."""
    page = Path(__file__).parents[1] / "docs" / "integrations" / "README.md"
    row = r"^\| \[(.+?)\]\(\S+?\)(?:, promised)? \| ([\d., ]+) \|"
    rows = re.findall(row, page.read_text(), re.M)
    table = {name.lower(): tuple(releases.split(", ")) for name, releases in rows}
    # The adapter for Liger monkey-patches nothing, so `TESTED` has no releases of Liger.
    del table["liger's api"]
    assert table == {n.replace("nemo-automodel", "automodel"): r for n, r in TESTED.items()}


# ---------------------------------------------------------------------- unused adapters


def stepped() -> list[str]:
    """Return the warnings that an adapter gives in two optimizer steps."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            weight.sum().backward()
            optimizer.step()
    return [str(w.message) for w in caught if "framework-with-a-loss" in str(w.message)]


class Fused:
    @staticmethod
    def apply(x: int) -> int:
        return x


@pytest.mark.parametrize("kind", ["function", "class"])
def test_an_adapter_that_was_never_called_says_so(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter without calls warns once, after the first step; a called or uninstalled adapter
    does not warn."""
    framework = ModuleType("framework_with_a_loss")
    theirs: Any = type("Theirs", (), {"apply": staticmethod(lambda x: -x)})
    framework.loss = theirs if kind == "class" else theirs.apply
    monkeypatch.setitem(sys.modules, framework.__name__, framework)
    ours = Fused if kind == "class" else Fused.apply
    adapter = Seams({(framework.__name__, "loss"): ours}, "framework-with-a-loss")
    adapter.install(quiet=True)
    (said,) = stepped()
    assert said.startswith("framework-with-a-loss: headloss's adapter was put in place, and by the")
    assert stepped() == []
    adapter.uninstall()
    adapter.install(quiet=True)
    loss = framework.loss
    assert (loss.apply if kind == "class" else loss)(3) == 3
    assert stepped() == []
    adapter.uninstall()
    adapter.install(quiet=True)
    adapter.uninstall()
    assert stepped() == [] and framework.loss is (theirs if kind == "class" else theirs.apply)


# ---------------------------------------------------------------------- adapters that say so


def test_agilerl_says_that_its_loss_is_liger_s() -> None:
    from headloss.integrations import agilerl

    layer = SimpleNamespace(base_layer=None, weight=torch.ones(3, 2), bias=None)
    agent = SimpleNamespace(use_liger_loss=True, _get_lm_head=lambda: layer)
    with pytest.warns(UserWarning, match=r"use_liger_loss: is True, .* want use_liger_loss=False"):
        agilerl.fused_logprob_fn_and_head(agent)
    agent.use_liger_loss = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agilerl.fused_logprob_fn_and_head(agent)


def test_ms_swift_refuses_a_trainer_and_not_its_loss_type() -> None:
    """`swift rlhf` sets a `loss_type` by itself."""
    pytest.importorskip("transformers")
    from headloss.integrations.ms_swift import Callback
    from headloss.losses import Objective

    class GRPOTrainer:
        __module__ = "swift.rlhf_trainers.grpo_trainer"

    with pytest.raises(ValueError, match="callbacks: got headloss with GRPOTrainer, .*swift sft"):
        Callback(SimpleNamespace(loss_type="grpo"), GRPOTrainer(), Objective.of(hl.cross_entropy()))


def test_trl_install_that_nothing_calls_says_so() -> None:
    trl = pytest.importorskip("trl")
    assert trl
    from headloss.integrations.trl import install, uninstall

    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    install()
    try:
        with pytest.warns(UserWarning, match="trl: headloss's adapter was put in place, and by"):
            torch.optim.SGD([weight], 0.1).step()
    finally:
        uninstall()
