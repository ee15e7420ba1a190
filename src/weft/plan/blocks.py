"""How adaptive cuts a product that is made before it is sent: into blocks of rows and columns.

Every chunk is a GEMM of its own, and a GEMM reads its rows of x and its columns of w. Chunks of
whole rows would each read all of w, which for few rows is most of the work; so the cut is the one
that reads least. For 8 chunks of 1024 rows and 1024 columns:

    8 x 1: reads 1 x, 8 w         4 x 2: 2 x, 4 w         2 x 4: 4 x, 2 w (as much, and taken)
"""

from __future__ import annotations

from functools import lru_cache

from weft.plan.order import slices

Cell = tuple[int, int, int, int]
"""Row, rows, column, columns of a chunk."""

INTENSITY = 160
"""The least rows * columns / (rows + columns) of a chunk: multiplications per element that its GEMM
reads. On a processor a GEMM above it takes at most a tenth longer than as part of a whole."""
TAPERED_INTENSITY = 200
"""The same where the ends are cut finer anyway, so that the others need not be small."""
FEWEST, MOST = 4, 16


@lru_cache(maxsize=256)
def cuts(rows: int, columns: int, depth: int) -> tuple[int, int]:
    """Into how many (slabs of rows, slabs of columns) a matrix is cut for `depth` chunks."""
    pairs = [(down, depth // down) for down in range(1, depth + 1) if depth % down == 0]
    fit = [(down, across) for down, across in pairs if down <= rows and across <= columns]
    return min(fit or pairs, key=lambda pair: (rows * pair[1] + columns * pair[0], pair[0]))


def cells(rows: int, columns: int, depth: int, tapered: bool = False) -> list[Cell]:
    """The chunks, those of the first rows first. Tapered: the first is halved, for links stand
    still until it is made, and the last halved twice, for its way has nothing to hide behind."""
    down, across = cuts(rows, columns, depth)
    made = [(*slab, *part) for slab in slices(rows, down) for part in slices(columns, across)]
    if tapered and len(made) > 1:
        first, *rest, last = made
        *half, end = _halves(last)
        made = [*_halves(first), *rest, *half, *_halves(end)]
    return [cell for cell in made if cell[1] and cell[3]]


def _halves(cell: Cell) -> list[Cell]:
    row, high, column, wide = cell
    return [(row, high, column + at, size) for at, size in slices(wide, 2)]


def depth_of(rows: int, columns: int, tapered: bool = False) -> int:
    """The number of chunks where the schedule leaves it open: as many as keep their intensity."""
    depth, least = FEWEST, TAPERED_INTENSITY if tapered else INTENSITY
    while depth < MOST:
        down, across = cuts(rows, columns, 2 * depth)
        high, wide = rows / down, columns / across
        if high * wide < least * (high + wide):
            break
        depth *= 2
    return depth
