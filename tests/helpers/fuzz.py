"""Random calls of the public functions, drawn from seeds, with results as plain dicts.

    python tests/helpers/fuzz.py --count 500 --against FOLDER
    python tests/helpers/fuzz.py --count 5000 --device cuda --workers 6 --against FOLDER

FOLDER contains an older version of the package `headloss`; `--first` sets the first seed.
Identical calls of two versions are compared in loss, gradients, metrics and error texts: bitwise,
or with a tolerance such as `--close 1e-6`. Every tenth call runs on two ranks, on the CPU.

N positions, T of them scored, S segments, H hidden width, V vocabulary rows.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():  # before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import fuzz_ranks
from fuzz_bad import SPOILS
from fuzz_draw import DTYPES, Call, draw
from fuzz_terms import make_term
from fuzz_versions import against, kinds, save, watched
from torch import Tensor

import headloss as hl

# ---------------------------------------------------------------------- running a call


@dataclass(kw_only=True)
class Built:
    """The arguments of a call as headloss objects."""

    hidden: Any
    head: Any
    batch: Any
    objective: Any
    options: Any
    leaves: dict[str, Tensor]
    logits: Any = None  # raw logits for `logits_loss`


def segments_of(call: Call) -> Any:
    """Return the call's segments, with tensors on the call's device."""
    if call.segments is None:
        return None
    kind, *value = call.segments
    if kind == "cu_seqlens" or (kind == "lengths" and call.device != "cpu"):
        value = [torch.tensor(value[0], device=call.device)]
    if kind == "lengths":
        return hl.Segments.from_lengths(value[0])
    if kind == "cu_seqlens":
        return hl.Segments.from_cu_seqlens(value[0])
    if kind == "ids":
        ids, count, *group = value[0]
        return hl.Segments.from_ids(ids, count=count, group=group[0] if group else None)
    if kind == "rows":
        return hl.Segments.rows(*value[0], device=call.device)
    return value[0]


def build(call: Call) -> Built:
    """Build all arguments of a random call; leaf tensors require gradients as the call's `grad`
    mode says."""
    into, onto = call.grad in ("train", "frozen"), call.grad in ("train", "weight")
    leaves: dict[str, Tensor] = {}

    def leaf(name: str, value: Any, required: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.detach().clone(memory_format=torch.preserve_format)
        if required and value.is_floating_point() and call.verb != "head_topk":
            leaves[name] = value.requires_grad_()
        return value

    hidden = leaf("hidden", call.hidden, into)
    given = dict(call.head)
    for name in ("weight", "bias"):
        if name in given:
            given[name] = leaf(name, given[name], onto)
    if call.lora is not None:
        a, b, scaling = call.lora
        a, b = leaf("lora0.a", a, onto), leaf("lora0.b", b, onto)
        given["lora"] = (hl.Lora(a=a, b=b, scaling=scaling),)
    head = hl.Head(**given)
    segments = segments_of(call)
    batch: Any = hl.Batch(segments=segments, **call.batch)
    if call.totals is not None:
        totals = hl.Totals.of(batch) if call.totals == "of" else call.totals
        totals = hl.Totals(*totals) if isinstance(totals, tuple) else totals
        batch = hl.Batch(segments=segments, totals=totals, **call.batch)
    terms = [coefficient * make_term(recipe) for coefficient, recipe in call.terms]
    if call.teacher is not None:
        other = None if call.teacher_head is None else hl.Head(call.teacher_head)
        terms.append(0.7 * hl.distillation(teacher_head=other, **call.teacher))
    objective = sum(terms) if call.objective is None else call.objective
    given = dict(call.options)
    if given.get("main_grad") is True:
        weight = call.head["weight"]
        given["main_grad"] = torch.ones(weight.shape, device=weight.device)
    return Built(
        hidden=hidden,
        head=head,
        batch=batch,
        objective=objective,
        options=hl.Options(**given),
        leaves=leaves,
        logits=logits_of(call) if call.verb == "logits_loss" else None,
    )


def run(call: Call) -> dict[str, Any]:
    """Return a call's results as a plain dict, or the type and text of its error."""
    if call.spoil is not None:
        SPOILS[call.spoil].apply(call)
    given = plainly(call) if call.place is None else fuzz_ranks.RUNNING.run(call)
    about = {"seed": call.seed, "call": str(call), "spoil": call.spoil, "dtype": call.dtype}
    return about | {"kinds": call.kinds} | given


def plainly(call: Call) -> dict[str, Any]:
    """Return the results of a call run in this process."""
    try:
        placed = on_device(call)
        return on(_run(placed, build(placed)), "cpu")
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "kind": type(error)}


