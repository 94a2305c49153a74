"""Draw a random call of a public function from a seed."""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass, field
from typing import Any

import torch

if not torch.cuda.is_available():  # before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import fuzz_ranks
from fuzz_bad import SPOILS
from fuzz_newer import draw_newer
from fuzz_terms import LOGP_ONLY, PAIRS, POLICY, SUPERVISED, draw_term
from torch import Tensor

import headloss as hl

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
SHARE_OF_BAD = 0.2
RANKS_EVERY = 10  # every tenth call runs on two ranks


@dataclass(kw_only=True)
class Call:
    """Plain values from which the arguments of a random call (head, batch, objective, options) are
    built. To make a call invalid, a test changes one of the fields of `Call`."""

    seed: int
    verb: str = "head_loss"
    # Gradient mode: "train", "no_grad", "inference", "frozen" (no weight gradient) or "weight" (no
    # hidden gradient).
    grad: str = "train"
    dtype: str = "float64"
    hidden: Any = None
    head: dict[str, Any] = field(default_factory=dict)
    lora: tuple[Tensor, Tensor, float] | None = None
    batch: dict[str, Any] = field(default_factory=dict)
    segments: tuple[str, Any] | None = None
    totals: tuple[float, ...] | str | None = None  # counts of tokens, segments and possibly prompts
    terms: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    teacher: dict[str, Any] | None = None
    teacher_head: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    k: Any = 1
    inplace: bool = False
    spoil: str | None = None
    objective: Any = None  # replaces the terms
    device: str = "cpu"
    place: str | None = None  # How `fuzz_ranks` splits the call over two ranks; None is one rank.
    captured: bool = False  # True if the call runs in a replayed CUDA graph.

    @property
    def kinds(self) -> list[str]:
        """Return the names of properties of this call, by which statistics over many calls are
        counted."""
        properties = {f"on {self.device}": True, f"ranks, {self.place}": self.place is not None}
        properties |= {"static": "static" in self.options, "captured": self.captured}
        return [kind for kind, holds in properties.items() if holds]

    def __str__(self) -> str:
        terms = [f"{c:g}*{r['name']}({r['options']})" for c, r in self.terms]
        shape = tuple(getattr(self.batch["targets"], "shape", ()))
        kind = self.segments and self.segments[0]
        return (
            f"seed {self.seed}: {self.verb} {self.grad} {self.dtype} targets {shape} {kind} "
            f"{terms} {self.teacher} options {self.options} spoil {self.spoil} {self.kinds}"
        )


