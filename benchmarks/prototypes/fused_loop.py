"""The loop around the product that holds softmax terms: fused_loop.py SHAPE PART.."""

from __future__ import annotations

import sys

import torch
from head_loop import F32, PLAIN, SHAPES, add_dw, full_width, known_of, limit, mm_to, steps
from setting import SCALE, Inputs, Record, exact, grpo, race, relative, trained_looking

from headloss import products
from headloss.kernels import triton_backend as kernels
from headloss.kernels import triton_product
from headloss.kernels.triton_product import Held
from headloss.stats import Normalizer, finish

NEEDS = frozenset({"logp", "lse", "entropy"})


def tuned(function, **constants):
    """With other constants of the product kernel."""

    def run(i):
        before = {k: getattr(triton_product, k) for k in constants}
        for k, value in constants.items():
            setattr(triton_product, k, value)
        try:
            return function(i)
        finally:
            for k, value in before.items():
                setattr(triton_product, k, value)

    return run


def one_pass(
    chunk, keep=None, dw=True, cast=False, needs=NEEDS, wide_dx=False, full=False, plan=None
):
    """`full`: the gradient kernel over the terms; `plan`: sizes of the chunks."""

    def run(i: Inputs):
        n, v = len(i.x), len(i.w)
        everything = Held.empty(chunk, v, "cuda")
        dx = torch.empty_like(i.x)
        total = torch.empty(v, i.x.shape[1], device="cuda") if dw else None
        chunks, start = [], 0
        for size in plan or [chunk] * (n // chunk):
            chunks.append(slice(start, start + size))
            start += size
        for at, r in enumerate(chunks):
            held = everything.rows(slice(0, r.stop - r.start))
            x, y = i.x[r], i.y[r]
            found = kernels.product_partials(x, i.w, y, 0, PLAIN, needs, held=held)
            stats, normalizer = finish(found, v, needs)
            c = grpo(i, r, stats, v, keep)
            given = (y, 0, PLAIN, normalizer, c, found.target)
            out, scale = dx[r], None
            if not full:
                scale = kernels.held_multiple_(held, *given)
            if keep is not None:
                live = c.target != 0
                which = kernels.dense_rows(live, int(live.sum()))
                g, x, scale = kernels.move_rows_(held.terms, which), x[which], scale[which]
                out = torch.empty_like(x)
            else:
                g = kernels.held_gradient_(held, *given) if full else held.terms
            if wide_dx:
                torch.mul(torch.mm(g, i.w, out_dtype=F32), scale[:, None], out=out)
            else:
                torch.mm(g, i.w, out=out)
                if scale is not None:
                    torch.mul(out, scale[:, None], out=out)
            if keep is not None:
                dx[r] = 0
                dx[r].index_copy_(0, which, out)
            if dw:
                add_dw(total, g, x if scale is None else products.scaled_rows(x, scale), at == 0)
        if cast:
            scale = torch.full((1,), 1 / SCALE, device="cuda")
            total = torch.mul(total, scale, out=torch.empty_like(i.w))
        return dx, total

    return run


def sweep(chunk, needs=NEEDS):
    def run(i: Inputs):
        found = [
            finish(kernels.product_partials(i.x[r], i.w, i.y[r], 0, PLAIN, needs), len(i.w), needs)
            for r in steps(len(i.x), chunk)
        ]
        return [torch.cat([getattr(s, name) for s, _ in found]) for name in needs]

    return run


def slabs(known, width, tokens):
    """Second half of recompute: fp32 logits in tiles of tokens, a slab of bf16 gradient."""
    normalizer, coefficients = known

    def run(i: Inputs):
        n, v = len(i.x), len(i.w)
        z = torch.empty(tokens * width, device="cuda")
        slab = torch.empty(n, width, dtype=torch.bfloat16, device="cuda")
        dx, dw = torch.empty(i.x.shape, device="cuda"), torch.empty_like(i.w)
        for columns in steps(v, width):
            size = columns.stop - columns.start
            for r in steps(n, tokens):
                part = z[: (r.stop - r.start) * size].view(-1, size)
                mm_to(i.x[r], i.w[columns].t(), F32, out=part)
                kernels.logit_gradient_(
                    part,
                    i.y[r],
                    columns.start,
                    PLAIN,
                    Normalizer(*(t[r] for t in normalizer)),
                    coefficients.map(lambda t, r=r: t[r]),
                    out=slab[r, :size],
                )
            g = slab[:, :size]
            torch.mm(g.t(), i.x, out=dw[columns])
            if columns.start:
                torch.ops.aten.addmm.dtype_out(dx, g, i.w[columns], F32, out=dx)
            else:
                mm_to(g, i.w[columns], F32, out=dx)
        return dx.to(torch.bfloat16), dw

    return run


def fused_slabs(known, width):
    """Second half of recompute by the same product: the terms of a slab for all tokens, their
    multiples, and dX summed over slabs."""
    normalizer, coefficients = known

    def run(i: Inputs):
        n, v = len(i.x), len(i.w)
        dx, dw = torch.empty(i.x.shape, device="cuda"), torch.empty_like(i.w)
        everything = Held.empty(n, width, "cuda")
        for columns in steps(v, width):
            size = columns.stop - columns.start
            held = Held(terms=everything.terms[:, :size], reference=everything.reference)
            found = kernels.product_partials(
                i.x, i.w[columns], i.y, columns.start, PLAIN, frozenset({"logp"}), held=held
            )
            g = kernels.held_gradient_(
                held, i.y, columns.start, PLAIN, normalizer, coefficients, found.target
            )
            torch.mm(g.t(), i.x, out=dw[columns])
            if columns.start:
                torch.ops.aten.addmm.dtype_out(dx, g, i.w[columns], F32, out=dx)
            else:
                mm_to(g, i.w[columns], F32, out=dx)
        return dx.to(torch.bfloat16), dw

    return run


def logits_product(i: Inputs):
    out = torch.empty(4096, len(i.w), dtype=torch.bfloat16, device="cuda")
    for r in steps(len(i.x), 4096):
        torch.mm(i.x[r], i.w.t(), out=out)


def main(shape: str, parts: list[str]) -> None:
    n, h, v = SHAPES[shape]
    record = Record(f"fused_loop_{shape}_{'_'.join(parts)}")
    first = trained_looking(n, h, v, 0)
    sets = [first, trained_looking(n, h, v, 1)]
    known = known_of(first)
    z = torch.mm(first.x[:4096], first.w.t(), out_dtype=F32)
    gradient = kernels.logit_gradient_(
        z,
        first.y[:4096],
        0,
        PLAIN,
        Normalizer(*(t[:4096] for t in known[0])),
        known[1].map(lambda t: t[:4096]),
        out=torch.empty_like(z, dtype=torch.bfloat16),
    )
    del z

    def frozen_limit(i):
        logits_product(i)
        out = torch.empty_like(i.x)
        for r in steps(n, 4096):
            torch.mm(gradient, i.w, out=out[r])

    if "errors" in parts:
        rows = torch.randint(n, (128,), device="cuda").unique()
        columns = torch.cat([first.y[:64], torch.randint(v, (64,), device="cuda")]).unique()
        logps, dx64, dw64 = exact(first, rows, columns)
        found = dict(zip(NEEDS, sweep(8192)(first), strict=True))
        record.add(of="log-prob error", max=float((found["logp"] - logps).abs().max()))
        for label, f in {
            "multiples": one_pass(4096),
            "multiples, fp32 dX": one_pass(4096, wide_dx=True),
            "gradient kernel": one_pass(4096, full=True),
            "fp32 logits": full_width(F32, 4096),
            "slabs": slabs(known, 4096, 4096),
            "fused slabs": fused_slabs(known, 4096),
        }.items():
            dx, dw = f(first)
            alive = dx64.norm(dim=1) > 0
            each = ((dx[rows].double() - dx64).norm(dim=1) / dx64.norm(dim=1))[alive]
            record.add(
                of=label,
                dx=relative(dx[rows], dx64),
                dw=relative(dw[columns], dw64),
                median_row=float(each.median()),
                worst_row=float(each.max()),
            )
        pair = one_pass(4096)(first), one_pass(4096)(first)
        record.add(of="same bits twice", same=all(map(torch.equal, *pair)))
    if "pass" in parts:
        half = (torch.rand(n, device="cuda") < 0.5).float()
        race(
            record,
            {
                "limit": limit(gradient),
                "chunk 2048": one_pass(2048),
                "chunk 4096": one_pass(4096),
                "chunk 8192": one_pass(8192),
                "chunk 16384": one_pass(16384),
                "chunk 4224, even waves": one_pass(4224, plan=[4224, 4224, 4224, 3712]),
                "chunk 4096, fp32 dX": one_pass(4096, wide_dx=True),
                "chunk 8192, fp32 dX": one_pass(8192, wide_dx=True),
                "chunk 8192, dW scaled to bf16": one_pass(8192, cast=True),
                "chunk 8192, log-prob alone": one_pass(8192, needs=frozenset({"logp"})),
                "chunk 8192, all statistics": one_pass(8192, needs=NEEDS | {"top1", "mean_logit"}),
                "chunk 4096, gradient kernel": one_pass(4096, full=True),
                "chunk 8192, gradient kernel": one_pass(8192, full=True),
                "half the rows 4096": one_pass(4096, keep=half),
                "half the rows 8192": one_pass(8192, keep=half),
            },
            sets,
            "limit",
            rounds=9,
        )
        race(
            record,
            {
                "frozen limit": frozen_limit,
                "frozen 4096": one_pass(4096, dw=False),
                "frozen 8192": one_pass(8192, dw=False),
            },
            sets,
            "frozen limit",
            rounds=9,
        )
    if "sweep" in parts:
        race(
            record,
            {
                "logits product": logits_product,
                "sweep 4096": sweep(4096),
                "sweep 8192": sweep(8192),
                "sweep 16384": sweep(16384),
                "sweep 16384, GROUP 8": tuned(sweep(16384), GROUP=8),
                "sweep 16384, GROUP 32": tuned(sweep(16384), GROUP=32),
                "sweep 16384, GROUP 64": tuned(sweep(16384), GROUP=64),
                "sweep 16384, log-prob alone": sweep(16384, frozenset({"logp"})),
            },
            sets,
            "logits product",
            rounds=9,
        )
    if "slabs" in parts:
        race(
            record,
            {
                "limit": limit(gradient),
                "slabs 4096 of 4096": slabs(known, 4096, 4096),
                "slabs 5120 of 2048": slabs(known, 5120, 2048),
                "fused slabs 4096": fused_slabs(known, 4096),
                "fused slabs 6144": fused_slabs(known, 6144),
            },
            sets,
            "limit",
        )
    if "profile" in parts:
        f = one_pass(8192)
        f(first)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            f(first)
            torch.cuda.synchronize()
        for e in sorted(prof.key_averages(), key=lambda e: -e.device_time_total)[:12]:
            record.add(of=e.key[:60], calls=e.count, ms=e.device_time_total / 1e3)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
