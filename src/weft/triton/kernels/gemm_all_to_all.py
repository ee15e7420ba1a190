"""GEMM + all-to-all: a tile is stored in its owner's result as soon as it is made."""

from __future__ import annotations

import triton.language as tl

from weft.triton.jit import kernel
from weft.triton.kernels.tiles import blocks_of, first_turn, store_tile, tile_product
from weft.triton.language import peer, signal_add, wait

PHASES = ("its tiles of the product",)


@kernel(do_not_specialize=["me", "world", "spins"])
def gemm_all_to_all(
    x,  # this rank's rows, in the order of the ranks they go to
    w,
    y,  # symmetric: this call's result
    arrived,  # symmetric: tiles that have arrived from every rank, over all calls
    bases,
    routes,  # [world, 4]: first row and rows to each rank, where they go there, rows from it
    expected,  # [world]: tiles that all calls so far must have sent; only the last program uses it
    status,
    me,
    world,
    N,
    K,
    x_stride,
    w_stride_k,
    w_stride_n,
    spins,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    across = blocks_of(N, BLOCK_N)
    # Phase 1: tiles of other ranks first, those of the next rank before those of the one after it,
    # so that links work from the start and no two ranks fill the same one.
    before = 0
    for step in range(world):
        owner = (me + 1 + step) % world
        first_row = tl.load(routes + owner * 4)
        num_rows = tl.load(routes + owner * 4 + 1)
        target_row = tl.load(routes + owner * 4 + 2)
        down = blocks_of(num_rows, BLOCK_M)
        there = peer(y, owner, bases, me)
        sent = 0
        for tile in range(first_turn(before), down * across, tl.num_programs(0)):
            # Down first: the rows for one owner are few, and all of them pass one block of w.
            row = tile % down * BLOCK_M
            column = tile // down * BLOCK_N
            sums = tile_product(
                x,
                w,
                first_row + row,
                column,
                first_row + num_rows,
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
            store_tile(there, sums, target_row, row, column, num_rows, N, BLOCK_M, BLOCK_N)
            sent += 1
        if sent > 0:
            signal_add(arrived + me, sent, owner, bases, me)
        # A rank without rows for an owner signals that: the owner's next call but one may then
        # reuse the result (docs/triton.md, "Two results take turns").
        if (down * across == 0) & (tl.program_id(0) == 0):
            signal_add(arrived + me, 1, owner, bases, me)
        before += down * across
    # Phase 2: the last program sends all of its own tiles, then waits for those of all ranks.
    if tl.program_id(0) == tl.num_programs(0) - 1:
        for step in range(world):
            source = (me + 1 + step) % world
            tiles = blocks_of(tl.load(routes + source * 4 + 3), BLOCK_M) * across
            target = tl.load(expected + source) + tl.maximum(tiles, 1)
            wait(arrived + source, target, spins, status, source, 0)
            tl.store(expected + source, target)
