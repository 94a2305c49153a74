"""Regenerate the pages: `python docs` runs every generator, `python docs readme losses` some."""

from __future__ import annotations

import importlib
import sys

GENERATORS = ("readme", "losses", "notebooks")


def main(names: list[str]) -> int:
    """Exit status: the number of generators that failed."""
    unknown = sorted(set(names) - set(GENERATORS))
    if unknown:
        print(f"python docs: got {', '.join(unknown)}, want {', '.join(GENERATORS)}")
        return 2
    return sum(importlib.import_module(name).main() != 0 for name in names or GENERATORS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
