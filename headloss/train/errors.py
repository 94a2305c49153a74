"""Errors of recipes and runs."""

from __future__ import annotations


class RecipeError(Exception):
    """Error in a recipe; the message is one line that begins with the key."""


class RunError(Exception):
    """Error that stopped a run; the message has the step and the value that was not finite."""
