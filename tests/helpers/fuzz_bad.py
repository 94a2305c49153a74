"""Changes that make a random call of headloss invalid, each with a pattern that the error text must
match."""

from __future__ import annotations

import fuzz_bad_arguments
import fuzz_bad_objectives

SPOILS = fuzz_bad_arguments.SPOILS | fuzz_bad_objectives.SPOILS
