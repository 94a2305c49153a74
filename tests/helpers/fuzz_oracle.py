"""Checks of a random call's results against a float64 computation from materialised logits."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import fuzz
import fuzz_draw
import torch
from fuzz_bad import SPOILS
from fuzz_newer import skipped_norms
from torch import Tensor

import headloss as hl
from headloss.testing import Plain, plain

# Regexes of the errors that a valid random call may raise, because some combinations of features
# are not supported.
REFUSALS = (
    r"term \w+: reads batch\.\w+, which was not given",
    r"term \w+: is restricted to batch\.kept, which was not given",
    r"totals: have no count for field 'kept'",
    r"schedule: ",
    r"static: ",
    r"segments: got \d+, want a multiple of 2",
    r"main_grad: ",
    r"objective: .* has no gradient with respect to any statistic",
    r"support_ids: ",
    r"gradient_tolerance: ",
)
# Allowed errors by input dtype, of statistics and losses (computed in at least float32) and of
# gradients.
STATISTICS = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 1e-4, "float16": 1e-4}
GRADIENTS = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}


def complaints(call: fuzz_draw.Call, record: dict[str, Any]) -> list[str]:
    """Return the errors found in a call's results, as texts; an empty list means a correct call."""
    call = replace(call, device="cpu")
    if call.spoil is not None or "error" in record:
        return _of_error(call, record)
    if call.verb == "head_topk":
        return _of_topk(call, *record["topk"])
    return [*_of_values(call, record), *_of_form(call, record)]


def _of_error(call: fuzz_draw.Call, record: dict[str, Any]) -> list[str]:
    error = record.get("error")
    if error is None:
        return [f"was accepted, want an error that says {SPOILS[call.spoil or ''].says!r}"]
    if record["kind"] not in (ValueError, TypeError):
        return [f"unnamed: {error}"]
    text = error.partition(": ")[2]
    wanted = REFUSALS if call.spoil is None else (SPOILS[call.spoil].says,)
    if any(re.search(pattern, text) for pattern in wanted):
        return []
    if call.spoil is not None:  # two errors apply; the text may name either
        right = replace(call, spoil=None)
        if fuzz.run(right).get("error") == error:
            return _of_error(right, record)
    return [f"says {error!r}, want {wanted}"]


# ---------------------------------------------------------------------- values


def _sum_of_all(lengths: Tensor, tokens: Tensor, segments: Tensor) -> Tensor:
    return torch.ones_like(lengths)


@hl.term(reduction=hl.Reduction("sum", _sum_of_all))
def of_statistics(stats, batch):
    """A loss computed from the results of `head_stats`."""
    return stats.logp + 0.3 * stats.entropy - 0.1 * stats.lse


@hl.term(reduction=hl.Reduction("sum", _sum_of_all))
def of_candidates(stats, batch):
    """A loss on candidate log-probs, added to the loss of a random call."""
    logps = stats.candidate_logps
    return 0.1 * torch.where(logps > -torch.inf, logps, 0).sum(1)


def _oracle(call: fuzz_draw.Call, built: fuzz.Built, mode: Any, upstream: float) -> Plain:
    hidden, head, objective = built.hidden, built.head, built.objective
    if call.verb == "head_stats":
        objective = of_statistics()
        if "candidate_ids" in call.batch:
            objective = objective + of_candidates()
    if call.verb == "logits_loss":
        hidden = fuzz.logits_of(call).requires_grad_()
        identity = torch.eye(hidden.shape[-1], dtype=hidden.dtype)
        head = replace(head, weight=identity, bias=None, lora=(), vocab_size=None)
    return plain(hidden, head, built.batch, objective, mode, upstream)


def _off(value: Tensor, oracle: Tensor, floor: float = 0.0) -> float:
    """Return the relative error of `value`, the norm of `value - oracle` divided by the norm of
    `oracle`; infinity if only `value` has non-finite entries."""
    value, oracle = value.detach().double(), oracle.double()
    if not value.isfinite().all() and oracle.isfinite().all():
        return float("inf")
    away = float((value - oracle).norm())
    return away / max(float(oracle.norm()), floor, 1e-30) if away else 0.0


