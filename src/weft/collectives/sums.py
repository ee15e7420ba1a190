"""Public collectives that add: all_reduce, reduce_scatter.

Terms are added in the order of ranks. Half precision is added in float32 and rounded once. So
results do not depend on timing: they are the same bits on every rank and in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from weft.collectives.arguments import (
    TensorOrHandle,
    answer,
    check_in_place,
    check_input,
    check_sizes,
    checked,
    result_for,
    row_bytes,
)
from weft.collectives.device_channel import AnyChannel, channel_of
from weft.collectives.group_channel import check_engine, check_reduction
from weft.collectives.handle import Handle, outside_graphs
from weft.collectives.kinds import ALL_REDUCE, REDUCE_SCATTER, reduction
from weft.operation import split


@overload
def all_reduce(
    x: torch.Tensor,
    op: str = ...,
    *,
    out: torch.Tensor | None = ...,
    group: dist.ProcessGroup | None = ...,
    async_op: Literal[False] = ...,
    engine: str = ...,
) -> torch.Tensor: ...
@overload
def all_reduce(
    x: torch.Tensor,
    op: str = ...,
    *,
    out: torch.Tensor | None = ...,
    group: dist.ProcessGroup | None = ...,
    async_op: Literal[True],
    engine: str = ...,
) -> Handle[torch.Tensor]: ...
def all_reduce(
    x: torch.Tensor,
    op: str = "sum",
    *,
    out: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    engine: str = "dma",
) -> TensorOrHandle:
    """Adds the tensors of all ranks, and returns the sum on every rank. Equals

        out = x.clone()
        dist.all_reduce(out)

    op: `sum`, `avg`, `product`, `min`, `max`, and for integers `band`, `bor`, `bxor`. `out=x` is in
    place. Every rank adds one part, and its peers copy the sums chunk by chunk.
    """
    if is_compiling():
        return outside_graphs(  # type: ignore[no-any-return]
            all_reduce, x, op, out=out, group=group, async_op=async_op, engine=engine
        )
    channel = channel_of(group, x)
    if (
        out is not None
        and async_op is False
        and op == "sum"
        and engine == "dma"
        and channel.quick(ALL_REDUCE, x, out)
    ):
        increment_version(out)
        return out
    x, into, number = checked(channel, async_op, _reduced, x, op, out, engine)
    job = channel.run_even(
        ALL_REDUCE, x, into, x.nbytes, reduction=number, engine=engine, background=async_op
    )
    return answer(channel, job, into, out, "all_reduce", async_op)  # type: ignore[no-any-return]


@overload
def reduce_scatter(
    x: torch.Tensor,
    op: str = ...,
    *,
    sizes: Sequence[int] | None = ...,
    out: torch.Tensor | None = ...,
    group: dist.ProcessGroup | None = ...,
    async_op: Literal[False] = ...,
    engine: str = ...,
) -> torch.Tensor: ...
@overload
def reduce_scatter(
    x: torch.Tensor,
    op: str = ...,
    *,
    sizes: Sequence[int] | None = ...,
    out: torch.Tensor | None = ...,
    group: dist.ProcessGroup | None = ...,
    async_op: Literal[True],
    engine: str = ...,
) -> Handle[torch.Tensor]: ...
def reduce_scatter(
    x: torch.Tensor,
    op: str = "sum",
    *,
    sizes: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    engine: str = "dma",
) -> TensorOrHandle:
    """Adds the tensors of all ranks, and returns this rank's rows of the sum. Equals

        out = x.new_empty(x.shape[0] // world, *x.shape[1:])
        dist.reduce_scatter_tensor(out, x)

    x: [rows, ...], of the same shape on all ranks. The rows are split as by `torch.tensor_split`,
    or into `sizes[r]` rows for rank r. out: may be this rank's rows of x (in place). op: as for
    `all_reduce`.
    """
    if is_compiling():
        return outside_graphs(  # type: ignore[no-any-return]
            reduce_scatter,
            x,
            op,
            sizes=sizes,
            out=out,
            group=group,
            async_op=async_op,
            engine=engine,
        )
    channel = channel_of(group, x)
    if (
        out is not None
        and async_op is False
        and sizes is None
        and op == "sum"
        and engine == "dma"
        and channel.quick(REDUCE_SCATTER, x, out)
    ):
        increment_version(out)
        return out
    x, into, number, counts = checked(
        channel, async_op, _reduce_scattered, channel, x, op, sizes, out, engine
    )
    if counts is None:
        job = channel.run_even(
            REDUCE_SCATTER, x, into, into.nbytes, reduction=number, engine=engine,
            background=async_op,
        )  # fmt: skip
    else:
        job = channel.run_uneven(
            REDUCE_SCATTER,
            counts,
            [x],
            counts,
            [into],
            [into.nbytes],
            reduction=number,
            engine=engine,
            background=async_op,
        )
    return answer(channel, job, into, out, "reduce_scatter", async_op)  # type: ignore[no-any-return]


def _reduced(
    x: object, op: str, out: torch.Tensor | None, engine: str
) -> tuple[torch.Tensor, torch.Tensor, int]:
    check_engine(engine)
    tensor, number = check_input(x), reduction(op)
    check_reduction(tensor.dtype, number)
    into = result_for(tensor, tensor.shape, out)
    if out is not None:
        check_in_place(tensor, into, 0)
    return tensor, into, number


def _reduce_scattered(
    channel: AnyChannel,
    x: object,
    op: str,
    sizes: Sequence[int] | None,
    out: torch.Tensor | None,
    engine: str,
) -> tuple[torch.Tensor, torch.Tensor, int, list[int] | None]:
    check_engine(engine)
    tensor, number = check_input(x), reduction(op)
    check_reduction(tensor.dtype, number)
    row, rows, world = row_bytes(tensor), tensor.shape[0], channel.world
    if sizes is None:
        listed: Sequence[int] = split(rows, world)
    else:
        listed = check_sizes("sizes", sizes, world, rows, row)
    counts = None if sizes is None and rows % world == 0 else [n * row for n in listed]
    shape = (listed[channel.rank], *tensor.shape[1:])
    into = result_for(tensor, shape, out)
    if out is not None:
        check_in_place(into, tensor, row * sum(listed[: channel.rank]))
    return tensor, into, number, counts
