"""Runs the notebooks and stores what their cells print: `python docs notebooks`.

A notebook here is JSON whose cells run as one program. Nothing but the standard library is needed,
so that the tests can compare the outputs that are stored with those of today.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("notebooks")


def run(notebook: dict[str, Any], name: str) -> list[str]:
    """What each code cell prints."""
    names: dict[str, Any] = {"__name__": name}
    found = []
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), names)
            found.append(printed.getvalue())
    return found


def stored(notebook: dict[str, Any]) -> list[str]:
    """What each code cell printed when it was stored."""
    code = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    return ["".join(t for output in c["outputs"] for t in output["text"]) for c in code]


def markdown(notebook: dict[str, Any]) -> str:
    """The notebook as a page: its text, its code and what that printed."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def main() -> int:
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        printed = iter(run(notebook, path.stem))
        count = 0
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                count, text = count + 1, next(printed).splitlines(keepends=True)
                output = {"name": "stdout", "output_type": "stream", "text": text}
                cell["outputs"], cell["execution_count"] = [output] if text else [], count
        partial = path.with_name(f".partial-{path.name}")
        partial.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        partial.replace(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
