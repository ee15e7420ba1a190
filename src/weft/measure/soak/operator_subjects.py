"""The operators that soak calls."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch.nn.functional import embedding_bag

from weft.measure.soak.subjects import Draw, Subject, register
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.all_gather_scaled_matmul import all_gather_scaled_matmul
from weft.ops.all_to_all_matmul import all_to_all_matmul
from weft.ops.concurrent import matmul_beside
from weft.ops.embedding_all_to_all import embedding_all_to_all
from weft.ops.matmul_all_reduce import matmul_all_reduce
from weft.ops.matmul_all_to_all import matmul_all_to_all
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
from weft.ops.scaled_matmul_reduce_scatter import scaled_matmul_reduce_scatter


def _total(draw: Draw) -> torch.Tensor:
    parts = [draw.x(rank).double() @ draw.w(rank).double() for rank in range(draw.world)]
    return torch.stack(parts).sum(0)


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
            d.there(d.routed(rank)),
            d.there(d.w(rank)),
            d.splits[rank],
            d.received(rank),
            group=group,
            schedule=schedule,
        ),
        lambda d, rank: d.exchanged(rank, d.routed) @ d.w(rank).double(),
    )
)
register(
    Subject(
        "matmul_all_to_all",
        lambda d, rank, group, schedule: matmul_all_to_all(
            d.there(d.routed(rank)),
            d.there(d.w(rank)),
            d.splits[rank],
            d.received(rank),
            group=group,
            schedule=schedule,
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


# -- several experts per rank ----------------------------------------------------------------------


def _experts(draw: Draw) -> int:
    """The number of experts of every rank."""
    return 1 + draw.seed % 3


def _tokens(draw: Draw) -> list[list[int]]:
    """The number of rows that every rank has for every expert of every rank."""
    choose, many = random.Random(draw.seed + 1), draw.world * _experts(draw)
    return [[choose.choice((0, 0, 1, 3, 8, 31)) for _ in range(many)] for _ in range(draw.world)]


def _of_experts(draw: Draw, rank: int) -> list[tuple[int, int]]:
    """The pieces of a rank's experts, in their order there: the source of each, and its place among
    the pieces of that source."""
    own = _experts(draw)
    places = range(rank * own, (rank + 1) * own)
    return [(source, place) for place in places for source in range(draw.world)]


def _splits_here(draw: Draw, rank: int) -> tuple[list[int], list[int]]:
    """The rows that a rank sends, by rank and expert, and those that its experts get."""
    tokens, own = _tokens(draw), _experts(draw)
    mine = range(rank * own, (rank + 1) * own)
    return tokens[rank], [tokens[source][place] for source in range(draw.world) for place in mine]


def _rows_here(draw: Draw, rank: int) -> torch.Tensor:
    """The rows of a rank, by rank and expert."""
    return draw.values(rank, 0, sum(_tokens(draw)[rank]), draw.k)


def _weights(draw: Draw, rank: int) -> torch.Tensor:
    return draw.values(rank, 1, _experts(draw), draw.k, draw.n)


def _dispatched(draw: Draw, rank: int) -> torch.Tensor:
    """Every expert's product with its rows."""
    tokens, w, own = _tokens(draw), _weights(draw, rank).double(), _experts(draw)
    pieces = [
        _rows_here(draw, source).double().split(tokens[source]) for source in range(draw.world)
    ]
    return torch.cat(
        [pieces[source][place] @ w[place % own] for source, place in _of_experts(draw, rank)]
    )


def _results(draw: Draw, rank: int) -> torch.Tensor:
    """The rows at the experts of a rank, by expert and source."""
    return draw.values(rank, 0, sum(_splits_here(draw, rank)[1]), draw.k)


