"""Test cases in which one argument of the last rank differs from the other ranks' arguments, in a
place where the difference is easily overlooked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from parallel_cases import groups
from torch import Tensor, distributed

import headloss as hl

T, H, V = 7, 4, 5  # rows per rank
CHECKED = hl.Options(check_ranks=True)


def scale(stats, batch, factor=None, how=None):
    found = -stats.logp if how is None else how(stats.logp)
    return found if factor is None else found * factor.sum()


scaled = hl.term(scale)


class Negative:
    """A callable class instance, without a function name."""

    def __call__(self, logp: Tensor) -> Tensor:
        return -logp


def last() -> bool:
    return distributed.get_rank() == distributed.get_world_size() - 1


def given(over: str, **changed: Any) -> Callable[[], hl.Output]:
    """Return a function that makes a valid call with the arguments in `changed` replaced."""
    generator = torch.Generator().manual_seed(0)
    _, group = groups(1, distributed.get_world_size())
    hidden = torch.randn(T, H, generator=generator)
    advantages = torch.randn(2, generator=generator)
    fields = {"advantages": advantages, "old_logps": torch.full((T,), -1.0)}
    segments = hl.Segments.from_lengths([4, 3])
    if over == "segments":
        segments = hl.Segments.from_ids(segments.ids, count=2, group=group)
    targets = torch.arange(T) % V
    targets[1] = -100
    known = {
        "hidden": hidden,
        "fields": fields,
        "objective": hl.gspo(),
        "targets": targets,
        "verb": "head_loss",
    }
    known |= {name: change(known.get(name)) for name, change in changed.items()}
    head = hl.Head(torch.ones(V, H), vocab_group=group if over == "vocabulary" else None)
    if known["verb"] == "head_stats":
        stats = known["hidden"], head, known["targets"], CHECKED
        return lambda: hl.head_stats(*stats)  # type: ignore[return-value]
    if known["verb"] == "head_topk":
        return lambda: hl.head_topk(known["hidden"], head, 2, CHECKED)  # type: ignore[return-value]
    batch = hl.Batch(known["targets"], segments, **known["fields"])
    return lambda: hl.head_loss(known["hidden"], head, batch, known["objective"], CHECKED)


def only_last(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: change(value) if last() else value


def one_value(hidden: Tensor) -> Tensor:
    return hidden + 1e-3


def poisoned(hidden: Tensor) -> Tensor:
    """Return a copy of hidden states with NaN in row 1, whose token is not scored."""
    hidden = hidden.clone()
    hidden[1] = float("nan")
    return hidden


def middle(on_last: float) -> Callable[[Any], Any]:
    """Return a function that makes a term with a tensor of 5000 values, whose middle value depends
    on the rank."""

    def change(_: Any) -> Any:
        values = torch.zeros(5000)
        values[2500] = on_last if last() else 1.0
        return scaled(factor=values)

    return change


def with_function(on_last: Any, otherwise: Any) -> Callable[[Any], Any]:
    return lambda _: scaled(how=on_last() if last() else otherwise())


def corrected(maximum: float) -> Callable[[Any], Any]:
    return lambda _: hl.reinforce().corrected("token_truncate", max=maximum if last() else 2.0)


def local() -> Callable[[Tensor], Tensor]:
    """Return a function that has the same name on every rank, but is a different object."""

    def negative(logp: Tensor) -> Tensor:
        return -logp

    return negative


def sampled(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**fields, "sampling_logps": torch.full((T,), -1.0)}


def other_advantages(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**fields, "advantages": fields["advantages"] * torch.tensor([1.0, -1.0])}


def other_field(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**fields, "share": torch.tensor([1, 2 + last()])}


def per_token(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the per-token fields, whose values may differ between ranks."""
    return {**fields, "advantages": torch.full((T,), float(distributed.get_rank()))}


# By name: what the ranks split, the arguments that differ on the last rank, and the expected error
# ("" if none).
CHANGED_INPUTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "hidden": ("vocabulary", {"hidden": only_last(one_value)}, "hidden: differs between the ranks"),
    "hidden, head_stats": (
        "vocabulary",
        {"hidden": only_last(one_value), "verb": lambda _: "head_stats"},
        "hidden: differs between the ranks",
    ),
    "hidden, head_topk": (
        "vocabulary",
        {"hidden": only_last(one_value), "verb": lambda _: "head_topk"},
        "hidden: differs between the ranks",
    ),
    "hidden where nothing is scored": ("vocabulary", {"hidden": only_last(poisoned)}, ""),
    "hidden where nothing is scored, head_stats": (
        "vocabulary",
        {"hidden": only_last(poisoned), "verb": lambda _: "head_stats"},
        "",
    ),
    "advantages of segments": (
        "segments",
        {"fields": only_last(other_advantages)},
        "advantages: its values per segment differ between the ranks of segments.group",
    ),
    "a field of segments": ("segments", {"fields": other_field}, "share: its values per segment"),
    "advantages per token": ("segments", {"fields": per_token}, ""),
    **{
        f"{name}, {over}": (over, change, error)
        for over in ("vocabulary", "segments")
        for name, change, error in (
            ("a tensor's middle", {"objective": middle(2.0)}, "values of options: differs"),
            ("equal tensors", {"objective": middle(1.0)}, ""),
            ("equal functions", {"objective": with_function(local, local)}, ""),
            ("equal objects", {"objective": with_function(Negative, Negative)}, ""),
            ("functions", {"objective": with_function(local, Negative)}, "objective: differs"),
            ("equal modifiers", {"objective": corrected(2.0), "fields": sampled}, ""),
            ("modifiers", {"objective": corrected(3.0), "fields": sampled}, "objective: differs"),
        )
    },
}


def compared(name: str) -> str:
    """Return this rank's error in a call of `CHANGED_INPUTS` ("" if none), and check that a valid
    call then works."""
    over, changed, _ = CHANGED_INPUTS[name]
    found = ""
    try:
        given(over, **changed)()
    except ValueError as error:
        found = str(error)
    assert given(over)().loss.isfinite()
    return found


def captured() -> str:
    """Capture a CUDA graph of a call on a vocabulary slice, without and with a warm-up call
    before."""
    _, group = groups(1, distributed.get_world_size())
    head = hl.Head(torch.ones(V, H), vocab_group=group)
    batch = hl.Batch(torch.arange(T) % V)
    options = hl.Options(static=True)
    before = torch.cuda.is_initialized, torch.cuda.is_current_stream_capturing

    def capturing(yes: bool) -> None:
        torch.cuda.is_initialized, torch.cuda.is_current_stream_capturing = before
        if yes:
            torch.cuda.is_initialized = torch.cuda.is_current_stream_capturing = lambda: True

    def run(hidden: Tensor) -> Tensor:
        return hl.head_loss(hidden, head, batch, hl.cross_entropy(), options).loss

    found = ""
    try:
        capturing(True)
        run(torch.ones(T, H))
    except RuntimeError as error:
        found = str(error)
    finally:
        capturing(False)
    want = run(torch.ones(T, H))
    try:
        capturing(True)
        assert torch.equal(run(torch.ones(T, H)), want)
    finally:
        capturing(False)
    return found
