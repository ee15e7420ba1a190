"""Compares the kernels with plain torch, on any space, for tests and `weft doctor --gpu`.

Inputs are small whole numbers, so that sums are exact in every dtype and results must be equal.
Every rank makes the inputs of all ranks, so only the kernel communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from weft.triton.all_gather_gemm import AllGatherGemm
from weft.triton.embedding_all_to_all import EmbeddingAllToAll
from weft.triton.gemm_all_to_all import GemmAllToAll
from weft.triton.gemv_all_reduce import GemvAllReduce
from weft.triton.resident_launch import Tiles
from weft.triton.space import Space


@dataclass(frozen=True)
class KernelCase:
    """How a kernel is checked: several calls of one operator, each with other numbers."""

    dtype: torch.dtype
    calls: int = 3
    seed: int = 0
    tiles: Tiles | None = None
    grid: int | None = None


class Numbers:
    """Whole numbers from a seed, made on the host and copied to the device."""

    def __init__(self, case: KernelCase, space: Space) -> None:
        self._generator = torch.Generator().manual_seed(case.seed)
        self._dtype, self._device = case.dtype, space.device

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        made = torch.randint(-2, 3, (rows, columns), generator=self._generator)
        return made.to(self._device, self._dtype)

    def counts(self, most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most + 1, shape, generator=self._generator)

    def product(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x @ w, exactly."""
        return x.double() @ w.double()


def gemm_all_to_all(
    space: Space, case: KernelCase, columns: int = 37, inner: int = 35, most: int = 20
) -> bool:
    """Checks different splits in every call, including zero."""
    world, me = space.world, space.rank
    numbers = Numbers(case, space)
    op = GemmAllToAll(
        space, most * world, columns, inner, case.dtype, tiles=case.tiles, grid=case.grid
    )
    exact = True
    for _ in range(case.calls):
        splits = numbers.counts(most, world, world).tolist()
        x = [numbers.matrix(sum(splits[rank]), inner) for rank in range(world)]
        w = [numbers.matrix(inner, columns) for _ in range(world)]
        y = op(x[me], w[me], splits)
        op.check()
        parts = [torch.split(numbers.product(x[r], w[r]), splits[r])[me] for r in range(world)]
        exact &= torch.equal(y, torch.cat(parts).to(case.dtype))
    return exact


def gemv_all_reduce(
    space: Space, case: KernelCase, batch: int = 3, columns: int = 101, inner: int = 19
) -> bool:
    """Checks a different K on every rank."""
    world, me = space.world, space.rank
    numbers = Numbers(case, space)
    op = GemvAllReduce(space, batch, columns, case.dtype, tiles=case.tiles, grid=case.grid)
    exact = True
    for _ in range(case.calls):
        x = [numbers.matrix(batch, inner + rank) for rank in range(world)]
        w = [numbers.matrix(inner + rank, columns) for rank in range(world)]
        y = op(x[me], w[me])
        op.check()
        total = torch.zeros(batch, columns, dtype=torch.float64, device=space.device)
        for rank in range(world):
            total += numbers.product(x[rank], w[rank])
        exact &= torch.equal(y, total.to(case.dtype))
    return exact


def all_gather_gemm(
    space: Space,
    case: KernelCase,
    rows: int = 43,
    columns: int = 23,
    inner: int = 19,
    claim: bool = False,
) -> bool:
    """Checks shards that differ by a row."""
    numbers = Numbers(case, space)
    op = AllGatherGemm(
        space, rows, inner, case.dtype, claim=claim, tiles=case.tiles, grid=case.grid
    )
    exact = True
    for _ in range(case.calls):
        x, w = numbers.matrix(rows, inner), numbers.matrix(inner, columns)
        y = op(x.tensor_split(space.world)[space.rank], w)
        op.check()
        exact &= torch.equal(y, numbers.product(x, w).to(case.dtype))
    return exact


def embedding_all_to_all(
    space: Space,
    case: KernelCase,
    batch: int = 21,
    widths: Sequence[Sequence[int]] = ((5, 70), (8,), (), (3, 1)),
    height: int = 11,
    mode: str = "sum",
    weighted: bool = False,
    most: int = 3,
) -> bool:
    """Checks tables of different widths, a rank without tables, and empty bags."""
    world, me = space.world, space.rank
    numbers = Numbers(case, space)
    tables = [[numbers.matrix(height, d) for d in widths[r % len(widths)]] for r in range(world)]
    op = EmbeddingAllToAll(
        space, tables[me], batch, case.dtype, mode=mode, weighted=weighted, grid=case.grid
    )
    exact = True
    for _ in range(case.calls):
        pooled, bags = [], []
        for rank in range(world):
            lengths = numbers.counts(most, len(tables[rank]) * batch)
            if mode == "mean":  # a mean of 0, 1, 2 or 4 small whole numbers is exact
                lengths = 2**lengths // 2
            indices = numbers.counts(height - 1, int(lengths.sum()))
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            weights = numbers.matrix(1, len(indices))[0].cpu() if weighted else None
            bags.append((indices, offsets, weights))
            pooled += [
                _pooled(table.cpu(), batch, t, bags[-1], mode)
                for t, table in enumerate(tables[rank])
            ]
        indices, offsets, weights = bags[me]
        device = space.device
        given = None if weights is None else weights.to(device)
        y = op(indices.to(device), offsets.to(device), given)
        op.check()
        whole = torch.cat(pooled, 1) if pooled else torch.zeros(batch, 0)
        exact &= torch.equal(y.cpu(), whole.tensor_split(world)[me].to(case.dtype))
    return exact


Bags = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _pooled(table: torch.Tensor, batch: int, number: int, bags: Bags, mode: str) -> torch.Tensor:
    indices, offsets, weights = bags
    bounds = offsets[number * batch : (number + 1) * batch + 1]
    begin, end = int(bounds[0]), int(bounds[-1])
    return torch.nn.functional.embedding_bag(
        indices[begin:end],
        table.double(),
        bounds[:-1] - begin,
        mode=mode,
        per_sample_weights=None if weights is None else weights[begin:end].double(),
    )


CHECKS: dict[str, Callable[[Space, KernelCase], bool]] = {
    "embedding_all_to_all": embedding_all_to_all,
    "gemv_all_reduce": gemv_all_reduce,
    "gemm_all_to_all": gemm_all_to_all,
    "all_gather_gemm": all_gather_gemm,
    "all_gather_gemm_claim": partial(all_gather_gemm, claim=True),
}
