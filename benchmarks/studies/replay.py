"""The cost of replaying a sampler's id sets: in generation, in a GRPO step, and in the loss alone.

Page: docs/replay.md.

    python benchmarks/studies/replay.py --device cuda --json benchmarks/results/replay.json
    python benchmarks/studies/replay.py --quick --device cpu  # seconds

The study has three parts, on one model with predictions like a trained model's.

`generation` measures the time per generated token (of all rows together), with and without the
recorder of kept ids.

`step` measures the time of a GRPO step, and its peak memory in excess of weights and gradients. On
average, the sampler keeps 8, 64 or 1,024 ids per token. The study compares steps with four kinds of
log-probs: over the ids that the sampler kept, over the whole vocabulary by headloss and by TRL's
head, and from masked logits.

`crossing` measures the time of the loss alone over K ids per token, and finds the K at which this
loss needs as much time as a loss over the whole vocabulary.

Before the timing, loss and gradients over the kept ids are compared with those of masked float32
logits; incorrect calls are not timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import torch
from measure import Stretch, synchronize
from run import about, write
from step_cases import QUICK, SETTINGS, Batch, make_batch, make_model, mean_loss, of_trl, with_trl
from steps import BACKBONE, PACKAGES, peak
from torch import Tensor

import headloss as hl
from headloss.integrations.transformers import record_support

ROUNDS = 5
MEANS = (8, 64, 1024)
Pairs = tuple[Tensor, Tensor]


# ---------------------------------------------------------------------- id sets


def make_sets(labels: Tensor, vocabulary: int, mean: int, ragged: bool = True) -> Pairs:
    """Return distinct pairs of a token and an id for `labels` [B, L], including the label.

    With `ragged` the numbers of ids are exponentially distributed, like top-p's: many sets of one
    id and a long tail. A token's ids are equally spaced modulo the vocabulary size, and different
    tokens read different rows of the head.
    """
    generator = torch.Generator(labels.device).manual_seed(0)
    flat = labels.flatten().clamp_min(0)
    counts = torch.full_like(flat, mean)
    if ragged:
        drawn = torch.empty(flat.shape, device=flat.device).exponential_(generator=generator)
        counts = (drawn * mean).ceil().long()
    counts = counts.clamp(1, vocabulary - 1)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    token = torch.arange(len(flat), device=flat.device).repeat_interleave(counts)
    step = torch.arange(int(offsets[-1]), device=flat.device) - offsets[token]
    stride = 1 + 2 * (flat % 7)  # An odd stride gives distinct ids modulo an even vocabulary size.
    stride = torch.where(torch.gcd(stride, torch.full_like(stride, vocabulary)) == 1, stride, 1)
    return (flat[token] + step * stride[token]) % vocabulary, offsets


def inside(pairs: Pairs, vocabulary: int, rows: slice) -> Tensor:
    """Return a mask [n, V] for the n tokens `rows`, True at the ids that the sampler kept for a
    token."""
    ids, offsets = pairs
    begin, end = int(offsets[rows.start]), int(offsets[rows.stop])
    counts = offsets[rows.start : rows.stop + 1].diff()
    token = torch.arange(len(counts), device=ids.device).repeat_interleave(counts)
    mask = torch.zeros(len(counts), vocabulary, dtype=torch.bool, device=ids.device)
    mask[token, ids[begin:end]] = True
    return mask


# ---------------------------------------------------------------------- a training step


def over_sets(pairs: Pairs) -> Callable[[Any, Batch], Tensor]:
    def loss(model: Any, batch: Batch) -> Tensor:
        scored = hl.Batch(
            batch.labels[:, 1:],
            advantages=batch.advantages,
            old_logps=hl.CURRENT,
            support_ids=pairs,
        )
        hidden = model.base_model(input_ids=batch.ids).last_hidden_state[:, :-1]
        return hl.head_loss(hidden, hl.Head.of_model(model), scored, hl.grpo()).loss

    return loss


def over_all(model: Any, batch: Batch) -> Tensor:
    scored = hl.Batch(batch.labels[:, 1:], advantages=batch.advantages, old_logps=hl.CURRENT)
    hidden = model.base_model(input_ids=batch.ids).last_hidden_state[:, :-1]
    return hl.head_loss(hidden, hl.Head.of_model(model), scored, hl.grpo()).loss


def with_trl_head(model: Any, batch: Batch) -> Tensor:
    with with_trl("GRPO", model):
        return of_trl("GRPO", model, batch)


def masked(pairs: Pairs, exact: bool = False) -> Callable[[Any, Batch], Tensor]:
    """Make a loss on plain logits in which the ids that the sampler did not keep are -inf; with
    `exact` the logits are float32."""

    def loss(model: Any, batch: Batch) -> Tensor:
        hidden = model.base_model(input_ids=batch.ids).last_hidden_state[:, :-1]
        weight = model.lm_head.weight
        logits = hidden.float() @ weight.float().T if exact else hidden @ weight.T
        shape = logits.shape
        mask = inside(pairs, shape[-1], slice(0, shape[0] * shape[1])).view(shape)
        log_p = logits.float().masked_fill(~mask, -torch.inf).log_softmax(-1)
        logps = log_p.gather(-1, batch.labels[:, 1:, None]).squeeze(-1)
        return mean_loss("GRPO", logps, batch)

    return loss


def step_rows(model: Any, batch: Batch, mean: int, device: torch.device) -> list[dict[str, Any]]:
    pairs = make_sets(batch.labels[:, 1:], model.config.vocab_size, mean)
    contestants: dict[str, Callable[[Any, Batch], Tensor]] = {
        "headloss, the sets": over_sets(pairs),
        "headloss, the whole vocabulary": over_all,
        "TRL, the whole vocabulary": with_trl_head,
        "masked logits": masked(pairs),
    }
    weights = list(model.parameters())
    small = first_rows(batch, 1), first_pairs(pairs, batch.labels.shape[1] - 1)
    want = gradients(model, small[0], masked(small[1], exact=True), weights)
    times: dict[str, list[float]] = {}
    rows = {name: {"mean": mean, "contestant": name, "status": "ok"} for name in contestants}
    of_sets = {"headloss, the sets": over_sets, "masked logits": masked}
    for name, row in rows.items():
        try:
            if name in of_sets:
                got = gradients(model, small[0], of_sets[name](small[1]), weights)
                row |= compared(got, want, weights[0].dtype)
            row["peak_bytes"] = peak(lambda n=name: step(model, batch, contestants[n]), device)
            times[name] = []
        except Exception as error:  # out of memory, or TRL is not installed
            row |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:200]}
    for _ in range(1 + ROUNDS):
        for name, ms in times.items():
            if rows[name]["status"] == "ok":
                ms.append(timed(lambda n=name: step(model, batch, contestants[n]), device))
    for name, ms in times.items():
        if len(ms) > 1:
            rows[name] |= {"ms": statistics.median(ms[1:]), "low": min(ms[1:]), "high": max(ms[1:])}
    kept = pairs[1].diff()
    facts = {"kept": float(kept.double().mean()), "kept_max": int(kept.max())}
    return [row | facts | {"tokens": batch.labels[:, 1:].numel()} for row in rows.values()]


def first_rows(batch: Batch, count: int) -> Batch:
    of_rows = {name: t[:count] for name, t in vars(batch).items() if isinstance(t, Tensor)}
    return replace(batch, **of_rows)


def first_pairs(pairs: Pairs, tokens: int) -> Pairs:
    return pairs[0][: int(pairs[1][tokens])], pairs[1][: tokens + 1]


def step(model: Any, batch: Batch, loss: Callable[[Any, Batch], Tensor]) -> None:
    loss(model, batch).backward()


def gradients(model: Any, batch: Batch, loss: Any, weights: list[Tensor]) -> list[Tensor]:
    """Return the loss followed by its gradients."""
    for weight in weights:
        weight.grad = None
    value = loss(model, batch)
    value.backward()
    return [value.detach().float(), *(w.grad.float() for w in weights)]  # type: ignore[union-attr]


def compared(got: list[Tensor], want: list[Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """Return errors of loss and gradient, with status "failed" for errors beyond rounding."""
    loss_error = float((got[0] - want[0]).abs())
    off = torch.stack([torch.dist(a, b) for a, b in zip(got[1:], want[1:], strict=True)]).norm()
    error = float(off / torch.stack([b.norm() for b in want[1:]]).norm())
    limit = 2 * BACKBONE if dtype == torch.bfloat16 else 1e-4
    well = error <= limit and loss_error <= limit
    status = {} if well else {"status": "failed", "reason": f"gradient off by {error:.1e}"}
    return {"loss_error": loss_error, "gradient_error": error, **status}


def timed(run: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    with Stretch(device) as stretch:
        run()
    synchronize(device)
    return stretch.ms


# ---------------------------------------------------------------------- the loss alone


def crossing(model: Any, batch: Batch, device: torch.device) -> dict[str, Any]:
    """Time the loss over K ids per token for several K, and find the K at which the loss over K ids
    is as slow as the loss over the whole vocabulary."""
    vocabulary, targets = model.config.vocab_size, batch.labels[:, 1:]
    with torch.no_grad():
        hidden = model.base_model(input_ids=batch.ids).last_hidden_state[:, :-1]
    hidden = hidden.detach().requires_grad_()
    weight = model.lm_head.weight.detach().clone().requires_grad_()
    options = {"advantages": batch.advantages, "old_logps": hl.CURRENT}

    def run(support: Pairs | None) -> Callable[[], None]:
        scored = hl.Batch(targets, support_ids=support, **options)  # type: ignore[arg-type]

        def once() -> None:
            hl.head_loss(hidden, hl.Head(weight), scored, hl.grpo()).loss.backward()
            hidden.grad = weight.grad = None

        return once

    def median(once: Callable[[], None]) -> float:
        return statistics.median([timed(once, device) for _ in range(1 + ROUNDS)][1:])

    whole, points, k = median(run(None)), [], 8
    while k < vocabulary and (not points or points[-1]["ms"] < 1.5 * whole):
        points.append({"k": k, "ms": median(run(make_sets(targets, vocabulary, k, ragged=False)))})
        k *= 2
    return {"whole_ms": whole, "points": points, "level_at": level(points, whole)}


def level(points: list[dict[str, float]], whole: float) -> float | None:
    """Return the number K of ids per token at which a loss over K ids is as slow as the loss over
    the whole vocabulary (`whole`, in ms), interpolated between the measured `points`; None if no
    measured K is as slow."""
    for low, high in itertools.pairwise(points):
        if low["ms"] < whole <= high["ms"]:
            share = (whole - low["ms"]) / (high["ms"] - low["ms"])
            return low["k"] * 2 ** (share * math.log2(high["k"] / low["k"]))
    return None


# ---------------------------------------------------------------------- generation

FILTERS: dict[str, dict[str, Any]] = {
    "top_k=20, top_p=0.9": {"top_k": 20, "top_p": 0.9},
    "top_p=0.999": {"top_k": 0, "top_p": 0.999},
}


def generation_rows(model: Any, rows: int, tokens: int, device: torch.device) -> list[dict]:
    prompts = torch.randint(model.config.vocab_size, (rows, 16), device=device)
    model.eval()

    def generate(options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model.generate(
            input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=True,
            max_new_tokens=tokens, min_new_tokens=tokens, use_cache=True, pad_token_id=0, **options,
        )  # fmt: skip

    found = []
    for name, options in FILTERS.items():
        times: dict[str, list[float]] = {"off": [], "on": []}
        for _ in range(1 + ROUNDS):
            times["off"].append(timed(lambda o=options: generate(o), device))
            with record_support(model) as drawn:
                times["on"].append(timed(lambda o=options: generate(o), device))
        kept = (drawn.support_ids >= 0).sum(-1).double()
        ms = {f"{k}_ms_a_token": statistics.median(v[1:]) / tokens for k, v in times.items()}
        sizes = {"rows": rows, "tokens": tokens, "kept": float(kept.mean())}
        found.append({"filter": name, **sizes, **ms})
    model.train()
    return found


# ---------------------------------------------------------------------- the command


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="Qwen2.5-0.5B", choices=[*SETTINGS])
    parser.add_argument("--quick", action="store_true", help="a small model, seconds on a CPU")
    parser.add_argument("--commit", help="what is measured, where there is no repository")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    setting = (QUICK if arguments.quick else SETTINGS)[arguments.model]
    model = make_model(setting, device)
    rows, length = setting.batches[-1]
    batch = make_batch(model, rows, length, device)
    means = [m for m in MEANS if 4 * m < model.config.vocab_size]
    results: dict[str, Any] = about(device, arguments.commit, PACKAGES)
    results |= {"model": arguments.model, "quick": arguments.quick}
    generated = (rows, 8) if arguments.quick else (64, 256)
    results["generation"] = generation_rows(model, *generated, device)
    for row in results["generation"]:
        print(row, flush=True)
    results["step"] = [row for m in means for row in step_rows(model, batch, m, device)]
    for row in results["step"]:
        print(row, flush=True)
    model.zero_grad(set_to_none=True)
    results["crossing"] = crossing(model, batch, device)
    print(results["crossing"], flush=True)
    if arguments.json is not None:
        write(arguments.json, json.dumps(results, indent=1) + "\n")
    of_sets = [row for row in results["step"] if row["contestant"] == "headloss, the sets"]
    return int(any(row["status"] != "ok" for row in of_sets))


if __name__ == "__main__":
    sys.exit(main())
