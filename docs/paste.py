"""Paste the README into this environment, as a newcomer does: `python docs/paste.py README.md`.

The lines of its blocks that install something run first. Then the blocks of Python run as one
program in an empty folder, and print what their comments say. Needs the standard library alone.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
EXPECTED = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)


def installs(text: str) -> list[list[str]]:
    """The arguments of pip in each line that calls it."""
    lines = "".join(code for kind, code in BLOCK.findall(text) if kind == "bash").splitlines()
    calls = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] for words in calls if words[:1] == ["pip"]]


def program(text: str) -> str:
    """The blocks of Python, one after the other."""
    return "".join(code for kind, code in BLOCK.findall(text) if kind == "python")


def main(page: Path) -> int:
    text = page.read_text()
    for words in installs(text):
        print("pip", *words, flush=True)
        command = [sys.executable, "-m", "pip", "-q", *words]
        subprocess.run(command, cwd=page.resolve().parent, check=True)
    code = program(text)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-"]
        ran = subprocess.run(command, cwd=folder, input=code, text=True, stdout=subprocess.PIPE)
    printed = ran.stdout.splitlines()
    agrees = ran.returncode == 0 and printed == EXPECTED.findall(code)
    print(f"{page.name}: {len(printed)} lines printed, {'as' if agrees else 'not as'} it says")
    return not agrees


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
