"""Terms agree with torchtitan's RL losses.

The tests extract these losses from torchtitan's source files, since importing them needs vLLM.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from parity import compare, extracted, file_of, step
from torch import Tensor

import headloss as hl


@pytest.mark.parametrize("edge", ["random", "clipped", "one token"])
def test_dapo(edge: str) -> None:
    """DAPO agrees with torchtitan as a mean over the tokens of all micro-batches and ranks."""
    file = file_of("torchtitan", "experiments/rl/losses/dapo.py")
    method = extracted(
        file,
        "DAPOLoss.__call__",
        _MAX_LOG_RATIO=10.0,
        compute_logprobs=lambda logp, labels, return_entropy: (logp, torch.zeros_like(logp)),
    )
    made = step(edge)
    agent = SimpleNamespace(ratio_clip_low=0.15, ratio_clip_high=0.25)

    def loss(logp: Tensor) -> Tensor:
        return vars(method)["__call__"](
            agent,
            logp,
            None,
            40.0,
            generator_logprobs=made["old_logps"],
            advantages=made["advantages"],
            loss_mask=made["mask"],
        )[0]

    term = hl.dapo(epsilon_low=0.15, epsilon_high=0.25)
    compare(term, made, loss, totals=hl.Totals(40, 9))
