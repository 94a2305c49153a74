"""Cost of a term over K candidate columns per token, added to GRPO on identical inputs.

Page: docs/candidates.md.

    python benchmarks/studies/candidates.py --output candidates.json  # on one GPU, about a minute
    python benchmarks/studies/candidates.py --quick                      # small, on a CPU

For each K, with and without the probability of all other columns, the study checks correctness
first: candidates' log-probs, and hidden and weight gradients of a few tokens and columns, against
float64. For correct calls the study measures the time of forward and backward, compared with GRPO
alone, the peak memory in excess of inputs and gradients, and the time of the two kernels for
candidate columns. An incorrect call gets no time.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import torch
from draws import columns_of
from plain import with_the_rest
from support import GRADIENTS, WORST
from timed import DEVICE, device_name, milliseconds, peak_mib, run_study, study_inputs
from torch import Tensor
from works import reverse_kl, to_uniform

import headloss as hl
from headloss import kernels
from headloss.kernels.interface import Backward
from headloss.kernels.pair import Chosen
from headloss.kernels.transform import Transform
from headloss.statistics.softmax import Normalizer, SoftmaxCoefficients


def objective(k: int, rest: bool) -> hl.Objective:
    return hl.Objective.of(hl.grpo()) + (0.1 * reverse_kl(rest) if k else hl.Objective(()))


def call(hidden: Tensor, weight: Tensor, batch: hl.Batch, made: hl.Objective, schedule: str) -> Any:
    # Without `skip_rows=False`, GRPO alone would skip clipped rows, and the measured cost of
    # candidates would include the rows that GRPO skips.
    options = hl.Options(metrics=False, schedule=schedule, skip_rows=False)
    out = hl.head_loss(hidden, hl.Head(weight), batch, made, options)
    return out, torch.autograd.grad(out.loss, (hidden, weight))


def check(
    hidden: Tensor, weight: Tensor, batch: hl.Batch, made: hl.Objective, rest: bool, schedule: str
) -> dict[str, float]:
    """Return the errors of a few tokens and columns; ValueError if an error is too large.

    For the gradients "hidden" and "weight" the result also contains a lower limit of the error:
    that of a float64 logit gradient after rounding to the inputs' dtype. The relative error of a
    gradient may be at most 5e-3 (`GRADIENTS`), and at most 1e-5 more than three times the error
    from rounding the float64 logit gradient. If a policy ratio lies exactly on GRPO's clip bound,
    the reference treats the token as the tested call did: as clipped or as not clipped.
    """
    ids, n = batch.candidate_ids, len(batch.targets)
    out, (dx, dw) = call(hidden, weight, batch, made, schedule)
    rows = torch.arange(0, n, max(1, n // 64), device=DEVICE)
    columns = ids[rows[:8], -1]
    x, w = hidden.detach(), weight.detach().double()
    want, rounded = torch.zeros(2, len(columns), x.shape[1], dtype=torch.float64, device=DEVICE)
    found = {}
    for part in torch.arange(n, device=DEVICE).split(256):
        z = (x[part].double() @ w.t()).requires_grad_()
        log_p = z.log_softmax(1)
        logp = log_p.gather(1, batch.targets[part, None])[:, 0]
        advantages = batch.advantages[part].double()
        ratio, own = (
            (t.double() - batch.old_logps[part].double()).exp() for t in (logp, out.logps[part])
        )
        edge = torch.where(advantages > 0, 1.2, 0.8)
        moved = torch.where((ratio - edge).abs() < 1e-3, own, ratio.detach())
        inside = (moved - edge) * advantages < 0
        surrogate = torch.where(inside, ratio, edge) * advantages
        chosen = with_the_rest(log_p, ids[part])
        kl = to_uniform(chosen[:, :-1], chosen[:, -1] if rest else None)
        loss = (0.1 * kl - surrogate).sum() / n
        (g,) = torch.autograd.grad(loss, z)
        narrow = g.to(x.dtype).double()
        want += g[:, columns].t() @ x[part].double()
        rounded += narrow[:, columns].t() @ x[part].double()
        if part[0] == 0:
            logps, into, into_rounded = logp.detach(), g @ w, (narrow @ w).to(x.dtype)
    found["logp"] = float((out.logps[: len(logps)].double() - logps).abs().max())
    # With `candidate_tail`, the allowed error of log-probs is ten times as large, because headloss
    # sums float32 logits.
    wrong = found["logp"] > (10 * WORST if rest else WORST)
    for name, got, exact, other in (
        ("hidden", dx[: len(into)], into, into_rounded),
        ("weight", dw[columns], want, rounded.to(x.dtype)),
    ):
        for key, value in ((name, got), (f"{name}, rounded", other)):
            found[key] = float((value.double() - exact).norm() / exact.norm())
        # Float32 rounding alone caused errors up to 7e-6 in 160 calls with the sizes of --quick.
        most = min(GRADIENTS, 3 * found[f"{name}, rounded"] + 1e-5)
        wrong |= not found[name] <= most
    if wrong:
        raise ValueError(f"wrong by {found}")
    return found


def acts(hidden: Tensor, weight: Tensor, ids: Tensor, repeats: int) -> dict[str, Any]:
    """Time only the kernels for candidate columns: milliseconds, and TB/s at which the kernels read
    the candidates' rows of the head."""
    backend = kernels.load("triton")
    x, w = hidden.detach(), weight.detach()
    ms = milliseconds(lambda: backend.chosen_logits(x, w, ids, Transform()), repeats)
    moved = ids.numel() * x.shape[1] * x.element_size()
    found: dict[str, Any] = {"logits": {"ms": round(ms, 3), "TB/s": round(moved / ms / 1e9, 2)}}
    rows = min(len(x), 4096)
    tile = torch.zeros(rows, len(w), dtype=x.dtype, device=DEVICE)
    zero, slopes = torch.zeros(rows, device=DEVICE), torch.zeros(rows, ids.shape[1], device=DEVICE)
    normalizer, c = Normalizer(zero, zero), SoftmaxCoefficients(target=zero, prob=zero)
    backward = Backward(ids[:rows, 0].contiguous(), 0, Transform(), normalizer, c, zero)
    chosen = Chosen(ids[:rows], slopes, slopes)
    ms = milliseconds(lambda: backend.chosen_gradient_(tile, chosen, backward), repeats)
    found["gradient of 4096 tokens"] = {"ms": round(ms, 3)}
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    n, h, v = arguments.tokens, arguments.hidden, arguments.vocab
    hidden, weight, targets, returned = study_inputs(arguments)
    advantages, old = torch.randn(n, device=DEVICE), -torch.rand(n, device=DEVICE)
    given = {"advantages": advantages, "old_logps": old}
    found: dict[str, Any] = {
        "device": device_name(),
        "sizes": {"tokens": n, "hidden": h, "vocabulary": v},
    }
    alone: dict[str, float] = {}
    for k, rest, schedule in (
        *((0, False, s) for s in ("one_pass", "recompute")),
        *((k, False, "one_pass") for k in arguments.ids),
        (arguments.ids[-1], False, "recompute"),
        *((k, True, "one_pass") for k in arguments.ids[-1:]),
    ):
        more = given
        if k:
            more = given | {"candidate_ids": columns_of(targets, v, k, torch.Generator(DEVICE))}
        batch, made = hl.Batch(targets, **more), objective(k, rest)
        row: dict[str, Any] = {}
        if k:
            row["errors"] = check(hidden, weight, batch, made, rest, schedule)
        run = partial(call, hidden, weight, batch, made, schedule)
        ms = milliseconds(run, arguments.repeats)
        alone.setdefault(schedule, ms)
        row |= {"ms": round(ms, 3), "share of GRPO's speed": round(alone[schedule] / ms, 3)}
        row["peak MiB"] = peak_mib(run, returned)
        if k and not rest and schedule == "one_pass" and DEVICE.type == "cuda":
            row["kernels"] = acts(hidden, weight, more["candidate_ids"], arguments.repeats)
        name = f"{schedule}, " + (f"{k} candidates" if k else "GRPO") + ", rest" * rest
        found[name] = row
        print(name, json.dumps(row), flush=True)
    return found


def main(argv: list[str] | None = None) -> int:
    ids = {"nargs": "+", "default": [32, 64]}
    return run_study(__doc__, measure, ids, [4, 8], argv)


if __name__ == "__main__":
    raise SystemExit(main())
