"""Persistent Triton products against cuBLAS: the logits product with the softmax statistics of each
block in its epilogue, and the two gradient products. python3 fused_product.py SHAPE"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl
from setting import Inputs, Record, measure, trained_looking
from triton.tools.tensor_descriptor import TensorDescriptor

SHAPES = {"wide": (8192, 4096, 128256), "narrow": (8192, 2048, 151936)}
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def place_of(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    group = tile // (GROUP * tiles_n)
    size = min(tiles_m - group * GROUP, GROUP)
    return group * GROUP + tile % size, (tile % (GROUP * tiles_n)) // size


@triton.jit
def halves_of(z, BM: tl.constexpr, BN: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(z, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def sums(z, shift, EXACT: tl.constexpr):
    z = z * LOG2E - shift[:, None]
    e = tl.exp2(z)
    mass = tl.sum(e, 1)
    if EXACT:
        less = tl.sum(tl.where(z < 0, e, 0.0), 1)
        mass = less + (tl.extra.cuda.libdevice.rint(mass - less) - 1)
    return e, mass, tl.sum(e * z, 1)


@triton.jit
def product_kernel(
    x,
    w,
    out,  # descriptor [n, v] bf16
    targets,
    at,  # [n]
    found,  # [3, blocks, n]
    n,
    v,
    h,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STATS: tl.constexpr,
    STORE: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPECIAL: tl.constexpr,
    HALVES: tl.constexpr,
    EXACT: tl.constexpr,
):
    tiles_m = tl.cdiv(n, BM)
    tiles_n = tl.cdiv(v, BN)
    for tile in tl.range(
        tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN, warp_specialize=SPECIAL
    ):
        m, c = place_of(tile, tiles_m, tiles_n, GROUP)
        z = tl.zeros((BM, BN), tl.float32)
        for k in range(0, h, BK):
            a = x.load([m * BM, k])
            b = w.load([c * BN, k])
            z = tl.dot(a, b.T, z)
        if STATS:
            rows = m * BM + tl.arange(0, BM)
            y = tl.load(targets + rows, mask=rows < n, other=-1) - c * BN
            here = (y >= 0) & (y < BN)
            if tl.max(here.to(tl.int32), 0) > 0:
                columns = tl.arange(0, BN)
                value = tl.sum(tl.where(columns[None, :] == y[:, None], z, 0.0), 1)
                tl.store(at + rows, value, mask=here)
            if c * BN + BN > v:
                columns = c * BN + tl.arange(0, BN)
                z = tl.where((columns < v)[None, :], z, -1e30)
            peak = tl.max(z, 1)
            shift = peak * LOG2E
            place = found + c * n + rows
            stride = tiles_n * n
            if HALVES:
                z0, z1 = halves_of(z, BM, BN)
                e0, mass, spread = sums(z0, shift, EXACT)
                if STORE:
                    out.store([m * BM, c * BN], e0.to(tl.bfloat16))
                e1, mass1, spread1 = sums(z1, shift, EXACT)
                mass += mass1
                spread += spread1
                if STORE:
                    out.store([m * BM, c * BN + BN // 2], e1.to(tl.bfloat16))
            else:
                e, mass, spread = sums(z, shift, EXACT)
                if STORE:
                    out.store([m * BM, c * BN], e.to(tl.bfloat16))
            tl.store(place, peak, mask=rows < n)
            tl.store(place + stride, mass, mask=rows < n)
            tl.store(place + 2 * stride, spread, mask=rows < n)
        else:
            if HALVES:
                z0, z1 = halves_of(z, BM, BN)
                out.store([m * BM, c * BN], z0.to(tl.bfloat16))
                out.store([m * BM, c * BN + BN // 2], z1.to(tl.bfloat16))
            else:
                out.store([m * BM, c * BN], z.to(tl.bfloat16))


def product(
    x,
    w,
    y,
    *,
    bm,
    bn,
    bk,
    group,
    warps,
    stages,
    flatten,
    stats,
    store,
    special=False,
    halves=False,
    exact=False,
):
    n, h = x.shape
    v = len(w)
    xd = TensorDescriptor.from_tensor(x, [bm, bk])
    wd = TensorDescriptor.from_tensor(w, [bn, bk])
    out = torch.empty(n if store else 1, v, dtype=torch.bfloat16, device="cuda")
    found = torch.empty(3, triton.cdiv(v, bn) if stats else 1, n, device="cuda")
    at = torch.full((n,), -torch.inf, device="cuda")
    kernel = product_kernel[(132,)](
        xd,
        wd,
        TensorDescriptor.from_tensor(out, [bm, bn // 2 if halves else bn]),
        y,
        at,
        found,
        n,
        v,
        h,
        BM=bm,
        BN=bn,
        BK=bk,
        GROUP=group,
        PROGRAMS=132,
        STATS=stats,
        STORE=store,
        FLATTEN=flatten,
        SPECIAL=special,
        HALVES=halves,
        EXACT=exact,
        num_warps=warps,
        num_stages=stages,
    )
    return out, found, kernel


@triton.jit
def backward_kernel(
    a,  # descriptor [m, k] or [k, m]
    b,  # descriptor [k, n]
    out,
    m,
    n,
    k_size,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ADD: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        i, j = place_of(tile, tiles_m, tiles_n, GROUP)
        z = tl.zeros((BM, BN), tl.float32)
        for k in range(0, k_size, BK):
            if TRANSPOSED:
                left = a.load([k, i * BM]).T
            else:
                left = a.load([i * BM, k])
            z = tl.dot(left, b.load([k, j * BN]), z)
        z0, z1 = halves_of(z, BM, BN)
        if ADD:
            out.atomic_add([i * BM, j * BN], z0)
            out.atomic_add([i * BM, j * BN + BN // 2], z1)
        else:
            out.store([i * BM, j * BN], z0.to(out.dtype))
            out.store([i * BM, j * BN + BN // 2], z1.to(out.dtype))


def backward(
    a, b, out, *, transposed, add, bm=128, bn=256, bk=64, group=16, stages=3, flatten=True
):
    m, n = out.shape
    k = len(b)
    backward_kernel[(132,)](
        TensorDescriptor.from_tensor(a, [bk, bm] if transposed else [bm, bk]),
        TensorDescriptor.from_tensor(b, [bk, bn]),
        TensorDescriptor.from_tensor(out, [bm, bn // 2]),
        m,
        n,
        k,
        BM=bm,
        BN=bn,
        BK=bk,
        GROUP=group,
        PROGRAMS=132,
        TRANSPOSED=transposed,
        ADD=add,
        FLATTEN=flatten,
        num_warps=8,
        num_stages=stages,
    )
    return out


BASE = {"bm": 128, "bn": 256, "bk": 64, "group": 16, "warps": 8}
CONFIGS = [
    {"stages": 4, "flatten": False},
    {"stages": 4, "flatten": False, "exact": True},
    {"stages": 4, "flatten": False, "halves": True},
    {"stages": 3, "flatten": False, "halves": True},
    {"stages": 4, "flatten": True, "halves": True},
    {"stages": 3, "flatten": True, "halves": True},
    {"stages": 4, "flatten": False, "halves": True, "group": 8},
    {"stages": 4, "flatten": False, "halves": True, "group": 32},
    {"stages": 4, "flatten": False, "halves": True, "group": 64},
    {"stages": 2, "flatten": False, "halves": True, "bk": 128},
    {"stages": 4, "flatten": False, "halves": True, "exact": True},
    {"stages": 4, "flatten": False, "halves": True, "special": True},
    {"stages": 3, "flatten": False, "halves": True, "special": True},
    {"stages": 4, "flatten": False, "bm": 256, "bn": 128},
    {"stages": 4, "flatten": False, "bm": 256, "bn": 128, "halves": True},
]


def main(shape: str) -> None:
    n, h, v = SHAPES[shape]
    record = Record(f"fused_{shape}")
    sets = [trained_looking(n, h, v, s) for s in (0, 1)]
    flop = 2 * n * h * v / 1e9

    def take(label, function, check=None, **more):
        try:
            ms, _ = measure(function, sets, repeats=8)
            wrong = 0.0 if check is None else check(function(sets[0]))
            record.add(of=label, ms=ms, tflops=flop / ms, wrong=wrong, **more)
        except Exception as e:
            record.add(of=label, failed=str(e)[:160], **more)
            torch.cuda.empty_cache()

    def cublas(i: Inputs):
        return [torch.mm(part, i.w.t()) for part in i.x.split(4096)]

    take("spin", cublas)
    take("cublas logits", cublas)
    reference = torch.mm(sets[0].x[:512], sets[0].w.t(), out_dtype=torch.float32)
    exact_lse = reference.logsumexp(1)
    for config in CONFIGS:
        c = BASE | config
        label = " ".join(f"{k}{int(value)}" for k, value in config.items())
        for stats, store in ((True, False), (True, True)):

            def check(result, c=c):
                _, found, kernel = result
                mass = found[1] + 1 if c.get("exact") else found[1]
                if c.get("exact") and c.get("halves"):
                    mass = mass + 1
                lse = (found[0] + mass.log())[:, :512].logsumexp(0)
                print("   regs", kernel.n_regs, "spills", kernel.n_spills, end=" ")
                return float((lse - exact_lse).abs().max())

            take(
                label,
                lambda i, c=c, a=stats, b=store: product(i.x, i.w, i.y, **c, stats=a, store=b),
                check,
                stats=stats,
                store=store,
            )
    for config in CONFIGS[2:6]:
        c = BASE | config
        label = "plain " + " ".join(f"{k}{int(value)}" for k, value in config.items())
        take(label, lambda i, c=c: product(i.x, i.w, i.y, **c, stats=False, store=True))
    take("cublas logits", cublas)

    g = torch.cat([reference.to(torch.bfloat16) * 1e-3] * (n // 512))
    dx = torch.empty(n, h, dtype=torch.bfloat16, device="cuda")
    dw = torch.zeros(v, h, device="cuda")
    take("cublas dX", lambda i: torch.mm(g, i.w, out=dx))
    take("cublas dW bf16", lambda i: torch.mm(g.t(), i.x))
    take(
        "cublas dW add",
        lambda i: torch.ops.aten.addmm.dtype_out(dw, g.t(), i.x, torch.float32, out=dw),
    )
    for flatten in (True, False):
        for group in (8, 16, 32):
            more = {"flatten": flatten, "group": group}
            take(
                f"dX {more}",
                lambda i, m=more: backward(g, i.w, dx, transposed=False, add=False, **m),
            )
            take(
                f"dW store {more}",
                lambda i, m=more: backward(g, i.x, dw, transposed=True, add=False, **m),
            )
            take(
                f"dW add {more}",
                lambda i, m=more: backward(g, i.x, dw, transposed=True, add=True, **m),
            )
    dw.zero_()
    backward(g, sets[0].x, dw, transposed=True, add=True)
    backward(g, sets[0].x, dw, transposed=True, add=True)
    truth = g[:, :64].double().t() @ sets[0].x.double() * 2
    print("dW error", float((dw[:64].double() - truth).norm() / truth.norm()))


if __name__ == "__main__":
    main(sys.argv[1])
