"""Small runs spend most of their time on plots: here these are files with nothing drawn in them.

What is drawn, `test_train.py`, `test_train_reports.py` and `test_shipped_recipe` see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headloss.train import plots

Drawn = plots.Figure


class Blank(Drawn):
    def savefig(self, *args: Any, **options: Any) -> None:
        self.clear()
        self.set_layout_engine("none")
        super().savefig(*args, **options)


@pytest.fixture(scope="module", autouse=True)
def blank_plots() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "Figure", Blank)
        yield
