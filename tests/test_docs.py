"""On README.md and all pages, code runs, links are valid, and generated parts are up to date."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from worlds import free_port

import headloss as hl

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "DESIGN.md", "CHANGELOG.md", "benchmarks/README.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
EXPECTED = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)
# Documentation pages whose code blocks do not run as one program.
NOT_RUN = {"CONTRIBUTING.md": "a fragment of headloss/losses, with the names of its file"}
RANKS = "docs/across-devices.md"  # page with a script that runs on two ranks
WITH_CODE = [page for page in PAGES if BLOCK.search((ROOT / page).read_text())]



def script(name: str):
    """Import docs/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


readme, notebooks = script("readme"), script("notebooks")
index_page, paste = script("index_page"), script("paste")
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


SHORT = {"README.md": 180, "DESIGN.md": 200, "CHANGELOG.md": 80, "benchmarks/NOTES.md": 400}


@pytest.mark.parametrize("page", SHORT)
def test_page_is_short(page: str) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= SHORT[page]


@pytest.mark.parametrize("page", [page for page in WITH_CODE if page not in (*NOT_RUN, RANKS)])
def test_code_prints_what_it_says(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A page's code blocks run as one program, and comments after print calls match the output."""
    names: dict[str, object] = {"__name__": "page"}
    for block in BLOCK.findall((ROOT / page).read_text()):
        exec(compile(block, page, "exec"), names)
        assert capsys.readouterr().out.splitlines() == EXPECTED.findall(block)


def test_code_for_two_ranks_prints_the_pages_output(tmp_path: Path) -> None:
    code = "\n".join(BLOCK.findall((ROOT / RANKS).read_text()))
    path = tmp_path / "script.py"
    path.write_text(f"{code}\ndistributed.destroy_process_group()\n")
    # Use new Python processes, in which sets iterate in different orders; forked processes, as in
    # `script_on`, have one order.
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    place |= {"PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen([sys.executable, str(path)], cwd=ROOT, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]  # fmt: skip
    printed = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], printed
    said = re.findall(r"^ *say\(.*\)  # (.*)$", code, re.MULTILINE)
    assert printed[0][0].splitlines() == said and len(said) == 4 and not printed[1][0]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_prints_what_is_stored(path: Path) -> None:
    notebook = json.loads(path.read_text())
    printed = notebooks.run(notebook, path.stem)
    assert printed == notebooks.stored(notebook), "run `python docs notebooks`"
    # no comparison printed by the notebook is False
    assert not any("False" in text for text in printed)


def test_there_are_two_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["gspo", "own_loss"]


def test_notebook_as_a_page() -> None:
    code = {"cell_type": "code", "source": ["a = 1\n", "print(a)"], "outputs": [{"text": ["1\n"]}]}
    page = notebooks.markdown({"cells": [{"cell_type": "markdown", "source": ["# A"]}, code]})
    assert page == "# A\n\n```python\na = 1\nprint(a)\n```\n\n```text\n1\n```\n"


DRAWINGS = sorted((ROOT / "docs" / "drawings").glob("*.svg"))


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.name)
def test_drawing_is_readable_on_any_background(path: Path) -> None:
    shown = path.read_text()
    light, dark = shown.split("@media (prefers-color-scheme: dark)")
    # Each CSS class has a colour for light and dark backgrounds.
    for kind in set(re.findall(r'class="(\w+)"', shown)):
        assert f".{kind} {{" in light and f".{kind} {{" in dark, kind
    assert f"drawings/{path.name}" in (ROOT / "docs" / "concepts.md").read_text()


def test_pages_with_code() -> None:
    pages = {"README.md", *(f"docs/{n}.md" for n in ("quickstart", "support", "candidates"))}
    assert {*pages, "docs/foreign-losses.md"} <= set(WITH_CODE)
    assert set(NOT_RUN) <= set(WITH_CODE)


