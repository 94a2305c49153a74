"""Changes that make a randomly drawn call of headloss invalid, each with a pattern that the error
text must match."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import headloss as hl


@dataclass(frozen=True, kw_only=True)
class Spoil:
    """A modification that makes a call invalid: `apply` changes the call, and `says` is a regex for
    the error text."""

    apply: Callable[[Any], None]
    says: str
    verbs: tuple[str, ...] = ("head_loss",)
    needs: Callable[[Any], bool] = lambda call: True

    def fits(self, call: Any) -> bool:
        return call.verb in self.verbs and self.needs(call)


SPOILS: dict[str, Spoil] = {}
ALL = ("head_loss", "head_stats", "head_topk")
POSITIONS = ("head_loss", "head_stats")


def add(name: str, says: str, apply: Callable[[Any], None], **given: Any) -> None:
    SPOILS[name] = Spoil(apply=apply, says=says, **given)


def put(where: str, key: str, value: Any) -> Callable[[Any], None]:
    """Return a function that sets entry `key` of the call's dict `where` to a value, which may be
    computed from the call."""

    def apply(call: Any) -> None:
        made = value(call) if callable(value) and not isinstance(value, type) else value
        getattr(call, where)[key] = made

    return apply


def attribute(name: str, value: Any) -> Callable[[Any], None]:
    return lambda call: setattr(call, name, value(call) if callable(value) else value)


def first(term: dict[str, Any]) -> Callable[[Any], None]:
    """Return a function that replaces all terms of a call by a single term."""
    plain = {"options": {}, "modifiers": [], "over": None, "weighted": False, "where": False}

    def apply(call: Any) -> None:
        call.terms, call.teacher = [(1.0, {**plain, **term})], None

    return apply


def targets(call: Any) -> Any:
    return call.batch["targets"]


def positions(call: Any) -> int:
    return targets(call).numel()


def changed(tensor: Any, value: Any) -> Any:
    tensor = tensor.clone()
    tensor.view(-1)[tensor.numel() // 2] = value
    return tensor


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


def no_segments(call: Any) -> bool:
    """Return True if no field or term of the call depends on its segments, so that changed segments
    raise no other error first."""
    fields = [v for v in call.batch.values() if isinstance(v, torch.Tensor)]
    whole = all(v.shape[: targets(call).dim()] == targets(call).shape for v in fields)
    return whole and not any(r["name"] in ("dpo", "ipo", "simpo") for _, r in call.terms)


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


def without(name: str, term: str) -> Callable[[Any], None]:
    def apply(call: Any) -> None:
        first({"name": term})(call)
        call.batch.pop(name, None)

    return apply


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
        first({"name": "cross_entropy", "where": True})(c),
        c.batch.update(kept=torch.ones(targets(c).shape)),
    ),
)
add(
    "kept: missing",
    "kept, which was not given",
    lambda c: (first({"name": "cross_entropy", "where": True})(c), c.batch.pop("kept", None)),
)
add(
    "pairs: odd",
    "segments: got 3, want a multiple of 2",
    lambda c: (
        first({"name": "dpo"})(c),
        [c.batch.pop(name, None) for name in ("advantages", "share", "kept")],
        setattr(c, "totals", None),
        setattr(c, "segments", ("ids", (torch.zeros_like(targets(c)), 3))),
    ),
)

# ---------------------------------------------------------------------- objective

for term, option, value in (
    ("grpo", "epsilon_low", -0.1),
    ("grpo", "epsilon_high", math.nan),
    ("grpo", "epsilon_high", "0.2"),
    ("grpo", "delta", 0.0),
    ("grpo", "importance_sampling_level", "tokens"),
    ("gspo", "epsilon_low", -1),
    ("gmpo", "epsilon_high", None),
    ("ppo", "dual_clip", 0.5),
    ("cispo", "epsilon_low", -1),
    ("sapo", "temperature_pos", 0),
    ("vespo", "k_neg", -2.0),
    ("kl", "estimator", "k4"),
    ("kl", "bias_corrected", 1),
    ("dpo", "beta", 0),
    ("ipo", "label_smoothing", 0.9),
    ("simpo", "gamma", -1),
    ("cross_entropy", "label_smoothing", 1.5),
    ("dr_grpo", "max_completion_length", 0),
    ("sdar", "beta", 0),
    ("score_centering", "mode", "token"),
):  # fmt: skip
    add(
        f"{term}: {option}: {value}",
        f"{term}: {option}: got",
        first({"name": term, "options": {option: value}}),
    )
add("grpo: epsilon", "epsilon", first({"name": "grpo", "options": {"epsilon": 0.2}}))
add(
    "dr_grpo: no length", "term dr_grpo: got max_completion_length=None", first({"name": "dr_grpo"})
)
for modifier, given, says in (
    ("corrected", {"mode": "tokens"}, "corrected: mode: got 'tokens'"),
    ("corrected", {"mode": "token_mask", "max": -1}, "corrected: max: got -1"),
    ("corrected", {"mode": "token_mask", "min": 5.0}, "corrected: min: got 5.0, want <= max"),
    ("off_policy_masked", {"threshold": math.nan}, "off_policy_masked: threshold: got nan"),
    ("top_entropy", {"quantile": 0}, "top_entropy: quantile: got 0"),
    ("top_entropy", {}, "top_entropy: got quantile=None and threshold=None"),
):
    add(f"{modifier}: {given}", says, first({"name": "grpo", "modifiers": [(modifier, given)]}))
add("over: a name", "reduction: got 'mean'", first({"name": "grpo", "over": "mean"}))
add("over: a length", "length: got -2.0", first({"name": "grpo", "over": -2.0}))
for name, value, says in (
    ("a factory", lambda c: hl.grpo, "objective: got function, want terms"),
    ("a name", lambda c: "grpo", "objective: got str"),
    ("a list", lambda c: [hl.grpo()], "objective: got list"),
    ("empty", lambda c: hl.Objective(()), "objective: got no terms"),
):
    add(f"objective: {name}", says, attribute("objective", value))


def distilled(call: Any, **given: Any) -> None:
    """Put a teacher into the batch, and remove everything else that could raise a different
    error."""
    for name in [n for n in call.batch if n.startswith("teacher_")]:
        del call.batch[name]
    call.terms, call.teacher_head = [], None
    call.teacher = {"divergence": "forward_kl", **given}
    call.batch["teacher_logits"] = torch.zeros(*targets(call).shape, scored(call))


def scored(call: Any) -> int:
    return call.head.get("vocab_size") or call.head["weight"].shape[0]


add(
    "distillation: generalized",
    "distillation: divergence: got 'total_variation' with tail=",
    lambda c: distilled(c, divergence="total_variation", tail="generalized"),
)
for option, value in (
    ("tail", "none"),
    ("divergence", "kl"),
    ("beta", 1.0),
    ("temperature", 0),
    ("temperature", math.inf),
):
    add(
        f"distillation: {option}: {value}",
        f"distillation: {option}: got",
        lambda c, option=option, value=value: distilled(c, **{option: value}),
    )
add(
    "distillation: columns",
    "teacher_logits: got a last dimension of",
    lambda c: (
        distilled(c),
        c.batch.update(teacher_logits=torch.zeros(*targets(c).shape, scored(c) + 1)),
    ),
)
add(
    "distillation: two teachers",
    "term distillation: got .* in the batch, want one of",
    lambda c: (distilled(c), c.batch.update(teacher_hidden=torch.zeros(*targets(c).shape, 4))),
)
add(
    "distillation: none",
    "term distillation: got no teacher",
    lambda c: (distilled(c), c.batch.pop("teacher_logits")),
)
add(
    "distillation: no head",
    "got batch.teacher_hidden without",
    lambda c: (
        distilled(c),
        c.batch.pop("teacher_logits"),
        c.batch.update(teacher_hidden=torch.zeros(*targets(c).shape, 4)),
    ),
)
add(
    "distillation: no log-probs",
    "term distillation: got",
    lambda c: (
        distilled(c),
        c.batch.pop("teacher_logits"),
        c.batch.update(teacher_topk_ids=torch.zeros(*targets(c).shape, 2).long()),
    ),
)
add(
    "distillation: ids",
    "teacher_topk_ids: got 100000",
    lambda c: (
        distilled(c),
        c.batch.pop("teacher_logits"),
        c.batch.update(teacher_topk_ids=torch.full((*targets(c).shape, 2), 100000)),
        c.batch.update(teacher_topk_logps=torch.full((*targets(c).shape, 2), -1.0)),
    ),
    needs=lambda c: not c.options.get("static"),
)
add(
    "distillation: ids of floats",
    "teacher_topk_ids: got torch.float32",
    lambda c: (
        distilled(c),
        c.batch.pop("teacher_logits"),
        c.batch.update(teacher_topk_ids=torch.zeros(*targets(c).shape, 2)),
        c.batch.update(teacher_topk_logps=torch.full((*targets(c).shape, 2), -1.0)),
    ),
)

# ---------------------------------------------------------------------- options

for option, value in (
    ("schedule", "fast"),
    ("backend", "cuda"),
    ("chunk_tokens", 0),
    ("chunk_tokens", -3),
    ("chunk_tokens", 1.5),
    ("chunk_tokens", True),
    ("memory_budget", 0),
    ("memory_budget", "1G"),
    ("logits_dtype", torch.int8),
    ("accumulate_dtype", torch.float64),
    ("main_grad", [1.0]),
    ("main_grad", torch.ones(3)),
):
    add(
        f"options: {option}: {value}",
        f"{option}: got",
        put("options", option, lambda c, v=value: v),
    )
add(
    "options: main_grad's dtype",
    "main_grad: got torch.float16",
    put("options", "main_grad", lambda c: torch.zeros(c.head["weight"].shape).half()),
)
