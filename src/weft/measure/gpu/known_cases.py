"""The cases of point 7: operators, their gradients and collectives on known numbers, beside plain
torch in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft.dtype import in_triton

DTYPES = tuple(in_triton())
ROWS, COLUMNS, INNER = 24, 20, 16
"""Of every rank."""

Case = Callable[[torch.device, torch.dtype, str], bool]
Collective = Callable[[torch.device, torch.dtype], bool]


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Small whole numbers, whose products and sums are exact in every dtype."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


def there(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The tensor on a device."""
    return tensor.to(dtype).to(device)


def equal(found: Any, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a result on a device is as expected, to the last bit."""
    return torch.equal(found.detach().cpu(), expected.to(dtype))


def _all_gather_matmul(device: torch.device, dtype: torch.dtype, schedule: str) -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    x, w = numbers(1, world * ROWS, INNER), numbers(2 + rank, INNER, COLUMNS)
    y = weft.all_gather_matmul(
        there(x.tensor_split(world)[rank], device, dtype),
        there(w, device, dtype),
        schedule=schedule,
    )
    return equal(y, x @ w, dtype)


def _matmul_reduce_scatter(device: torch.device, dtype: torch.dtype, schedule: str) -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    xs = [numbers(10 + r, world * ROWS, INNER) for r in range(world)]
    ws = [numbers(30 + r, INNER, COLUMNS) for r in range(world)]
    y = weft.matmul_reduce_scatter(
        there(xs[rank], device, dtype), there(ws[rank], device, dtype), schedule=schedule
    )
    total = torch.stack([x @ w for x, w in zip(xs, ws, strict=True)]).sum(0)
    return equal(y, total.tensor_split(world)[rank], dtype)


def _matmul_all_reduce(device: torch.device, dtype: torch.dtype, schedule: str) -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    xs = [numbers(10 + r, ROWS, INNER) for r in range(world)]
    ws = [numbers(30 + r, INNER, COLUMNS) for r in range(world)]
    y = weft.matmul_all_reduce(
        there(xs[rank], device, dtype), there(ws[rank], device, dtype), schedule=schedule
    )
    return equal(y, torch.stack([x @ w for x, w in zip(xs, ws, strict=True)]).sum(0), dtype)


def _gather_backward(device: torch.device, dtype: torch.dtype, schedule: str) -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    x, w = numbers(1, world * ROWS, INNER), numbers(2, INNER, COLUMNS)
    shard = there(x.tensor_split(world)[rank], device, dtype).requires_grad_()
    weight = there(w, device, dtype).requires_grad_()
    y = weft.all_gather_matmul(shard, weight, schedule=schedule)
    dy = numbers(3 + rank, world * ROWS, COLUMNS)
    torch.autograd.backward(y, there(dy, device, dtype))
    grads = [numbers(3 + r, world * ROWS, COLUMNS) @ w.t() for r in range(world)]
    dx = torch.stack(grads).sum(0).tensor_split(world)[rank]
    assert shard.grad is not None
    assert weight.grad is not None
    return equal(shard.grad, dx, dtype) and equal(weight.grad, x.t() @ dy, dtype)


def _scatter_backward(device: torch.device, dtype: torch.dtype, schedule: str) -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    x, w = numbers(10 + rank, world * ROWS, INNER), numbers(30 + rank, INNER, COLUMNS)
    rows = there(x, device, dtype).requires_grad_()
    weight = there(w, device, dtype).requires_grad_()
    dy = [numbers(50 + r, ROWS, COLUMNS) for r in range(world)]
    y = weft.matmul_reduce_scatter(rows, weight, schedule=schedule)
    torch.autograd.backward(y, there(dy[rank], device, dtype))
    whole = torch.cat(dy)
    assert rows.grad is not None
    assert weight.grad is not None
    return equal(rows.grad, whole @ w.t(), dtype) and equal(weight.grad, x.t() @ whole, dtype)


def _splits() -> tuple[list[list[int]], list[int], list[int]]:
    """How many rows each rank sends to each, and those that this rank sends and receives."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = [[3 + (r + 2 * to) % 4 for to in range(world)] for r in range(world)]
    return sent, sent[rank], [own[rank] for own in sent]


def _received(rows: Sequence[torch.Tensor], sent: Sequence[Sequence[int]]) -> torch.Tensor:
    rank = dist.get_rank()
    pairs = zip(rows, sent, strict=True)
    return torch.cat([torch.split(own, list(splits))[rank] for own, splits in pairs])


def _all_to_all_matmul(device: torch.device, dtype: torch.dtype, schedule: str) -> bool:
    rank = dist.get_rank()
    sent, in_splits, out_splits = _splits()
    xs = [numbers(10 + r, sum(own), INNER) for r, own in enumerate(sent)]
    w = numbers(30 + rank, INNER, COLUMNS)
    y = weft.all_to_all_matmul(
        there(xs[rank], device, dtype),
        there(w, device, dtype),
        in_splits,
        out_splits,
        schedule=schedule,
    )
    return equal(y, _received(xs, sent) @ w, dtype)


def _matmul_all_to_all(device: torch.device, dtype: torch.dtype, schedule: str) -> bool:
    rank = dist.get_rank()
    sent, in_splits, out_splits = _splits()
    xs = [numbers(10 + r, sum(own), INNER) for r, own in enumerate(sent)]
    ws = [numbers(30 + r, INNER, COLUMNS) for r in range(len(sent))]
    y = weft.matmul_all_to_all(
        there(xs[rank], device, dtype),
        there(ws[rank], device, dtype),
        in_splits,
        out_splits,
        schedule=schedule,
    )
    products = [x @ w for x, w in zip(xs, ws, strict=True)]
    return equal(y, _received(products, sent), dtype)


def _embedding_all_to_all(device: torch.device, dtype: torch.dtype, schedule: str) -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    bags = 4 * world + 1
    tables = [numbers(10 + r, 40, INNER) for r in range(world)]
    draw = torch.Generator().manual_seed(7)
    indices = [torch.randint(0, 40, (3 * bags,), generator=draw) for _ in range(world)]
    y = weft.embedding_all_to_all(
        [there(tables[rank], device, dtype)],
        [indices[rank].to(device)],
        [torch.arange(0, 3 * bags, 3).to(device)],
        schedule=schedule,
    )
    pooled = [t[i].view(bags, 3, INNER).sum(1) for t, i in zip(tables, indices, strict=True)]
    return equal(y, torch.cat(pooled, 1).tensor_split(world)[rank], dtype)


CASES: dict[str, Case] = {
    "all_gather_matmul": _all_gather_matmul,
    "backward of all_gather_matmul": _gather_backward,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "backward of matmul_reduce_scatter": _scatter_backward,
    "matmul_all_reduce": _matmul_all_reduce,
    "all_to_all_matmul": _all_to_all_matmul,
    "matmul_all_to_all": _matmul_all_to_all,
    "embedding_all_to_all": _embedding_all_to_all,
}


def _sums(device: torch.device, dtype: torch.dtype) -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    xs = [numbers(10 + r, world * ROWS, INNER) for r in range(world)]
    mine, total = there(xs[rank], device, dtype), torch.stack(xs).sum(0)
    part = total.tensor_split(world)[rank]
    return equal(weft.all_reduce(mine), total, dtype) and equal(
        weft.reduce_scatter(mine), part, dtype
    )


def _gathers(device: torch.device, dtype: torch.dtype) -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    xs = [numbers(10 + r, ROWS, INNER) for r in range(world)]
    mine, whole, root = there(xs[rank], device, dtype), torch.cat(xs), world - 1
    right = equal(weft.all_gather(mine), whole, dtype)
    right &= equal(weft.broadcast(mine, root), xs[root], dtype)
    found = weft.gather(mine, root)
    return right and (rank != root or (found is not None and equal(found, whole, dtype)))


def _exchanges(device: torch.device, dtype: torch.dtype) -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    xs = [numbers(10 + r, world * ROWS, INNER) for r in range(world)]
    mine, root = there(xs[rank], device, dtype), world - 1
    received = torch.cat([x.tensor_split(world)[rank] for x in xs])
    part = xs[root].tensor_split(world)[rank]
    return equal(weft.all_to_all(mine), received, dtype) and equal(
        weft.scatter(mine, root), part, dtype
    )


COLLECTIVES: dict[str, Collective] = {
    "all_reduce, reduce_scatter": _sums,
    "all_gather, gather, broadcast": _gathers,
    "all_to_all, scatter": _exchanges,
}
