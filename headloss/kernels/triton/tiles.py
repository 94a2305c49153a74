"""The loop over tiles of a product x @ w.T, for kernels that end each tile in an act of their own.

n tokens, v columns, H hidden width. A fixed set of programs reads through the tensor memory
accelerator; what is done with a tile is an `EPILOGUE`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .launch import TileShape
from .versions import capability

ROWS = 128
WIDTH = 256
DEPTH = 64  # a tile, and the slice of H that is in flight
WARPS = 8
STAGES = 4
SHARED = 226 << 10  # bytes that a program takes: the stages, and half a tile on its way out
BM = tl.constexpr(ROWS)
BN = tl.constexpr(WIDTH)
BK = tl.constexpr(DEPTH)


@triton.jit
def place_of(tile, tiles_m, blocks, GROUP: tl.constexpr = 16):
    """Row and column of a tile; GROUP rows share one of w while it is in the L2."""
    group = tile // (GROUP * blocks)
    size = min(tiles_m - group * GROUP, GROUP)
    return group * GROUP + tile % size, (tile % (GROUP * blocks)) // size


@triton.jit
def halves(z):
    """The left and the right half of a tile's columns, which take half the shared memory on their
    way out."""
    return tl.split(tl.permute(tl.reshape(z, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def biased(z, of, columns, v):
    """A tile with the bias of its columns, where there is one; 0 beyond the last."""
    if of.restore is not None:
        z *= of.restore
    if of.bias is not None:
        z += tl.load(of.bias + columns, mask=columns < v, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit
def each_tile(x, w, out, of, n, v, h, PROGRAMS: tl.constexpr, EPILOGUE: tl.constexpr):
    """x [n, H] and w [v, H] are descriptors; so is `out`, or None, which like `of` is the
    epilogue's own."""
    tiles_m = tl.cdiv(n, BM)
    blocks = tl.cdiv(v, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * blocks, PROGRAMS):
        m, block = place_of(tile, tiles_m, blocks)
        z = tl.zeros((BM, BN), tl.float32)
        for k in range(0, h, BK):
            z = tl.dot(x.load([m * BM, k]), w.load([block * BN, k]).T, z)
        EPILOGUE(z, m, block, out, of, n, v)


LOADED = {"x": TileShape((ROWS, DEPTH)), "w": TileShape((WIDTH, DEPTH))}
STORED = TileShape((ROWS, WIDTH // 2))
OPTIONS = {"num_warps": WARPS, "num_stages": STAGES}


@functools.cache
def has_accelerator(device: torch.device) -> bool:
    """And the shared memory for the tiles in flight, which consumer cards have not."""
    if capability(device)[0] < 9:
        return False
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= SHARED
