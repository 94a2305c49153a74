"""Options of a call; the defaults are right for nearly everybody."""

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
    """Options of `head_loss`, and of the other verbs as far as they apply.

    Attributes:
        backend: "auto", "reference" (PyTorch, any device) or "triton". An explicit choice that
            cannot serve the call raises.
        schedule: "auto", "one_pass" (6NHV), "recompute" (8NHV, any objective, least memory),
            "frozen" (4NHV, a head without gradient) or "held" (6NHV, any objective; keeps the
            softmax terms or logits of all tokens until the loss is known); "narrow" (8NHV, a head
            at most 256 wide of the hidden states' dtype, on the triton backend, without adapters,
            teachers, candidates, supports, `logits_dtype` or `main_grad`, with which "auto"
            takes "recompute"), whose tiles of logits never leave the chip.
        chunk_tokens: tokens per chunk; under schedule "auto" any number works with any objective.
        memory_budget: bytes for a chunk of logits, or for all that "held" keeps; gradients and sums
            come on top. Default: 256 MiB on a CPU; a 64th of a GPU's memory, 1.25 GiB of 80 (of a
            vocabulary group's smallest). A budget below the logits of one token gives a warning.
        logits_dtype: None keeps logits in float32 (float64 for float64 inputs). torch.bfloat16 or
            torch.float16 rounds them, as other libraries do.
        accumulate_dtype: in which the weight gradient is summed over chunks.
        static: fixed shapes, so that the call can be captured in a CUDA graph: nothing is read from
            the device, no row is skipped, no value is checked. Hidden rows of unscored positions
            count as zeros. A batch-scoped term sees them too and has to use `batch.live`, [T] bool;
            one that does not is refused.
        skip_rows: leave rows without gradient out of the two backward products, if these are large.
            This reads their number from the device once per chunk.
        gradient_tolerance: x >= 0. Rows that carry almost no gradient leave these products too: in
            each chunk (in the whole call under "held" and "recompute") those with the least
            |dL/dz|, as long as their sum stays within x of the chunk's. The metrics `skipped_rows`
            and `skipped_mass` say what was left out. In the Frobenius norm, `skipped_mass.sum`
            times the largest norm of a row of the weight bounds the error of the hidden gradient;
            times the largest norm of a hidden state it bounds the weight's. It changes nothing
            under "frozen", and in blocks so small that a GPU would wait longer than it saves. Dense
            teachers, given logits and static shapes are refused.
        batch_invariant: the log-prob, log-sum-exp and entropy of a token have the same bits in any
            batch, chunk and schedule. bfloat16 heads without bias and adapters have this on a GPU
            anyway; this extends it to other heads there, and to the token's row of the hidden
            gradient for given coefficients and one schedule, by products that are slower than the
            vendor's. It does not hold for the weight's gradient, divergences, or between different
            devices or numbers of shards.
        sequence_parallel: `hidden` is this rank's slice of the tokens; needs a vocabulary group.
            Hidden states are gathered on every rank, and each gets the gradient of its own.
        check_ranks: compare on every call, and not on a group's first one alone, what the ranks of
            a group have to be given alike: targets, fields, one value of each hidden state, values
            of the objective's options. For a loss that is right on one rank and wrong on several,
            or ranks that wait for each other: their data may differ. It reads the device twice.
        metrics: False leaves `out.metrics` empty and computes only what the loss needs.
        per_token: names of what `out.per_token` holds at each position: "top1", or what a term
            reports of each token, as "nla/acceptance".
        upstream: the gradient that `out.loss` will receive, declared in advance. Gradients are then
            final in the forward pass, and `main_grad` is written there.
        main_grad: float32 [V, H] tensor that the weight gradient is added to; none is returned
            then. For a weight that requires a gradient.

    Raises:
        TypeError, ValueError: for a value that an option cannot have.

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
