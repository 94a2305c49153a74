"""Recent features of random calls: policy terms, candidates, `support_ids`, the `held` schedule and
a gradient tolerance.

A random call's recent features are drawn after its older features. So the older features that a
seed draws stay the same if a recent feature is added here.

N positions, K ids per position (candidates or allowed ids), V vocabulary size.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import headloss as hl

# an id outside of any vocabulary, put at unscored positions, where ids must not be read
BEYOND = 1 << 40


@hl.term
def chosen(stats, batch, rest=0.2):
    """A term over the log-probs of candidates, which may be -inf, and of the total probability of
    all other tokens."""
    logps = stats.candidate_logps
    scores = torch.arange(1, 1 + logps.shape[1], dtype=logps.dtype, device=logps.device) * 0.1
    inside = (logps.exp() * scores).sum(1)
    return inside - 0.1 * stats.logp + (rest * stats.candidate_tail.exp() if rest else 0)


NEWER = ("dppo", "icepop", "vaco", "ce_gppo", "aspo", "clip_cov", "kl_cov", "dro", "dft", "eaft")
NEWER = (*NEWER, "focal", "a2po", "kto", "on_policy_distillation", "real", "fipo", "topr")
PAIRS = ("cpo", "orpo", "aot")
OPTIONS = {
    "dppo": {"delta_low": 0.05},
    "vaco": {"delta": 0.1},
    "clip_cov": {"share": 0.1, "low": -1.0},
    "kl_cov": {"share": 0.2},
    "a2po": {"beta": 0.5},
    "sdar": {"beta": 0.7},
    "real": {"tau": 0.2},
    "topr": {"importance_sampling_level": "sequence", "weight_neg": 0.5},
    "fipo": {"delta": 1.2, "half_life": 3.0, "weight_clip": 0.5, "high_only": False},
}
# The terms in `LATEST` are drawn after all other random values, so that the other random values of
# a seed are as they were before these terms existed.
LATEST = ("chord_phi", "sdar")
POLICY = ("grpo", "gspo", "dapo", "ppo", "cispo", "reinforce", "sapo", "gmpo")


def draw_newer(call: Any, count: int, vocabulary: int, unscored: Tensor) -> None:
    """Add policy terms, candidates, `support_ids`, the `held` schedule or a gradient tolerance to a
    random call with `count` segments."""
    rng = random.Random(f"newer {call.seed}")
    generator = torch.Generator().manual_seed(call.seed + 1)
    if rng.random() < 0.12:
        call.options["schedule"] = "held"
    if call.verb == "head_topk":
        return
    _draw_terms(call, rng, generator, count, unscored.shape)
    if rng.random() < 0.15:
        _draw_candidates(call, rng, generator, vocabulary, unscored)
    if rng.random() < 0.12 and call.verb != "logits_loss" and call.teacher is None:
        call.batch["support_ids"] = support(
            rng, generator, call.batch["targets"], vocabulary, unscored
        )
    dense = call.teacher is not None and "teacher_topk_ids" not in call.batch
    free = "static" not in call.options and call.options.get("metrics", True) and not dense
    if rng.random() < 0.1 and call.verb == "head_loss" and free:
        call.options["gradient_tolerance"] = rng.choice([1e-3, 0.05, 0.3])
    if call.verb != "head_stats":
        _draw_latest(call, random.Random(f"latest {call.seed}"), vocabulary, unscored)


def _draw_terms(
    call: Any, rng: random.Random, generator: torch.Generator, count: int, shape: torch.Size
) -> None:
    if rng.random() > 0.25 or call.verb == "head_stats":
        return
    name = rng.choice([*NEWER, *(PAIRS if count % 2 == 0 else ())])
    _add_term(call, name, OPTIONS.get(name, {}) if rng.random() < 0.7 else {}, rng)
    call.batch["desirable"] = torch.rand(count, generator=generator) < 0.5
    call.batch["reference_kl"] = torch.rand(count, generator=generator)
    call.batch["teacher_logps"] = -3 * torch.rand(shape, generator=generator)
    call.batch["draws"] = torch.rand(shape, generator=generator)
    call.batch["prompts"] = 3 - torch.randint(3, (count,), generator=generator)
    if rng.random() < 0.25 and "sampling_logps" in call.batch:
        masked = {"threshold": rng.choice([0.01, 0.04, 0.2]), "live": rng.random() < 0.5}
        call.terms[-1][1]["modifiers"].append(("second_moment_masked", masked))
    if rng.random() < 0.25:
        call.terms[-1][1]["over"] = "prompt_mean"
        if isinstance(call.totals, tuple):
            call.totals = (*call.totals[:2], 2.5)


def _add_term(call: Any, name: str, options: dict[str, Any], rng: random.Random) -> None:
    recipe = {"name": name, "options": options, "modifiers": [], "over": None}
    call.terms.append((rng.choice([1.0, 0.3, -0.5]), recipe | {"weighted": False, "where": False}))


def _draw_latest(call: Any, rng: random.Random, vocabulary: int, unscored: Tensor) -> None:
    generator = torch.Generator().manual_seed(call.seed + 3)
    if rng.random() < 0.12:
        name = rng.choice(LATEST)
        _add_term(call, name, OPTIONS.get(name, {}) if rng.random() < 0.7 else {}, rng)
    policy = [recipe for _, recipe in call.terms if recipe["name"] in POLICY]
    if policy and rng.random() < 0.1:
        options = {"mix": rng.choice([0.0, 0.3, 1.0]), "epsilon": rng.choice([0.1, 2.0])}
        rng.choice(policy)["shaped"] = options | {"negative_only": rng.random() < 0.5}
    if policy and rng.random() < 0.1:
        bounds = rng.choice([{"min": 0.5}, {"max": 2.0}, {"min": 0.3, "max": 4.0}])
        given = {"measure": "ratio", "level": "sequence_max", "live": rng.random() < 0.3}
        rng.choice(policy)["modifiers"].append(("rejected", given | bounds))
    call.batch.setdefault("teacher_logps", -3 * torch.rand(unscored.shape, generator=generator))
    if call.teacher is not None and "teacher_topk_ids" in call.batch:
        sampled = ["sampled"] if call.teacher["divergence"] == "reverse_kl" else []
        call.teacher["tail"] = rng.choice(["bucket", "truncated", "generalized", *sampled])
    if "candidate_ids" in call.batch or rng.random() < 0.08:
        _draw_centering(call, rng, generator, vocabulary, unscored)


def _draw_centering(
    call: Any, rng: random.Random, generator: torch.Generator, vocabulary: int, unscored: Tensor
) -> None:
    """Add the term `score_centering` to a random call, over its `candidate_ids` or, in their
    absence, over its padded `support_ids` or over newly drawn ids."""
    support = call.batch.get("support_ids")
    if "candidate_ids" not in call.batch and isinstance(support, Tensor):
        call.batch["candidate_ids"] = support
    elif "candidate_ids" not in call.batch:
        call.batch["candidate_ids"] = _candidate_ids(call, rng, generator, vocabulary, unscored)
    shape = call.batch["candidate_ids"].shape
    logps = torch.randn(*shape[:-1], shape[-1] + 1, generator=generator).log_softmax(-1)[..., :-1]
    logps = logps.masked_fill(torch.rand(shape, generator=generator) < 0.1, -torch.inf)
    call.batch["candidate_sampling_logps"] = logps.masked_fill(unscored.unsqueeze(-1), torch.nan)
    bounds = rng.choice([{"min": 0.5}, {"max": 2.0}, {"min": 0.3, "max": 4.0}])
    modes = [{}, *({"mode": mode} | bounds for mode in ("token_truncate", "token_mask"))]
    _add_term(call, "score_centering", rng.choice(modes), rng)


def _draw_candidates(
    call: Any, rng: random.Random, generator: torch.Generator, vocabulary: int, unscored: Tensor
) -> None:
    call.batch["candidate_ids"] = _candidate_ids(call, rng, generator, vocabulary, unscored)
    if call.verb != "head_stats":
        _add_term(call, "chosen", {"rest": 0.0} if rng.random() < 0.5 else {}, rng)


def _candidate_ids(
    call: Any, rng: random.Random, generator: torch.Generator, vocabulary: int, unscored: Tensor
) -> Tensor:
    k = rng.choice([1, 3, 6])
    ids = torch.rand(*unscored.shape, vocabulary, generator=generator).argsort(-1)[..., :k]
    if rng.random() < 0.5:  # make the target one of the candidates in half of the calls
        first = call.batch["targets"].unsqueeze(-1)
        ids[..., :1] = torch.where((ids == first).any(-1, keepdim=True), ids[..., :1], first)
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.15, -1)
    return ids.masked_fill(unscored.unsqueeze(-1), BEYOND)


def support(
    rng: random.Random,
    generator: torch.Generator,
    targets: Tensor,
    vocabulary: int,
    unscored: Tensor,
) -> Tensor | tuple[Tensor, Tensor]:
    """Draw `support_ids` for each token, with the target or empty, as a padded tensor or as flat
    ids with offsets."""
    k, share = rng.choice([1, 4, 9]), rng.choice([0.0, 0.0, 0.4])
    ids = torch.rand(*targets.shape, vocabulary, generator=generator).argsort(-1)[..., :k]
    first = targets.unsqueeze(-1)
    ids = torch.where(ids == first, ids[..., :1], ids)
    ids[..., :1] = first  # put the target first; duplicates of the target were replaced above
    ids = ids.masked_fill(torch.rand(targets.shape, generator=generator).lt(share)[..., None], -1)
    ids = ids.masked_fill(unscored.unsqueeze(-1), BEYOND)
    if rng.random() < 0.6:
        return ids
    rows = ids.reshape(-1, k)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), (rows >= 0).sum(1).cumsum(0)])
    return rows[rows >= 0], offsets


def skipped_norms(built: Any, skipped: float) -> dict[str, float]:
    """Bound how much each gradient changes if token rows of total weight `skipped` are left out:
    `skipped` times the largest row norm."""
    weight = built.head.weight.detach().double()
    for adapter in built.head.lora:
        weight = weight + adapter.scaling * (adapter.b.detach() @ adapter.a.detach()).double()
    scored = built.batch.targets != -100
    rows = built.hidden.detach()[scored].double().norm(dim=-1)
    found = {"hidden": float(weight.norm(dim=1).max()), "bias": 1.0}
    found["weight"] = float(rows.max()) if len(rows) else 0.0
    return {name: skipped * largest for name, largest in found.items()}
