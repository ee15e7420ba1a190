"""Runs torch's collectives on weft's emulated links, without overlap.

gloo does not use weft's paced links, so a model on gloo and a model on weft would have different
networks. Inside `plain_collectives()`, the functional collectives of torch on CPU tensors, which
DTensor and the parallel styles use, move the same bytes over the same links as weft's operators,
with weft's serial schedule:

    all_gather_into_tensor   every rank pulls the shards of the others
    all_to_all_single        every rank pulls the rows that are for it
    reduce_scatter_tensor    an all-to-all of the parts, and a sum in the order of ranks
    all_reduce               a reduce-scatter, and an all-gather of the parts

On a mesh, no algorithm can move fewer bytes. An `all_reduce` of less than one row per rank (the
gradient of a norm, a loss) is left to gloo.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from weft.ops.operands import group_name, resolve_group

SERIAL = "serial@dma"


@dataclass
class Traffic:
    """The collectives of this rank: number of calls, bytes pulled, and seconds."""

    num_calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def clear(self) -> None:
        self.num_calls, self.num_bytes, self.seconds = 0, 0, 0.0


@contextmanager
def plain_collectives() -> Iterator[Traffic]:
    """Runs the functional collectives of torch on CPU tensors over weft's links, in this process,
    until the block ends. Every rank must enter the block. Yields a counter of the traffic."""
    traffic = Traffic()
    library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]

    def counted(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def collective(*arguments: Any) -> torch.Tensor:
            start = time.perf_counter()
            result = function(traffic, *arguments)
            traffic.seconds += time.perf_counter() - start
            traffic.num_calls += 1
            return result

        return collective

    for name, function in (
        ("all_gather_into_tensor", _all_gather),
        ("reduce_scatter_tensor", _reduce_scatter),
        ("all_reduce", _all_reduce),
        ("all_to_all_single", _all_to_all),
    ):
        library.impl(name, counted(function), "CPU")  # type: ignore[no-untyped-call]
    try:
        yield traffic
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _all_gather(traffic: Traffic, x: torch.Tensor, world: int, group: Any) -> torch.Tensor:
    shard = x.reshape(x.shape[0], -1) if x.dim() > 1 else x.reshape(-1, 1)
    gathered, _ = torch.ops.weft.all_gather_matmul(
        shard, [], 0, _name(group), return_A=True, schedule=SERIAL
    )
    traffic.num_bytes += (world - 1) * x.nbytes
    whole: torch.Tensor = gathered.reshape(world * x.shape[0], *x.shape[1:])
    return whole


def _all_to_all(
    traffic: Traffic,
    x: torch.Tensor,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    group: Any,
) -> torch.Tensor:
    rows = x.reshape(x.shape[0], -1) if x.dim() > 1 else x.reshape(-1, 1)
    nothing = rows.new_empty(rows.shape[1], 0)
    received, _ = torch.ops.weft.all_to_all_matmul(
        rows, nothing, in_splits, out_splits, _name(group), return_A=True, schedule=SERIAL
    )
    own = out_splits[_rank(group)]
    traffic.num_bytes += (received.shape[0] - own) * rows.shape[1] * x.itemsize
    whole: torch.Tensor = received.reshape(received.shape[0], *x.shape[1:])
    return whole


def _reduce_scatter(
    traffic: Traffic, x: torch.Tensor, reduce_op: str, world: int, group: Any
) -> torch.Tensor:
    rows = x.shape[0] // world
    received = _all_to_all(traffic, x, [rows] * world, [rows] * world, group)
    parts = received.reshape(world, rows, *x.shape[1:])
    total = parts.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
    return total / world if reduce_op == "avg" else total


def _all_reduce(traffic: Traffic, x: torch.Tensor, reduce_op: str, group: Any) -> torch.Tensor:
    world = _world(group)
    if reduce_op not in ("sum", "avg") or x.dim() < 2 or x.shape[0] % world:
        result = x.clone()
        dist.all_reduce(result, _OPERATIONS[reduce_op], _resolved(group))
        return result
    part = _reduce_scatter(traffic, x, reduce_op, world, group)
    return _all_gather(traffic, part, world, group)


_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def _resolved(group: Any) -> dist.ProcessGroup:
    return resolve_group(group) if isinstance(group, str) else group


def _name(group: Any) -> str:
    return group if isinstance(group, str) else group_name(group)


def _world(group: Any) -> int:
    return dist.get_world_size(_resolved(group))


def _rank(group: Any) -> int:
    return dist.get_rank(_resolved(group))
