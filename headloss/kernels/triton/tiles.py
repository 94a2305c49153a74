"""Loop over the tiles of a product x @ w.T, for kernels with an epilogue per tile.

n tokens, v columns, H hidden width. A fixed number of GPU programs computes all tiles, and reads x
and w through the tensor memory accelerator. The argument `EPILOGUE` is a function that a kernel
calls with each finished tile.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .launch import TileShape
from .versions import Constant, capability

ROWS = 128
WIDTH = 256
DEPTH = 64  # Number of elements of a row of x or w that one step loads.
WARPS = 8
STAGES = 4
# Shared memory of a program in bytes: all stages, and half a tile that is being stored.
SHARED = 226 << 10
BM = Constant(ROWS)
BN = Constant(WIDTH)
BK = Constant(DEPTH)


@triton.jit
def place_of(tile, tiles_m, blocks, GROUP: tl.constexpr = 16):
    """Return the row and the column of a tile; GROUP rows of tiles read the same rows of w one
    after another, from the L2 cache."""
    group = tile // (GROUP * blocks)
    size = min(tiles_m - group * GROUP, GROUP)
    return group * GROUP + tile % size, (tile % (GROUP * blocks)) // size


@triton.jit
def halves(z):
    """Return the left and the right half of a tile's columns: storing a half needs half the shared
    memory."""
    return tl.split(tl.permute(tl.reshape(z, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def biased(z, of, columns, v):
    """Return a tile plus the bias of each column, if there is a bias; columns from v on get no
    bias."""
    if of.restore is not None:
        z *= of.restore
    if of.bias is not None:
        z += tl.load(of.bias + columns, mask=columns < v, other=0.0).to(tl.float32)
    return z


@triton.jit
def each_tile(x, w, out, of, n, v, h, PROGRAMS: tl.constexpr, EPILOGUE: tl.constexpr):
    """Multiply x [n, H] by w.T [H, v] tile by tile, and call `EPILOGUE` on each float32 tile.
    `EPILOGUE` is a function that gets the tile and further inputs `of`, and writes its results to
    `out`. `x`, `w` and `out` are tensor descriptors, for the tensor memory accelerator; `out` may
    be None."""
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
    """Return True if the GPU has a tensor memory accelerator, and enough shared memory for the ring
    buffer of tiles. The shared memory of consumer GPUs is too small for the ring buffer of
    tiles."""
    if capability(device)[0] < 9:
        return False
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= SHARED
