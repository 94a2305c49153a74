"""README.md and the pages: code runs, links lead somewhere, generated parts are current."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
import yaml

import headloss as hl

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
EXPECTED = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)
# The blocks of a page run as one program, but for these.
NOT_RUN = {"CONTRIBUTING.md": "a fragment of headloss/losses, with the names of its file"}
WITH_CODE = [page for page in PAGES if BLOCK.search((ROOT / page).read_text())]

spec = importlib.util.spec_from_file_location("readme", ROOT / "docs" / "readme.py")
assert spec is not None and spec.loader is not None
readme = importlib.util.module_from_spec(spec)
spec.loader.exec_module(readme)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("page", [page for page in WITH_CODE if page not in NOT_RUN])
def test_code_prints_what_it_says(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks run as one program; a comment after a print is what it prints."""
    names: dict[str, object] = {"__name__": "page"}
    for block in BLOCK.findall((ROOT / page).read_text()):
        exec(compile(block, page, "exec"), names)
        assert capsys.readouterr().out.splitlines() == EXPECTED.findall(block)


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


def anchors(path: Path) -> set[str]:
    """What a page's headings are called in links."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(path), f"{page}: {target}"


MADE = [(file, part) for file, parts in readme.PLACES.items() for part in parts]


@pytest.mark.parametrize(("file", "part"), MADE)
def test_parts_are_current(file: str, part: str) -> None:
    text = (ROOT / file).read_text()
    shown = re.search(rf"<!-- {part} -->\n(.*?)\n<!-- /{part} -->", text, re.DOTALL)
    assert shown is not None, f"{file}: no part {part}"
    assert shown[1] == readme.PARTS[part](), "run `python docs/readme.py`"


def test_every_part_has_a_place() -> None:
    assert {part for _, part in MADE} == set(readme.PARTS)


def test_part_without_a_place() -> None:
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
    assert all(name == "index.md" or (ROOT / name).exists() for name in set(menu) - pages)


def test_api_has_every_public_name() -> None:
    names = re.findall(r"^::: headloss\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(names) == sorted(set(hl.__all__) - {"CURRENT"})  # a constant: see Batch


def test_twenty_questions_have_a_page_each() -> None:
    rows = (ROOT / "docs/questions.md").read_text().splitlines()[4:]
    assert len(rows) == 20 and all(re.match(r"\| .*\? .*\| \[.*\) \|$", row) for row in rows)
