"""All-gather + GEMM in one launch: tiles wait for the chunk that they read, which an engine
moves."""

from __future__ import annotations

import triton.language as tl

from weft.triton.jit import kernel
from weft.triton.kernels.tiles import blocks_of, first_turn, store_tile, tile_product
from weft.triton.language import wait

PHASES = ("its chunks of x",)


@kernel(do_not_specialize=["me", "shard_first", "num_chunks", "epoch", "spins"])
def all_gather_gemm(
    shard,  # this rank's rows of x
    gathered,  # [M, K]: engines copy the rows of all others here
    w,
    y,  # [M, N]
    chunks,  # [chunks, 4], in the expected order: first row, rows, rank, counter
    counters,  # engines set them to the epoch when a chunk has arrived
    status,
    num_chunks,
    me,
    shard_first,  # the row of x that this rank's shard begins with
    N,
    K,
    shard_stride,
    gathered_stride,
    w_stride_k,
    w_stride_n,
    counter_stride,
    epoch,
    spins,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    across = blocks_of(N, BLOCK_N)
    before = 0
    for chunk in range(num_chunks):
        first_row = tl.load(chunks + chunk * 4)
        num_rows = tl.load(chunks + chunk * 4 + 1)
        rank = tl.load(chunks + chunk * 4 + 2)
        counter = tl.load(chunks + chunk * 4 + 3)
        down = blocks_of(num_rows, BLOCK_M)
        start = first_turn(before)
        mine = start < down * across
        there = mine
        if mine & (rank != me):
            there = wait(counters + counter * counter_stride, epoch, spins, status, rank, 0)
        # This rank's own rows are read where they are, the others where the engines put them.
        x = tl.where(rank == me, shard, gathered)
        x_stride = tl.where(rank == me, shard_stride, gathered_stride)
        x_first = tl.where(rank == me, first_row - shard_first, first_row)
        # A chunk that did not arrive has no tiles.
        num_tiles = tl.where(there, down * across, 0)
        for tile in range(start, num_tiles, tl.num_programs(0)):
            row = tile % down * BLOCK_M
            column = tile // down * BLOCK_N
            sums = tile_product(
                x,
                w,
                x_first + row,
                column,
                x_first + num_rows,
                N,
                K,
                x_stride,
                w_stride_k,
                w_stride_n,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                PRECISION,
            )
            store_tile(y, sums, first_row, row, column, num_rows, N, BLOCK_M, BLOCK_N)
        before += down * across
