"""README.md as a package index shows it, where a relative link leads nowhere."""

from __future__ import annotations

import re

LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def description(readme: str, url: str | None) -> str:
    """The text with links and pictures at `url`, the address of the repository.

    Without an address a link is its text, and a picture is left out: the table below it has its
    numbers. Links within the page stay.
    """

    def absolute(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        if url is None:
            return "" if mark else text
        return f"{mark}[{text}]({url.rstrip('/')}/{'raw' if mark else 'blob'}/HEAD/{target})"

    return LINK.sub(absolute, readme)


def urls(url: str | None) -> dict[str, str]:
    """Of the project, for the index's side bar."""
    if url is None:
        return {}
    url = url.rstrip("/")
    pages = {"Documentation": "docs", "Changelog": "CHANGELOG.md"}
    return {
        "Source": url,
        **{name: f"{url}/blob/HEAD/{path}" for name, path in pages.items()},
        "Issues": f"{url}/issues",
    }
