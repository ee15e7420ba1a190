"""Embedding + all-to-all: a pooled row is stored in its owner's result as soon as it is made."""

from __future__ import annotations

import triton.language as tl

from weft.triton.jit import kernel
from weft.triton.kernels.tiles import blocks_of, first_turn
from weft.triton.language import BAD_INDEX, peer, report, signal_add, wait

PHASES = ("its pooled rows",)


@kernel
def largest(values):
    """The largest of a block of whole numbers."""
    return tl.reduce(values, 0, tl.standard._elementwise_max)


@kernel(do_not_specialize=["me", "world", "epoch", "spins"])
def embedding_all_to_all(
    tables,  # [tables]: addresses of this rank's tables
    heights,  # [tables]: rows of each
    widths,  # [tables]: columns of each
    targets,  # [tables]: the first column of each in the result
    indices,  # of all bags of all tables, one bag after another
    offsets,  # [tables * batch + 1]: where each bag begins
    weights,  # like indices; only read if WEIGHTED
    out,  # symmetric: this call's result
    arrived,  # symmetric: pieces that have arrived from every rank, over all calls
    bases,
    firsts,  # [world + 1]: the first bag of every rank
    pieces,  # [world]: pieces that every rank sends here in a call
    status,
    me,
    world,
    num_tables,
    batch,
    out_stride,
    epoch,
    spins,
    MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Phase 1: a piece is a block of one owner's bags of one table. Other ranks' come first, those
    # of the next rank before those of the one after it.
    before = 0
    for step in range(world):
        owner = (me + 1 + step) % world
        first_bag = tl.load(firsts + owner)
        num_bags = (tl.load(firsts + owner + 1) - first_bag).to(tl.int32)
        blocks = blocks_of(num_bags, BLOCK_B)
        there = peer(out, owner, bases, me)
        sent = 0
        for piece in range(first_turn(before), num_tables * blocks, tl.num_programs(0)):
            table = piece // blocks
            rows = piece % blocks * BLOCK_B + tl.arange(0, BLOCK_B)
            live = rows < num_bags
            bags = offsets + tl.cast(table, tl.int64) * batch + first_bag + rows
            begin = tl.load(bags, mask=live, other=0)
            end = tl.load(bags + 1, mask=live, other=0)
            longest = largest(end - begin)
            width = tl.load(widths + table)
            height = tl.load(heights + table)
            source = tl.load(tables + table).to(out.dtype)
            target = there + tl.load(targets + table)
            wrong = tl.full((BLOCK_B,), 0, tl.int32)
            worst = tl.full((BLOCK_B,), -(2**62), tl.int64)
            for column in range(0, width, BLOCK_D):
                columns = column + tl.arange(0, BLOCK_D)
                in_row = columns < width
                sums = tl.full((BLOCK_B, BLOCK_D), 0.0, tl.float32)
                for position in range(longest):
                    at = begin + position
                    inside = at < end
                    index = tl.load(indices + at, mask=inside, other=0).to(tl.int64)
                    sound = (index >= 0) & (index < height)
                    wrong = tl.where(inside & (sound == 0), 1, wrong)
                    worst = tl.where(inside & (sound == 0), index, worst)
                    values = tl.load(
                        source + index[:, None] * width + columns[None, :],
                        mask=(inside & sound)[:, None] & in_row[None, :],
                        other=0.0,
                    ).to(tl.float32)
                    if WEIGHTED:
                        weight = tl.load(weights + at, mask=inside, other=0.0)
                        values *= weight.to(tl.float32)[:, None]
                    sums += values
                if MEAN:
                    sums /= tl.maximum(end - begin, 1).to(tl.float32)[:, None]
                tl.store(
                    target + rows[:, None].to(tl.int64) * out_stride + columns[None, :],
                    sums.to(out.dtype.element_ty),
                    mask=live[:, None] & in_row[None, :],
                )
            if largest(wrong) > 0:
                report(status, BAD_INDEX, me, table, height, largest(worst))
            sent += 1
        if sent > 0:
            signal_add(arrived + me, sent, owner, bases, me)
        # A rank without rows for an owner signals that: the owner's next call but one may then
        # reuse the result (docs/triton.md, "Two results take turns").
        if (num_tables * blocks == 0) & (tl.program_id(0) == 0):
            signal_add(arrived + me, 1, owner, bases, me)
        before += num_tables * blocks
    # Phase 2: the last program sends all of its own pieces, then waits for those of all ranks.
    if tl.program_id(0) == tl.num_programs(0) - 1:
        for step in range(world):
            source_rank = (me + 1 + step) % world
            expected = tl.load(pieces + source_rank) * epoch
            wait(arrived + source_rank, expected, spins, status, source_rank, 0)
