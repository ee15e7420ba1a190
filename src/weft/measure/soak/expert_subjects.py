"""The operators with several experts per rank, for soak."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from weft.measure.soak.subjects import Draw, Subject, register
from weft.ops.all_to_all_matmul import all_to_all_matmul
from weft.ops.matmul_all_to_all import matmul_all_to_all


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
        torch.split(_rows_here(draw, source).double(), tokens[source])
        for source in range(draw.world)
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
            places, torch.split(_results(draw, target).double(), sizes), strict=True
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