def _of_values(call: fuzz_draw.Call, record: dict[str, Any]) -> list[str]:
    upstream = record.get("upstream", 1.0)
    built = fuzz.build(call)
    oracle = _oracle(call, built, "float64", upstream)
    tight, loose = STATISTICS[call.dtype], GRADIENTS[call.dtype]
    found = []

    lost = skipped_norms(built, record["skipped"] * upstream) if "skipped" in record else {}

    def check(name: str, off: float, allowed: float, yardstick: Any = None) -> None:
        # The error of plain PyTorch in the inputs' dtype, by which errors are judged, is computed
        # only if needed.
        if off > allowed and (yardstick is None or not off <= 5 * yardstick() + allowed):
            found.append(f"{name}: off by {off:.2g}, want {allowed:g}")

    def other(mode: str) -> Plain:
        return _oracle(call, fuzz.build(call), mode, upstream)

    for name in ("logps", "entropies"):
        if record[name] is not None:
            check(name, _off(record[name], getattr(oracle, name), 1e-3), tight)
    terms = record.get("terms", {})
    if terms and list(terms) != list(oracle.terms):
        found.append(f"terms: got {list(terms)}, want {list(oracle.terms)}")
    for name, value in terms.items():
        want = oracle.terms[name]
        check(
            f"terms[{name}]",
            _off(value, want, 0.1),
            tight,
            lambda n=name, w=want: _off(other("float32").terms[n], w, 0.1),
        )
    size = sum(abs(c) for c, _ in built.objective.parts) * max(
        (abs(float(v)) for v in oracle.terms.values()), default=0.0
    )
    check(
        "loss",
        _off(record["loss"], oracle.loss, max(size, 0.1)),
        tight,
        lambda: _off(other("float32").loss, oracle.loss, max(size, 0.1)),
    )
    for name, value in record["gradients"].items():
        want = oracle.gradients[name]
        allowed = max(loose, 3e-2) if "accumulate_dtype" in call.options else loose
        # `main_grad` was filled with 1 before the call, so the sum is rounded relative to 1. Where
        # the exact gradient is 0, only rounding errors of the terms' derivatives remain.
        added = name == "weight" and "main_grad" in call.options
        floor = 1e-3 * want.numel() ** 0.5 if added else 1e-4
        floor = floor if want.any() else max(floor, 1e-4 * size)
        if lost and name not in lost:
            continue
        check(
            f"gradients[{name}]",
            _off(value, want, floor) - abs(lost.get(name, 0)) / max(float(want.norm()), floor),
            allowed,
            lambda n=name, w=want: _off(other("input").gradients[n], w, 1e-4),
        )
    expected = set(oracle.gradients) if "upstream" in record else set()
    if set(record["gradients"]) != expected:
        found.append(f"gradients: got {sorted(record['gradients'])}, want {sorted(expected)}")
    return found


def _of_form(call: fuzz_draw.Call, record: dict[str, Any]) -> list[str]:
    """Check dtypes of the results, and zeros at unscored positions."""
    found = []
    targets = call.batch["targets"]
    unscored = targets == -100
    wide = torch.float64 if call.dtype == "float64" else torch.float32
    for name in ("loss", "logps", "entropies"):
        value = record[name]
        if value is not None and value.dtype != wide:
            found.append(f"{name}: got {value.dtype}, want {wide}")
        if name != "loss" and value is not None and value[unscored].any():
            found.append(f"{name}: not 0 where nothing is scored")
    gradient = record["gradients"].get("hidden")
    if gradient is not None and gradient[unscored].any():  # true for NaN, too
        found.append("gradients[hidden]: not 0 where nothing is scored")
    for name, value in record["gradients"].items():
        own = torch.float32 if name == "weight" and "main_grad" in call.options else None
        if value.dtype != (own or fuzz_draw.DTYPES[call.dtype]):
            found.append(f"gradients[{name}]: got {value.dtype}")
    metrics = record.get("metrics", {})
    if (not metrics) != (call.verb == "head_stats" or call.options.get("metrics") is False):
        found.append(f"metrics: got {sorted(metrics)}")
    if metrics:
        scored = int((~unscored).sum())
        if metrics["tokens"] != scored:
            found.append(f"metrics: got {metrics['tokens']} tokens, want {scored}")
        entropies = record["entropies"]
        mean = float(entropies.sum(dtype=torch.float64)) / scored if scored else 0.0
        if scored and abs(metrics["entropy"] - mean) > 1e-5 * (1 + mean):
            found.append(f"metrics: got an entropy of {metrics['entropy']}, want {mean}")
    return found


def _of_topk(call: fuzz_draw.Call, ids: Tensor, logps: Tensor) -> list[str]:
    built, k = fuzz.build(call), call.k
    head = built.head
    doubled = {"weight": head.weight.double(), "bias": head.bias}
    if head.bias is not None:
        doubled["bias"] = head.bias.double()
    doubled["lora"] = tuple(replace(x, a=x.a.double(), b=x.b.double()) for x in head.lora)
    want = replace(head, **doubled).logits(built.hidden.double()).log_softmax(-1)
    best = want.topk(k, -1).values
    tight = STATISTICS[call.dtype]
    offs = {"logps": _off(logps, best, 1e-3), "ids": _off(want.gather(-1, ids), best, 1e-3)}
    found = [f"topk {name}: off by {off:.2g}" for name, off in offs.items() if off > tight]
    if ids.dtype != torch.int64 or bool((ids.sort(-1).values.diff() == 0).any()):
        found.append("topk: ids are not distinct int64")
    return found
