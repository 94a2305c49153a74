"""The section of CHANGELOG.md about a tag: `python docs/release_notes.py v0.1.0`.

Fails where the tag is not that of the package's version, or has no section: such a tag is released
by nobody. Needs the standard library alone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version() -> str:
    """The package's version, without importing the package."""
    text = (ROOT / "headloss" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def sections(changelog: str) -> dict[str, str]:
    """The text under each version's heading."""
    parts = re.split(r"^## \[([^\]]+)\].*\n", changelog, flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def notes(tag: str, changelog: str, current: str) -> str:
    """The section of a tag.

    Raises:
        ValueError: the tag names another version than `current`, or one without a section.
    """
    if tag != f"v{current}":
        raise ValueError(f"tag: got {tag!r}, want 'v{current}', of headloss.__version__")
    if not (text := sections(changelog).get(current)):
        raise ValueError(f"CHANGELOG.md: has no section [{current}]")
    return text


if __name__ == "__main__":
    try:
        print(notes(sys.argv[1], (ROOT / "CHANGELOG.md").read_text(), version()))
    except ValueError as error:
        sys.exit(str(error))
