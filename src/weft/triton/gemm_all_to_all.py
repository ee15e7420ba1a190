"""`GemmAllToAll`: the combine of a mixture of experts, in one kernel."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from weft.errors import Unsupported
from weft.triton.kernels import gemm_all_to_all as device
from weft.triton.resident_launch import (
    KernelCalls,
    Tiles,
    check_input,
    check_sizes,
    rows_contiguous,
)
from weft.triton.space import Space, aligned

Splits = Sequence[Sequence[int]]


class GemmAllToAll:
    """Sends the rows of x @ w to the ranks that own them, each tile as soon as it is made. Equals

        received = [torch.empty(splits[r][rank], N) for r in range(world)]
        dist.all_to_all(received, list((x @ w).split(splits[rank])))
        y = torch.cat(received)

    rows: the most rows that any rank receives in a call. The result is in this rank's symmetric
    memory and is overwritten by the next call but one; use `clone()` to keep it.
    """

    def __init__(
        self,
        space: Space,
        rows: int,
        columns: int,
        inner: int,
        dtype: torch.dtype,
        *,
        tiles: Tiles | None = None,
        grid: int | None = None,
    ) -> None:
        check_sizes(dtype, rows=rows, columns=columns, inner=inner)
        self.space, self.rows, self.columns, self.inner = space, rows, columns, inner
        self.dtype, self.tiles = dtype, tiles or Tiles.of(space, dtype)
        same = (
            ("rows", rows),
            ("columns", columns),
            ("inner", inner),
            ("dtype", str(dtype)),
            ("tiles", str(self.tiles)),
        )
        result = aligned(rows * columns * dtype.itemsize)
        size = 2 * result + aligned(8 * space.world)
        self._calls = KernelCalls(
            device.gemm_all_to_all, device.PHASES, space, same, size=size, grid=grid
        )
        region = self._calls.region
        self._results = [region.carve((rows, columns), dtype) for _ in range(2)]
        self._arrived = region.carve((space.world,), torch.int64)
        self._expected = torch.zeros(space.world, dtype=torch.int64, device=space.device)

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, splits: Splits | None = None
    ) -> torch.Tensor:
        """splits[s][d]: the number of rows that rank s sends to rank d; equal on every rank.
        Without it, x has the same number of rows on every rank, and they are split evenly."""
        if splits is None:
            splits = [_even(len(x), self.space.world)] * self.space.world
        world, me = self.space.world, self.space.rank
        turn = self._calls.turn

        def prepare() -> dict[str, Any]:
            num_rows, received = self._check_splits(splits)
            check_input(self.space, "x", x, self.dtype, (num_rows, self.inner))
            check_input(self.space, "w", w, self.dtype, (self.inner, self.columns))
            if received > self.rows:
                raise Unsupported(
                    f"rank {me} would receive {received} rows, but was made for up to {self.rows}"
                )
            x_rows = rows_contiguous(x)
            return {
                "x": x_rows,
                "w": w,
                "y": self._results[turn],
                "arrived": self._arrived,
                "bases": self._calls.region.bases,
                "routes": self._routes(splits),
                "expected": self._expected,
                "me": me,
                "world": world,
                "N": self.columns,
                "K": self.inner,
                "x_stride": x_rows.stride(0),
                "w_stride_k": w.stride(0),
                "w_stride_n": w.stride(1),
                "BLOCK_M": self.tiles.m,
                "BLOCK_N": self.tiles.n,
                "BLOCK_K": self.tiles.k,
                "PRECISION": "ieee",
            }

        self._calls.run(prepare, (("splits", _in_header(splits)),), options=self.tiles.options)
        return self._results[turn][: sum(row[me] for row in splits)]

    def check(self) -> None:
        """Raises the error of the calls so far, if there is one. On a GPU this waits for them."""
        self._calls.check()

    def _routes(self, splits: Splits) -> torch.Tensor:
        """For every rank: the first of this rank's rows for it, their number, their first row in
        its result, and the number of its rows for this rank."""
        world, me = self.space.world, self.space.rank
        routes = [
            [
                sum(splits[me][:rank]),
                splits[me][rank],
                sum(splits[source][rank] for source in range(me)),
                splits[rank][me],
            ]
            for rank in range(world)
        ]
        return torch.tensor(routes, dtype=torch.int32, device=self.space.device)

    def _check_splits(self, splits: Splits) -> tuple[int, int]:
        """The rows that this rank sends and receives."""
        world, me = self.space.world, self.space.rank
        if len(splits) != world or any(len(row) != world for row in splits):
            raise Unsupported(f"splits must be {world} lists of {world} numbers of rows")
        if any(count < 0 for row in splits for count in row):
            raise Unsupported("splits must not be negative")
        return sum(splits[me]), sum(row[me] for row in splits)


def _even(rows: int, world: int) -> list[int]:
    """Row counts as by `tensor_split`."""
    return [rows // world + (rank < rows % world) for rank in range(world)]


def _in_header(splits: Splits) -> object:
    """The splits, or a hash of them, so that they fit into a header."""
    rows = [list(map(int, row)) for row in splits]
    if len(rows) <= 8:
        return rows
    return hashlib.blake2b(repr(rows).encode(), digest_size=8).hexdigest()
