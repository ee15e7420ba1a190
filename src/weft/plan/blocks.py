"""Cuts a product into blocks of rows and columns, for the adaptive schedule of products that are
sent after they are computed.

Every chunk is a GEMM of its own, and a GEMM reads its rows of x and its columns of w. Chunks of
whole rows would each read all of w. With few rows, that would be most of the work. So the cut that
reads the fewest elements is chosen. For 8 chunks of 1024 rows and 1024 columns:

    8 x 1: reads 1 x, 8 w     4 x 2: 2 x, 4 w     2 x 4: 4 x, 2 w (equal to 4 x 2; chosen)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from weft.plan.order import slices

Block = tuple[int, int, int, int]
"""Row, rows, column, columns of a chunk."""

INTENSITY = 160
"""The smallest rows * columns / (rows + columns) of a chunk, that is, multiplications per element
read. On a CPU, a GEMM above it takes at most 10 % longer than the same work in a larger GEMM."""
OPENING_INTENSITY = 200
"""The same for cuts whose first chunk is cut finer: the others can be larger."""
FEWEST, MOST = 4, 16
SMALLEST = 8192
"""The smallest rows * columns of a half. A smaller chunk takes longer to hand over than to make."""

Taper = Literal["none", "opening", "closing"]
"""Which chunks are cut finer. Links are idle until the first chunk is computed, and nothing hides
the transfer of the last one.

opening: the first chunk is halved three times. For products that are sent once: a rank computes its
own rows last, so the last transfers are hidden, and links catch up with chunks that grow.

closing: the second half of the chunks is halved, and the last one twice. For sums that are sent,
too: links then have as much work as compute until the end, and lag behind it by the largest chunk
so far. They catch up only as far as small chunks take longer to compute than to send, so chunks
shrink.
"""

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


def cut_blocks(rows: int, columns: int, depth: int, taper: Taper = "none") -> list[Block]:
    """The chunks in row order."""
    down, across = cuts(rows, columns, depth)
    made = [(*slab, *part) for slab in slices(rows, down) for part in slices(columns, across)]
    if len(made) > 1 and taper == "opening":
        made = [*_opened(made[0], 3), *made[1:]]
    elif len(made) > 1 and taper == "closing":
        whole, rest, last = made[: len(made) // 2], made[len(made) // 2 : -1], made[-1:]
        made = [*whole, *_finer(rest), *_finer(_finer(last))]
    return [block for block in made if block[1] and block[3]]


def _opened(block: Block, times: int) -> list[Block]:
    """The block, halved so many times at its beginning."""
    first, *rest = _halves(block)
    return [*(_opened(first, times - 1) if times > 1 else [first]), *rest]


def _finer(blocks: Sequence[Block]) -> list[Block]:
    return [half for block in blocks for half in _halves(block)]


def _halves(block: Block) -> list[Block]:
    """The two halves of the longer side, or the block itself if they would be too small."""
    row, high, column, wide = block
    if high * wide < 2 * SMALLEST:
        return [block]
    if high > wide:
        return [(row + at, size, column, wide) for at, size in slices(high, 2)]
    return [(row, high, column + at, size) for at, size in slices(wide, 2)]


def depth_of(rows: int, columns: int, taper: Taper = "none") -> int:
    """The default number of chunks: as many as keep each chunk above the smallest intensity."""
    depth, least = FEWEST, OPENING_INTENSITY if taper == "opening" else INTENSITY
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
