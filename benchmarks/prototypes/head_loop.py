"""The loops of a linear head whose logits products are cuBLAS's."""

from __future__ import annotations

import torch
from setting import Inputs, grpo

from headloss.kernels import triton_backend as kernels
from headloss.kernels.transform import Transform
from headloss.stats import Coefficients, Normalizer, finish

SHAPES = {"wide": (16384, 4096, 128256), "narrow": (16384, 2048, 151936)}
NEEDS = frozenset({"logp", "lse", "entropy"})
PLAIN = Transform()
F32 = torch.float32
mm_to = torch.ops.aten.mm.dtype_out
addmm_to = torch.ops.aten.addmm.dtype_out


def steps(total: int, step: int) -> list[slice]:
    return [slice(a, min(total, a + step)) for a in range(0, total, step)]


def limit(gradient, chunk=4096):
    """The three products with bf16 outputs."""

    def run(i: Inputs):
        z = torch.empty(chunk, len(i.w), dtype=torch.bfloat16, device="cuda")
        dx, dw = torch.empty_like(i.x), torch.empty_like(i.w)
        for rows in steps(len(i.x), chunk):
            torch.mm(i.x[rows], i.w.t(), out=z)
            torch.mm(gradient, i.w, out=dx[rows])
            torch.mm(gradient.t(), i.x[rows], out=dw)
        return dx, dw

    return run


def add_dw(dw, g, x, fresh):
    if fresh:
        mm_to(g.t(), x, F32, out=dw)
    else:
        addmm_to(dw, g.t(), x, F32, out=dw)


def full_width(dtype, chunk, zero_first=False):
    """One pass over full-width logits in `dtype`, the gradient in place in bf16."""

    def run(i: Inputs):
        n, v = len(i.x), len(i.w)
        z = torch.empty(chunk, v, dtype=dtype, device="cuda")
        dx, dw = torch.empty_like(i.x), torch.empty(v, i.x.shape[1], device="cuda")
        if zero_first:
            dw.zero_()
        for at, rows in enumerate(steps(n, chunk)):
            if dtype == F32:
                mm_to(i.x[rows], i.w.t(), F32, out=z)
            else:
                torch.mm(i.x[rows], i.w.t(), out=z)
            part = kernels.partials(z, i.y[rows], 0, PLAIN, NEEDS)
            stats, normalizer = finish(part, v, NEEDS)
            c = grpo(i, rows, stats, v)
            out = kernels.narrowed(z, torch.bfloat16)
            g = kernels.logit_gradient_(z, i.y[rows], 0, PLAIN, normalizer, c, out=out)
            torch.mm(g, i.w, out=dx[rows])
            add_dw(dw, g, i.x[rows], at == 0 and not zero_first)
        return dx, dw

    return run


def fold(i: Inputs, rows, tile, buffer):
    """Sweep the vocabulary for some tokens: float32 tiles, each joined to those before it."""
    running, n = None, rows.stop - rows.start
    for columns in steps(len(i.w), tile):
        z = buffer[: n * (columns.stop - columns.start)].view(n, -1)
        mm_to(i.x[rows], i.w[columns].t(), F32, out=z)
        running = kernels.partials(z, i.y[rows], columns.start, PLAIN, NEEDS, onto=running)
    return running


def sweep(token_tile, tile):
    """Log-prob and entropy of every token, no gradient."""

    def run(i: Inputs):
        buffer = torch.empty(token_tile * tile, device="cuda")
        found = [fold(i, rows, tile, buffer) for rows in steps(len(i.x), token_tile)]
        stats = [finish(f, len(i.w), NEEDS)[0] for f in found]
        return torch.cat([s.logp for s in stats]), torch.cat([s.entropy for s in stats])

    return run


def known_of(i: Inputs):
    parts, v = [], len(i.w)
    buffer = torch.empty(4096 * 8192, device="cuda")
    for rows in steps(len(i.x), 4096):
        stats, normalizer = finish(fold(i, rows, 8192, buffer), v, NEEDS)
        parts.append((*normalizer, *grpo(i, rows, stats, v).tensors().values()))
    peak, log_sum, target, prob = (torch.cat(p) for p in zip(*parts, strict=True))
    return Normalizer(peak, log_sum), Coefficients(target=target, prob=prob)
