"""What a build adds to the metadata: the page and the addresses for a package index.

`PROJECT_URL` is the address of the repository; who releases gives it (`make dist URL=...`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class IndexPage(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        root = Path(self.root)
        sys.path.insert(0, str(root / "docs"))
        from index_page import description, urls

        url = os.environ.get("PROJECT_URL") or None
        text = description((root / "README.md").read_text(), url)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls(url)
