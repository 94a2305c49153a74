"""Test helper that makes small training runs faster: plots become empty files, and each data set
of problems is created only once.

Plots with content are tested in `test_train.py`, `test_train_reports.py` and
`test_shipped_recipe`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from headloss.train import plots

Drawn = plots.Figure


class Blank(Drawn):
    def savefig(self, path: Path, **options: Any) -> None:
        path.touch()


@pytest.fixture(scope="module", autouse=True)
def blank_plots() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "Figure", Blank)
        create = functools.cache(reasoning_gym.create_dataset)  # name problems by number
        patch.setattr(reasoning_gym, "create_dataset", create)
        yield
