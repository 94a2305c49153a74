"""The correctness gate: errors against a float64 oracle, and peak memory against eager PyTorch.

T scored tokens, H hidden width, V vocabulary, S segments. `judge` compares what any contestant
computed; `check` runs headloss through a table of cases; `memory` runs it beside eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
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
from .oracle import LiveTensors, Mode, error, parameters, plain, random_batch, trained_looking

# ---------------------------------------------------------------------- errors


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One quantity beside the oracle; errors are norms of differences over the oracle's norm."""

    quantity: str
    error: float
    budget: float

    @property
    def ok(self) -> bool:
        """Whether the error is within the budget; NaN never is."""
        return self.error <= self.budget


def judge(
    found: Mapping[str, Tensor],
    hidden: Tensor,  # [.., H]
    head: Head,
    batch: Batch,
    objective: Term | Objective,
) -> list[Comparison]:
    """Compare what a contestant computed with the float64 oracle, which makes the logits.

    Args:
        found: any of "loss", "logps", "entropies" and the gradients "hidden", "weight", "bias",
            "lora0.a", ...

    The budget is 3 err(torch) + 1e-6, where torch makes the logits in float32 for values and in
    the input dtype for gradients.

    Raises:
        ValueError: a name that the oracle does not have, or another shape. TypeError: no tensor.
    """
    values = ("loss", "logps", "entropies")
    oracle, wide, same = (
        {name: getattr(computed, name) for name in values} | computed.gradients
        for computed in (plain(hidden, head, batch, objective, m) for m in get_args(Mode))
    )
    unknown = found.keys() - oracle.keys()
    if unknown:
        raise ValueError(f"found: got {sorted(unknown)}, want names out of {sorted(oracle)}")
    compared = []
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"found: got {value!r} for {name!r}, want a tensor")
        budget = 3 * error((wide if name in values else same)[name], oracle[name]) + 1e-6
        compared.append(Comparison(quantity=name, error=error(value, oracle[name]), budget=budget))
    return compared


def run(
    hidden: Tensor, head: Head, batch: Batch, objective: Term | Objective,
    options: Options | None = None
) -> dict[str, Tensor]:
    """`head_loss` and its backward, in the form that `judge` takes; `.grad` is left alone."""
    out = head_loss(hidden, head, batch, objective, options)
    results = {"loss": out.loss.detach(), "logps": out.logps}
    leaves = {n: t for n, t in parameters(hidden, head).items() if t.requires_grad}
    if leaves and out.loss.requires_grad:
        results |= zip(leaves, torch.autograd.grad(out.loss, list(leaves.values())), strict=True)
    return results


# ---------------------------------------------------------------------- the table of cases


class Case(NamedTuple):
    """One row of the gate."""

    objective: str
    schedule: str
    dtype: torch.dtype

    @property
    def names(self) -> tuple[str, str, str]:
        return self.objective, self.schedule, name_of(self.dtype)


class Verdict(NamedTuple):
    """What the gate says of a case; `failure` holds the message where it could not even run."""

    case: Case
    backend: str = ""
    comparisons: tuple[Comparison, ...] = ()
    failure: str = ""

    @property
    def ok(self) -> bool:
        return not self.failure and all(c.ok for c in self.comparisons)


# Every coefficient of the gradient, every scope and every schedule has a case.
OBJECTIVES: dict[str, Callable[[Head], Term | Objective]] = {
    "cross_entropy + z_loss": lambda _: cross_entropy(label_smoothing=0.1) + 1e-3 * z_loss(),
    "gspo + kl - entropy": lambda _: gspo() + 0.1 * kl(estimator="k3") - 0.01 * entropy(),
    "grpo": lambda _: grpo(),
    "dpo": lambda _: dpo(),
    "grpo, top_entropy": lambda _: grpo().top_entropy(quantile=0.5),
    "distillation": lambda teacher: distillation(divergence="js", teacher_head=teacher),
}
LOGP_ONLY = ("grpo", "dpo")
QUICK = ("cross_entropy + z_loss", "gspo + kl - entropy", "grpo")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cases(quick: bool = False) -> Iterator[Case]:
    """The cases of the gate; `quick` keeps about a third of them."""
    for objective in QUICK if quick else OBJECTIVES:
        for schedule in ("one_pass", "recompute", *["frozen"] * (objective in LOGP_ONLY)):
            for dtype in DTYPES[:2] if quick else DTYPES:
                yield Case(objective, schedule, dtype)


