"""Signed errors of log-probs against float64, which a mean over tokens does not average out.

Page: benchmarks/NOTES.md.

    python benchmarks/studies/logp_errors.py [--device cpu --quick] [--output FILE.json]

The model, hidden states and targets are those of `gradient_truth.py`. For each way to compute
log-probs, the program prints the mean error of the target's logit, of the log-sum-exp and of the
log-prob, the spread of the errors of sequence means, and the largest error of a log-prob. In
"exact logit, float32 sum" the target's logit is exact and all other logits come from the tensor
cores' product: the product's rounding error does not cancel in the log-prob.

T tokens in B sequences of C, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import torch
from gradient_truth import BLOCK, FULL, QUICK, Bench
from torch import Tensor
from works import Inputs

import headloss as hl

Pair = tuple[Tensor, Tensor]  # the target's logit [T] and the log-sum-exp [T]


def by_blocks(inputs: Inputs, logits: Callable[[Tensor], Tensor]) -> Pair:
    found = []
    blocks = torch.arange(len(inputs.targets), device=inputs.targets.device)
    for rows in blocks.split(max(1, BLOCK // len(inputs.weight))):
        z = logits(inputs.hidden[rows])
        found.append((z.gather(1, inputs.targets[rows, None]).squeeze(1), z.logsumexp(1)))
    own, total = (torch.cat(part).double() for part in zip(*found, strict=True))
    return own, total


def float32_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return the float32 accumulator of a 16-bit product."""
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()


def ways(inputs: Inputs) -> dict[str, Pair]:
    weight = inputs.weight.detach()
    exact_weight = weight.double()
    found = {
        "float64": by_blocks(inputs, lambda x: x.double() @ exact_weight.t()),
        "float32 logits": by_blocks(inputs, lambda x: float32_logits(x, weight)),
        "bfloat16 logits": by_blocks(inputs, lambda x: (x @ weight.t()).float()),
    }
    found["exact logit, float32 sum"] = found["float64"][0], found["float32 logits"][1]
    stats = hl.head_stats(inputs.hidden, hl.Head(weight), inputs.targets)
    found["headloss"] = (stats.logp.double() + stats.lse.double(), stats.lse.double())
    return found


@torch.no_grad()
def rows_of(bench: Bench, largest: float) -> list[dict[str, Any]]:
    inputs, size = bench.inputs(largest)
    found = ways(inputs)
    own, total = found.pop("float64")
    rows = []
    for name, (logit, lse) in found.items():
        error = (logit - lse) - (own - total)
        means = inputs.segment_mean(error)
        rows.append(
            {
                "largest": size,
                "way": name,
                "logit": float((logit - own).mean()),
                "lse": float((lse - total).mean()),
                "logp": float(error.mean()),
                "apart": float(means.std()),
                "worst": float(means.abs().max()),
                "worst_token": float(error.abs().max()),
            }
        )
    return rows


FIGURES = ("logit", "lse", "logp", "apart", "worst", "worst_token")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--logits", nargs="+", type=float, default=[5, 10, 27, 40, 60])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    bench = Bench(QUICK if given.quick else FULL, torch.device(given.device))
    rows = []
    print("in 1e-6 | " + " | ".join(FIGURES))
    for largest in given.logits:
        for row in rows_of(bench, largest):
            rows.append(row)
            figures = " | ".join(f"{1e6 * row[name]:.2f}" for name in FIGURES)
            print(f"{row['largest']:.0f}, {row['way']} | {figures}", flush=True)
    if given.output:
        given.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
