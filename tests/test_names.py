"""The package shows only public names at a prompt, with helpful docstrings."""

from __future__ import annotations

import doctest
import pydoc

import pytest

import headloss as hl

VERBS = ("head_loss", "logits_loss", "head_stats", "head_function", "head_topk", "plan")


def test_dir_is_the_public_names() -> None:
    assert dir(hl) == sorted(hl.__all__)
    assert not {"batch", "head", "objective", "options", "losses", "command"} & set(dir(hl))


def test_public_names_are_no_modules() -> None:
    assert [n for n in dir(hl) if type(getattr(hl, n)) is type(hl)] == []
    assert hl.batch.batch.Batch is hl.Batch  # submodules stay importable


@pytest.mark.parametrize("name", ["Batch", "Head", *VERBS])
def test_help_gives_shapes_and_examples_that_run(name: str) -> None:
    """Help texts give shapes before arguments, and examples with their output."""
    shown = pydoc.plain(pydoc.render_doc(getattr(hl, name)))
    first = "Attributes:" if name == "Head" else "Args:"
    shapes, arguments = shown.find("Shapes: "), shown.find(first)
    assert 0 < shapes < arguments < shown.index(">>>")
    assert shown[shapes:arguments].count("[") >= 2
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(hl, name), name, globs={})
    assert any(example.want for example in test.examples)
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0
