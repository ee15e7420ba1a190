"""The operators that soak calls, but those with experts and of float8."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import embedding_bag

from weft.measure.soak.subjects import Draw, Subject, register
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.all_to_all_matmul import all_to_all_matmul
from weft.ops.concurrent import matmul_beside
from weft.ops.embedding_all_to_all import embedding_all_to_all
from weft.ops.matmul_all_reduce import matmul_all_reduce
from weft.ops.matmul_all_to_all import matmul_all_to_all
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter


def _total(draw: Draw) -> torch.Tensor:
    parts = [draw.x(rank).double() @ draw.w(rank).double() for rank in range(draw.world)]
    return torch.stack(parts).sum(0)


def _routed(draw: Draw, rank: int) -> tuple[Any, ...]:
    """The operands and splits of an exchange with a product."""
    x, w = draw.there(draw.routed(rank)), draw.there(draw.w(rank))
    return x, w, draw.splits[rank], draw.received(rank)


def _gathered(draw: Draw) -> torch.Tensor:
    return torch.cat([draw.shard(rank).double() for rank in range(draw.world)])


register(
    Subject(
        "all_gather_matmul",
        lambda d, rank, group, schedule: all_gather_matmul(
            d.there(d.shard(rank)), d.there(d.w(rank)), group=group, schedule=schedule
        ),
        lambda d, rank: _gathered(d) @ d.w(rank).double(),
    )
)
register(
    Subject(
        "matmul_reduce_scatter",
        lambda d, rank, group, schedule: matmul_reduce_scatter(
            d.there(d.x(rank)), d.there(d.w(rank)), group=group, schedule=schedule
        ),
        lambda d, rank: _total(d).tensor_split(d.world)[rank],
    )
)
register(
    Subject(
        "matmul_all_reduce",
        lambda d, rank, group, schedule: matmul_all_reduce(
            d.there(d.x(rank)), d.there(d.w(rank)), group=group, schedule=schedule
        ),
        lambda d, rank: _total(d),
    )
)
register(
    Subject(
        "all_to_all_matmul",
        lambda d, rank, group, schedule: all_to_all_matmul(
            *_routed(d, rank), group=group, schedule=schedule
        ),
        lambda d, rank: d.exchanged(rank, d.routed) @ d.w(rank).double(),
    )
)
register(
    Subject(
        "matmul_all_to_all",
        lambda d, rank, group, schedule: matmul_all_to_all(
            *_routed(d, rank), group=group, schedule=schedule
        ),
        lambda d, rank: d.exchanged(rank, lambda r: d.routed(r).double() @ d.w(r).double()),
    )
)


def _bags(draw: Draw, rank: int) -> tuple[list[torch.Tensor], ...]:
    """The tables, indices and offsets of a rank."""
    tables, indices, offsets = [], [], []
    for place in range(1 + (draw.seed + rank) % 3):
        rows, columns = 1 + 7 * place, (1, 8, 37)[(draw.seed + place) % 3]
        tables.append(draw.values(rank, place, rows, columns))
        indices.append(torch.arange(draw.m) % rows)
        offsets.append(torch.arange(draw.m) // 2 * 2)
    return tables, indices, offsets


def _pooled(draw: Draw, rank: int) -> torch.Tensor:
    found = [torch.zeros(draw.m, 0, dtype=torch.float64)]
    for table, index, offset in zip(*_bags(draw, rank), strict=True):
        if draw.m:
            found.append(embedding_bag(index, table.double(), offset, mode="sum"))
        else:
            found.append(table.double()[:0])
    return torch.cat(found, 1)


def _looked_up(draw: Draw, rank: int) -> torch.Tensor:
    whole = torch.cat([_pooled(draw, source) for source in range(draw.world)], 1)
    return whole.tensor_split(draw.world)[rank]


register(
    Subject(
        "embedding_all_to_all",
        lambda d, rank, group, schedule: embedding_all_to_all(
            *([d.there(t) for t in some] for some in _bags(d, rank)),
            group=group,
            schedule=schedule,
        ),
        _looked_up,
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        schedules=lambda world: ("auto", "in-kernel:3", "serial@dma", "hetero-unfused-1d@cores"),
    )
)


# -- a product beside a collective -----------------------------------------------------------------


def _beside(draw: Draw, rank: int) -> torch.Tensor:
    rest = [draw.values(r, 2, draw.m, 3).double() for r in range(draw.world) if r != rank]
    return torch.cat(
        [(draw.x(rank).double() @ draw.w(rank).double()).flatten(), *map(torch.flatten, rest)]
    )


register(
    Subject(
        "matmul_beside",
        lambda d, rank, group, strategy: torch.cat(
            [
                made.flatten()
                for made in matmul_beside(
                    d.there(d.x(rank)),
                    d.there(d.w(rank)),
                    d.there(d.values(rank, 2, d.m, 3)),
                    strategy=strategy,
                    group=group,
                )
            ]
        ),
        _beside,
        schedules=lambda world: ("dma", "concurrent"),
        collective=True,
    )
)
