"""The arms of a measurement, per operation: its compute alone, its communication alone, its call
under a schedule, and plain torch over gloo. Inputs are random.

Communication alone is the serial call with an empty product: w has no columns if rows are gathered
first, and K is empty if products are sent. Sums of received products count as communication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import Unsupported
from weft.fabric import Fabric
from weft.measure.launch import all_gather_flat
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.all_to_all_matmul import all_to_all_matmul
from weft.ops.matmul_all_reduce import matmul_all_reduce
from weft.ops.matmul_all_to_all import matmul_all_to_all
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.all_to_all_matmul import AllToAllMatmul
from weft.plan.matmul_all_to_all import MatmulAllToAll
from weft.plan.matmul_reduce_scatter import MatmulReduceScatter
from weft.schedule import Schedule

Action = Callable[[], Any]
SERIAL = "serial@dma"


@dataclass(frozen=True)
class Arms:
    """The functions that one rank runs in each arm. plain: gloo and `torch.mm`; only if rows are
    split evenly."""

    compute: Action
    communicate: Action
    call: Callable[[Schedule | str], Action]
    plain: Action


Adapter = Callable[[Any, "Maker"], Arms]
_adapters: dict[str, Adapter] = {}


def register(name: str) -> Callable[[Adapter], Adapter]:
    """Makes an operation measurable: `weft run`, `weft tune` and the benchmarks find its arms."""

    def keep(adapter: Adapter) -> Adapter:
        _adapters[name] = adapter
        return adapter

    return keep


def measurable() -> list[str]:
    """The names of the operations that have arms."""
    return sorted(_adapters)


def arms_of(operation: Any, fabric: Fabric) -> Arms:
    """The arms of an operation on this rank."""
    maker = Maker(fabric, getattr(torch, operation.dtype))
    if operation.name not in _adapters:
        raise Unsupported(
            f"{operation.name} is part of other operators and not measured by itself; "
            f"measure one of {', '.join(measurable())}"
        )
    return _adapters[operation.name](operation, maker)


class Maker:
    """Creates the tensors of this rank, with random values."""

    def __init__(self, fabric: Fabric, dtype: torch.dtype) -> None:
        self.fabric = fabric
        self.rank = fabric.rank
        self.dtype, self.device = dtype, fabric.device
        self.random = torch.Generator().manual_seed(fabric.rank + 1)

    def tensor(self, rows: int, columns: int) -> torch.Tensor:
        made = torch.randn(rows, columns, generator=self.random)
        return made.to(self.dtype).to(self.device)

    def symmetric(self, rows: int, columns: int) -> torch.Tensor:
        if self.device.type != "cpu":  # there weft stages inputs itself
            return self.tensor(rows, columns)
        tensor = self.fabric.memory.empty((rows, columns), self.dtype)
        return tensor.copy_(self.tensor(rows, columns))

    def empty(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=self.dtype, device=self.device)


@register("all_gather_matmul")
def _all_gather_matmul(operation: AllGatherMatmul, make: Maker) -> Arms:
    k, columns, rows = operation.k, operation.columns[make.rank], operation.rows
    x, whole = make.symmetric(rows[make.rank], k), make.tensor(operation.m, k)
    weights = [make.tensor(k, n) for n in columns]
    outs = [make.empty(operation.m, n) for n in columns]

    def multiply() -> None:
        for w, out in zip(weights, outs, strict=True):
            torch.mm(whole, w, out=out)

    def plain() -> None:
        all_gather_flat(whole, x)
        multiply()

    return Arms(
        multiply,
        lambda: all_gather_matmul(x, [], schedule=SERIAL, return_gathered=True, shard_rows=rows),
        lambda s: lambda: all_gather_matmul(x, weights, schedule=s, out=outs, shard_rows=rows),
        plain,
    )


@register("all_to_all_matmul")
def _all_to_all_matmul(operation: AllToAllMatmul, make: Maker) -> Arms:
    rank, k, (n,) = make.rank, operation.k, operation.columns[make.rank]
    sent, taken = _splits(operation.splits, rank)
    x, received = make.symmetric(sum(sent), k), make.tensor(sum(taken), k)
    w, nothing, out = make.tensor(k, n), make.empty(k, 0), make.empty(sum(taken), n)

    def plain() -> None:
        dist.all_to_all_single(received, x, taken, sent)
        torch.mm(received, w, out=out)

    return Arms(
        lambda: torch.mm(received, w, out=out),
        lambda: all_to_all_matmul(x, nothing, sent, taken, schedule=SERIAL, return_gathered=True),
        lambda s: lambda: all_to_all_matmul(x, w, sent, taken, schedule=s, out=out),
        plain,
    )


@register("matmul_all_to_all")
def _matmul_all_to_all(operation: MatmulAllToAll, make: Maker) -> Arms:
    rank, n = make.rank, operation.n
    sent, taken = _splits(operation.splits, rank)
    x, w, product = _operands(make, sum(sent), n, operation.inner[rank])
    out, no_x, no_w = make.empty(sum(taken), n), make.empty(sum(sent), 0), make.empty(0, n)

    def plain() -> None:
        torch.mm(x, w, out=product)
        dist.all_to_all_single(out, product, taken, sent)

    return Arms(
        lambda: torch.mm(x, w, out=product),
        lambda: matmul_all_to_all(no_x, no_w, sent, taken, schedule=SERIAL, out=out),
        lambda s: lambda: matmul_all_to_all(x, w, sent, taken, schedule=s, out=out),
        plain,
    )


@register("matmul_reduce_scatter")
def _matmul_reduce_scatter(operation: MatmulReduceScatter, make: Maker) -> Arms:
    m, n, own = operation.m, operation.n, operation.rows[make.rank]
    x, w, product = _operands(make, m, n, operation.inner[make.rank])
    out, no_x, no_w = make.empty(own, n), make.empty(m, 0), make.empty(0, n)

    def plain() -> None:
        torch.mm(x, w, out=product)
        dist.reduce_scatter(out, list(torch.split(product, list(operation.rows))))

    return Arms(
        lambda: torch.mm(x, w, out=product),
        lambda: matmul_reduce_scatter(no_x, no_w, schedule=SERIAL, out=out, own_rows=own),
        lambda s: lambda: matmul_reduce_scatter(x, w, schedule=s, out=out, own_rows=own),
        plain,
    )


@register("matmul_all_reduce")
def _matmul_all_reduce(operation: MatmulReduceScatter, make: Maker) -> Arms:
    m, n = operation.m, operation.n
    x, w, out = _operands(make, m, n, operation.inner[make.rank])
    no_x, no_w = make.empty(m, 0), make.empty(0, n)

    def plain() -> None:
        torch.mm(x, w, out=out)
        dist.all_reduce(out)

    return Arms(
        lambda: torch.mm(x, w, out=out),
        lambda: matmul_all_reduce(no_x, no_w, schedule=SERIAL, out=out),
        lambda s: lambda: matmul_all_reduce(x, w, schedule=s, out=out),
        plain,
    )


def _operands(
    make: Maker, m: int, n: int, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return make.tensor(m, k), make.tensor(k, n), make.empty(m, n)


def _splits(splits: tuple[tuple[int, ...], ...], rank: int) -> tuple[list[int], list[int]]:
    """The rows that a rank sends to each rank, and those that it receives from each."""
    return list(splits[rank]), [sizes[rank] for sizes in splits]
