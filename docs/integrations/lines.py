"""Lines of code of each adapter: without docstrings, comments and blank lines."""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "headloss" / "integrations"


def lines(path: Path) -> int:
    """Lines on which there is some code of the file's syntax tree, docstrings aside."""
    tree = ast.parse(path.read_text())
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = node.end_lineno or node.lineno
            if isinstance(body, list):  # of a block: its head
                last = max(node.lineno, body[0].lineno - 1)
            found |= set(range(node.lineno, last + 1))
    text = path.read_text().splitlines()
    return sum(bool(text[n - 1].strip()) and text[n - 1].strip()[0] != "#" for n in found)


if __name__ == "__main__":
    for path in sorted(FOLDER.iterdir()):
        files = [path] if path.suffix == ".py" else sorted(path.glob("*.py"))
        if count := sum(map(lines, files)):
            print(f"{path.stem:16} {count}")
