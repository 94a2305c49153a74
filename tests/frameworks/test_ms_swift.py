"""Terms agree with ms-swift's losses.

The tests extract the loss functions from ms-swift's source files, since its trainer imports many
packages.
"""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parity import EDGES, compare, extracted, file_of, step
from torch import Tensor

import headloss as hl

TRAINER = "rlhf_trainers/grpo_trainer.py"


def branch(assigned: str, **namespace: Any) -> Any:
    """Run the branch `if self.loss_type == 'real'` of ms-swift's trainer, and return the value of
    the variable `assigned`."""
    tree = ast.parse(file_of("swift", TRAINER).read_text())
    chosen = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "self.loss_type == 'real'"
        and any(isinstance(n, ast.Name) and n.id == "group_scores" for n in ast.walk(node))
    ]
    body = ast.fix_missing_locations(ast.Module(chosen[0].body, type_ignores=[]))
    names = {"torch": torch, **namespace}
    exec(compile(body, TRAINER, "exec"), names)
    return names[assigned]


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(
    "signs", [(1, -1, 1, -1, 1, -1), (1, 1, 1, -1, 1, 1), (0, 1, 1, 1, -1, -1)]
)
def test_real(edge: str, signs: tuple[int, ...]) -> None:
    """REAL agrees with ms-swift for groups of three consecutive rows, the last of which has no
    scored tokens."""
    made = step(edge, per_token=False)
    made = {name: torch.cat([value, value[1:2]]) for name, value in made.items()}
    made["advantages"] = made["advantages"].abs() * torch.tensor(signs)[:, None]
    trainer = SimpleNamespace(num_generations=3, real_tau=0.5, beta=0.0)

    def loss(logp: Tensor) -> Tensor:
        return branch(
            "loss",
            self=trainer,
            log_ratio=logp - made["old_logps"],
            completion_mask=made["mask"],
            advantages=made["advantages"],
        )

    # ms-swift averages REAL over prompt groups, and a row without tokens counts as a member of its
    # group.
    value = hl.real().weighted("share")
    rows = made["mask"].any(1).view(2, 3).sum(1, keepdim=True)
    share = (3 / rows).expand(2, 3).reshape(-1).double()
    compare(value, made, loss, prompts=torch.tensor([8, 8, 8, -1, -1, -1]), share=share)


def whole_rows(edge: str) -> dict[str, Tensor]:
    """Return a training step whose rows have no unscored token in between: ms-swift divides by
    positions, headloss by scored tokens."""
    made = step(edge)
    made["mask"][0, 2] = made["mask"][0, 1]
    return made


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("delta", [None, 1.1])
@pytest.mark.parametrize("weight_clip", [None, 0.2])
@pytest.mark.parametrize("high_only", [True, False])
def test_fipo(edge: str, delta: float | None, weight_clip: float | None, high_only: bool) -> None:
    """FIPO agrees with ms-swift's, whose future-KL weights are computed by ms-swift's function."""
    if edge == "overflow" and weight_clip is None:
        pytest.skip("without a clip the weight of FIPO is e^90 here")
    made = whole_rows(edge)
    names = "GRPOTrainer._compute_fipo_influence"
    peer = extracted(file_of("swift", TRAINER), names, Tuple=tuple, Dict=dict)
    trainer = SimpleNamespace(
        args=SimpleNamespace(delta=delta),
        fipo_gamma=2 ** (-1 / 3.0),
        fipo_clip_range=weight_clip,
        fipo_clip_high_only=high_only,
        fipo_safety_threshold=1.2,
    )
    advantages, mask = made["advantages"], made["mask"]

    def loss(logp: Tensor) -> Tensor:
        d = logp - made["old_logps"]
        ratio = d.clamp(-20, 20).exp()
        weight, _ = peer._compute_fipo_influence(trainer, d, ratio, advantages, mask)
        bounded = ratio if delta is None else ratio.clamp(max=delta)
        value = -torch.min(bounded * advantages, ratio.clamp(0.8, 1.2) * advantages) * weight
        return (value * mask).sum() / mask.sum()

    term = hl.fipo(
        delta=delta, half_life=3.0, weight_clip=weight_clip, high_only=high_only, safety=1.2
    )
    compare(term, made, loss, 1e-10)
