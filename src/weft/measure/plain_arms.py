"""What a user would write without an operator: `torch.mm` and a collective, of gloo or of weft.

Beside them, the same call of the operator. Buffers that a user would keep (the gathered rows, the
result of a collective) are made once; products are made by `torch.mm` in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weft import collectives
from weft.measure.launch import all_gather_flat
from weft.operation import split
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.all_to_all_matmul import all_to_all_matmul
from weft.ops.matmul_all_reduce import matmul_all_reduce
from weft.ops.matmul_all_to_all import matmul_all_to_all
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter

Action = Callable[[], object]


@dataclass(frozen=True)
class PlainArms:
    """The functions that one rank runs. call: the operator under a schedule."""

    call: Callable[[str], Action]
    gloo: Action
    weft: Action


def plain_arms(name: str, m: int, w: torch.Tensor) -> PlainArms:
    """The arms of an operator with M rows in all (M rows on every rank for all-to-all)."""
    return _ARMS[name](m, w, split(m, dist.get_world_size()))


def _all_gather_matmul(m: int, w: torch.Tensor, rows: Sequence[int]) -> PlainArms:
    k, rank = w.shape[0], dist.get_rank()
    x, gathered = torch.randn(rows[rank], k), torch.empty(m, k)
    most, even = max(rows), len(set(rows)) == 1
    padded, received = torch.zeros(most, k), torch.empty(most * len(rows), k)
    sizes = None if even else list(rows)

    def gloo() -> object:
        if even:
            all_gather_flat(gathered, x)
            return gathered @ w
        padded[: rows[rank]] = x  # gloo gathers equal sizes only
        all_gather_flat(received, padded)
        parts = torch.split(received, most)
        return torch.cat([part[:own] for part, own in zip(parts, rows, strict=True)]) @ w

    def plain() -> object:
        collectives.all_gather(x, sizes=sizes, out=gathered)
        return gathered @ w

    return PlainArms(lambda s: lambda: all_gather_matmul(x, w, schedule=s), gloo, plain)


def _all_to_all_matmul(m: int, w: torch.Tensor, rows: Sequence[int]) -> PlainArms:
    k, rank = w.shape[0], dist.get_rank()
    sent, taken = list(rows), [rows[rank]] * len(rows)
    x, received = torch.randn(m, k), torch.empty(sum(taken), k)
    splits = (None, None) if len(set(rows)) == 1 else (sent, taken)

    def gloo() -> object:
        dist.all_to_all_single(received, x, taken, sent)
        return received @ w

    def plain() -> object:
        collectives.all_to_all(x, *splits, out=received)
        return received @ w

    return PlainArms(
        lambda s: lambda: all_to_all_matmul(x, w, sent, taken, schedule=s), gloo, plain
    )


def _matmul_all_to_all(m: int, w: torch.Tensor, rows: Sequence[int]) -> PlainArms:
    (k, n), rank = w.shape, dist.get_rank()
    sent, taken = list(rows), [rows[rank]] * len(rows)
    x, y = torch.randn(m, k), torch.empty(sum(taken), n)
    splits = (None, None) if len(set(rows)) == 1 else (sent, taken)
    return PlainArms(
        lambda s: lambda: matmul_all_to_all(x, w, sent, taken, schedule=s),
        lambda: dist.all_to_all_single(y, x @ w, taken, sent),
        lambda: collectives.all_to_all(x @ w, *splits, out=y),
    )


def _matmul_reduce_scatter(m: int, w: torch.Tensor, rows: Sequence[int]) -> PlainArms:
    (k, n), rank = w.shape, dist.get_rank()
    x, y = torch.randn(m, k), torch.empty(rows[rank], n)
    first, even = sum(rows[:rank]), len(set(rows)) == 1
    sizes = None if even else list(rows)

    def gloo() -> object:
        product = x @ w
        if even:
            return dist.reduce_scatter(y, list(torch.split(product, rows[0])))
        dist.all_reduce(product)  # gloo scatters equal sizes only
        return product[first : first + rows[rank]]

    def plain() -> object:
        return collectives.reduce_scatter(x @ w, sizes=sizes, out=y)

    return PlainArms(lambda s: lambda: matmul_reduce_scatter(x, w, schedule=s), gloo, plain)


def _matmul_all_reduce(m: int, w: torch.Tensor, rows: Sequence[int]) -> PlainArms:
    x = torch.randn(m, w.shape[0])

    def plain() -> object:
        y = x @ w
        return collectives.all_reduce(y, out=y)

    return PlainArms(
        lambda s: lambda: matmul_all_reduce(x, w, schedule=s),
        lambda: dist.all_reduce(x @ w),
        plain,
    )


_ARMS: dict[str, Callable[[int, torch.Tensor, Sequence[int]], PlainArms]] = {
    "all_gather_matmul": _all_gather_matmul,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "matmul_all_reduce": _matmul_all_reduce,
    "all_to_all_matmul": _all_to_all_matmul,
    "matmul_all_to_all": _matmul_all_to_all,
}
NAMES = tuple(_ARMS)