def draw(seed: int, triton: bool = False, device: str = "cpu") -> Call:
    """Draw a random call from a seed; one call in five is invalid.

    `triton` selects the Triton backend, on a GPU or interpreted. A call on a GPU may have
    more tokens and a larger head than a call on a CPU, and is sometimes captured in a CUDA graph.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    bad = rng.random() < SHARE_OF_BAD and not triton
    if triton and torch.cuda.is_available():
        device = "cuda"
    ranks = seed % RANKS_EVERY == RANKS_EVERY - 1 and not (bad or triton)
    call = Call(seed=seed, device="cpu" if ranks else device)
    wide = 0 if triton else 2 if call.device == "cpu" else 1
    call.dtype = rng.choice([*["float64"] * wide, "float32", "bfloat16", "float16"])
    _draw_verb(call, rng, bad)
    shape, count = _draw_shape(call, rng, generator, bad)
    vocabulary = _draw_head(call, rng, generator, shape)
    unscored = _draw_targets(call, rng, generator, shape, vocabulary, bad)
    _draw_terms(call, rng, count)
    _draw_fields(call, rng, generator, unscored, count)
    _draw_teacher(call, rng, generator, vocabulary, unscored)
    _draw_options(call, rng, generator, triton)
    if bad:
        _make_right(call)
        allowed = [name for name, spoil in SPOILS.items() if spoil.fits(call)]
        call.spoil = rng.choice(allowed)
    else:
        draw_newer(call, count, vocabulary, unscored)
    if ranks:
        fuzz_ranks.draw_place(call, rng)
    graphs = device == "cuda" and not bad and call.verb in ("head_loss", "logits_loss")
    call.captured = graphs and "static" in call.options and rng.random() < 0.6
    return call


def _make_right(call: Call) -> None:
    """Add the fields that a call needs to be valid. One argument is then made invalid, so that the
    call has exactly one error."""
    shape = call.batch["targets"].shape
    for name in ("advantages", "old_logps", "ref_logps", "sampling_logps", "share"):
        call.batch.setdefault(name, torch.full(shape, -1.0))
    call.batch.setdefault("kept", torch.ones(shape, dtype=torch.bool))
    if call.totals is not None:
        call.totals = "of"


def _draw_verb(call: Call, rng: random.Random, bad: bool) -> None:
    if bad:
        call.verb = rng.choices(["head_loss", "head_topk", "head_stats"], [8, 1, 1])[0]
        return
    verbs = ["head_loss", "logits_loss", "head_stats", "head_topk"]
    call.verb = rng.choices(verbs, [72, 14, 8, 6])[0]
    modes = ["train", "no_grad", "inference", "frozen", "weight"]
    call.grad = rng.choices(modes, [62, 10, 8, 13, 7])[0]


def _draw_shape(
    call: Call, rng: random.Random, generator: torch.Generator, bad: bool
) -> tuple[tuple[int, ...], int]:
    """Draw the targets' shape and S, the number of segments."""
    layout = rng.choice(["packed", "packed", "ids", "one", "rows", "rows of ids", "cube"])
    few = rng.random() < 0.15 and not bad
    most = 60 if call.device == "cpu" else rng.choice([60, 400])
    positions = rng.choice([0, 1, 2]) if few else rng.randint(4, most)
    if layout in ("packed", "ids"):
        count = rng.randint(1, 8) if rng.random() < 0.5 else 2 * rng.randint(1, 4)
        cuts = sorted(rng.randint(0, positions) for _ in range(count - 1))
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, positions], strict=True)]
        if layout == "packed":
            cu = [0, *cuts, positions]
            call.segments = rng.choice([("lengths", lengths), ("cu_seqlens", cu)])
            return (positions,), count
        ids = torch.arange(count).repeat_interleave(torch.tensor(lengths))
        ids = ids[torch.randperm(positions, generator=generator)]
        call.segments = ("ids", (ids, count))
        return (positions,), count
    if layout == "one":
        return (positions,), 1
    rows = rng.choice([1, 2, 3, 4, 6])
    length = max(positions // rows, 1)
    if layout == "rows":
        call.segments = rng.choice([None, ("rows", (rows, length))])
        return (rows, length), rows
    if layout == "cube":
        return (2, rows, max(length // 2, 1)), 2 * rows
    count = rng.randint(1, 6)
    ids = torch.randint(count, (rows, length), generator=generator)
    call.segments = ("ids", (ids, count))
    return (rows, length), count


def _draw_head(
    call: Call, rng: random.Random, generator: torch.Generator, shape: tuple[int, ...]
) -> int:
    """Draw the hidden states and the head of `call`; return the number of vocabulary entries that
    a target may name."""
    width, rows = rng.choice([8, 16, 24, 32, 7]), rng.randint(17, 300)
    if call.device != "cpu":
        width, rows = width * rng.choice([1, 8, 16]), rows * rng.choice([1, 10])
    dtype, positions = DTYPES[call.dtype], math.prod(shape)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    scale = rng.choice([0.1, 0.5, 1.0, 2.0]) * width**-0.5
    hidden = normal(width, positions).t() if rng.random() < 0.2 else normal(positions, width)
    call.hidden = hidden.to(dtype).unflatten(0, shape) if positions else hidden.to(dtype)
    call.hidden = call.hidden.reshape(*shape, width)
    head: dict[str, Any] = {"weight": (scale * normal(rows, width)).to(dtype)}
    if rng.random() < 0.3:
        head["bias"] = normal(rows).to(dtype)
    if rng.random() < 0.25:
        head["softcap"] = rng.choice([3.0, 30.0])
    if rng.random() < 0.25:
        head["logit_scale"] = rng.choice([0.5, 2.0, -1.0])
    kind = rng.random()
    if kind < 0.2:
        head["temperature"] = rng.choice([0.5, 1.3, 2])
    elif kind < 0.4:
        head["temperature"] = torch.rand(shape, generator=generator) + 0.5
    if rng.random() < 0.25:
        head["vocab_size"] = rng.randint(16, rows)
    if rng.random() < 0.25:
        rank = rng.randint(1, 4)
        call.lora = (normal(rank, width).to(dtype), normal(rows, rank).to(dtype), 0.1)
    call.head = head
    if call.verb == "logits_loss":
        call.lora = None
        head.pop("bias", None), head.pop("vocab_size", None)
    return head.get("vocab_size", rows)


def _draw_targets(
    call: Call,
    rng: random.Random,
    generator: torch.Generator,
    shape: tuple[int, ...],
    vocabulary: int,
    bad: bool,
) -> Tensor:
    """Draw targets, put invalid values at unscored positions, and return [..] bool, True if
    unscored."""
    targets = torch.randint(vocabulary, shape, generator=generator)
    share = 0.0 if bad else rng.choice([0.0, 0.0, 0.3, 0.3, 0.8, 1.0])
    unscored = torch.rand(shape, generator=generator) < share
    call.batch["targets"] = targets.masked_fill(unscored, -100)
    if rng.random() < 0.5 and call.verb != "head_topk":
        poison = rng.choice([math.nan, math.inf, -6e4 if call.dtype == "float16" else -1e30])
        call.hidden = call.hidden.masked_fill(unscored.unsqueeze(-1), poison)
    temperature = call.head.get("temperature")
    if isinstance(temperature, Tensor) and call.verb != "head_topk":
        call.head["temperature"] = temperature.masked_fill(unscored, 0.0)
    if call.segments and call.segments[0] == "ids" and rng.random() < 0.5:
        ids, count = call.segments[1]
        call.segments = ("ids", (ids.masked_fill(unscored, -1), count))
    return unscored


def _draw_terms(call: Call, rng: random.Random, count: int) -> None:
    names = [*POLICY, *SUPERVISED, *(PAIRS if count % 2 == 0 else ())]
    if call.grad == "frozen" and rng.random() < 0.7:
        names = [name for name in names if name in LOGP_ONLY]
    for _ in range(rng.choices([1, 2, 3, 4], [5, 3, 2, 1])[0]):
        coefficient = rng.choice([1.0, 1.0, 0.3, -0.5, 2, 0.0, 1e-3])
        call.terms.append((coefficient, draw_term(rng.choice(names), rng)))


def _draw_fields(
    call: Call, rng: random.Random, generator: torch.Generator, unscored: Tensor, count: int
) -> None:
    """Draw every field that terms read; one field may be missing."""
    shape, typical = unscored.shape, math.log(call.head["weight"].shape[0])

    def logps(spread: float) -> Tensor:
        return (spread * torch.randn(shape, generator=generator) - typical).clamp_max(0)

    def either(values: Any) -> Tensor:
        return values(shape) if rng.random() < 0.5 else values((count,))

    def normal(size: Any) -> Tensor:
        return torch.randn(size, generator=generator)

    fields: dict[str, Any] = {
        "advantages": either(normal),
        "old_logps": hl.CURRENT if rng.random() < 0.25 else logps(0.3),
        "ref_logps": logps(0.5),
        "sampling_logps": logps(0.3),
        "share": either(normal),
        "kept": either(lambda size: torch.rand(size, generator=generator) > 0.3),
    }
    if rng.random() < 0.3:
        fields["sampling_logps"] = fields["sampling_logps"].to(torch.float64)
    if rng.random() < 0.3 and unscored.any():
        for name in ("advantages", "old_logps", "ref_logps", "share"):
            value = fields[name]
            if isinstance(value, Tensor) and value.shape == shape:
                fields[name] = value.masked_fill(unscored, math.nan)
    if rng.random() < 0.05:
        del fields[rng.choice(list(fields))]
    call.batch |= fields
    if rng.random() < 0.3:
        call.totals = rng.choice(["of", "of", (100, 10), (37.5, 4.0)])


def _draw_teacher(
    call: Call, rng: random.Random, generator: torch.Generator, vocabulary: int, unscored: Tensor
) -> None:
    if rng.random() > 0.2 or call.verb not in ("head_loss", "logits_loss"):
        return
    shape, form = unscored.shape, rng.choice(["logits", "hidden", "topk"])
    call.teacher = {
        "divergence": rng.choice(["forward_kl", "reverse_kl", "js"]),
        "beta": rng.choice([0.5, 0.2]),
        "temperature": rng.choice([1.0, 1.0, 2.0]),
    }
    dtype = DTYPES[call.dtype]
    raw = torch.randn(*shape, vocabulary, generator=generator)
    if form == "logits":
        call.batch["teacher_logits"] = raw.to(dtype)
    elif form == "hidden":
        call.batch["teacher_hidden"] = torch.randn(*shape, 5, generator=generator).to(dtype)
        call.teacher_head = torch.randn(vocabulary, 5, generator=generator).to(dtype)
    else:
        k = rng.choice([1, 4])
        ids = torch.rand(*shape, vocabulary, generator=generator).argsort(-1)[..., :k]
        logps = (raw / call.teacher["temperature"]).log_softmax(-1).gather(-1, ids)
        empty = torch.rand(*shape, k, generator=generator) < 0.1
        call.batch["teacher_topk_ids"] = ids.masked_fill(empty, -1)
        call.batch["teacher_topk_logps"] = logps


def _draw_options(call: Call, rng: random.Random, generator: torch.Generator, triton: bool) -> None:
    chances: list[tuple[float, str, Any]] = [
        (0.3, "schedule", lambda: rng.choice(["one_pass", "recompute", "frozen", "auto"])),
        (0.35, "chunk_tokens", lambda: rng.choice([1, 3, 7, 16, 1000])),
        (0.15, "memory_budget", lambda: rng.choice([1, 3000, 10**6])),
        (0.12 if call.device == "cpu" else 0.2, "static", lambda: True),
        (0.2, "skip_rows", lambda: False),
        (0.15, "metrics", lambda: False),
        (0.1, "upstream", lambda: rng.choice([1.0, 0.5, 3])),
        (0.1, "accumulate_dtype", lambda: torch.bfloat16),
        (0.1, "main_grad", lambda: True),
        (0.2, "backend", lambda: "reference"),
    ]
    for chance, name, make in chances:
        if rng.random() < chance:
            call.options[name] = make()
    trained = call.grad in ("train", "weight") and call.verb == "head_loss"
    if "main_grad" in call.options and (not trained or call.dtype == "float64"):
        del call.options["main_grad"]
    if triton:
        call.options["backend"] = "triton"
    call.k = rng.choice([1, 2, 5, 16])
    call.inplace = rng.random() < 0.3
