"""All-gather + GEMM in one launch whose programs take tiles of whatever has arrived.

`all_gather_gemm` waits for chunks in the order in which they are expected. Here a program that
finds a chunk that is not there looks at the next one. Tiles are claimed with a counter per chunk,
and a tile sums its whole K in one order, so results do not depend on who computes it, or when.
"""

from __future__ import annotations

import triton.language as tl

from weft.triton.jit import kernel
from weft.triton.kernels.tiles import blocks_of, store_tile, tile_product
from weft.triton.language import WAITED, pause, report

PHASES = ("a chunk of x",)


@kernel(do_not_specialize=["me", "shard_first", "num_chunks", "epoch", "spins"])
def all_gather_gemm_claim(
    shard,  # this rank's rows of x
    gathered,  # [M, K]: engines copy the rows of all others here
    w,
    y,  # [M, N]
    chunks,  # [chunks, 4], in the expected order: first row, rows, rank, counter
    counters,  # engines set them to the epoch when a chunk has arrived
    claims,  # tiles of each chunk that are taken; 0 before the launch
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
    chunk = 0
    finished = 0  # chunks in a row of which no tile is left; all of them: the end
    idle = 0  # chunks in a row of which none could be taken
    missing = me  # the rank of the last chunk that was not there
    left = spins
    while (finished < num_chunks) & (left > 0):
        first_row = tl.load(chunks + chunk * 4)
        num_rows = tl.load(chunks + chunk * 4 + 1)
        rank = tl.load(chunks + chunk * 4 + 2)
        counter = tl.load(chunks + chunk * 4 + 3)
        down = blocks_of(num_rows, BLOCK_M)
        num_tiles = down * across
        there = rank == me
        if rank != me:
            arrived = tl.atomic_add(
                counters + counter * counter_stride, 0, sem="acquire", scope="sys"
            )
            there = arrived >= epoch
        tile = num_tiles
        if there & (tl.load(claims + chunk, volatile=True) < num_tiles):
            tile = tl.atomic_add(claims + chunk, 1, sem="relaxed", scope="gpu")
        if tile < num_tiles:
            # This rank's own rows are read where they are, the others where engines put them.
            x = tl.where(rank == me, shard, gathered)
            x_stride = tl.where(rank == me, shard_stride, gathered_stride)
            x_first = tl.where(rank == me, first_row - shard_first, first_row)
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
            finished = 0
            idle = 0
        else:
            finished = tl.where(there, finished + 1, 0)
            missing = tl.where(there, missing, rank)
            idle += 1
            chunk = (chunk + 1) % num_chunks
            if idle >= num_chunks:
                idle = 0
                if finished < num_chunks:
                    left = tl.where(tl.load(status, volatile=True) == 0, pause(left), 0)
    if finished < num_chunks:
        report(status, WAITED, missing, 0, epoch, finished)
