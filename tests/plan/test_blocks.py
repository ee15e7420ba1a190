"""The blocks into which adaptive cuts products, and where they are cut finer."""

from __future__ import annotations

import pytest

from weft.plan.blocks import SMALLEST, Block, Taper, cut_blocks, depth_of

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
