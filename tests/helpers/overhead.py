"""Work of libraries that takes longer than a small test and that no test is about."""

from __future__ import annotations

import functools
import gc
import importlib.metadata

import torch


def spare() -> None:
    """Torch keeps each seed with the formatted stack of who set it, for every kind of device that
    is not there; accelerate parses a package's description for each module that it meets."""
    if not torch.cuda.is_available():
        for absent in (torch.cuda, torch.xpu, torch.mtia):
            absent.manual_seed_all = lambda seed: None
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)


def freeze() -> None:
    """What is there now stays: a trainer collects garbage after every run, among all objects."""
    gc.collect()
    gc.freeze()
