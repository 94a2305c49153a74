"""The names and options of all terms agree with the terms' docstrings and with the generated
tables of the documentation."""

from __future__ import annotations

import inspect

import pytest

from headloss import losses as h
from headloss.losses import catalogue
from headloss.losses.catalogue import MODIFIERS, TERMS, modifier_table, table


def test_names_options_and_signatures() -> None:
    term = h.grpo(epsilon_high=0.3)
    assert repr(term) == (
        "grpo(epsilon_low=0.2, epsilon_high=0.3, delta=None, importance_sampling_level='token')"
    )
    assert list(inspect.signature(h.gspo).parameters) == ["epsilon_low", "epsilon_high"]
    for factory in TERMS:
        parameters = inspect.signature(factory).parameters.values()
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters), factory.__name__
        assert factory().name == factory.__name__


def test_docstrings_are_complete() -> None:
    for made in (*TERMS, *MODIFIERS):
        text = inspect.getdoc(made) or ""
        assert "Inputs:" in text, made.__name__
        assert "20" in text or "19" in text, made.__name__
        assert made in MODIFIERS or "Default reduction:" in text, made.__name__


def test_table_is_traced() -> None:
    rows = {line.split("`")[1]: line for line in table().splitlines()[2:]}
    assert list(rows) == [f.__name__ for f in TERMS]
    assert "| `advantages`, `old_logps` | fixed_length(max_completion_length) |" in rows["dr_grpo"]
    assert "`sampling_logps` (optional)" in rows["vespo"]
    assert "`ref_logps`; `old_logps` when `bias_corrected`" in rows["kl"]
    assert "`epsilon_low=0.0003`, `epsilon_high=0.0004`" in rows["gspo"]
    assert "|  | token_mean |" in rows["z_loss"]
    modifiers = modifier_table()
    assert "`mode`, `min=None`, `max=3.0` | `old_logps`, `sampling_logps` |" in modifiers
    assert "`sampling_logps` or `old_logps`" in modifiers


def test_an_equation_is_the_paragraph_below_the_summary() -> None:
    def of_two() -> None:
        """A summary.

        x +
        y
        """

    def of_one() -> None:
        """A summary."""

    assert catalogue._equation(of_two) == "`x + y`"
    with pytest.raises(ValueError, match="of_one: its docstring has no equation"):
        catalogue._equation(of_one)
