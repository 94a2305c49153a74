"""How a call is to be served; the defaults are right for nearly everybody."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .dense import check_dense

BACKENDS = ("auto", "reference", "triton")
SCHEDULES = ("auto", "one_pass", "recompute", "frozen", "held")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `head_loss`, and of the other verbs as far as they apply.

    Attributes:
        backend: "auto", "reference" (PyTorch, any device) or "triton". An explicit choice that
            cannot serve the call raises.
        schedule: "auto", "one_pass" (6NHV), "recompute" (8NHV, any objective, least memory),
            "frozen" (4NHV, a head without gradient) or "held" (6NHV, any objective; the softmax
            terms or logits of all tokens are kept until the coefficients are there).
        chunk_tokens: tokens per chunk; under schedule "auto" any number works with any objective.
        memory_budget: bytes for a chunk of logits, or for all that a held schedule keeps; default
            256 MiB on a CPU; on a GPU a 28th of all its memory (of a vocabulary group's smallest),
            at least 1200 MiB. One below the logits of one token is warned of.
        logits_dtype: None keeps logits in float32 (float64 for float64 inputs); torch.bfloat16 or
            torch.float16 rounds them, for those who ask.
        accumulate_dtype: of the weight gradient over chunks.
        static: static shapes: no read of the device, no row skipping, no value checks; unscored
            hidden rows count as zeros. A batch-scoped term sees them unless it heeds `batch.live`,
            [T] bool, and is refused if it does not. Can be captured in a CUDA graph.
        skip_rows: leave rows without gradient out of the two backward products (one read of the
            device per chunk).
        gradient_tolerance: x >= 0, leave out of these products also the rows that carry almost no
            gradient: of each chunk (of the whole call under "held" and "recompute") those with the
            least |dL/dz|, while their sum stays within x of the chunk's. The metrics `skipped_rows`
            and `skipped_mass` say what was left out; `skipped_mass.sum` times the largest norm of a
            row of the weight bounds the error of the hidden gradient in the Frobenius norm, times
            that of a hidden state the error of the weight's. It changes nothing where no product
            can be saved: under "frozen", and in blocks so small that a GPU would wait for longer
            than it saves. Dense teachers, given logits and static shapes are refused.
        batch_invariant: a token's log-prob, log-sum-exp and entropy are the same bits in any batch,
            chunk and schedule also for heads with a bias, adapters, float16 and float32; and, for
            given coefficients and one schedule, its row of the hidden gradient. Products are then
            our own, slower than the vendor's. On a GPU; without it bfloat16 heads have the first.
            Not promised: the weight's gradient, divergences, other devices and numbers of shards.
        sequence_parallel: `hidden` is this rank's slice of the tokens; needs a vocab group. They
            are gathered a chunk at a time; with `static`, whose order of tokens is known to the
            device alone, all at once.
        metrics: measure; False leaves `out.metrics` empty and computes only what the loss needs.
        upstream: the gradient that `out.loss` will receive, declared in advance: gradients are
            final in the forward pass, and `main_grad` is written there.
        main_grad: float32 [V, H] tensor that the weight gradient is added to, in place of
            returning it; for a weight that requires a gradient.

    Raises:
        TypeError, ValueError: for a value that an option cannot have.

    >>> import headloss as hl
    >>> options = hl.Options(schedule="recompute", memory_budget=512 << 20)
    """

    backend: str = "auto"
    schedule: Any = "auto"
    chunk_tokens: int | None = None
    memory_budget: int | None = None
    logits_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype = torch.float32
    static: bool = False
    skip_rows: bool = True
    gradient_tolerance: float = 0.0
    batch_invariant: bool = False
    sequence_parallel: bool = False
    metrics: bool = True
    upstream: float | None = None
    main_grad: Tensor | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("backend", BACKENDS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, want one of {allowed}")
        for name in ("chunk_tokens", "memory_budget"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}: got {value!r}, want a positive integer or None")
            if value < 1:
                raise ValueError(f"{name}: got {value}, want a positive integer or None")
        if self.logits_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"logits_dtype: got {self.logits_dtype}, want None, torch.float32, torch.bfloat16 "
                "or torch.float16"
            )
        if self.accumulate_dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"accumulate_dtype: got {self.accumulate_dtype}, want torch.float32, "
                "torch.bfloat16 or torch.float16"
            )
        self._check_tolerance()
        if self.upstream is not None:
            if isinstance(self.upstream, bool) or not isinstance(self.upstream, Real):
                raise TypeError(f"upstream: got {self.upstream!r}, want a number or None")
            if not math.isfinite(self.upstream):
                raise ValueError(f"upstream: got {self.upstream!r}, want a finite number or None")
        if self.main_grad is not None and not isinstance(self.main_grad, Tensor):
            raise TypeError(f"main_grad: got {type(self.main_grad).__name__}, want a tensor")
        if self.main_grad is not None:
            check_dense("main_grad", self.main_grad)

    def _check_tolerance(self) -> None:
        x, name = self.gradient_tolerance, "gradient_tolerance"
        if isinstance(x, bool) or not isinstance(x, Real):
            raise TypeError(f"{name}: got {x!r}, want a number >= 0")
        if not (math.isfinite(x) and x >= 0):
            raise ValueError(f"{name}: got {x!r}, want a finite number >= 0")
        if x and self.static:
            raise ValueError(f"{name}: got {x!r} with static=True, which leaves no row out")
        if x and not self.skip_rows:
            raise ValueError(f"{name}: got {x!r} with skip_rows=False, want rows to be skipped")
