"""`AllGatherGemm`: FiCCO in a single launch. Copy engines move chunks; tiles wait for theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.errors import Unsupported
from weft.triton.engines import KernelEngines, engines_of
from weft.triton.kernels import all_gather_gemm as expected
from weft.triton.kernels import all_gather_gemm_claim as arrived
from weft.triton.resident_launch import KernelCalls, Tiles, check_input, check_sizes
from weft.triton.space import Space


class AllGatherGemm:
    """all_gather(x_shard) @ w. Equals

        x = torch.empty(rows, inner)
        dist.all_gather(list(x.tensor_split(world)), x_shard)
        y = x @ w

    The rows of every rank are moved in `depth` chunks (by default, as many as ranks) by copy
    engines: native threads on the host, copy streams on a GPU. The rank's own rows are multiplied
    first. With `claim`, programs take tiles of whatever chunks have arrived; otherwise they wait
    for the chunks in the expected order. Results are equal to the last bit.
    """

    def __init__(
        self,
        space: Space,
        rows: int,
        inner: int,
        dtype: torch.dtype,
        *,
        depth: int | None = None,
        claim: bool = False,
        tiles: Tiles | None = None,
        grid: int | None = None,
    ) -> None:
        check_sizes(dtype, rows=rows, inner=inner)
        world, me = space.world, space.rank
        self.depth = world if depth is None else depth
        if self.depth < 1:
            raise Unsupported(f"a shard has at least one chunk, not {self.depth}")
        self.space, self.rows, self.inner, self.dtype = space, rows, inner, dtype
        self.tiles = tiles or Tiles.of(space, dtype)
        same = (("rows", rows), ("inner", inner), ("dtype", str(dtype)), ("depth", self.depth))
        self._firsts = [rank * (rows // world) + min(rank, rows % world) for rank in range(world)]
        self._firsts.append(rows)
        self.shard_rows = self._firsts[me + 1] - self._firsts[me]
        self._engines: KernelEngines = engines_of(space)
        most_rows = -(-rows // world)
        self._calls = KernelCalls(
            arrived.all_gather_gemm_claim if claim else expected.all_gather_gemm,
            arrived.PHASES if claim else expected.PHASES,
            space,
            same,
            size=self._engines.symmetric_bytes(most_rows, inner, dtype),
            grid=grid,
        )
        self._gathered = torch.empty(rows, inner, dtype=dtype, device=space.device)
        self._chunks = self._chunks_in_order()
        self._engines.prepare(
            self._calls.region, self._gathered, most_rows, self._firsts, self._chunks
        )
        table = [chunk for chunk in self._chunks if chunk[1] > 0]
        self._num_chunks = len(table)
        self._table = torch.tensor([*table, (0, 0, 0, 0)], dtype=torch.int32, device=space.device)
        self._claims = torch.zeros(len(table) + 1, dtype=torch.int32, device=space.device)
        self._claim = claim

    def __call__(self, x_shard: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x_shard: [own rows, inner], w: [inner, any]."""
        results: list[torch.Tensor] = []
        world, me = self.space.world, self.space.rank
        shard = x_shard.contiguous() if isinstance(x_shard, torch.Tensor) else x_shard

        def prepare() -> dict[str, Any]:
            check_input(self.space, "x_shard", x_shard, self.dtype, (self.shard_rows, self.inner))
            check_input(self.space, "w", w, self.dtype, (self.inner, None))
            y = torch.empty(self.rows, w.shape[1], dtype=self.dtype, device=self.space.device)
            results.append(y)
            claims = {"claims": self._claims.zero_()} if self._claim else {}
            return {
                **claims,
                "shard": shard,
                "gathered": self._gathered,
                "w": w,
                "y": y,
                "chunks": self._table,
                "counters": self._engines.counters,
                "num_chunks": self._num_chunks,
                "me": me,
                "shard_first": self._firsts[me],
                "N": w.shape[1],
                "K": self.inner,
                "shard_stride": self.inner,
                "gathered_stride": self.inner,
                "w_stride_k": w.stride(0),
                "w_stride_n": w.stride(1),
                "counter_stride": self._engines.counter_stride,
                "BLOCK_M": self.tiles.m,
                "BLOCK_N": self.tiles.n,
                "BLOCK_K": self.tiles.k,
                "PRECISION": "ieee",
            }

        def beside(visit: Any) -> tuple[dict[str, Any], Callable[[bool], None]]:
            epoch = self._engines.start(visit, shard, self._calls.done + 1)
            return {"epoch": epoch}, self._engines.end

        share = shard if world > 1 else None
        self._calls.run(prepare, beside=beside, share=share, options=self.tiles.options)
        return results[0]

    def check(self) -> None:
        """Raises the error of the calls so far, if there is one. On a GPU this waits for them."""
        self._calls.check()

    def _chunks_in_order(self) -> list[tuple[int, int, int, int]]:
        """(first row, rows, rank, counter) of every chunk, in the expected order of arrival: this
        rank's own, then chunk by chunk from all peers, the next rank first."""
        world, me = self.space.world, self.space.rank
        own = (self._firsts[me], self.shard_rows, me, me * self.depth)
        chunks = [own]
        for number in range(self.depth):
            for step in range(1, world):
                rank = (me + step) % world
                first, count = self._firsts[rank], self._firsts[rank + 1] - self._firsts[rank]
                begin = first + number * count // self.depth
                end = first + (number + 1) * count // self.depth
                # Rows without columns need not be moved: such a chunk is ready, like the rank's
                # own.
                source = rank if self.inner else me
                chunks.append((begin, end - begin, source, rank * self.depth + number))
        return chunks
