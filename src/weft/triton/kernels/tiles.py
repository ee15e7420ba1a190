"""Shared by the kernels: the assignment of work to programs, and the product of a tile."""

from __future__ import annotations

import triton.language as tl

from weft.triton.jit import kernel
from weft.triton.language import dot


@kernel
def blocks_of(length, block: tl.constexpr):
    """The number of blocks that cover a length."""
    return (length + block - 1) // block


@kernel
def first_turn(before):
    """The first of this program's pieces in a run of pieces, after `before` earlier ones. Over all
    runs, pieces are assigned to programs in turn."""
    programs = tl.num_programs(0)
    return (tl.program_id(0) - before % programs + programs) % programs


@kernel
def tile_product(
    x,
    w,
    row,
    column,
    rows_end,
    N,
    K,
    x_stride,
    w_stride_k,
    w_stride_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x[row : row + BLOCK_M] @ w[:, column : column + BLOCK_N] in float32. Rows from `rows_end` on
    and columns from N on are zero, as are the indices from K on."""
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    x_tile = x + rows[:, None].to(tl.int64) * x_stride + inner[None, :]
    w_tile = w + inner[:, None].to(tl.int64) * w_stride_k + columns[None, :] * w_stride_n
    sums = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    for k in range(0, K, BLOCK_K):
        left = K - k
        in_x = (rows[:, None] < rows_end) & (inner[None, :] < left)
        in_w = (inner[:, None] < left) & (columns[None, :] < N)
        sums = dot(
            tl.load(x_tile, mask=in_x, other=0.0),
            tl.load(w_tile, mask=in_w, other=0.0),
            sums,
            PRECISION,
        )
        x_tile += BLOCK_K
        w_tile += BLOCK_K * w_stride_k
    return sums


@kernel
def store_tile(
    y,
    sums,
    first_row,
    row,
    column,
    num_rows,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Stores a tile at `row` and `column` of the `num_rows` rows of y that begin at `first_row`."""
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    target = y + (first_row + rows[:, None]).to(tl.int64) * N + columns[None, :]
    inside = (rows[:, None] < num_rows) & (columns[None, :] < N)
    tl.store(target, sums.to(y.dtype.element_ty), mask=inside)
