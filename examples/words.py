"""Write a task file of words to spell backward, without a network: `python examples/words.py`.

Each line of the file is a prompt with its answer, the format of `headloss train task=FILE`.
"""

from __future__ import annotations

import json
import random
import string
import sys
from pathlib import Path


def main(path: Path = Path("words.jsonl"), count: int = 6000, seed: int = 0) -> int:
    chosen = random.Random(seed)
    words: set[str] = set()
    while len(words) < count:
        words.add("".join(chosen.choices(string.ascii_lowercase[:12], k=chosen.randint(3, 6))))
    lines = [json.dumps({"prompt": f"{w} -> ", "answer": w[::-1]}) for w in sorted(words)]
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(lines) + "\n")
    partial.rename(path)
    print(f"{count} problems in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])) if sys.argv[1:] else main())
