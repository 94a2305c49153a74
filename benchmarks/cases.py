"""The lists of benchmark cases: each combines losses, a setting (sizes and features), and the
implementations to time.

N tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from works import Setting

DEFAULTS = ("headloss",)
FASTEST = ("headloss, 5 GiB",)
BUDGETS = (*FASTEST, "headloss, 1200 MiB", "headloss, 2200 MiB")
RECOMPUTE = ("headloss, recompute",)
CAPTURED = ("headloss, captured",)
UNMETERED = ("headloss, no metrics",)
OURS = (*DEFAULTS, *BUDGETS, *RECOMPUTE)
PLAIN = ("eager", "torch.compile")
LOGPS = ("TRL", "Liger scaled CE")
RL = (*PLAIN, *LOGPS, "Liger GRPO")
CE = (
    *PLAIN,
    "F.linear_cross_entropy",
    "F.linear_cross_entropy, chunks of 2048",
    "F.linear_cross_entropy, chunks of 4096",
    "F.linear_cross_entropy, chunks of 8192",
    *LOGPS,
    "Liger FLCE",
    "Liger FLCE, fp32 sums",
    "Liger FLCE, Hopper",
    "CCE",
    "QuACK",
    "QuACK, no scaled exp",
)
SCORES = (*PLAIN, *LOGPS, "CCE", "QuACK", "QuACK, no scaled exp")
SEVERAL = ("headloss in place, metrics", "Fast-LLM, Triton", "Fast-LLM, compiled")
GIVEN = (
    "headloss in place",
    "headloss in place, declared upstream",
    "headloss in place, captured",
    *PLAIN,
    "Liger CE",
    "QuACK",
    "Fast-LLM, Triton",
    "Fast-LLM, compiled",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One benchmark case: losses in one setting, timed for several implementations.

    Attributes:
        row: name in the report; cases of one row differ in shape.
        group: part of the report: "table", "small", "shapes", "tokens" or "vocabulary". Each call
            of the group "small" is timed alone, so that its CPU time counts.
        goal: the speed that headloss should reach, as text for the report.
    """

    row: str
    works: tuple[str, ...]
    setting: Setting
    contestants: tuple[str, ...]
    group: str = "shapes"
    goal: str = ""

    @property
    def name(self) -> str:
        s = self.setting
        dtype = str(s.dtype).removeprefix("torch.")
        return f"{self.row}, N={s.tokens} H={s.width} V={s.vocabulary} {dtype}"


SMALL = (256, 512, 1024, 2048, 4096, 8192)
SMALL_HEADS = ((896, 151936), (2048, 151936), (4096, 128256))
WIDE = Setting(tokens=16384, width=4096, vocabulary=128256)
NARROW = Setting(tokens=16384, width=2048, vocabulary=151936)
# Variants of small calls by name: names of the losses, and the fields of `Setting` that differ from
# `NARROW`.
KINDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "another number of tokens each": (("ce", "grpo"), {"changing": True}),
    "bias": (("ce", "grpo"), {"bias": True, "trains": ("hidden", "weight", "bias")}),
    "LoRA": (("ce", "grpo"), {"lora": 16, "trains": ("hidden", "lora_a", "lora_b")}),
    "float16": (("ce", "grpo"), {"dtype": torch.float16}),
    "frozen head": (("ce", "grpo", "gspo"), {"trains": ("hidden",)}),
    "32000 columns": (("ce", "grpo"), {"vocabulary": 32000}),
    "DPO": (("dpo",), {"segments": 64}),
    "distillation": (("distillation",), {"teacher": True}),
    "no gradient": (("scores",), {"trains": ()}),
}
LEVEL = "never slower than torch.compile or eager"
RAGGED = (200, 4000)
MEMORY = "1.00 in 5 GiB, 0.96 in 2200 MiB, 0.93 in 1200 MiB; recompute 0.72"
AHEAD = "0.98, and ahead of QuACK"