def on(value: Any, device: str) -> Any:
    """Move all tensors in dicts and sequences to a device, except meta tensors."""
    if isinstance(value, Tensor):
        return value if value.is_meta else value.to(device)
    if isinstance(value, dict):
        return {name: on(part, device) for name, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(on(part, device) for part in value)
    return value


def on_device(call: Call) -> Call:
    """Return the call with its tensors on the call's device."""
    if call.device == "cpu":
        return call
    names = ("hidden", "head", "lora", "batch", "segments", "teacher_head", "options")
    return replace(call, **{name: on(getattr(call, name), call.device) for name in names})


def _run(call: Call, built: Built) -> dict[str, Any]:
    if call.verb == "head_topk":
        return {"topk": tuple(hl.head_topk(built.hidden, built.head, call.k))}
    graph = torch.set_grad_enabled(call.grad not in ("no_grad", "inference"))
    with graph, torch.inference_mode(call.grad == "inference"):
        if call.captured:
            out, loss, gradients = _replayed(lambda: _act(call, built), built.options.main_grad)
        else:
            out, loss, gradients = _act(call, built)
        found = {"loss": loss.detach().clone(), "gradients": gradients}
        found |= {} if gradients is None else {"upstream": _upstream(call)}
        found["gradients"] = gradients or {}
        if call.verb == "head_stats":
            found |= {"logps": out.logp.detach(), "entropies": out.entropy.detach()}
            return found | {"lse": out.lse.detach()}
        metrics = out.metrics
        if call.place == "segments":
            metrics = metrics.all_reduce(built.batch.segments.group)
    found |= {"terms": dict(out.terms), "metrics": metrics.compute(), "logps": out.logps}
    found |= {"entropies": out.entropies, "schedule": str(out.plan).split()[1].rstrip(":")}
    if "skipped_mass" in out.metrics:
        found["skipped"] = float(out.metrics["skipped_mass"].sum)
    return found


def _act(call: Call, built: Built) -> tuple[Any, Tensor, dict[str, Tensor] | None]:
    """Run forward and backward without reading values from the device, as a CUDA graph needs.

    Return output, loss and gradients by name; the gradients are None if no leaf needs one.
    """
    if call.verb == "head_stats":
        out = _head_stats(call, built)
        loss = (out.logp + 0.3 * out.entropy - 0.1 * out.lse).sum()
        if (logps := out.candidate_logps) is not None:
            loss = loss + 0.1 * torch.where(logps > -torch.inf, logps, 0).sum()
    elif call.verb == "logits_loss":
        out = _logits_loss(call, built)
        loss = out.loss
    else:
        out = hl.head_loss(*_arguments(built))
        loss = out.loss
    if not built.leaves or call.grad not in ("train", "frozen", "weight"):
        return out, loss, None
    upstream = torch.full_like(loss, _upstream(call))
    found = torch.autograd.grad(loss, list(built.leaves.values()), upstream, allow_unused=True)
    gradients = {n: g for n, g in zip(built.leaves, found, strict=True) if g is not None}
    if built.options.main_grad is not None:
        gradients["weight"] = built.options.main_grad - 1
    return out, loss, gradients


def _upstream(call: Call) -> float:
    return 1.7 if call.options.get("upstream") is None else call.options["upstream"]


def _replayed(act: Callable[[], Any], main_grad: Tensor | None) -> Any:
    """Capture `act` in a CUDA graph, replay the graph, and return the results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        act()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = act()
    if main_grad is not None:
        main_grad.fill_(1)
    graph.replay()
    torch.cuda.synchronize()
    return found


def _head_stats(call: Call, built: Built) -> hl.HeadStats:
    batch = built.batch
    if batch.support is None and "candidate_ids" not in batch.fields:
        batch = batch.targets
    names = ("logp", "lse", "entropy")
    names = (*names, "candidate_logps") if "candidate_ids" in call.batch else names
    schedule = call.options.get("schedule")
    options = hl.Options(schedule="held") if schedule == "held" else None
    return hl.head_stats(built.hidden, built.head, batch, options, names)


def _arguments(built: Built) -> tuple[Any, ...]:
    return built.hidden, built.head, built.batch, built.objective, built.options


def logits_of(call: Call) -> Tensor:
    """Return the raw logits [.., V] of a `logits_loss` call, identical on every device."""
    hidden, weight = call.hidden.cpu().float(), call.head["weight"].cpu().float()
    return (hidden @ weight.t()).to(call.hidden.device, DTYPES[call.dtype])


def _logits_loss(call: Call, built: Built) -> Any:
    logits = built.logits.clone()
    built.leaves.clear()
    if call.grad in ("train", "frozen", "weight"):
        built.leaves["hidden"] = logits.requires_grad_()
        logits = logits * 1  # a non-leaf copy, since leaves cannot be overwritten
    names = ("temperature", "softcap", "logit_scale")
    given = {name: call.head[name] for name in names if name in call.head}
    return hl.logits_loss(
        logits, built.batch, built.objective, inplace=call.inplace, options=built.options, **given
    )


# ---------------------------------------------------------------------- the command


def records(
    first: int, count: int, device: str = "cpu", until: float = math.inf
) -> Iterator[dict[str, Any]]:
    """Yield the results of calls with consecutive seeds until the time limit."""
    for seed in range(first, first + count):
        if time.perf_counter() > until:
            return
        yield run(draw(seed, device=device))


def main(argv: list[str] | None = None) -> int:
    """Run random calls; return 1 if a call differs between two versions, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--against", type=Path, help="the folder that holds another headloss/")
    parser.add_argument("--close", type=float, default=0.0, help="relative; 0: to the bit")
    parser.add_argument("--workers", type=int, default=1, help="processes of each version")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no call begins later")
    parser.add_argument("--save", type=Path, help="records of the headloss that is imported")
    parser.add_argument("--json", type=Path, help="where to write what --against found")
    given = parser.parse_args(argv)
    here = Path(hl.__file__).parents[1]
    if given.against is not None:
        return against(given, {"old": given.against, "new": here})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    fuzz_ranks.RUNNING.prepare = None  # internals differ between versions
    begin = time.perf_counter()
    found = watched(records(given.first, given.count, given.device, begin + given.seconds))
    if given.save is not None:
        save(found, given.save, hl.__file__)
    else:
        print(hl.__file__, *sorted(kinds(found).items()), sep="\n    ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
