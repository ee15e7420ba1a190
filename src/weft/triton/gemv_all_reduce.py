"""`GemvAllReduce`: the row-parallel linear layer of decoding, in one kernel."""

from __future__ import annotations

from typing import Any

import torch

from weft.errors import Unsupported
from weft.triton.kernels import gemv_all_reduce as device
from weft.triton.resident_launch import (
    HOST_PROGRAMS,
    KernelCalls,
    Tiles,
    check_input,
    check_sizes,
    rows_contiguous,
)
from weft.triton.space import Space, aligned

MOST_ROWS = 128
"""For more rows, a GEMM that is also split over rows is faster."""


class GemvAllReduce:
    """The sum of x @ w over all ranks, for a few rows of x. Equals

        y = x @ w
        dist.all_reduce(y)

    with sums in float32, in the order of ranks, rounded once. K may differ between ranks. The
    result is in this rank's symmetric memory and is overwritten by the next call but one; use
    `clone()` to keep it.
    """

    def __init__(
        self,
        space: Space,
        batch: int,
        columns: int,
        dtype: torch.dtype,
        *,
        tiles: Tiles | None = None,
        grid: int | None = None,
    ) -> None:
        check_sizes(dtype, batch=batch, columns=columns)
        if batch > MOST_ROWS:
            raise Unsupported(f"x has {batch} rows; this kernel is for up to {MOST_ROWS}")
        self.space, self.batch, self.columns, self.dtype = space, batch, columns, dtype
        self.tiles = tiles or (Tiles.of(space, dtype) if space.device.type == "cpu" else GPU_TILES)
        same = (
            ("batch", batch),
            ("columns", columns),
            ("dtype", str(dtype)),
            ("tiles", str(self.tiles)),
        )
        blocks = -(-columns // self.tiles.n)
        world = space.world
        sizes = [
            *[batch * columns * dtype.itemsize] * 2,
            world * batch * columns * 4,
            world * blocks * 8,
            world * 8,
        ]
        # All ranks must have the same grid, because a block belongs to the same program everywhere.
        if grid is None and space.device.type == "cpu":
            grid = HOST_PROGRAMS
        self._calls = KernelCalls(
            device.gemv_all_reduce,
            device.PHASES,
            space,
            same,
            size=sum(map(aligned, sizes)),
            grid=grid,
        )
        region = self._calls.region
        self._results = [region.carve((batch, columns), dtype) for _ in range(2)]
        self._inbox = region.carve((world, batch, columns), torch.float32)
        self._made = region.carve((world, blocks), torch.int64)
        self._summed = region.carve((world,), torch.int64)

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x: [batch, K], w: [K, columns]."""
        turn = self._calls.turn

        def prepare() -> dict[str, Any]:
            check_input(self.space, "x", x, self.dtype, (self.batch, None))
            check_input(self.space, "w", w, self.dtype, (x.shape[1], self.columns))
            x_rows = rows_contiguous(x)
            return {
                "x": x_rows,
                "w": w,
                "y": self._results[turn],
                "inbox": self._inbox,
                "made": self._made,
                "summed": self._summed,
                "bases": self._calls.region.bases,
                "me": self.space.rank,
                "world": self.space.world,
                "batch": self.batch,
                "N": self.columns,
                "K": x.shape[1],
                "x_stride": x_rows.stride(0),
                "w_stride_k": w.stride(0),
                "w_stride_n": w.stride(1),
                "epoch": self._calls.done + 1,
                "BLOCK_B": max(16, _power_of_two(self.batch)),
                "BLOCK_N": self.tiles.n,
                "BLOCK_K": self.tiles.k,
                "PRECISION": "ieee",
            }

        self._calls.run(prepare, options=self.tiles.options)
        return self._results[turn]

    def check(self) -> None:
        """Raises the error of the calls so far, if there is one. On a GPU this waits for them."""
        self._calls.check()


GPU_TILES = Tiles(16, 32, 64, 4, 2)
"""Narrow blocks of N, so that all compute units read weights, and few registers, so that each unit
holds several programs that read at once."""


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below a number."""
    return 1 << max(number - 1, 0).bit_length()