def _combined(draw: Draw, rank: int) -> torch.Tensor:
    """The products of all experts, at the rank whose rows they are."""
    tokens, own = _tokens(draw), _experts(draw)
    found: dict[int, torch.Tensor] = {}
    for target in range(draw.world):
        places = _of_experts(draw, target)
        sizes = [tokens[source][place] for source, place in places]
        for (source, place), rows in zip(
            places, _results(draw, target).double().split(sizes), strict=True
        ):
            if source == rank:
                found[place] = rows @ _weights(draw, target).double()[place % own]
    return torch.cat([found[place] for place in sorted(found)])


def _expert_schedules(world: int) -> Sequence[str]:
    """Those that exist where every expert has a product of its own."""
    plain = ["auto", "serial@dma", "shard-p2p@cores", "hetero-unfused-1d@dma", "adaptive@dma"]
    return [*plain, "hetero-unfused-1d@direct", "adaptive:3@cores", "adaptive@direct"]


register(
    Subject(
        "all_to_all_grouped_matmul",
        lambda d, rank, group, schedule: all_to_all_matmul(
            d.there(_rows_here(d, rank)),
            d.there(_weights(d, rank)),
            *_splits_here(d, rank),
            group=group,
            schedule=schedule,
        ),
        _dispatched,
        schedules=_expert_schedules,
    )
)
register(
    Subject(
        "grouped_matmul_all_to_all",
        lambda d, rank, group, schedule: matmul_all_to_all(
            d.there(_results(d, rank)),
            d.there(_weights(d, rank)),
            *_splits_here(d, rank)[::-1],
            group=group,
            schedule=schedule,
        ),
        _combined,
        schedules=_expert_schedules,
    )
)


# -- float8 ----------------------------------------------------------------------------------------

_RESULTS = (torch.bfloat16, torch.float16, torch.float32)


def _eight(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float8_e4m3fn)


def _scales(draw: Draw, rank: int, place: int, *shape: int) -> torch.Tensor:
    """Powers of two, so that scaling is exact: one for each row or column, or one for all of them,
    which is the same on all ranks."""
    by_row = draw.seed % 2 == 1
    found = 2.0 ** draw.values(rank if by_row else 0, place, *(shape if by_row else ())).float()
    return found


def _gathered_and_scaled(draw: Draw, rank: int) -> torch.Tensor:
    rows = torch.cat(
        [
            draw.shard(source).double() * _scales(draw, source, 2, draw.rows_of(source), 1).double()
            for source in range(draw.world)
        ]
    )
    return rows @ (draw.w(rank).double() * _scales(draw, rank, 3, 1, draw.n).double())


def _scaled_total(draw: Draw) -> torch.Tensor:
    parts = []
    for rank in range(draw.world):
        x = draw.x(rank).double() * _scales(draw, rank, 2, draw.m, 1).double()
        parts.append(x @ (draw.w(rank).double() * _scales(draw, rank, 3, 1, draw.n).double()))
    return torch.stack(parts).sum(0)


register(
    Subject(
        "all_gather_scaled_matmul",
        lambda d, rank, group, schedule: all_gather_scaled_matmul(
            d.there(_eight(d.shard(rank))),
            d.there(_eight(d.w(rank))),
            d.there(_scales(d, rank, 2, d.rows_of(rank), 1)),
            d.there(_scales(d, rank, 3, 1, d.n)),
            group=group,
            out_dtype=d.dtype,
            schedule=schedule,
        ),
        _gathered_and_scaled,
        dtypes=_RESULTS,
    )
)
register(
    Subject(
        "scaled_matmul_reduce_scatter",
        lambda d, rank, group, schedule: scaled_matmul_reduce_scatter(
            d.there(_eight(d.x(rank))),
            d.there(_eight(d.w(rank))),
            d.there(_scales(d, rank, 2, d.m, 1)),
            d.there(_scales(d, rank, 3, 1, d.n)),
            group=group,
            out_dtype=d.dtype,
            schedule=schedule,
        ),
        lambda d, rank: _scaled_total(d).tensor_split(d.world)[rank],
        dtypes=_RESULTS,
    )
)
