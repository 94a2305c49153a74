"""`headloss plan --plot` draws a plan, with labels at the lines."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from named_lines import GAP, name_lines

from headloss.__main__ import main

SIZES = ["--tokens", "4096", "--hidden", "64", "--vocab", "1000", "--device", "cuda"]


def test_every_schedule_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "memory.svg"
    assert main(["plan", *SIZES, "--plot", str(path)]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("headloss: not drawn: frozen:") and "schedule" in said.out
    comments = path.read_text()  # matplotlib adds each text of a plot to the SVG as a comment
    assert ElementTree.fromstring(comments).tag.endswith("svg")
    for name in ("one_pass", "held", "recompute", "plain logits", "scored tokens of a call"):
        assert f"<!-- {name} -->" in comments
    assert list(tmp_path.iterdir()) == [path]
    assert main(["plan", *SIZES, "--frozen-head", "--plot", str(path)]) == 0
    assert "<!-- frozen -->" in path.read_text()
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith("headloss: not drawn: narrow:")


def test_labels_lie_inside_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: (figures.append(f), save(f, *a, **k)))
    objective = "gspo+z_loss+kl+entropy+cross_entropy+reinforce"
    assert main(["plan", *SIZES, "--plot", str(tmp_path / "a.png"), "--objective", objective]) == 0
    (figure,) = figures
    figure.canvas.draw()
    axes = figure.axes[0]
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label, *figure.legends[0].get_texts()):
        box = text.get_window_extent(figure.canvas.get_renderer())
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1, text
        assert 0 <= box.y0 < box.y1 <= figure.bbox.y1, text


@pytest.mark.parametrize(
    ("file", "said"),
    [("memory.txt", "want a file ending in .png"), ("no/memory.png", "cannot write")],
)
def test_files_that_cannot_be(
    file: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *SIZES, "--plot", str(tmp_path / file)])
    error = capsys.readouterr().err
    assert error.startswith("headloss: --plot: ") and said in error and error.count("\n") == 1


def test_names_do_not_overlap() -> None:
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines = [axes.plot([0, 1], [0, y], label=f"{y}")[0] for y in (1.0, 0.999, 0.998, 0.5, 0.0)]
    name_lines(axes, lines)
    heights = sorted(float(text.xyann[1]) for text in axes.texts)
    assert [text.get_text() for text in axes.texts] == ["0.0", "0.5", "0.998", "0.999", "1.0"]
    assert all(b - a >= GAP - 1e-9 for a, b in pairwise(heights))
    assert heights[0] >= 0 and heights[-1] <= 1
