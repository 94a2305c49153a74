"""Name, help and version of the command line; `headloss.__main__` holds the commands."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

EXAMPLES = """\
examples:
  headloss doctor
  headloss plan --tokens 16384 --hidden 4096 --vocab 128256 --objective gspo --gpu-memory 80GiB
  headloss train sft                   a tiny model learns from answers, in minutes on a CPU
  headloss train gspo                  and goes on from there with rewards
  headloss compare runs/sft runs/gspo

headloss COMMAND --help says more of each."""
COMMANDS = {
    "plan": "what would run for a call of this size, in how many bytes",
    "check": "errors of losses and gradients against float64, on this machine",
    "doctor": "what this machine can run, and what is missing",
    "terms": "the table of terms, in Markdown",
    "train": "train a model by a recipe",
    "compare": "one page about several runs of train",
}


class Parser(argparse.ArgumentParser):
    """Argument parser that answers bad arguments with one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"headloss: {' '.join(message.splitlines())}\n")


def parsers(version: str) -> tuple[Parser, dict[str, Parser]]:
    """Return the command line's parser, and a dict that maps each command's name to the command's
    own parser, which has no arguments yet."""
    parser = Parser(
        prog="headloss",
        description="Any loss at the head of a language model, fused, in a memory budget.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"headloss {version}")
    commands = parser.add_subparsers(required=True, metavar=" | ".join(COMMANDS))
    return parser, {name: commands.add_parser(name, help=about) for name, about in COMMANDS.items()}


@contextlib.contextmanager
def until_nobody_reads() -> Iterator[None]:
    """End the process without a traceback if the reader of stdout (such as `| head`) has closed the
    pipe."""
    try:
        yield
    finally:
        # A BrokenPipeError from inside the `with` block may come from a socket of a training run:
        # flush stdout to learn whether stdout is closed.
        failed = isinstance(sys.exc_info()[1], BrokenPipeError)
        try:
            print(end="\n" if failed else "", flush=True)
        except BrokenPipeError:
            # Python flushes stdout again at exit: write to os.devnull, so that this flush does not
            # fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)  # the exit code of a shell for SIGPIPE
