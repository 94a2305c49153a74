"""Changes that make the hidden states, head or batch of a random call invalid."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from fuzz_spoil import Spoils, attribute, changed, one_term, positions, put, targets

import headloss as hl

SPOILS = Spoils()
ALL = ("head_loss", "head_stats", "head_topk")
POSITIONS = ("head_loss", "head_stats")
add = SPOILS.add


def no_segments(call: Any) -> bool:
    """Return True if no field or term of the call depends on the call's segments; wrong segments
    then cause no second error in a field or a term."""
    fields = [v for v in call.batch.values() if isinstance(v, torch.Tensor)]
    per_token = all(v.shape[: targets(call).dim()] == targets(call).shape for v in fields)
    return per_token and not any(r["name"] in ("dpo", "ipo", "simpo") for _, r in call.terms)


def without(name: str, term: str) -> Callable[[Any], None]:
    def apply(call: Any) -> None:
        one_term({"name": term})(call)
        call.batch.pop(name, None)

    return apply


# ---------------------------------------------------------------------- hidden states, head

add(
    "hidden: width",
    "hidden: got shape",
    attribute("hidden", lambda c: c.hidden[..., 1:]),
    verbs=ALL,
)
add(
    "hidden: integers",
    "hidden: got",
    attribute("hidden", lambda c: torch.ones(4, 3).long()),
    verbs=ALL,
)
add("hidden: a list", "hidden: got list", attribute("hidden", lambda c: [1.0, 2.0]), verbs=ALL)
add("hidden: nothing", "hidden: got", attribute("hidden", lambda c: None), verbs=ALL)
add(
    "hidden: positions",
    "hidden: got|targets: got|temperature: got",
    attribute("hidden", lambda c: torch.cat([c.hidden, c.hidden])),
    verbs=POSITIONS,
)
add(
    "hidden: dtype",
    "hidden: got torch.float16, want the dtype of weight",
    attribute("hidden", lambda c: c.hidden.half()),
    verbs=ALL,
    needs=lambda c: c.dtype != "float16",
)
add("hidden: meta", "meta", attribute("hidden", lambda c: c.hidden.to("meta")), verbs=POSITIONS)
add("weight: a vector", "weight: got shape", put("head", "weight", torch.ones(5)), verbs=ALL)
add(
    "weight: integers",
    "weight: got torch.int64",
    put("head", "weight", lambda c: c.head["weight"].long()),
    verbs=ALL,
)
add("weight: nothing", "weight: got None", put("head", "weight", None), verbs=ALL)
add(
    "weight: device",
    "weight: got device meta|meta device|bias: got|lora",
    put("head", "weight", lambda c: c.head["weight"].to("meta")),
    verbs=POSITIONS,
)
add(
    "bias: length",
    "bias: got shape",
    put("head", "bias", lambda c: torch.zeros(c.head["weight"].shape[0] + 1)),
    verbs=ALL,
)
for value in (0, -1.0, math.nan, math.inf, "hot"):
    add(f"temperature: {value}", "temperature: got", put("head", "temperature", value), verbs=ALL)
add(
    "temperature: shape",
    "temperature: got shape",
    put("head", "temperature", torch.ones(3)),
    verbs=ALL,
)
add(
    "temperature: integers",
    "temperature: got torch.int64",
    put("head", "temperature", lambda c: torch.ones(targets(c).shape).long()),
    verbs=ALL,
)
for value in (0.0, -3.0, math.nan, "tight"):
    add(f"softcap: {value}", "softcap: got", put("head", "softcap", value), verbs=ALL)
for value in (math.inf, math.nan, None):
    add(f"logit_scale: {value}", "logit_scale: got", put("head", "logit_scale", value), verbs=ALL)
for value in (0, -1, 10**6, 7.0):
    add(f"vocab_size: {value}", "vocab_size: got", put("head", "vocab_size", value), verbs=ALL)
add(
    "lora: rank",
    "lora.b: got shape",
    attribute("lora", lambda c: (torch.ones(2, c.hidden.shape[-1]), torch.ones(5, 3), 1.0)),
    verbs=ALL,
)
add(
    "lora: width",
    r"lora\[0\].a: got shape",
    attribute("lora", lambda c: (torch.ones(2, 99), torch.ones(c.head["weight"].shape[0], 2), 1.0)),
    verbs=ALL,
)
add(
    "lora: scaling",
    "lora.scaling: got",
    attribute("lora", lambda c: (torch.ones(2, 9), torch.ones(5, 2), math.nan)),
    verbs=ALL,
)
for value in (0, -1, 10**6, 2.5, "a", None):
    add(
        f"k: {value}",
        "k: (got|differs)",
        attribute("k", lambda c, value=value: value),
        verbs=("head_topk",),
    )

# ---------------------------------------------------------------------- batch

add(
    "targets: float",
    "targets: got torch.float",
    put("batch", "targets", lambda c: targets(c).float()),
    verbs=POSITIONS,
)
add("targets: a list", "targets: got list", put("batch", "targets", lambda c: [1, 2]))
add(
    "targets: too large",
    "targets: got 100000 at position",
    put("batch", "targets", lambda c: changed(targets(c), 100000)),
    verbs=POSITIONS,
    needs=lambda c: not c.options.get("static"),
)
add(
    "targets: negative",
    "targets: got -5 at position",
    put("batch", "targets", lambda c: changed(targets(c), -5)),
    verbs=POSITIONS,
    needs=lambda c: not c.options.get("static"),
)
add(
    "segments: positions",
    "segments: got",
    attribute("segments", lambda c: ("lengths", [positions(c), 3])),
)
add("segments: lengths", "lengths: got", attribute("segments", lambda c: ("lengths", [-1, 3])))
add(
    "segments: cu_seqlens",
    "cu_seqlens: got",
    attribute("segments", lambda c: ("cu_seqlens", [1, positions(c)])),
)
add("segments: kind", "segments: got list", attribute("segments", lambda c: ("as it is", [1, 2])))
add(
    "segments: an id",
    "segments: got 9 at position",
    attribute("segments", lambda c: ("ids", (changed(torch.zeros_like(targets(c)), 9), 2))),
    needs=lambda c: not c.options.get("static") and no_segments(c),
)
add(
    "segments: a negative id",
    "segments: got -3 at position",
    attribute("segments", lambda c: ("ids", (changed(torch.zeros_like(targets(c)), -3), 2))),
    needs=lambda c: not c.options.get("static") and no_segments(c),
)
add("totals: a list", "totals: got list", attribute("totals", lambda c: [1, 2]))


for name in ("advantages", "old_logps", "ref_logps", "sampling_logps", "kept"):
    add(f"{name}: shape", f"{name}: got shape", put("batch", name, torch.ones(99, 2)))
    add(f"{name}: a list", f"{name}: got list", put("batch", name, lambda c: [0.0]))
    add(
        f"{name}: gradient",
        f"{name}: requires a gradient",
        put("batch", name, lambda c: torch.zeros(targets(c).shape, requires_grad=True)),
    )
    add(
        f"{name}: device",
        f"{name}: got device meta",
        put("batch", name, lambda c: torch.zeros(targets(c).shape, device="meta")),
    )
add(
    "ref_logps: CURRENT",
    "ref_logps: got headloss.CURRENT",
    put("batch", "ref_logps", lambda c: hl.CURRENT),
)
add(
    "a field: reserved",
    "fields: is a name of the batch|fields",
    put("batch", "fields", torch.ones(1)),
)


for name, term in (("advantages", "reinforce"), ("old_logps", "grpo"), ("ref_logps", "kl")):
    add(
        f"{name}: missing",
        f"term {term}: reads batch.{name}, which was not given",
        without(name, term),
    )
add(
    "kept: floats",
    "kept: want a boolean tensor",
    lambda c: (
        one_term({"name": "cross_entropy", "where": True})(c),
        c.batch.update(kept=torch.ones(targets(c).shape)),
    ),
)
add(
    "kept: missing",
    "kept, which was not given",
    lambda c: (one_term({"name": "cross_entropy", "where": True})(c), c.batch.pop("kept", None)),
)
add(
    "pairs: odd",
    "segments: got 3, want a multiple of 2",
    lambda c: (
        one_term({"name": "dpo"})(c),
        [c.batch.pop(name, None) for name in ("advantages", "share", "kept")],
        setattr(c, "totals", None),
        setattr(c, "segments", ("ids", (torch.zeros_like(targets(c)), 3))),
    ),
)
