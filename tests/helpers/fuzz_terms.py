"""Draw the terms of a random call, and make them from their drawn descriptions."""

from __future__ import annotations

import random
from typing import Any

import torch
from fuzz_newer import chosen

import headloss as hl


@hl.term
def blend(stats, batch, a=0.3):
    """A user-defined term that reads every statistic."""
    return a * stats.mean_logit - stats.logp * stats.entropy + 0.1 * stats.lse


@hl.term(scope="segment", per="segment")
def sigmoid_of_segments(stats, batch):
    mean = batch.segments.mean
    return -torch.sigmoid(mean(stats.logp) + 0.1 * mean(stats.entropy)) * mean(batch.advantages)


LEVELS = ("token", "sequence", "sequence_token")
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CLIPPED = ("grpo", "dapo", "bnpo", "luspo")
POLICY = (*CLIPPED, "gspo", "gspo_token", "dr_grpo", "ppo", "cispo", "reinforce", "sapo", "gmpo")
POLICY = (*POLICY, "vespo")
SUPERVISED = ("cross_entropy", "z_loss", "entropy", "unlikelihood", "kl", "blend", "sigmoid")
PAIRS = ("dpo", "ipo", "simpo")
# Terms whose loss depends on log-probs alone, as the schedule for a frozen head requires.
LOGP_ONLY = (*POLICY, *PAIRS, "kl", "unlikelihood")


def options_of(name: str, rng: random.Random) -> dict[str, Any]:
    """Draw random options of a term, often none."""
    if rng.random() < 0.4:
        return {"max_completion_length": rng.choice([3, 16.5])} if name == "dr_grpo" else {}
    low, high = rng.choice([0.1, 0.2, 0.5]), rng.choice([0.1, 0.28, 0.7])
    options: dict[str, Any] = {}
    if name in (*CLIPPED, "gspo", "gspo_token", "dr_grpo", "ppo", "gmpo"):
        options = {"epsilon_low": low, "epsilon_high": high}
    if name in (*CLIPPED, "dr_grpo"):
        options["delta"] = rng.choice([None, 1.5])
    if name in (*CLIPPED, "dr_grpo", "cispo", "sapo"):
        options["importance_sampling_level"] = rng.choice(LEVELS)
    if name == "dr_grpo":
        options["max_completion_length"] = 16
    if name == "ppo":
        options["dual_clip"] = rng.choice([None, 1.5])
    if name == "cispo":
        options |= {"epsilon_low": rng.choice([None, low]), "epsilon_high": high}
    if name == "sapo":
        options |= {"temperature_pos": 0.7, "temperature_neg": 1.3}
    if name == "vespo":
        options = {"k_pos": 1.5, "lambda_neg": 1.2}
    if name == "cross_entropy":
        options = {"label_smoothing": rng.choice([0.0, 0.1, 1.0])}
    if name == "kl":
        options = {"estimator": rng.choice(["k1", "k2", "k3"])}
        options |= {"bias_corrected": rng.random() < 0.5}
        options |= {"importance_sampling_level": rng.choice(LEVELS)}
    if name in PAIRS:
        options = {"beta": rng.choice([0.1, 0.5]), "label_smoothing": rng.choice([0.0, 0.2])}
    return options


def make_term(recipe: dict[str, Any]) -> hl.Term:
    """Make a term from its description: function, options, modifiers, reduction, token weights and
    restriction to a subset of tokens."""
    user_defined = {"blend": blend, "sigmoid": sigmoid_of_segments, "chosen": chosen}
    name = recipe["name"]
    term = (user_defined[name] if name in user_defined else getattr(hl, name))(**recipe["options"])
    if recipe.get("shaped") is not None:
        term = hl.rlsd_shaped(term, **recipe["shaped"])
    for modifier, arguments in recipe["modifiers"]:
        term = getattr(term, modifier)(**arguments)
    if recipe["over"] is not None:
        over = recipe["over"]
        term = term.over(hl.fixed_length(over) if isinstance(over, float) else over)
    if recipe["weighted"]:
        term = term.weighted("share")
    if recipe["where"]:
        term = term.where("kept")
    return term


def draw_term(name: str, rng: random.Random) -> dict[str, Any]:
    modifiers: list[tuple[str, dict[str, Any]]] = []
    if name in POLICY and name != "vespo" and rng.random() < 0.3:
        mode, most, least = rng.choice(MODES), rng.choice([None, 1.5, 3.0]), rng.choice([None, 0.5])
        modifiers.append(("corrected", {"mode": mode, "max": most, "min": least}))
    if name in POLICY and rng.random() < 0.15:
        modifiers.append(("off_policy_masked", {"threshold": rng.choice([0.0, 0.2])}))
    if rng.random() < 0.12:
        modifiers.append(("top_entropy", rng.choice([{"quantile": 0.4}, {"threshold": 1.0}])))
    over: Any = rng.choice(["token_mean", "sequence_mean", "sequence_sum", 7.5])
    return {
        "name": name,
        "options": options_of(name, rng),
        "modifiers": modifiers,
        "over": over if rng.random() < 0.3 else None,
        "weighted": rng.random() < 0.15,
        "where": rng.random() < 0.15 and name not in PAIRS,
    }
