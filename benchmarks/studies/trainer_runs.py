"""Runs of one configuration of `trainer_cases` by headloss and by a reference trainer, and the
differences between the two runs.

Imported by trainers.py. Page: docs/train.md.
"""

from __future__ import annotations

import contextlib
import gc
import math
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from torch import Tensor, distributed
from torch.nn.attention import SDPBackend, sdpa_kernel
from trainer_cases import Case, Size, build, float64_head, launched
from transformers import PrinterCallback, TrainerCallback, set_seed

TIMES = ("step_time", "runtime", "per_second", "epoch", "total_flos", "learning_rate")
STEPS, RESUMED = 6, 2


class Watch(TrainerCallback):
    """A callback that records step times, peak memory, and the first step's gradient as whole
    tensors."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.gradient: dict[str, Tensor] = {}
        self.times: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _wait()
        if len(self.times) == 1 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        if not self.gradient and self.trainer.deepspeed is not None:
            self._watch(self.trainer.deepspeed)
        self._begun = time.perf_counter()

    def _watch(self, engine: Any) -> None:
        """Record gradients before DeepSpeed's step, which clips before `on_pre_optimizer_step`."""
        from deepspeed.utils import safe_get_full_grad

        def step(*args: Any, **kwargs: Any) -> None:
            del engine.step
            for name, parameter in engine.module.named_parameters():
                if parameter.requires_grad:
                    self.gradient[name] = safe_get_full_grad(parameter).float().cpu()
            engine.step(*args, **kwargs)
            norm = float(engine.get_global_grad_norm())
            for grad in self.gradient.values():
                grad *= min(1.0, self.trainer.args.max_grad_norm / (norm + 1e-6))

        engine.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _wait()
        self.times.append(time.perf_counter() - self._begun)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if self.gradient:
            return
        for name, parameter in model.named_parameters():
            if (grad := parameter.grad) is not None:
                whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                self.gradient[name.replace("module.", "")] = whole.detach().float().cpu()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run(
    case: Case, kind: str, size: Size, folder: Path, processes: int = 2, steps: int = STEPS
) -> dict[str, Any]:
    """Return the results of a short run of one kind of trainer; "gradient" is the first step's."""
    held = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0  # held by DeepSpeed
    with launched(case, processes), float64_head(kind == "exact"):
        trainer = build(case, kind, size, folder, processes, max_steps=steps)
        watch = Watch(trainer)
        trainer.add_callback(watch)
        trainer.remove_callback(PrinterCallback)
        set_seed(0)
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        evaluated = trainer.evaluate() if case.then == "eval" else {}
        peak = None
        if torch.cuda.is_available():
            peak = (torch.cuda.max_memory_allocated() - held) / 2**20
    found = {
        "losses": [entry["loss"] for entry in logs],
        "grad_norms": [entry["grad_norm"] for entry in logs],
        "logs": logs,
        "evaluated": evaluated,
        "gradient": watch.gradient,
        "step_ms": 1e3 * min(watch.times[2:] or watch.times),  # first steps compile kernels
        "peak_mib": peak,
    }
    del trainer
    release()
    return found


