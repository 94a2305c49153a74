"""Changes that make the objective or the options of a random call invalid."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from fuzz_spoil import Spoils, attribute, one_term, put, targets

import headloss as hl

SPOILS = Spoils()
add = SPOILS.add

# ---------------------------------------------------------------------- terms

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
        one_term({"name": term, "options": {option: value}}),
    )
add("grpo: epsilon", "epsilon", one_term({"name": "grpo", "options": {"epsilon": 0.2}}))
add(
    "dr_grpo: no length",
    "term dr_grpo: got max_completion_length=None",
    one_term({"name": "dr_grpo"}),
)
for modifier, options, says in (
    ("corrected", {"mode": "tokens"}, "corrected: mode: got 'tokens'"),
    ("corrected", {"mode": "token_mask", "max": -1}, "corrected: max: got -1"),
    ("corrected", {"mode": "token_mask", "min": 5.0}, "corrected: min: got 5.0, want <= max"),
    ("off_policy_masked", {"threshold": math.nan}, "off_policy_masked: threshold: got nan"),
    ("top_entropy", {"quantile": 0}, "top_entropy: quantile: got 0"),
    ("top_entropy", {}, "top_entropy: got quantile=None and threshold=None"),
):
    add(
        f"{modifier}: {options}",
        says,
        one_term({"name": "grpo", "modifiers": [(modifier, options)]}),
    )
add("over: a name", "reduction: got 'mean'", one_term({"name": "grpo", "over": "mean"}))
add("over: a length", "length: got -2.0", one_term({"name": "grpo", "over": -2.0}))
for name, value, says in (
    ("a factory", lambda c: hl.grpo, "objective: got function, want terms"),
    ("a name", lambda c: "grpo", "objective: got str"),
    ("a list", lambda c: [hl.grpo()], "objective: got list"),
    ("empty", lambda c: hl.Objective(()), "objective: got no terms"),
):
    add(f"objective: {name}", says, attribute("objective", value))

# ---------------------------------------------------------------------- distillation


def distilled(call: Any, **arguments: Any) -> None:
    """Put a teacher into the batch, and remove everything else that could raise a different
    error."""
    for name in [n for n in call.batch if n.startswith("teacher_")]:
        del call.batch[name]
    call.terms, call.teacher_head = [], None
    call.teacher = {"divergence": "forward_kl", **arguments}
    call.batch["teacher_logits"] = torch.zeros(*targets(call).shape, scored(call))


def scored(call: Any) -> int:
    return call.head.get("vocab_size") or call.head["weight"].shape[0]


def teacher(logits: bool = False, **fields: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return a function that turns a call into distillation, with teacher fields computed from the
    call; the batch has the teacher's logits only if `logits` is True."""

    def apply(call: Any) -> None:
        distilled(call)
        if not logits:
            del call.batch["teacher_logits"]
        call.batch.update({name: field(call) for name, field in fields.items()})

    return apply


def per_token(count: int, value: float) -> Callable[[Any], Any]:
    """Return a function of a call that returns a tensor with `count` numbers per token, all equal
    to `value`."""
    return lambda call: torch.full((*targets(call).shape, count), value)


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
    teacher(teacher_logits=lambda c: torch.zeros(*targets(c).shape, scored(c) + 1)),
)
add(
    "distillation: two teachers",
    "term distillation: got .* in the batch, want one of",
    teacher(logits=True, teacher_hidden=per_token(4, 0.0)),
)
add("distillation: none", "term distillation: got no teacher", teacher())
add(
    "distillation: no head",
    "got batch.teacher_hidden without",
    teacher(teacher_hidden=per_token(4, 0.0)),
)
add(
    "distillation: no log-probs",
    "term distillation: got",
    teacher(teacher_topk_ids=per_token(2, 0)),
)
add(
    "distillation: ids",
    "teacher_topk_ids: got 100000",
    teacher(teacher_topk_ids=per_token(2, 100000), teacher_topk_logps=per_token(2, -1.0)),
    needs=lambda c: not c.options.get("static"),
)
add(
    "distillation: ids of floats",
    "teacher_topk_ids: got torch.float32",
    teacher(teacher_topk_ids=per_token(2, 0.0), teacher_topk_logps=per_token(2, -1.0)),
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