def table() -> Iterator[Case]:
    """Yield the cases of the benchmark table, each with its design goal."""

    def row(row: str, works: str, setting: Setting, *contestants: str, goal: str = "") -> Case:
        return Case(
            row=row,
            works=tuple(works.split("|")),
            setting=setting,
            contestants=contestants,
            group="table",
            goal=goal,
        )

    yield row("GRPO", "grpo", WIDE, *OURS, *RL, goal=MEMORY)
    yield row("cross-entropy", "ce", WIDE, *OURS, *UNMETERED, *CE, goal=AHEAD)
    yield row("GRPO", "grpo", NARROW, *OURS, *RL, goal="1.00 in 5 GiB, 0.94 in 2200 MiB")
    yield row("cross-entropy", "ce", NARROW, *OURS, *UNMETERED, *CE, goal=AHEAD)
    for shape in (WIDE, NARROW):
        scores = replace(shape, trains=())
        ours = ("head_stats", "headloss, 128 MiB")
        name = "log-prob and entropy, no gradient"
        yield row(name, "scores", scores, *ours, *SCORES, goal="1.03")
    ragged = replace(WIDE, segments=RAGGED)
    yield row("GSPO, ragged", "gspo", ragged, *OURS, "TRL", goal=MEMORY)
    yield from small()
    frozen = replace(WIDE, trains=("hidden",))
    ours = (*DEFAULTS, *FASTEST, "headloss, frozen", "head_stats, frozen")
    goal = "0.93 of logits + dX"
    yield row("GRPO, frozen head", "grpo", frozen, *ours, *PLAIN, *LOGPS, goal=goal)
    foreign = ("head_stats, held", "head_stats, recompute", "head_function, token")
    foreign = (*foreign, "head_function, sequence", "head_function, undeclared")
    goal = "held: 0.95 within T x V x 2 bytes"
    yield row("GRPO in plain PyTorch on log-probs", "grpo", WIDE, *foreign, goal=goal)
    half = replace(WIDE, quiet=2)
    yield row("GRPO, half the rows", "grpo", half, *DEFAULTS, *BUDGETS, "TRL", goal="1.4")
    certain = replace(WIDE, certain=0.6, segments=256)
    ours = (*DEFAULTS, "headloss, tolerance 0.001", "headloss, tolerance 0.004")
    goal = "tolerance 0.004: 1.5 of the dense products"
    yield row("GRPO, most tokens nearly certain", "grpo", certain, *ours, goal=goal)
    one_and_five = ("headloss, no metrics", "headloss")
    goal = "five terms and metrics <= 1.03 x one term"
    yield row("one term and five", "grpo|five terms", WIDE, *one_and_five, goal=goal)
    chosen = replace(WIDE, candidates=64)
    works = "grpo|grpo+candidates|grpo+candidates+rest|grpo+collision"
    goal = "as GRPO alone, to a few percent"
    yield row("GRPO and 64 candidates", works, chosen, *DEFAULTS, *FASTEST, *RECOMPUTE, goal=goal)
    kept = replace(WIDE, support=64)
    goal = "5 times the dense call"
    yield row("GRPO, softmax over 64 ids", "grpo", kept, *DEFAULTS, *RECOMPUTE, "eager", goal=goal)
    teacher = replace(WIDE, teacher=True)
    ours = (*DEFAULTS, *FASTEST, "headloss, 2200 MiB", *RECOMPUTE)
    goal = "0.88 within 2200 MiB; recompute 0.6"
    peers = ("torch.compile", "Liger JSD")
    yield row("distillation", "distillation", teacher, *ours, *peers, goal=goal)
    # Logits of 16 GiB take 8 ms to copy: next to 8 ms, the overhead of a kernel launch is
    # negligible.
    for tokens, vocabulary in (
        (66560, 128256),
        (262144, 32768),
        (56320, 151936),
        (32768, 262144),
    ):
        given = Setting(
            tokens=tokens, width=512, vocabulary=vocabulary, trains=("hidden",), given=True
        )
        goal = "0.86 of a copy, captured 0.88, and ahead of QuACK"
        yield row("given logits, in place", "ce", given, *GIVEN, goal=goal)
        name, goal = "given logits, CE + z-loss + GRPO", "ahead of Fast-LLM from 128k columns on"
        yield row(name, "ce+z+grpo", given, *SEVERAL, goal=goal)


