"""Reports of training runs are self-contained HTML pages, with correct numbers of tokens per second
and with the evaluations made during training."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL trains")
pytest.importorskip("omegaconf", reason="recipes are read by it")
pytest.importorskip("reasoning_gym", reason="the tasks of the shipped recipes")
from test_train_runs import SMALL, run

from headloss import train
from headloss.__main__ import main
from headloss.train import callbacks, plots


class Page(HTMLParser):
    """A parser of a page's text, images and external links."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.images: list[str] = []
        self.fetched: list[str] = []
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        source = given.get("src") or given.get("href") or ""
        if source.startswith("data:image/png;base64,iVBORw0KGgo"):  # PNG signature
            self.images.append(given["alt"] or "")
        elif source or tag in ("script", "link", "iframe"):
            self.fetched.append(source or tag)

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def entries(tokens: list[int], seconds: float = 2.0, stride: int = 1) -> list[dict[str, Any]]:
    return [
        {"step": stride * (i + 1), "num_tokens": n, "step_time": seconds, "loss": 1.0}
        for i, n in enumerate(tokens)
    ]


def test_rate() -> None:
    assert plots.rate([]) is None
    assert plots.rate([{"step": 1, "step_time": 1.0}]) is None
    assert plots.rate(entries([100])) == 50
    assert plots.rate(entries([100, 300])) == 75
    assert plots.rate(entries([100, 300], stride=5)) == 15  # Each log entry covers five steps.
    # The tokens per second come from the last ten log entries, with 1000 new tokens per entry.
    assert plots.rate(entries([0] * 5 + [1000 * i for i in range(1, 11)])) == 500


def test_measured_has_labels_with_units() -> None:
    found = plots.measured([{**e, "reward": 0.5} for e in entries([10, 30])])
    assert list(found) == ["reward", "loss", "step_time", "tokens_per_second"]
    assert found["tokens_per_second"] == ("tokens per second", [(1, 5.0), (2, 7.5)])
    assert found["loss"][0] == plots.POLICY_LOSS
    assert plots.measured(entries([10]))["loss"][0] == "loss, nats per token"


def test_figures() -> None:
    entry = {"loss": 0.12345, "reward": 0.5, "tokens_per_second": 12345.6, "kl": None}
    assert callbacks.figures(entry) == "loss 0.123  reward 0.5  tokens/s 12346"


def test_latest_remembers_the_reward() -> None:
    drawn, again = {"step": 1, "reward": 0.5, "loss": 1.0}, {"step": 2, "loss": 2.0, "kl": None}
    found = callbacks.latest([drawn, again])
    assert found == {"step": 2, "reward": 0.5, "loss": 2.0, "tokens_per_second": None}


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    assert run("sft", place / "a", "held_out_steps=1", "trainer.max_steps=3") == 0
    # Run b is a copy of run a, with another learning rate in its recipe.
    shutil.copytree(place / "a", place / "b")
    recipe, rate = place / "b" / "recipe.yaml", "learning_rate: 0.002"
    assert rate in recipe.read_text()
    recipe.write_text(recipe.read_text().replace(rate, "learning_rate: 0.1"))
    return place


