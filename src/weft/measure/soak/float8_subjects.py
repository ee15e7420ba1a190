"""The operators of float8, for soak."""

from __future__ import annotations

import torch

from weft.measure.soak.subjects import Draw, Subject, register
from weft.ops.all_gather_scaled_matmul import all_gather_scaled_matmul
from weft.ops.scaled_matmul_reduce_scatter import scaled_matmul_reduce_scatter

_RESULTS = (torch.bfloat16, torch.float16, torch.float32)


def _eight(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float8_e4m3fn)


def _scales(draw: Draw, rank: int, place: int, *shape: int) -> torch.Tensor:
    """Powers of two, so that scaling is exact: one for each row or column, or one for all of them,
    which is the same on all ranks."""
    if draw.seed % 2:
        return 2.0 ** draw.values(rank, place, *shape).float()
    return 2.0 ** draw.values(0, place).float()


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
