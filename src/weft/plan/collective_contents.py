"""What every rank must hold after a collective by copy engines (`command_variants.py`)."""

from __future__ import annotations

from itertools import pairwise

from weft.errors import InvalidPlan
from weft.operation import starts
from weft.plan.collective import Collective
from weft.plan.contents import Contents, Data


def check_collective(operation: Collective, contents: Contents, pulled: bool) -> None:
    """Raises `InvalidPlan` unless every rank holds its result. pulled: whether the inputs are in
    buffers of their own (`x`), or in place of the result (`y`)."""
    world, sizes, root = operation.world, operation.sizes, operation.root
    begin, total = starts(sizes), sum(sizes)
    for r in range(world):
        if operation.kind == "all_gather":
            for p in range(world):
                source = ((p, "x"), 0) if pulled else ((p, "y"), begin[p])
                _holds(contents, r, begin[p], sizes[p], [source])
        elif operation.kind == "broadcast":
            _holds(contents, r, 0, total, [((root, "x" if pulled else "y"), 0)])
        elif operation.kind == "gather":
            for p in range(world if r == root else 0):
                _holds(contents, r, begin[p], sizes[p], [((p, "x"), 0)])
        elif operation.kind == "scatter":
            _holds(contents, r, 0, sizes[r], [((root, "x"), begin[r])])
        elif operation.kind == "reduce_scatter":
            _holds(contents, r, 0, sizes[r], [((p, "x"), begin[r]) for p in range(world)])
        elif operation.kind == "all_reduce":
            _holds(contents, r, 0, total, [((p, "x"), 0) for p in range(world)])
        else:
            _check_exchanged(operation, contents, r)


def _check_exchanged(operation: Collective, contents: Contents, rank: int) -> None:
    world = operation.world
    sent = [operation.sent(source) for source in range(world)]
    got = [sent[source][rank] for source in range(world)]
    pieces = contents.of(rank, "y")
    named = pieces[0].value.buffer[1] if pieces and isinstance(pieces[0].value, Data) else "x"
    for p in range(world):
        wanted = [((p, named), starts(sent[p])[rank])]
        _holds(contents, rank, starts(got)[p], got[p], wanted)


def _holds(
    contents: Contents, rank: int, row: int, rows: int, wanted: list[tuple[tuple[int, str], int]]
) -> None:
    """Raises unless rows of a rank's result are the sum of rows of these inputs, and of nothing
    else."""
    pieces = [
        piece
        for piece in contents.of(rank, "y")
        if piece.row < row + rows and row < piece.row + piece.rows
    ]
    edges = {row, row + rows}
    for piece in pieces:
        edges |= {max(row, piece.row), min(row + rows, piece.row + piece.rows)}
    cuts = sorted(edges)
    for top, bottom in pairwise(cuts):  # inside, nothing begins or ends
        found = []
        for piece in pieces:
            if piece.row <= top and bottom <= piece.row + piece.rows:
                if not isinstance(piece.value, Data):
                    raise InvalidPlan(f"rank {rank} has a product where a collective only adds")
                found.append((piece.value.buffer, piece.value.row + top - piece.row))
        expected = sorted((buffer, first + top - row) for buffer, first in wanted)
        if sorted(found) != expected:
            raise InvalidPlan(
                f"rows {top}:{bottom} of rank {rank}'s result hold {found}, not {expected}"
            )
