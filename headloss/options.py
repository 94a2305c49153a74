"""Options of a call; the defaults suit nearly all calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .arguments import check_dense, check_number, check_own_places, plain_numbers, with_nearest_name

BACKENDS = ("auto", "reference", "triton")
SCHEDULES = ("auto", "one_pass", "recompute", "frozen", "held", "narrow")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@with_nearest_name
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `head_loss`, `logits_loss`, `head_stats`, `head_function`, `head_topk` and `plan`;
    each function uses the options that apply.

    Attributes:
        backend: "auto", "reference" (PyTorch, any device) or "triton". An explicit backend that
            does not support the call raises an error.
        schedule: "auto", "one_pass" (three matmuls of 2NHV operations for N tokens, H hidden width
            and V vocabulary), "recompute" (four matmuls, any objective, least memory), "frozen"
            (two matmuls, a head without gradient), "held" (three matmuls, any objective; keeps the
            softmax terms or logits of all tokens until the loss is known) or "narrow" (four matmuls
            in kernels that keep logits on the chip). "narrow" needs the triton backend and a head
            of width at most 256 in the hidden states' dtype. "narrow" excludes adapters, extra
            low-rank columns (`Head(beside=..)`), teachers, candidates, supports, `logits_dtype` and
            `main_grad`: with any of these features, "auto" chooses another schedule.
        chunk_tokens: tokens per chunk; with schedule "auto", any number works for any objective.
        memory_budget: bytes for a chunk of logits, or for all tensors that "held" keeps, without
            gradients and their accumulators. The default memory budget is 256 MiB on a CPU, and
            1/64 of the memory on a GPU (1.25 GiB of 80 GiB), or on the smallest GPU of a vocabulary
            group. A budget too small for the logits of one token gives a warning.
        logits_dtype: None keeps logits in float32 (float64 for float64 inputs). torch.bfloat16 or
            torch.float16 rounds the logits, as other libraries do.
        accumulate_dtype: the dtype in which the weight gradient is summed over chunks.
        static: fixed shapes, so that the call can be captured in a CUDA graph: no read from the
            device, no skipped row, no check of values. Hidden states at unscored positions count as
            zeros. A batch-scoped term also sees unscored positions, and is refused unless it reads
            `batch.live`, [T] bool.
        skip_rows: leave tokens without a gradient out of the two backward matmuls, if the matmuls
            are so large that this saves time. With `skip_rows`, the CPU reads the number of tokens
            with a gradient from the GPU once per chunk.
        gradient_tolerance: a number >= 0; tokens with almost no gradient are left out of the two
            backward matmuls. In each chunk (under "held" and "recompute": in the whole call) tokens
            are skipped in increasing order of |dL/dz|, the norm of the gradient of a token's
            logits, while the sum of |dL/dz| over the skipped tokens is at most `gradient_tolerance`
            times the sum of |dL/dz| over all tokens of the chunk. The metrics `skipped_rows` and
            `skipped_mass` report the number of skipped tokens and a bound on the sum of their
            |dL/dz|. In the Frobenius norm, `skipped_mass.sum` times the largest norm of a weight
            row bounds the error of the hidden gradient; `skipped_mass.sum` times the largest norm
            of a hidden state bounds the error of the weight gradient. No row is skipped under the
            schedule "frozen", or in a block of tokens so small that a GPU's wait for the number of
            rows costs more than skipping saves. A teacher with logits over the whole vocabulary,
            `logits_loss`, and static shapes do not support `gradient_tolerance` and raise an error.
        batch_invariant: the log-prob, log-sum-exp and entropy of a token have the same bits in any
            batch, chunk and schedule. bfloat16 heads without bias and adapters are batch-invariant
            on a GPU without this option. `batch_invariant` makes float16 and float32 heads, and
            heads with a bias or adapters, batch-invariant on a GPU, through matmuls slower than the
            vendor's. With `batch_invariant`, a token's hidden gradient has the same bits in any
            batch under one schedule, if the derivatives of the loss are equal. The weight gradient
            and divergences may differ between batches even with `batch_invariant`, and all results
            may differ between devices and between numbers of shards.
        sequence_parallel: `hidden` is this rank's slice of the tokens; needs a vocabulary group.
            Hidden states are gathered on every rank, and each rank gets the gradient of its slice.
        check_ranks: compare the inputs of a group's ranks on every call, not only on the group's
            first call. Compared inputs, which must be equal on all ranks, are targets, fields, one
            value of each hidden state, and the objective's options. `check_ranks` adds two
            reads of GPU values by the CPU to each call. Set `check_ranks` to find ranks with
            different data, if a loss is right on one rank and wrong on several, or if ranks wait
            for each other.
        metrics: False leaves `out.metrics` empty and computes only statistics that the loss needs.
        per_token: names of the values in `out.per_token`: "top1", or a term's value per token, such
            as "nla/acceptance".
        upstream: the gradient that `out.loss` will receive, declared in advance. With `upstream`,
            the forward pass computes final gradients and writes `main_grad`.
        main_grad: float32 [V, H] tensor to which the weight gradient is added; the call then
            returns no weight gradient. The weight must require a gradient.

    Raises:
        TypeError, ValueError: for a value that an option does not accept.

    >>> import headloss as hl
    >>> options = hl.Options(schedule="recompute", memory_budget=512 << 20)
    """

    backend: str = "auto"
    schedule: str = "auto"
    chunk_tokens: int | None = None
    memory_budget: int | None = None
    logits_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype = torch.float32
    static: bool = False
    skip_rows: bool = True
    gradient_tolerance: float = 0.0
    batch_invariant: bool = False
    sequence_parallel: bool = False
    check_ranks: bool = False
    metrics: bool = True
    per_token: tuple[str, ...] = ()
    upstream: float | None = None
    main_grad: Tensor | None = None

    def __post_init__(self) -> None:
        for name, allowed in {"backend": BACKENDS, "schedule": SCHEDULES}.items():
            if not (isinstance(value := getattr(self, name), str) and value in allowed):
                raise ValueError(f"{name}: got {value!r}, want one of {allowed}")
        for name, value in vars(self).items():
            if isinstance(getattr(Options, name), bool) and not isinstance(value, bool):
                raise TypeError(f"{name}: got {value!r}, want True or False")
        names = self.per_token
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise TypeError(f'per_token: got {names!r}, want a tuple of names, ("top1",)')
        plain_numbers(self, "chunk_tokens", "memory_budget", "gradient_tolerance", "upstream")
        for name in ("chunk_tokens", "memory_budget"):
            if getattr(self, name) is not None:
                want = "a positive integer or None"
                check_number(name, getattr(self, name), want, want, lambda x: x > 0, int)
        for name, dtypes in {"logits_dtype": (None, *DTYPES), "accumulate_dtype": DTYPES}.items():
            if not any(getattr(self, name) is dtype for dtype in dtypes):
                *others, last = map(str, dtypes)
                want = f"{', '.join(others)} or {last}"
                raise ValueError(f"{name}: got {getattr(self, name)}, want {want}")
        x = self.gradient_tolerance
        name = "gradient_tolerance"
        check_number(name, x, "a number >= 0", "a finite number >= 0", lambda x: x >= 0)
        if x and self.static:
            raise ValueError(f"{name}: got {x!r} with static=True, which leaves no row out")
        if x and not self.skip_rows:
            raise ValueError(f"{name}: got {x!r} with skip_rows=False, want rows to be skipped")
        if self.upstream is not None:
            check_number("upstream", self.upstream, "a number or None", "a finite number or None")
        if self.main_grad is not None:
            if not isinstance(self.main_grad, Tensor):
                raise TypeError(f"main_grad: got {type(self.main_grad).__name__}, want a tensor")
            check_dense("main_grad", self.main_grad)
            check_own_places("main_grad", self.main_grad)


DEFAULT = Options()
