"""The errors of recipes and runs."""

from __future__ import annotations


class RecipeError(Exception):
    """What is wrong with a recipe, in one line that begins with the key."""


class RunError(Exception):
    """What has ended a run that had begun, in one line: the step, and what was not finite there."""
