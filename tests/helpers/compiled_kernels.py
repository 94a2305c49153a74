"""Compile every kernel of the Triton backend for absent GPUs, and report the results.

    python tests/helpers/compiled_kernels.py cuda:80 cuda:90 --only '*product*'
    python tests/helpers/compiled_kernels.py hip:gfx942

Backend operations are called with CPU tensors; in place of a launch, the kernel is compiled for the
call's arguments. Triton's interpreter must be off. The output has a line of JSON per kernel and
call.

n tokens, H hidden width, v columns, K chosen columns.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

# set before the import of the kernels, which read `torch.version.hip`
if __name__ == "__main__" and "hip:" in " ".join(sys.argv):
    torch.version.hip = "7.0"  # type: ignore[assignment]

from headloss.kernels import triton as acts
from headloss.kernels.interface import (
    Backward,
    ExpTile,
    Forward,
    LogitRows,
    Order,
    ShiftedSums,
    Sum,
    Support,
    Walk,
)
from headloss.kernels.pair import (
    Chosen,
    Distribution,
    Divergence,
    Pair,
    StoredTopk,
)
from headloss.kernels.transform import Transform
from headloss.kernels.triton import launch, narrow, product, tiles, versions
from headloss.statistics.divergence import LOG_ACCEPTANCE, Measure
from headloss.statistics.softmax import Normalizer, SoftmaxCoefficients, SoftmaxState

ALL = frozenset({"logp", "lse", "entropy", "mean_logit", "top1"})
LEAST = frozenset({"logp"})
KINDS = ("forward_kl", "reverse_kl", "js", "skew_forward_kl", "skew_reverse_kl", "total_variation")
SHARED = {"80": 163, "86": 99, "89": 99, "90": 227, "100": 227, "120": 99}  # KiB of shared memory
WAVE = {"gfx942": 64}
N, H, V, K = 2100, 512, 1000, 8
Call = Callable[[], object]


def target_of(name: str) -> GPUTarget:
    """Return the target of a name like "cuda:90" or "hip:gfx942"."""
    backend, arch = name.split(":")
    return GPUTarget(backend, int(arch) if backend == "cuda" else arch, WAVE.get(arch, 32))


class Absent:
    """Triton driver of a GPU that is not installed; each target counts as a separate device."""

    def __init__(self, target: GPUTarget, number: int) -> None:
        self.target, self.number = target, number

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def pretend(target: GPUTarget, number: int) -> None:
    """Replace every query of the package about the GPU by values of the target GPU."""
    triton.runtime.driver.set_active(Absent(target, number))
    cuda = target.backend == "cuda"
    major, minor = divmod(target.arch, 10) if cuda else (0, 0)
    shared = SHARED[str(target.arch)] << 10 if cuda else 64 << 10
    properties = types.SimpleNamespace(
        shared_memory_per_block_optin=shared, multi_processor_count=132
    )
    assert cuda is (torch.version.hip is None), "NVIDIA's and AMD's each in a process of its own"
    torch.cuda.get_device_capability = lambda device=None: (major, minor)
    torch.cuda.get_device_properties = lambda device=None: properties
    tiles.has_accelerator.cache_clear()
    versions.overlaps.cache_clear()
    fuses = tiles.has_accelerator(torch.device("cuda", 0))
    overlapping = versions.overlaps(torch.device("cuda", 0))
    tiles.can_fuse = acts.can_fuse = lambda x, w: fuses and x.element_size() == 2
    product.overlaps = lambda device: overlapping
    product.accelerated = narrow.accelerated = lambda x: fuses


# ---------------------------------------------------------------------- calls to compile


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def whole(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


class Form:
    """Arguments for every backend operation, with the smallest or the largest set of features."""

    def __init__(self, full: bool, dtype: torch.dtype) -> None:
        self.full = full
        self.x, self.w, self.targets = some(N, H, dtype=dtype), some(V, H, dtype=dtype), whole(N)
        self.raw = some(N, V, dtype=torch.float32 if full else dtype)
        self.normalizer = Normalizer(some(N), some(N))
        self.one = SoftmaxCoefficients(target=some(N), prob=some(N))
        self.c, self.transform = self.one, Transform()
        if full:
            self.c = self.one._replace(entropy=some(N), uniform=some(N))
            self.transform = Transform(scale=0.5, softcap=30.0, temperature=torch.ones(N))
        bias = some(V, dtype=dtype) if full else None
        self.plain = replace(self.transform, softcap=None)
        self.biased = replace(self.transform, bias=bias)
        self.forward = Forward(self.targets, 0, self.transform, ALL if full else LEAST)
        self.backward = Backward(self.targets, 0, self.transform, self.normalizer, self.c, some(N))
        self.multiple = self.backward._replace(transform=self.plain, coefficients=self.one)
        self.exp_tile = ExpTile.empty(len(self.x), V, self.x)
        self.order = Order(whole(N), whole(1)) if full else None

    def if_full(self, value: Any) -> Any:
        return value if self.full else None

    def products(self) -> Iterator[tuple[str, Call]]:
        x, w, given = self.x, self.w, {"transform": self.biased}
        forward, backward = self.forward._replace(**given), self.backward._replace(**given)
        yield "terms", lambda: acts.product_statistics(x, w, forward, V, self.exp_tile)
        yield "product", lambda: acts.product_partials(x, w, forward)
        yield "slab", lambda: acts.product_gradient(x, w, backward)

    def narrow(self) -> Iterator[tuple[str, Call]]:
        width = 200 if self.full else 64
        x, w, out = self.x[:, :width], self.w[:, :width], some(V, width)
        given = {"transform": self.biased}
        forward, backward = self.forward._replace(**given), self.backward._replace(**given)
        more = {"bias": self.if_full(some(V)), "factor": self.if_full(some(1)[0])}
        for sums in (False, True):
            yield "narrow", lambda s=sums: acts.narrow_partials(x, w, forward, s)
        sums, multiple = ShiftedSums(some(N, width), some(N), whole(N), whole(N) > 0), self.multiple
        yield "narrow, rows", lambda: acts.narrow_hidden(x, w, multiple, sums)
        yield "narrow, hidden", lambda: acts.narrow_hidden(x, w, backward)
        yield "narrow, weight", lambda: acts.narrow_weight_(x, w, backward, out, **more)

    def tiles(self) -> Iterator[tuple[str, Call]]:
        raw, exp_tile, order, backward = self.raw, self.exp_tile, self.order, self.backward
        no_mean = backward._replace(coefficients=self.c._replace(uniform=None))
        onto = self.if_full(acts.partials)
        yield "best", lambda: acts.best(self.raw, self.plain)
        yield "partials", lambda: acts.partials(raw, self.forward)
        if onto is not None:
            yield "partials onto", lambda: acts.partials(raw, self.forward, partials_of(N))
        yield "gradient", lambda: acts.logit_gradient_(raw, backward)
        yield "terms' gradient", lambda: acts.exp_gradient_(exp_tile, no_mean, order=order)
        yield (
            "multiple",
            lambda: acts.exp_multiple_(
                exp_tile, self.multiple, x=self.x, order=order, least=self.if_full(some(N))
            ),
        )
        fields = 5 if self.full else 3
        yield "finish", lambda: acts.finish(some(2, fields, N), self.forward.needs, V)
        for add in {self.full, False}:
            out = some(N, V) if add else None
            yield "fixed product", lambda o=out: acts.fixed_product(self.x, self.w.t(), out=o)

    def rows(self) -> Iterator[tuple[str, Call]]:
        index, x = whole(N), self.x
        more = {"places": index, "out": some(N, H)} if self.full else {}
        yield "order", lambda: acts.dense_order(some(N, dtype=torch.bool), N)
        yield "scaled rows", lambda: acts.scaled_rows(x, some(N), **more)
        for value in (some(V, H), some(V, H, dtype=x.dtype)):
            factor = self.if_full(some(1)[0])
            rows = self.if_full(some(N))
            sums = [Sum(value, x.dtype), Sum(some(N, H, dtype=x.dtype), x.dtype, rows)]
            yield "scaled", lambda s=sums, f=factor: acts.scaled(s, f)

    def walks(self) -> Iterator[tuple[str, Call]]:
        walk = Walk(
            LogitRows(self.raw, whole(N), self.full),
            self.if_full(LogitRows(self.raw, whole(N), self.full)),
            self.if_full(some(N, dtype=torch.bool)),
            *self.forward[:4],
            self.if_full(self.c),
            self.if_full(some(2, 5, N)),
        )
        later = LogitRows(self.raw, whole(N), False)
        again = walk._replace(out=later, needs=None, coefficients=self.c, slopes=None)
        wide = some(2, 1 << 18, dtype=self.x.dtype)
        rows = LogitRows(wide, whole(N), True)
        yield "walk", lambda: acts.given_rows(walk)
        yield "walk, later", lambda: acts.given_rows(again._replace(normalizer=self.normalizer))
        whole_walk = walk._replace(logits=rows, out=rows, coefficients=self.c)
        yield "walk, wide", lambda: acts.given_rows(whole_walk)
        yield "scaled in place", lambda: acts.scale_rows_(rows, some(1)[0])

    def sparse(self) -> Iterator[tuple[str, Call]]:
        columns, x, w = whole(N, K), self.x, self.w
        chosen = Chosen(columns, some(N, K), some(N, K))
        more = {"multiples": self.if_full(some(N)), "order": self.order}
        onto = self.if_full(partials_of(N))
        side = Distribution(self.plain, self.normalizer)
        outcomes = StoredTopk(columns, side, some(N, K), some(N))
        tail = Forward(None, 0, self.plain, frozenset())
        given = {"extra": self.if_full(some(N, V)), "others": self.if_full(self.backward)}
        yield "chosen", lambda: acts.chosen_logits(x, w, columns, self.biased)
        yield (
            "chosen gradient",
            lambda: acts.chosen_gradient_(self.exp_tile.exp_logits, chosen, self.backward, **more),
        )
        for few in (columns, whole(N, 1)):
            yield "tail", lambda few=few: acts.partials(self.raw, tail, onto, few)
        yield "stored", lambda: acts.part_gradient_(self.raw, outcomes, **given)
        lone = StoredTopk(whole(N, 1), side, some(N, 1), some(N))
        yield "stored", lambda: acts.part_gradient_(self.raw, lone, **given)

    def pairs(self) -> Iterator[tuple[str, Call]]:
        number = Transform(scale=0.5, softcap=30.0 if self.full else None, temperature=1.5)
        side = Distribution(number, self.normalizer)
        more = {"extra": self.if_full(some(N, V))}
        others = self.backward._replace(transform=replace(number, temperature=2.0))
        more |= {"others": self.if_full(others)}
        for kind in KINDS:
            pair = Pair(side, side, (Measure(kind, 0.5),))
            yield f"{kind}", lambda p=pair: acts.divergence(self.raw, self.raw, p)
            yield (
                f"{kind}, gradient",
                lambda p=pair: acts.part_gradient_(
                    self.raw, Divergence(self.raw, p, some(N, 1), some(N, 1)), **more
                ),
            )
        several = tuple(Measure(kind, 0.5) for kind in (*KINDS, LOG_ACCEPTANCE))
        of_rows = Pair(side, side, several, whole(N) % N)
        yield "several", lambda: acts.divergence(self.raw, self.raw, of_rows)
        slopes = some(N, len(several))
        parts = Divergence(self.raw, of_rows, slopes, slopes, some(N))
        yield "several, gradient", lambda: acts.part_gradient_(self.raw, parts, **more)
        # A logit tile has one column if the last block of vocabulary rows has a single row.
        column = some(N, 1)
        one = Divergence(column, pair, some(N, 1), some(N, 1))
        last = more | {"extra": self.if_full(column)}
        yield "one column, gradient", lambda: acts.part_gradient_(column, one, **last)

    def support(self) -> Iterator[tuple[str, Call]]:
        count = N * K
        support = Support(whole(count), torch.arange(N + 1) * K, 0, V)
        columns = Support(whole(count), whole(V + 1), 0, N)
        values, out, add = some(count), some(N, H, dtype=self.x.dtype), self.full
        onto = self.if_full(values)
        yield "support", lambda: acts.support_logits(self.x, self.w, support, onto)
        yield "support, act one", lambda: acts.support_partials(values, support, self.forward)
        yield "support, act two", lambda: acts.support_gradient(values, support, self.backward)
        yield (
            "support, into hidden",
            lambda: acts.support_sums(values, self.w, support, out, add),
        )
        yield (
            "support, into weight",
            lambda: acts.support_sums(values, self.x, columns, some(V, H), add, True),
        )


def partials_of(n: int) -> SoftmaxState:
    return SoftmaxState(*some(5, n))


def calls(full: bool, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    form = Form(full, dtype)
    groups = [form.tiles, form.rows, form.walks, form.sparse, form.pairs, form.support]
    groups.append(form.narrow)
    if acts.can_fuse(form.x, form.w):
        groups.append(form.products)
    for group in groups:
        yield from group()


# ---------------------------------------------------------------------- compiling


def compiling(target: GPUTarget, report: Callable[[dict[str, Any]], None]) -> Any:
    """Return a function that replaces `Launcher.send`, the launch of a Triton kernel: it compiles
    the kernel for `target` and passes the result to `report`."""

    def compiled(
        launcher: launch.Launcher, programs: int, arguments: list[Any], constants: dict[str, Any]
    ) -> None:
        name, shared, error = launcher.kernel.__name__, 0, ""
        try:
            found = launcher.kernel.warmup(
                *arguments, grid=(programs,), **constants, **launcher.options
            )
            shared, code = found.metadata.shared, found.asm.get("amdgcn", "")
            if "approx" in code:  # AMD's compiler prints a warning instead of raising
                error = "instructions of PTX"
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"[-600:]
        report({"kernel": name, "shared": shared, "error": error})

    return compiled


def kernels() -> set[str]:
    """Return the names of all launched kernels."""
    prefix = acts.__name__
    modules = [m for name, m in sys.modules.items() if name.startswith(prefix)]
    values = [value for module in modules for value in vars(module).values()]
    jitted = {v.__name__ for v in values if isinstance(v, JITFunction)}
    return {name for name in jitted if name.endswith("_kernel")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--only", default="*", help="acts, as a pattern of a shell")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--forms", nargs="+", default=["least", "all"])
    arguments = parser.parse_args()
    if versions.INTERPRETED.value:
        parser.error("TRITON_INTERPRET is set")
    for number, name in enumerate(arguments.targets):
        target = target_of(name)
        pretend(target, number)
        seen: dict[str, Any] = {"target": name, "triton": triton.__version__}

        def report(found: dict[str, Any], seen: dict[str, Any] = seen) -> None:
            print(json.dumps(seen | found), flush=True)

        launch.Launcher.send = compiling(target, report)  # type: ignore[method-assign]
        for form in arguments.forms:
            for dtype in arguments.dtypes:
                for act, call in calls(form == "all", getattr(torch, dtype)):
                    if fnmatch.fnmatch(act, arguments.only):
                        seen |= {"act": act, "form": form, "dtype": dtype}
                        call()
    print(json.dumps({"kernels": sorted(kernels())}))


if __name__ == "__main__":
    main()