def test_readme_plain_and_headloss_agree() -> None:
    names: dict[str, object] = {}
    for block in BLOCK.findall((ROOT / "README.md").read_text())[:2]:
        exec(compile(block, "README.md", "exec"), names)
    ours, plain = names["out"].loss, names["plain_loss"]  # type: ignore[attr-defined]
    assert isinstance(plain, torch.Tensor)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)


def test_page_of_a_package_index() -> None:
    """Pictures and links of the README work on a package index, or are removed."""
    text = (ROOT / "README.md").read_text()
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text)
    assert pictures == ["benchmarks/results/problem.png"] and (ROOT / pictures[0]).is_file()
    shown = index_page.description(text, "https://host.example/a/b/")
    assert f"](https://host.example/a/b/raw/HEAD/{pictures[0]})" in shown
    assert "](https://host.example/a/b/blob/HEAD/docs/quickstart.md)" in shown
    for page in (shown, index_page.description(text, None)):
        assert not re.search(r"\]\((?!https?:|#)", page)
    assert "![" not in index_page.description(text, None)
    assert index_page.urls(None) == {}
    assert index_page.urls("https://host.example/a/b")["Source"] == "https://host.example/a/b"


def test_readme_can_be_pasted() -> None:
    """Commands of the README exist; `make dist` runs the README's blocks in a fresh environment."""
    text = (ROOT / "README.md").read_text()
    commands = "".join(re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    commands = re.sub(r"#.*", "", commands)
    assert not re.search(r"\b[A-Z]{4,}\b|<\w+>|git clone", commands)  # no placeholders
    targets = re.findall(r"^make (\S+)", commands, re.MULTILINE)
    assert targets == ["demo", "test"] and "make test" in (ROOT / ".ci/run").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert "docs/paste.py README.md" in makefile
    assert paste.installs(text) == [["install", ".[transformers]"]]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "transformers" in extras["optional-dependencies"]["transformers"]
    assert paste.program(text) == "".join(BLOCK.findall(text))


@pytest.mark.parametrize(("line", "agrees"), [("print(1 + 1)  # 2", 0), ("print(1)  # 2", 1)])
def test_pasting_compares_printed_with_stated_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, agrees: int
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```python\n{line}\n```\n")
    assert paste.main(page) == agrees
    assert capsys.readouterr().out.startswith("page.md: 1 lines printed, ")


def anchors(path: Path) -> set[str]:
    """Return the link anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    check_links(page, text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_notebooks(path: Path) -> None:
    text = notebooks.markdown(json.loads(path.read_text()))
    check_links(str(path.relative_to(ROOT)), text)


def check_links(page: str, text: str) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]+`", "", text, flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose):
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(path), f"{page}: {target}"


def test_every_result_and_drawing_is_used() -> None:
    """Every result page and picture is linked, and every data file is named in a page or script, or
    has the name of a linked page or picture."""
    docs, benchmarks = ROOT / "docs", ROOT / "benchmarks"
    pages = [*ROOT.glob("*.md"), *docs.rglob("*.md"), *benchmarks.glob("*.md")]
    prose = "\n".join(path.read_text() for path in pages)
    scripts = [*benchmarks.rglob("*.py"), *docs.glob("*.py")]
    text = prose + "\n".join(path.read_text() for path in scripts)
    files = [*(benchmarks / "results").iterdir(), *(docs / "drawings").iterdir()]
    data = [path for path in files if path.suffix in (".json", ".jsonl")]
    linked = {path for path in files if path not in data and f"/{path.name})" in prose}
    unused = set(files) - linked - {path for path in data if path.name in text}
    stems = {path.stem for path in linked}
    assert not {path.name for path in unused if path not in data or path.stem not in stems}


MADE = [(file, part) for file, parts in readme.PLACES.items() for part in parts]


@pytest.mark.parametrize(("file", "part"), MADE)
def test_parts_are_current(file: str, part: str) -> None:
    text = (ROOT / file).read_text()
    shown = re.search(rf"<!-- {part} -->\n(.*?)\n<!-- /{part} -->", text, re.DOTALL)
    assert shown is not None, f"{file}: no part {part}"
    assert shown[1] == readme.PARTS[part](), "run `python docs readme`"


def test_every_part_has_a_place() -> None:
    assert {part for _, part in MADE} == set(readme.PARTS)


def test_steps_with_further_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The benchmark page shows rows of DPO, also if stock Transformers has no time, and a table of
    the longest sequences."""
    results = json.loads(readme.STEPS.read_text())
    rows = [row for row in results["rows"] if row.get("work") == "GRPO" and "longest" not in row]
    rows = [row | {"work": "DPO"} for row in rows if row["tokens"] == 16384]
    failed = {"status": "failed", "reason": "out of memory"}
    same = {name: rows[0][name] for name in ("case", "model", "work", "tokens", "contestant")}
    assert same["contestant"] == "Transformers"
    rows[0] = same | failed | {"run": 0}
    longest = {"work": "SFT", "longest": 54272, "contestant": "headloss", "status": "ok", "run": 0}
    results["rows"] = [row for row in results["rows"] if row.get("work") in ("SFT", "GRPO")]
    results["rows"] = [row for row in results["rows"] if "longest" not in row]
    monkeypatch.setattr(readme, "STEPS", tmp_path / "steps.json")

    def made(rows: list[dict]) -> tuple[str, str]:
        readme.STEPS.write_text(json.dumps(results | {"rows": results["rows"] + rows}))
        return readme.few_steps(), readme.steps()

    before, after = made([]), made([*rows, longest | {"model": same["model"], "case": "longest"}])
    for old, new in zip(before, after, strict=True):
        assert set(old.splitlines()) - set(new.splitlines()) <= set(re.findall("Compared .*", old))
    assert before[1].count("| DPO |") == 0 and after[1].count("| DPO |") == 3
    assert "DPO" not in after[0] and "54272" not in after[0]
    assert f"| {same['model']} | SFT | - | - | - | 54272 | - | - |" in after[1]


def test_a_generated_part_without_a_marker_is_refused() -> None:
    with pytest.raises(ValueError, match=r"README.md: has no place <!-- logits -->"):
        readme.fill("nothing")
    with pytest.raises(ValueError, match=r"a page: has no place <!-- claim -->"):
        readme.fill("nothing", ["claim"], "a page")


def site_pages(nav: list) -> list[str]:
    found = []
    for entry in nav:
        (value,) = entry.values()
        found += site_pages(value) if isinstance(value, list) else [value]
    return found


def test_every_page_is_in_the_menu() -> None:
    menu = site_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert len(set(menu)) == len(menu)
    assert pages <= set(menu)
    made = {"index.md", *(f"notebooks/{path.stem}.md" for path in NOTEBOOKS)}
    assert made <= set(menu)
    assert all((ROOT / name).exists() for name in set(menu) - pages - made)


def test_api_has_every_public_name() -> None:
    names = re.findall(r"^::: headloss\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    # `CURRENT` is a constant, which docs/api.md documents under `Batch`.
    assert sorted(names) == sorted(set(hl.__all__) - {"CURRENT"})


def test_twenty_questions_have_a_page_each() -> None:
    rows = (ROOT / "docs/questions.md").read_text().splitlines()[4:]
    assert len(rows) == 20 and all(re.match(r"\| .*\? .*\| \[.*\) \|$", row) for row in rows)


VERBS = (hl.head_loss, hl.logits_loss, hl.head_stats, hl.head_function, hl.head_topk, hl.plan)


@pytest.mark.parametrize("verb", [*VERBS, hl.check_term], ids=lambda verb: verb.__name__)
def test_verbs_say_what_they_return_and_raise_with_an_example(verb) -> None:
    for part in ("Args:", "Returns:", "Raises:", ">>> "):
        assert part in verb.__doc__, part


@pytest.mark.parametrize(
    "made", [hl.Head, hl.Batch, hl.Totals, hl.Options, hl.Metrics, hl.clear_cache, hl.term]
)
def test_public_classes_have_an_example(made) -> None:
    assert made.__doc__ and ">>> " in made.__doc__
