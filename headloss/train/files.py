"""Files that are whole or not there: written under another name, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PARTIAL = ".partial"  # how the name of what is not finished begins


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` for a file or a folder; at the end it takes the place of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{PARTIAL}-{path.name}")
    remove(partial)
    try:
        yield partial
        if path.is_dir():
            remove(path)
        os.replace(partial, path)
    finally:
        remove(partial)


def write(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text)


def write_json(path: Path, value: Any) -> None:
    write(path, json.dumps(value, indent=1) + "\n")


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Lines:
    """A JSONL file: a line is added in one write, and a line that was cut off is passed over."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        found = []
        if self.path.is_file():
            for line in self.path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    found.append(json.loads(line))
        return found

    def add(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def keep(self, lines: list[dict[str, Any]]) -> None:
        write(self.path, "".join(json.dumps(line) + "\n" for line in lines))