def check(case: Case, device: torch.device | str = "cpu") -> Verdict:
    """Run one case on a ragged batch of trained-looking inputs with a prompt in each segment."""
    hidden, head, batch = _inputs(case, torch.device(device))
    objective = OBJECTIVES[case.objective](Head(head.weight.detach()))
    # Small enough for several chunks and tiles; a batch-scoped objective still takes them all.
    options = Options(schedule=case.schedule, chunk_tokens=64)
    try:
        backend = plan(hidden, head, batch, objective, options).backend
        results = run(hidden, head, batch, objective, options)
        compared = judge(results, hidden, head, batch, objective)
    except Exception as reason:  # a kernel that does not compile here is a red row, not the end
        first = (str(reason) or type(reason).__name__).splitlines()[0]
        return Verdict(case, failure=f"{type(reason).__name__}: {first}")
    return Verdict(case, backend, tuple(compared))


LENGTHS = (40, 13, 60, 1, 31, 33, 24, 8)
PROMPT = 5  # the first positions of each longer segment are not scored
SIZES = (64, 701)  # H, V


def _inputs(case: Case, device: torch.device) -> tuple[Tensor, Head, Batch]:
    """Made on the CPU, so that every device sees the same numbers."""
    width, vocabulary = SIZES
    hidden, weight, targets = trained_looking(sum(LENGTHS), width, vocabulary, case.dtype)
    z = F.linear(hidden.double(), weight.double())
    logps = -F.cross_entropy(z, targets, reduction="none")
    segments = Segments.from_lengths(LENGTHS)
    places = torch.cat([torch.arange(n) - min(PROMPT, n - 1) for n in LENGTHS])
    targets = torch.where(places < 0, IGNORE, targets)
    noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(7))
    teacher = hidden + 0.3 * noise.to(hidden.dtype)
    batch = random_batch(targets, segments, logps, teacher_hidden=teacher).to(device)
    weight = weight.to(device).requires_grad_(case.schedule != "frozen")
    return hidden.to(device).requires_grad_(), Head(weight), batch


# ---------------------------------------------------------------------- memory


def peak_bytes(contestant: Callable[[], list[Tensor]], device: torch.device) -> int | None:
    """Peak bytes while `contestant` runs, less what it returns; None where memory ran out.

    From the allocator on a GPU; on a CPU from the tensors that operators create.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        try:
            returned = contestant()
        except torch.OutOfMemoryError:
            return None
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        with LiveTensors() as meter:
            returned = contestant()
        peak = meter.peak
    return peak - sum(t.untyped_storage().nbytes() for t in returned)


def memory(
    device: torch.device | str = "cpu",
) -> Iterator[tuple[str, str, int | None, int | None]]:
    """headloss beside eager PyTorch, on cross-entropy and GSPO: the work, who does it, peak bytes
    beyond the inputs and the returned gradients, forward and backward, and the planned ones."""
    gpu = (device := torch.device(device)).type == "cuda"
    tokens, width, vocabulary = (4096, 2048, 128256) if gpu else (1024, 128, 16384)
    dtype = torch.bfloat16 if gpu else torch.float32
    hidden, weight, targets = trained_looking(tokens, width, vocabulary, dtype, device)
    hidden.requires_grad_()
    weight.requires_grad_()
    segments = Segments.from_lengths(torch.full((8,), tokens // 8, device=device))
    batch = random_batch(targets, segments, torch.full((tokens,), -1.0, device=device))
    sizes = f"T={tokens} H={width} V={vocabulary} {name_of(dtype)}"
    # An eighth of the logits: a default budget would hold all of so small a batch.
    budget = tokens * vocabulary * 4 // 8

    def eager(loss: Callable[[Tensor, Batch], Tensor]) -> list[Tensor]:
        value = loss(F.linear(hidden, weight).float(), batch)
        return list(torch.autograd.grad(value, [hidden, weight]))

    works = (cross_entropy(), eager_cross_entropy), (gspo(), eager_gspo)
    for objective, loss in works:
        work = f"{objective.name} {sizes}"
        yield work, "eager", peak_bytes(partial(eager, loss), device), None
        for schedule in ("one_pass", "recompute"):
            options = Options(schedule=schedule, memory_budget=budget)
            arguments = (hidden, Head(weight), batch, objective, options)
            peak = peak_bytes(lambda arguments=arguments: list(run(*arguments).values()), device)
            yield work, f"headloss {schedule}", peak, plan(*arguments).total_bytes


def eager_cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """The mean over tokens, as everybody writes it."""
    return F.cross_entropy(logits, batch.targets)


def eager_gspo(logits: Tensor, batch: Batch, low: float = 3e-4, high: float = 4e-4) -> Tensor:
    """-min(s A, clip(s) A) averaged over segments, s = exp(mean_t(logp - old))."""
    logps = logits.log_softmax(-1).gather(1, batch.targets.unsqueeze(1)).squeeze(1)
    ratio = batch.segments.mean(logps - batch.old_logps).exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).mean()
