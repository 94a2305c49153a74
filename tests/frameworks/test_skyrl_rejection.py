"""`.rejected("ratio", "sequence_max", ...)` agrees with SkyRL 0.4.0's outlier mask."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from parity import EDGES, B, C, batch_of, extracted, file_of, step

import headloss as hl

UTILS = "backends/skyrl_train/utils"
BOUNDS = [(0.6, 1.6), (None, 1.3), (0.7, None), (1e-4, 100.0)]


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_outliers(edge: str, bounds: tuple[float | None, float | None]) -> None:
    """Rejected sequences with a token ratio outside two bounds equal SkyRL's, in padded and packed
    batches."""
    torch_utils = file_of("skyrl", f"{UTILS}/torch_utils.py")
    theirs = extracted(
        file_of("skyrl", f"{UTILS}/off_policy_correction_utils.py"),
        "compute_outlier_token_mask",
        safe_exp_delta=extracted(torch_utils, "safe_exp_delta").safe_exp_delta,
    )
    low, high = bounds
    config = SimpleNamespace(
        outlier_token_is_threshold_low=low, outlier_token_is_threshold_high=high
    )
    for seed in range(4):
        made = step(edge, seed)
        mask = made["mask"]
        if edge == "overflow":
            made["sampling_logps"] = made["logp"]
        kept, _ = theirs.compute_outlier_token_mask(
            made["old_logps"], made["sampling_logps"], mask.double(), config
        )
        want = kept.expand(B, C)[mask]
        for layout in ("padded", "packed"):
            found = hl.rejection_mask(
                batch_of(made, layout), "ratio", level="sequence_max", min=low, max=high
            )
            found = found[mask] if layout == "padded" else found
            assert torch.equal(found, want.bool())
