"""The correctness gate: errors of losses and gradients against a float64 oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch.batch import IGNORE, Batch
from ..batch.segments import Segments
from ..head.head import Head
from ..head_loss import head_loss, plan
from ..losses import cross_entropy, distillation, dpo, entropy, grpo, gspo, kl, z_loss
from ..losses.term import Objective, Term
from ..options import Options
from .oracle import Mode, budget, error, parameters, plain, random_batch, trained_looking


@dataclass(frozen=True)
class Comparison:
    """Error of one quantity: norm of the difference from the float64 reference, over its norm."""

    quantity: str
    error: float
    budget: float

    @property
    def ok(self) -> bool:
        """True if the error against float64 is at most the allowed `budget`; False for a NaN
        error."""
        return self.error <= self.budget


def judge(
    values: Mapping[str, Tensor],
    hidden: Tensor,  # [.., H]
    head: Head,
    batch: Batch,
    objective: Term | Objective,
) -> list[Comparison]:
    """Compare computed values with the float64 oracle, which materialises the logits.

    The names of `values` are "loss", "logps" and the gradients' names from `parameters`. The error
    budget of a value is 3 e + 1e-6, where e is the error of PyTorch's result from materialised
    logits, in float32 for values and in the input dtype for gradients.
    """
    oracle, wide, same = (plain(hidden, head, batch, objective, m) for m in get_args(Mode))
    exact = oracle.gradients | {"loss": oracle.loss, "logps": oracle.logps}
    yardsticks = same.gradients | {"loss": wide.loss, "logps": wide.logps}
    return [
        Comparison(name, error(value, exact[name]), budget(yardsticks[name], exact[name]))
        for name, value in values.items()
    ]


def run(
    hidden: Tensor, head: Head, batch: Batch, objective: Term | Objective, options: Options
) -> dict[str, Tensor]:
    """Return the loss, log-probs and gradients of `head_loss`, by the names that the error check
    `judge` expects."""
    out = head_loss(hidden, head, batch, objective, options)
    leaves = {n: t for n, t in parameters(hidden, head).items() if t.requires_grad}
    gradients = torch.autograd.grad(out.loss, list(leaves.values()))
    values = {"loss": out.loss.detach(), "logps": out.logps}
    return values | dict(zip(leaves, gradients, strict=True))


class Case(NamedTuple):
    """One test case of `headloss gate`, which compares losses and gradients with a float64
    oracle."""

    objective: str
    schedule: str
    dtype: torch.dtype

    @property
    def names(self) -> tuple[str, str, str]:
        return self.objective, self.schedule, name_of(self.dtype)


class Verdict(NamedTuple):
    """Result of one test case of `headloss gate`, which compares losses and gradients with float64;
    `failure` is the text of a raised error."""

    case: Case
    backend: str = ""
    comparisons: tuple[Comparison, ...] = ()
    failure: str = ""

    @property
    def ok(self) -> bool:
        return not self.failure and all(c.ok for c in self.comparisons)


# Objectives whose losses and gradients are compared with a reference computed in float64. Together,
# the `OBJECTIVES` use every gradient coefficient (`c_target`, `c_prob`, `c_entropy`, `c_uniform`),
# and terms that need one token, one segment or the whole batch at once.
OBJECTIVES: dict[str, Callable[[Head], Term | Objective]] = {
    "cross_entropy + z_loss": lambda _: cross_entropy(label_smoothing=0.1) + 1e-3 * z_loss(),
    "gspo + kl - entropy": lambda _: gspo() + 0.1 * kl(estimator="k3") - 0.01 * entropy(),
    "grpo": lambda _: grpo(),
    "dpo": lambda _: dpo(),
    "grpo, top_entropy": lambda _: grpo().top_entropy(quantile=0.5),
    "distillation": lambda teacher: distillation(divergence="js", teacher_head=teacher),
}
QUICK = ("cross_entropy + z_loss", "gspo + kl - entropy", "grpo")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cases(quick: bool = False) -> Iterator[Case]:
    """Yield the cases to compare with the float64 oracle; `quick` yields about a third of the
    cases."""
    for objective in QUICK if quick else OBJECTIVES:
        for schedule in ("one_pass", "recompute", *["frozen"] * (objective in ("grpo", "dpo"))):
            for dtype in DTYPES[:2] if quick else DTYPES:
                yield Case(objective, schedule, dtype)


def check(case: Case, device: torch.device | str = "cpu") -> Verdict:
    """Run one test case on segments of unequal length, with hidden states and weight that predict
    many targets well. Each segment of several tokens begins with a prompt that has no targets."""
    hidden, head, batch = _inputs(case, device)
    objective = OBJECTIVES[case.objective](Head(head.weight.detach()))
    # The test has more than 64 tokens, so `chunk_tokens=64` makes several chunks, except for
    # objectives that need the whole batch in one chunk.
    options = Options(schedule=case.schedule, chunk_tokens=64)
    try:
        backend = plan(hidden, head, batch, objective, options).backend
        results = run(hidden, head, batch, objective, options)
        compared = judge(results, hidden, head, batch, objective)
    except Exception as reason:  # E.g. a kernel that does not compile fails its test case.
        first = (str(reason) or type(reason).__name__).splitlines()[0]
        return Verdict(case, failure=f"{type(reason).__name__}: {first}")
    return Verdict(case, backend, tuple(compared))


LENGTHS = (40, 13, 60, 1, 31, 33, 24, 8)
# Number of prompt positions (without targets) at the start of a segment; a segment of n <= 5 tokens
# has n - 1 prompt positions.
PROMPT = 5


def _inputs(case: Case, device: torch.device | str) -> tuple[Tensor, Head, Batch]:
    """Return inputs made on the CPU, so that every device gets the same numbers."""
    hidden, weight, targets = trained_looking(sum(LENGTHS), 64, 701, case.dtype)
    logps = -F.cross_entropy(F.linear(hidden.double(), weight.double()), targets, reduction="none")
    segments = Segments.from_lengths(LENGTHS)
    places = torch.cat([torch.arange(n) - min(PROMPT, n - 1) for n in LENGTHS])
    targets = torch.where(places < 0, IGNORE, targets)
    noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(7))
    teacher = hidden + 0.3 * noise.to(hidden.dtype)
    batch = random_batch(targets, segments, logps, teacher_hidden=teacher).to(device)
    weight = weight.to(device).requires_grad_(case.schedule != "frozen")
    return hidden.to(device).requires_grad_(), Head(weight), batch
