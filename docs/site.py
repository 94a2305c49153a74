"""A hook of `mkdocs build`: shows files from outside docs/, mends links that cross its border.

Pages link as they lie in the repository. On the site the README is the front page, and what is not
shown there (examples, tests) is named without a link. A link to nothing fails the build.

The table of terms becomes a section for each term, a name of the API that is a function in a module
of the same name is shown as the function, and examples in docstrings are blocks of code.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from griffe import Extension, Object
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import notebooks

ROOT = Path(__file__).parents[1]
FRONT = "index.md"
SHOWN = ("CHANGELOG.md", "CONTRIBUTING.md", "DESIGN.md")
SHOWN += ("benchmarks/README.md", "benchmarks/NOTES.md")
RESULTS = ("*.md", "*.png")
# Their tables take the room.
WITHOUT_CONTENTS = (FRONT, "benchmarks/README.md", "integrations/README.md", "losses.md")
MODULE = re.compile(r"^::: headloss\.(\w+)$", re.MULTILINE)
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)  # to an empty line
TERMS = re.compile(r"<!-- terms -->\n.*\n\| --- .*\n((?:\|.*\n)*)<!-- /terms -->")
CODE = r"```.*?```|`[^`\n]+`"  # is left as it stands
LINK = re.compile(
    CODE + r"|\[([^\[\]]*)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)", re.DOTALL
)


# In a page's HTML: code of a line, options in it, words in a column of numbers, our figures.
INLINE = re.compile(r"(?<!<pre>)<code>[^<]*</code>")
OPTION = re.compile(r"(?<![\w-])-{1,2}[a-z][\w-]*")
WORDS = re.compile(r'<td (style="text-align: right;">[^<]{25,}</td>)')
FIGURE = re.compile(r'<img [^>]*src="((?!https?:)[^"]+\.(?:png|svg))"[^>]*>')


class Examples(Extension):
    """Doctests of docstrings in a fence: Markdown takes their prompts for quotations."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)


def on_files(files: Files, config: Any) -> Files:
    results = ROOT / "benchmarks" / "results"
    found = [str(p.relative_to(ROOT)) for kind in RESULTS for p in sorted(results.glob(kind))]
    files.append(_file(config, FRONT, "README.md"))
    for name in (*SHOWN, *found):
        files.append(_file(config, name, name))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.remove(files.src_uris[f"notebooks/{path.name}"])
        page = notebooks.markdown(json.loads(path.read_text()))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
    return files


def _file(config: Any, uri: str, path: str) -> File:
    made = File.generated(config, uri, abs_src_path=str(ROOT / path))
    if path.startswith("benchmarks/results/") or path == "benchmarks/NOTES.md":
        made.inclusion = made.inclusion.NOT_IN_NAV  # reached by links, not from the menu
    return made


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    uri = page.file.src_uri
    if uri in WITHOUT_CONTENTS:
        page.meta["hide"] = ["toc"]
    if uri == "api.md":
        markdown = MODULE.sub(_function, markdown)
    markdown = TERMS.sub(lambda table: "\n\n".join(map(_section, table[1].splitlines())), markdown)
    lies = _in_repository(uri, page.file.generated_by is not None)

    def mended(match: re.Match[str]) -> str:
        if match[2] is None:
            return match[0]
        text, target, anchor = match[1], match[2], match[3] or ""
        path = os.path.normpath(str(PurePosixPath(lies).parent / target))
        if not (ROOT / path).exists():
            raise PluginError(f"{lies}: link to {target}, which does not exist")
        name = FRONT if path == "README.md" else path.removeprefix("docs/")
        name = str(PurePosixPath(name).with_suffix(".md")) if name.endswith(".ipynb") else name
        if files.get_file_from_path(name) is None:
            return text
        return f"[{text}]({os.path.relpath(name, PurePosixPath(uri).parent)}{anchor})"

    return LINK.sub(mended, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Options in code stay whole, words between numbers wrap, and a figure links to its file."""
    option = r'<span class="option">\g<0></span>'
    html = INLINE.sub(lambda code: OPTION.sub(option, code[0]), html)
    html = WORDS.sub(r'<td class="words" \1', html)
    return FIGURE.sub(r'<a class="figure" href="\1">\g<0></a>', html)


def _function(directive: re.Match[str]) -> str:
    name = directive[1]
    is_module = (ROOT / "headloss" / f"{name}.py").exists()
    return f"::: headloss.{name}.{name}" if is_module else directive[0]


def _section(row: str) -> str:
    """A row of the table of terms under a heading of its own, its equation as a block."""
    cells = [c.strip().replace("\\|", "|") for c in re.split(r"(?<!\\)\|", row)[1:-1]]
    name, equation, options, inputs, reduction, others = cells
    lines = [f"## {name}", f"```{{.text .equation}}\n{equation.strip('`')}\n```"]
    named = {"Options": options, "Reads": inputs, "Reduction": reduction, "Also called": others}
    lines.append("  \n".join(f"*{what}*: {cell}" for what, cell in named.items() if cell))
    return "\n\n".join(lines)


def _in_repository(uri: str, generated: bool) -> str:
    if uri == FRONT:
        return "README.md"
    if uri.startswith("notebooks/"):
        return f"docs/{uri}"
    return uri if generated else f"docs/{uri}"
