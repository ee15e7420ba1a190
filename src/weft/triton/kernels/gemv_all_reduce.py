"""GEMV + all-reduce in one kernel: a block of the product is sent to its owner as soon as it is
made, and the owner sends the sum to everyone."""

from __future__ import annotations

import triton.language as tl

from weft.triton.jit import kernel
from weft.triton.kernels.tiles import blocks_of, tile_product
from weft.triton.language import peer, put, signal, signal_add, wait

PHASES = ("its part of a sum", "its sums")


@kernel
def first_own(block):
    """The first block from `block` on that belongs to this program. Blocks are assigned to programs
    by their number, equally on every rank; the proof in docs/triton.md depends on it."""
    programs = tl.num_programs(0)
    return block + (tl.program_id(0) - block % programs + programs) % programs


@kernel(do_not_specialize=["me", "world", "epoch", "spins"])
def gemv_all_reduce(
    x,  # [batch, K]: this rank's columns of the input
    w,  # [K, N]: this rank's rows of the weight
    y,  # symmetric, [batch, N]: this call's result
    inbox,  # symmetric, [world, batch, N] of float32: what every rank made for the blocks it owns
    made,  # symmetric, [world, blocks]: the call for which the inbox holds a block of a rank
    summed,  # symmetric, [world]: blocks that have arrived from every owner, over all calls
    bases,
    status,
    me,
    world,
    batch,
    N,
    K,
    x_stride,
    w_stride_k,
    w_stride_n,
    epoch,
    spins,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    blocks = blocks_of(N, BLOCK_N)
    rows = tl.arange(0, BLOCK_B)
    # Phase 1: this rank's part of every block, into its owner's inbox; other owners' blocks first,
    # those of the next rank before those of the one after it.
    for step in range(world):
        owner = (me + 1 + step) % world
        there = peer(inbox, owner, bases, me) + tl.cast(me, tl.int64) * batch * N
        for block in range(
            first_own(owner * blocks // world), (owner + 1) * blocks // world, tl.num_programs(0)
        ):
            column = block * BLOCK_N
            part = tile_product(
                x,
                w,
                0,
                column,
                batch,
                N,
                K,
                x_stride,
                w_stride_k,
                w_stride_n,
                BLOCK_B,
                BLOCK_N,
                BLOCK_K,
                PRECISION,
            )
            columns = column + tl.arange(0, BLOCK_N)
            inside = (rows[:, None] < batch) & (columns[None, :] < N)
            tl.store(there + rows[:, None] * N + columns[None, :], part, mask=inside)
            signal(made + me * blocks + block, epoch, owner, bases, me)
    # Phase 2: the sums of this rank's own blocks, in the order of ranks, into everyone's result.
    for block in range(
        first_own(me * blocks // world), (me + 1) * blocks // world, tl.num_programs(0)
    ):
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (rows[:, None] < batch) & (columns[None, :] < N)
        place = rows[:, None] * N + columns[None, :]
        sums = tl.full((BLOCK_B, BLOCK_N), 0.0, tl.float32)
        complete = epoch > 0
        for rank in range(world):
            complete &= wait(made + rank * blocks + block, epoch, spins, status, rank, 0)
            part = inbox + tl.cast(rank, tl.int64) * batch * N + place
            known = inside & (rows[:, None] < tl.where(complete, batch, 0))
            sums += tl.load(part, mask=known, other=0.0)
        if complete:
            for step in range(world):
                reader = (me + 1 + step) % world
                put(y + place, sums.to(y.dtype.element_ty), reader, bases, me, mask=inside)
                signal_add(summed + me, 1, reader, bases, me)
    # Phase 3: the last program waits for the sums of all owners.
    if tl.program_id(0) == tl.num_programs(0) - 1:
        for step in range(world):
            owner = (me + 1 + step) % world
            num_blocks = (owner + 1) * blocks // world - owner * blocks // world
            wait(summed + owner, epoch * num_blocks, spins, status, owner, 1)