def quiet() -> None:
    warnings.filterwarnings("ignore")
    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def resumed(case: Case, size: Size, folder: Path) -> float:
    """Return the largest difference in losses and gradient norms between a run and a run resumed
    from its checkpoint."""
    kept = folder / "run"
    options: dict[str, Any] = {
        "max_steps": STEPS, "save_strategy": "steps", "save_steps": RESUMED,
        "optim": "adamw_torch", "learning_rate": 1e-3,  # AdamW has a state, which must be resumed.
    }  # fmt: skip
    _clear(kept)
    with launched(case):
        trainer = build(case, "headloss", size, folder, 2, **options)
        trainer.remove_callback(PrinterCallback)
        set_seed(0)
        trainer.train()
        want = [entry for entry in trainer.state.log_history if "loss" in entry]
        del trainer
        release()
    with launched(case):
        trainer = build(case, "headloss", size, folder, 2, **options)
        trainer.remove_callback(PrinterCallback)
        # The seed sets the order of the data; random states after the checkpoint come from the
        # checkpoint.
        set_seed(0)
        trainer.train(resume_from_checkpoint=str(kept / f"checkpoint-{RESUMED}"))
        got = [entry for entry in trainer.state.log_history if "loss" in entry]
        del trainer
        release()
    _clear(kept)
    assert len(got) == len(want) == STEPS
    found = differences(got[RESUMED:], want[RESUMED:])
    # The token count is not compared, because TRL restarts it when a run resumes.
    return max(found["loss"], found["grad_norm"])


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic operations, since unordered sums (as in attention's backward) change
    results."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def _clear(folder: Path) -> None:
    distributed.barrier()
    if distributed.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    distributed.barrier()


# ---------------------------------------------------------------------- differences


def apart(a: float, b: float) -> float:
    """Return |a - b| relative to the larger value, or to 1e-2 if both are smaller."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b), 1e-2)


def differences(a: list[dict[str, float]], b: list[dict[str, float]]) -> dict[str, float]:
    """Return the largest difference over steps, for each number reported by both runs."""
    known = set.intersection(*map(set, (*a, *b)))
    shared = [n for n in a[0] if n in known and not n.endswith(TIMES) and n != "step"]
    return {n: max(apart(x[n], y[n]) for x, y in zip(a, b, strict=True)) for n in shared}


def gradient_apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the norm of the difference over the norm of `b`, over all parameters."""
    if a.keys() != b.keys() or not b:
        raise ValueError(f"gradients of other parameters: {sorted(a.keys() ^ b.keys())}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    square = whole = 0.0
    for name, value in b.items():
        exact = value.to(device).double()
        square += float((a[name].to(device).double() - exact).square().sum())
        whole += float(exact.square().sum())
    return math.sqrt(square / whole)


def compare(case: Case, size: Size, folder: Path) -> dict[str, Any]:
    """Run headloss's trainer and the reference trainer for a case, on both processes, and return
    the differences as a row of the table."""
    found = {kind: run(case, kind, size, folder) for kind in ("headloss", case.reference)}
    mine, other = found["headloss"], found[case.reference]
    shared = differences(mine["logs"], other["logs"])
    row: dict[str, Any] = {
        "losses": mine["losses"],
        "grad_norms": mine["grad_norms"],
        "first_apart": max(differences(mine["logs"][:1], other["logs"][:1]).values()),
        "loss_apart": shared.pop("loss"),
        "grad_norm_apart": shared.pop("grad_norm"),
        "metrics_apart": max(shared.values(), default=0.0),
        "worst_metric": max(shared, key=shared.__getitem__, default=""),
        "metrics": len(shared),
        "gradient_apart": gradient_apart(mine["gradient"], other["gradient"]),
        "step_ms": mine["step_ms"],
        "reference_step_ms": other["step_ms"],
        "peak_mib": mine["peak_mib"],
        "reference_peak_mib": other["peak_mib"],
    }
    if case.precision == "bf16":
        exact = run(case, "exact", size, folder)
        row["gradient_off_exact"] = gradient_apart(mine["gradient"], exact["gradient"])
        row["reference_gradient_off_exact"] = gradient_apart(other["gradient"], exact["gradient"])
        row["loss_off_exact"] = abs(mine["losses"][0] - exact["losses"][0])
        row["reference_loss_off_exact"] = abs(other["losses"][0] - exact["losses"][0])
    if case.then == "eval":
        row["eval_apart"] = max(
            differences([mine["evaluated"]], [other["evaluated"]]).values(), default=math.nan
        )
    if case.then == "resume":
        with deterministic():
            row["resume_apart"] = resumed(case, size, folder)
    return row


# Allowed differences between float32 runs and their reference run; bf16 runs are judged against a
# float64 head.
TOLERANCES = {
    "loss_apart": 1e-3,
    "grad_norm_apart": 1e-3,
    "metrics_apart": 5e-3,
    "gradient_apart": 1e-3,
    "eval_apart": 1e-3,
}


def failures(case: Case, row: dict[str, Any]) -> list[str]:
    """Return texts that name each value of the row whose error is larger than allowed."""
    found = []
    if case.precision == "float32" and case.experts:
        # With experts only the first step is compared: in later steps rounding may send a token to
        # another expert, which changes all values.
        first = ("first_apart", "gradient_apart")
        found += [f"{n} {row[n]:.1e}" for n in first if row.get(n, 0.0) > 1e-3]
    elif case.precision == "float32":
        found += [f"{n} {row[n]:.1e}" for n, most in TOLERANCES.items() if row.get(n, 0.0) > most]
    else:
        mine, other = row["gradient_off_exact"], row["reference_gradient_off_exact"]
        if mine > max(1.1 * other, 0.02):
            found.append(f"gradient off float64 by {mine:.1e}, the reference by {other:.1e}")
    if row.get("resume_apart", 0.0) > 1e-5:
        found.append(f"resume_apart {row['resume_apart']:.1e}")
    if row.get("one_process_apart", 0.0) > 1e-3:
        found.append(f"one_process_apart {row['one_process_apart']:.1e}")
    return found
