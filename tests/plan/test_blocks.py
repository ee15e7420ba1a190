"""The blocks into which adaptive cuts products, and where they are cut finer."""

from __future__ import annotations

import pytest

from weft.operation import find
from weft.plan import network
from weft.plan.blocks import SMALLEST, Block, Taper, cut_blocks, depth_of, growing_blocks
from weft.plan.tasks import Copy
from weft.schedule import Schedule

TAPERS: tuple[Taper, ...] = ("none", "opening", "closing")
SIZES = (
    (1024, 1024),
    (2048, 64),
    (64, 4096),
    (509, 331),
    (1, 1),
    (1, 50000),
    (3, 2),
    (0, 8),
    (8, 0),
)


def area(block: Block) -> int:
    return block[1] * block[3]


@pytest.mark.parametrize("taper", TAPERS)
@pytest.mark.parametrize("size", SIZES)
def test_blocks_cover_the_product_once(size: tuple[int, int], taper: Taper) -> None:
    rows, columns = size
    for depth in (1, 2, 3, 8, 16, depth_of(rows, columns, taper)):
        seen = [[0] * columns for _ in range(rows)] if rows * columns < 10_000 else None
        blocks = cut_blocks(rows, columns, depth, taper)
        assert sum(map(area, blocks)) == rows * columns
        for row, high, column, wide in blocks:
            assert row + high <= rows
            assert column + wide <= columns
            if seen is not None:
                for line in seen[row : row + high]:
                    line[column : column + wide] = [n + 1 for n in line[column : column + wide]]
        assert seen is None or all(n == 1 for line in seen for n in line)


def test_an_opening_starts_small_and_at_most_doubles() -> None:
    blocks = cut_blocks(1024, 1024, 4, "opening")
    areas = list(map(area, blocks))
    assert areas[0] == 1024 * 1024 // 32
    # While a link sends a chunk, compute makes at least as much again for each of two ranks.
    assert all(later <= sum(areas[:at]) * 2 for at, later in enumerate(areas) if at)


def test_a_closing_never_grows() -> None:
    areas = [area(block) for block in cut_blocks(1024, 1024, 4, "closing")]
    assert areas == [1024 * 1024 // part for part in (4, 4, 8, 8, 16, 16, 16, 16)]


@pytest.mark.parametrize("taper", TAPERS)
def test_small_products_are_not_cut_finer(taper: Taper) -> None:
    assert cut_blocks(64, 64, 4, taper) == cut_blocks(64, 64, 4)
    assert min(map(area, cut_blocks(512, 256, 4, taper))) >= SMALLEST
    assert len(cut_blocks(4096, 4096, 1, taper)) == 1


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("size", SIZES)
def test_growing_blocks_follow_each_other_and_grow(size: tuple[int, int], world: int) -> None:
    rows, columns = size
    blocks = growing_blocks(rows, columns, world)
    assert sum(map(area, blocks)) == rows * columns
    assert all(map(area, blocks))
    assert list(map(area, blocks)) == sorted(map(area, blocks))
    whole = {(column, wide) for _, _, column, wide in blocks} <= {(0, columns)}
    assert whole or {(row, high) for row, high, _, _ in blocks} <= {(0, rows)}
    ends = [row + high if whole else column + wide for row, high, column, wide in blocks]
    begins = [row if whole else column for row, _, column, _ in blocks]
    assert begins == [0, *ends][: len(begins)]


def test_between_machines_products_leave_as_whole_rows() -> None:
    """The network would have to copy parts of rows before it sends them."""
    for name in ("matmul_reduce_scatter", "matmul_all_to_all"):
        plan = network.lower(find(name).of(2048, 1024, 64, 2), Schedule.parse("adaptive"), (0, 1))
        copies = [task for task in plan.tasks if isinstance(task, Copy) and task.rank == 0]
        assert len(copies) > 3
        assert {copy.source.columns for copy in copies} == {1024}
        assert copies[0].source.rows == 64
