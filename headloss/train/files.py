"""Atomic files: written under a temporary name, then renamed, so that no partial file remains."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

PARTIAL = ".partial"  # prefix of the names of unfinished files


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; at the end the temporary file replaces `path`."""
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


def digest(path: Path) -> str | None:
    """Return the SHA-256 of a file, after a flush to disk; None if the file does not exist."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def finite(value: Any) -> Any:
    """Return a number for JSON: None for NaN and infinity, which JSON cannot represent, else the
    value."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Lines:
    """JSONL file whose lines are added in one write each; a truncated last line is ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """Return the file's lines as dictionaries, empty for a line that is not a JSON object."""
        found: list[dict[str, Any]] = []
        if self.path.is_file():
            for line in self.path.read_bytes().split(b"\n")[:-1]:
                value: Any = None
                with contextlib.suppress(ValueError, RecursionError):
                    value = json.loads(line)
                found.append(value if isinstance(value, dict) else {})
        return found

    def add(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(self._text(line))

    def keep(self, lines: list[dict[str, Any]]) -> int | None:
        """Replace the file's lines by `lines`, and return the number of the first line that was
        missing or damaged before; None if no line was."""
        damaged, kept = None, []
        pairs = zip_longest(self.read(), lines)
        for number, (old, want) in enumerate(pairs, 1):
            same = bool(old) and (want is None or want.items() <= old.items())
            if not same and damaged is None:
                damaged = number
            if want is not None:
                kept.append(old if same else want)
        write(self.path, "".join(map(self._text, kept)))
        return damaged

    @staticmethod
    def _text(line: dict[str, Any]) -> str:
        return json.dumps(line, allow_nan=False) + "\n"