def test_held_out_on_the_way(two_runs: Path) -> None:
    """Held-out evaluations after intermediate steps are recorded in one file; the evaluations
    before and after training have files of their own."""
    lines = [json.loads(line) for line in (two_runs / "a/held_out.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["problems"] == 6 and "samples" not in line for line in lines)
    report = (two_runs / "a/report.md").read_text()
    assert "| step 1 | 6 | 0.0% ± 0.0% |" in report and "| after | 6 |" in report


def test_page_of_a_run(two_runs: Path) -> None:
    page = Page(two_runs / "a/report.html")
    assert page.fetched == []
    drawn = {path.stem.replace("_", " ") for path in (two_runs / "a/plots").iterdir()}
    assert set(page.images) == drawn and len(page.images) == len(drawn)
    assert {"held out", "loss", "entropy", "tokens per second", "peak memory"} <= drawn
    after = json.loads((two_runs / "a/after.json").read_text())
    for sample in after["samples"][:5]:
        assert sample["answer"] in page.text and sample["prompt"].strip() in page.text
    assert "learning_rate: 0.002" in page.text


def test_plots_show_whole_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All labels lie inside their plots, even the longest loss label and run names wider than a
    plot."""
    shown: dict[str, str] = {}
    save = plots.Figure.savefig

    def measured(figure: Any, path: Path, **options: Any) -> None:
        save(figure, path, **options)
        # `save` laid out the figure for the file's resolution; lay it out for the canvas.
        figure.canvas.draw()
        axes, renderer = figure.axes[0], figure.canvas.get_renderer()
        texts = [axes.xaxis.label, axes.yaxis.label, *axes.get_legend().get_texts()]
        for box in (text.get_window_extent(renderer) for text in texts):
            assert 0 <= box.x0 < box.x1 <= figure.bbox.x1, (path, box)
            assert 0 <= box.y0 < box.y1 <= figure.bbox.y1, (path, box)
        shown[path.name] = "".join("".join(text.get_text().split()) for text in texts)

    monkeypatch.setattr(plots.Figure, "savefig", measured)
    long, held = "learning_rate_" * 12, [(0, {"accuracy": 0.1, "sampled_accuracy": 0.2})]
    more = dict.fromkeys(("loss/kl_old_k3", "clip_ratio/region_mean", "peak_memory_mib"), 1.0)
    logged = [{**e, "kl": 0.1, "entropy": 1.0} for e in entries([10, 30])]
    policy = [{**e, "reward": 0.5, **more} for e in logged]
    paths = plots.overlay({f"rl/{long}": (policy, held), "sft": (logged, held)}, tmp_path)
    assert len(paths) == len(shown) == 1 + len(plots.FIGURES)
    loss = next(text for name, text in shown.items() if name.endswith("loss.png"))
    assert f"{plots.POLICY_LOSS} / loss, nats per token".replace(" ", "") in loss
    assert all(long in text for text in shown.values())


def test_page_of_several_runs(two_runs: Path, capsys: Any) -> None:
    to = two_runs / "both.html"
    runs = [str(two_runs / name) for name in ("a", "b")]
    assert main(["compare", *runs, "--output", str(to)]) == 0
    assert capsys.readouterr().out.strip() == str(to)
    page = Page(to)
    assert page.fetched == [] and {"held out", "loss"} <= set(page.images)
    differ = page.text[page.text.index("Where the recipes differ") :].split()
    assert differ[differ.index("trainer.learning_rate") :][1:3] == ["0.002", "0.1"]
    assert "trainer.weight_decay" not in differ


def test_a_comparison_of_nothing(two_runs: Path, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(train.RecipeError, match="compare: got '.*a', want the folders of two or m"):
        train.compare(str(two_runs / "a"))
    for given, said in (
        ([two_runs / "a", two_runs / "a"], "compare: got 1 run, want the folders of two or more"),
        ([two_runs / "a", tmp_path], f"compare: {tmp_path} holds no run that can be read"),
    ):
        with pytest.raises(SystemExit):
            main(["compare", *map(str, given), "--output", str(tmp_path / "x.html")])
        assert capsys.readouterr().err.startswith(f"headloss: {said}")
        assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("before.json", "{}"),
        ("after.json", "[]"),
        ("before.json", '{"accuracy": null, "sampled_accuracy": 0, "problems": 1, "score": 0}'),
        ("after.json", '{"accuracy": 0, "sampled_accuracy": 0, "problems": 0, "score": 0}'),
        ("held_out.jsonl", '{"step": 1}\n'),
        ("held_out.jsonl", '{"step": "one"}\n'),
    ],
)
def test_a_comparison_of_a_damaged_run(
    two_runs: Path, tmp_path: Path, capsys: Any, name: str, text: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_runs / "a", run)
    (run / name).write_text(text)
    with pytest.raises(SystemExit):
        main(["compare", str(two_runs / "a"), str(run), "--output", str(tmp_path / "x.html")])
    said = capsys.readouterr().err
    assert said.startswith(f"headloss: compare: {run} holds no run that can be read: ")
    assert said.count("\n") == 1 and not (tmp_path / "x.html").exists()


def test_text_of_a_model_is_no_markup(two_runs: Path) -> None:
    """A model's text is escaped in HTML pages."""
    recipe = train.recipe("sft", [*SMALL, f"output={two_runs / 'a'}"])
    found = json.loads((two_runs / "a/after.json").read_text())
    found["samples"][0]["completion"] = "<script src=x></script>"
    from headloss.train import pages

    result = train.Result(
        output=two_runs / "a", finished=True, steps=3, before=found, after=found,
        split="", held_out=[(0, found)], metrics=[], plots=[], seconds=1.0,
    )  # fmt: skip
    path = two_runs / "escaped.html"
    path.write_text(pages.of_run(recipe, result, 10))
    page = Page(path)
    assert page.fetched == [] and "<script src=x></script>" in page.text
