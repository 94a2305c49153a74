"""Count code: lines including comments and docstrings, tokens without comments and docstrings.

    python tests/helpers/counts.py [FOLDER ...] # folders with a headloss/; default: this repository

The core is all code outside the folders kernels, losses, integrations, rl and train, and outside
naive.py.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

BESIDE = ("losses", "integrations", "rl", "train", "naive.py")
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
SILENT |= {tokenize.ENDMARKER}
SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def tokens(source: str) -> int:
    """Count Python tokens without comments, docstrings, line ends and indents."""
    scopes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, SCOPES)]
    described = [node for node in scopes if ast.get_docstring(node, clean=False) is not None]
    docstrings = {(node.body[0].lineno, node.body[0].col_offset) for node in described}
    count = inside = 0  # f-strings count as one token in every Python version
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        docstring = token.type == tokenize.STRING and token.start in docstrings
        count += not inside and token.type not in SILENT and not docstring
        name = tokenize.tok_name[token.type]
        inside += (name == "FSTRING_START") - (name == "FSTRING_END")
    return count


def counts(package: Path) -> dict[str, int]:
    """Return lines, tokens and files of a folder `headloss`, by the name of each count in printing
    order."""
    found: Counter[str] = Counter()
    longest = 0
    for path in sorted(package.rglob("*.py")):
        source, part = path.read_text(), path.relative_to(package).parts[0]
        room = "kernels" if part == "kernels" else "beside" if part in BESIDE else "core"
        lines = len(source.splitlines())
        longest = max(longest, lines)
        found.update({f"{room} lines": lines, f"{room} tokens": tokens(source), "lines": lines})
    names = ("core lines", "core tokens", "kernels lines", "kernels tokens")
    top = len(list(package.glob("*.py")))
    more = {"package lines": found["lines"], "longest file": longest, "files on top": top}
    return {name: found[name] for name in names} | more


if __name__ == "__main__":
    for folder in sys.argv[1:] or [str(Path(__file__).parents[2])]:
        print(folder, counts(Path(folder) / "headloss"))
