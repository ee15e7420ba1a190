"""Cuts a product into blocks of rows and columns, for the adaptive schedule of products that are
sent after they are computed.

Every chunk is a GEMM of its own, and a GEMM reads its rows of x and its columns of w. Chunks of
whole rows would each read all of w. With few rows, that would be most of the work. So the cut that
reads the fewest elements is chosen. For 8 chunks of 1024 rows and 1024 columns:

    8 x 1: reads 1 x, 8 w     4 x 2: 2 x, 4 w     2 x 4: 4 x, 2 w (equal to 4 x 2; chosen)
"""

from __future__ import annotations

from functools import lru_cache

from weft.plan.order import slices

Block = tuple[int, int, int, int]
"""Row, rows, column, columns of a chunk."""

INTENSITY = 160
"""The smallest rows * columns / (rows + columns) of a chunk, that is, multiplications per element
read. On a CPU, a GEMM above it takes at most 10 % longer than the same work in a larger GEMM."""
TAPERED_INTENSITY = 200
"""The same for tapered cuts. Their ends are cut finer, so the other chunks can be larger."""
FEWEST, MOST = 4, 16

FIRST_SHARE, FIRST_LEAST = 16, 32
"""Growing cuts begin with one of `FIRST_SHARE` parts, but with at least `FIRST_LEAST` rows."""
GROWTH = 0.6
"""How much larger a chunk of a growing cut is than the one before, with one peer; with more peers,
less. If the links take as long as all of compute, they take `world / (world - 1)` times as long as
it takes to compute what they send. As long as chunks grow by less, the next one is always ready."""


@lru_cache(maxsize=256)
def cuts(rows: int, columns: int, depth: int) -> tuple[int, int]:
    """The number of cuts (of rows, of columns) that make `depth` chunks of a matrix."""
    pairs = [(down, depth // down) for down in range(1, depth + 1) if depth % down == 0]
    fit = [(down, across) for down, across in pairs if down <= rows and across <= columns]
    return min(fit or pairs, key=lambda pair: (rows * pair[1] + columns * pair[0], pair[0]))


def cut_blocks(rows: int, columns: int, depth: int, tapered: bool = False) -> list[Block]:
    """The chunks in row order. Tapered: the first chunk is halved, because links are idle until it
    is computed, and the last is halved twice, because nothing can hide its transfer."""
    down, across = cuts(rows, columns, depth)
    made = [(*slab, *part) for slab in slices(rows, down) for part in slices(columns, across)]
    if tapered and len(made) > 1:
        first, *rest, last = made
        *half, end = _halves(last)
        made = [*_halves(first), *rest, *half, *_halves(end)]
    return [block for block in made if block[1] and block[3]]


def _halves(block: Block) -> list[Block]:
    row, high, column, wide = block
    return [(row, high, column + at, size) for at, size in slices(wide, 2)]


def depth_of(rows: int, columns: int, tapered: bool = False) -> int:
    """The default number of chunks: as many as keep each chunk above the smallest intensity."""
    depth, least = FEWEST, TAPERED_INTENSITY if tapered else INTENSITY
    while depth < MOST:
        down, across = cuts(rows, columns, 2 * depth)
        high, wide = rows / down, columns / across
        if high * wide < least * (high + wide):
            break
        depth *= 2
    return depth


def growing_blocks(rows: int, columns: int, world: int) -> list[Block]:
    """Chunks of which each is larger than the one before: links are idle until the first is
    computed, and large GEMMs are faster. They are whole rows, which the network sends without
    copying them first, unless there are few."""
    if 4 * rows < columns:
        return [(0, rows, at, size) for at, size in _growing(columns, world) if rows]
    return [(at, size, 0, columns) for at, size in _growing(rows, world) if columns]


def _growing(total: int, world: int) -> list[tuple[int, int]]:
    parts, at = [], 0
    size = float(max(total / FIRST_SHARE, FIRST_LEAST))
    while at < total:
        part = round(size)
        size *= 1.0 + GROWTH / (world - 1)
        if total - at - part < part:  # a smaller one at the end would be another GEMM
            part = total - at
        parts.append((at, part))
        at += part
    return parts
