"""Checks of the two TRL functions that headloss replaces: argument order, and example results."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..seams import TESTED, check_signature, release

TEMPERATURE, SOFTCAP, SCALE, BETA = 0.7, 3.0, 1.5, 0.3
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def broken(seam: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"{seam} of trl {release('trl')}: {what}. headloss would give its trainers other numbers: "
        "do without install(), or install trl " + ", ".join(TESTED["trl"])
    )


def _example(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states [N, 4], weight [7, 4] and bias [7]."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    return normal(rows, 4), normal(7, 4), normal(7)


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits [N, 7] after scale, soft cap and temperature, and their log-softmax, in
    float64."""
    raw = hidden.double() @ weight.double().T + bias.double()
    logits = SOFTCAP * torch.tanh(raw * SCALE / SOFTCAP) / TEMPERATURE
    return logits, logits.log_softmax(-1)


def _compare(seam: str, names: tuple[str, ...], got: Any, want: tuple[Tensor, ...]) -> None:
    if not isinstance(got, tuple) or len(got) != len(want):
        count = len(got) if isinstance(got, tuple) else 1
        raise broken(seam, f"it returns {count} values, want {len(want)}: {', '.join(names)}")
    for name, a, b in zip(names, got, want, strict=True):
        a = torch.as_tensor(a, device="cpu").double()
        if a.shape != b.shape or not torch.allclose(a, b.double(), rtol=1e-4, atol=1e-5):
            numbers = [[f"{x:.6g}" for x in t.flatten().tolist()] for t in (a, b)]
            raise broken(seam, f"its {name} is {numbers[0]}, by the formula {numbers[1]}")


def _call(seam: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)
    except Exception as error:
        raise broken(seam, f"a call of it ends in {type(error).__name__}: {error}") from error


def check_log_probs(theirs: Any, ours: Callable[..., Any]) -> None:
    """Raise RuntimeError if TRL's chunked log-probs differ from headloss's.

    The order of arguments matters, since TRL passes them by position.
    """
    seam = "trainer.utils._ChunkedLogProbFunction"
    # Binding `ctx`, the first parameter of an autograd function's forward, drops it from
    # signatures.
    forward = functools.partial(theirs.forward, None)
    got, want = (list(inspect.signature(f).parameters) for f in (forward, ours))
    if len(got) != len(want):
        raise broken(seam, f"it takes ({', '.join(got)}), want ({', '.join(want)})")
    hidden, weight, bias = _example(3, seed=0)
    logits, logps = _log_softmax(hidden, weight, bias)
    best = logits.argmax(-1)
    targets = torch.stack([best[0], (best[1] + 1) % 7, best[2]])
    found = _call(
        seam, theirs.apply, hidden, weight, bias, targets, TEMPERATURE, 4, SOFTCAP, SCALE, OUTPUTS
    )
    probs = logps.exp()
    wanted = (
        logps.gather(1, targets[:, None])[:, 0],
        -(probs * logps).sum(-1),
        (probs * probs).sum(-1).log(),
        logits.mean(-1),
        targets == best,
    )
    _compare(seam, ("log_probs", *OUTPUTS), found, wanted)


def check_divergence(theirs: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """Raise RuntimeError if TRL's chunked divergence differs from headloss's."""
    seam = "trainer.distillation_trainer._chunked_divergence_loss"
    try:
        check_signature(theirs, ours, seam)
    except RuntimeError as error:
        raise broken(seam, str(error)) from None
    students, teachers = _example(3, seed=0), _example(3, seed=1)
    mask = torch.tensor([[1, 0, 1]], device="cpu")
    shared = {"logit_scale": SCALE, "final_logit_softcapping": SOFTCAP}
    settings: dict[str, Any] = {f"student_{name}": value for name, value in shared.items()}
    settings |= {f"teacher_{name}": value for name, value in shared.items()}
    settings |= {"student_lm_head_bias": students[2], "teacher_lm_head_bias": teachers[2]}
    settings |= {"num_items_in_batch": 5, "temperature": TEMPERATURE}
    states = students[0][None], teachers[0][None], students[1], teachers[1], mask, BETA
    found = _call(seam, theirs, *states, **settings)
    student, teacher = (_log_softmax(*example)[1] for example in (students, teachers))
    mixed = (BETA * teacher.exp() + (1 - BETA) * student.exp()).log()
    apart = BETA * (teacher.exp() * (teacher - mixed)).sum(-1)
    apart = apart + (1 - BETA) * (student.exp() * (student - mixed)).sum(-1)
    entropy = -(student.exp() * student).sum(-1)
    scored = mask[0] != 0
    wanted = apart[scored].sum() / 5, entropy[scored].sum(), scored.sum()
    _compare(seam, ("loss", "sum of entropies", "number of tokens"), found, wanted)