def small() -> Iterator[Case]:
    """Yield cases of few tokens, like micro-batches."""
    for width, vocabulary in SMALL_HEADS:
        for tokens in SMALL:
            yield Case(
                row="small calls",
                works=("ce", "grpo", "gspo, wide clip"),
                setting=Setting(tokens=tokens, width=width, vocabulary=vocabulary, segments=256),
                contestants=(*DEFAULTS, *(CAPTURED if tokens <= 1024 else ()), *PLAIN),
                group="small",
                goal=f"{LEVEL}, host time <= 0.7 ms",
            )
    for kind, (works, more) in KINDS.items():
        ours = DEFAULTS if more.get("trains") != () else ("head_stats", *DEFAULTS)
        for tokens in (256, 1024, 4096):
            yield Case(
                row=f"small calls, {kind}",
                works=works,
                setting=replace(NARROW, **({"tokens": tokens, "segments": 256} | more)),
                contestants=(*ours, *PLAIN),
                group="small",
                goal=f"{LEVEL}, no more memory than eager",
            )


SHAPES = (
    (4096, 4096, 128256),
    (16384, 4096, 128256),
    (16384, 2048, 151936),
    (16384, 3584, 152064),
    (65536, 2048, 151936),
    (8192, 2304, 256000),
)
MAIN = (*DEFAULTS, *FASTEST, *RECOMPUTE)


def full() -> Iterator[Case]:
    """Yield cases for several shapes, numbers of tokens and sizes of the vocabulary."""
    for tokens, width, vocabulary in SHAPES:
        setting = Setting(tokens=tokens, width=width, vocabulary=vocabulary)
        ragged = replace(setting, segments=RAGGED)
        teacher = replace(setting, teacher=True)
        for row, work, sizes, contestants in (
            ("cross-entropy", "ce", setting, (*MAIN, *CE)),
            ("GRPO", "grpo", setting, (*MAIN, *RL)),
            ("GSPO, ragged", "gspo", ragged, (*MAIN, *PLAIN, *LOGPS)),
            ("GSPO + KL + entropy + z-loss", "gspo+kl+entropy+z", ragged, (*MAIN, *PLAIN)),
            ("distillation", "distillation", teacher, (*MAIN, *BUDGETS, *PLAIN, "Liger JSD")),
        ):
            yield Case(row=row, works=(work,), setting=sizes, contestants=contestants)
    few = (*MAIN, *PLAIN, *LOGPS)
    for tokens in (4096, 16384, 65536, 131072, 262144):
        setting = replace(NARROW, tokens=tokens)
        yield Case(
            row="GRPO, tokens", works=("grpo",), setting=setting, contestants=few, group="tokens"
        )
    for vocabulary in (32768, 65536, 131072, 262144):
        setting = replace(NARROW, tokens=8192, vocabulary=vocabulary)
        yield Case(
            row="GRPO, vocabulary",
            works=("grpo",),
            setting=setting,
            contestants=few,
            group="vocabulary",
        )


def quick() -> Iterator[Case]:
    """Yield small float32 cases that a CPU can run: one case for each row of the benchmark's table,
    and a few cases for the plots against the number of tokens and the vocabulary size."""
    seen = set()
    for case in table():
        if case.row not in seen:
            seen.add(case.row)
            yield _small(case, tokens=96, vocabulary=331)
    for case in full():
        if case.group == "tokens" and case.setting.tokens <= 16384:
            yield _small(case, tokens=case.setting.tokens // 128, vocabulary=331)
        if case.group == "vocabulary" and case.setting.vocabulary <= 65536:
            yield _small(case, tokens=64, vocabulary=case.setting.vocabulary // 128)


def _small(case: Case, tokens: int, vocabulary: int) -> Case:
    return replace(case, setting=small_setting(case.setting, tokens, vocabulary))


def small_setting(setting: Setting, tokens: int, vocabulary: int) -> Setting:
    """Return the benchmark setting with sizes that are small enough for a CPU, and with float32 in
    place of bfloat16."""
    return replace(
        setting,
        tokens=tokens,
        width=32,
        vocabulary=vocabulary,
        dtype=torch.float32 if setting.dtype == torch.bfloat16 else setting.dtype,
        segments=16 if isinstance(setting.segments, int) else (3, 20),
    )


def part(cases: Iterable[Case], index: int, count: int) -> list[Case]:
    """Return part `index` (from 1) of `count` parts with about equal work."""
    return list(cases)[index - 1 :: count]
