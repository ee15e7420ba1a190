"""Public collectives that give every rank a different part: all_to_all, scatter."""

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
    check_root,
    check_sizes,
    checked,
    result_for,
    row_bytes,
)
from weft.collectives.device_channel import AnyChannel, channel_of
from weft.collectives.group_channel import check_engine
from weft.collectives.handle import Handle, outside_graphs
from weft.collectives.kinds import ALL_TO_ALL, SCATTER
from weft.errors import Unsupported


@overload
def all_to_all(
    x: torch.Tensor,
    in_splits: Sequence[int] | None = ...,
    out_splits: Sequence[int] | None = ...,
    *,
    out: torch.Tensor | None = ...,
    group: dist.ProcessGroup | None = ...,
    async_op: Literal[False] = ...,
    engine: str = ...,
) -> torch.Tensor: ...
@overload
def all_to_all(
    x: torch.Tensor,
    in_splits: Sequence[int] | None = ...,
    out_splits: Sequence[int] | None = ...,
    *,
    out: torch.Tensor | None = ...,
    group: dist.ProcessGroup | None = ...,
    async_op: Literal[True],
    engine: str = ...,
) -> Handle[torch.Tensor]: ...
def all_to_all(
    x: torch.Tensor,
    in_splits: Sequence[int] | None = None,
    out_splits: Sequence[int] | None = None,
    *,
    out: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    engine: str = "dma",
) -> TensorOrHandle:
    """Sends rows to every rank, and returns those from every rank in the order of ranks. Equals

        out = x.new_empty(sum(out_splits), *x.shape[1:])
        dist.all_to_all_single(out, x, out_splits, in_splits)

    in_splits: how many rows of x go to each rank. out_splits: how many rows come from each rank.
    Both may differ by rank; if two ranks disagree about their pair, all ranks raise `Mismatch`.
    Without them x is split evenly. `out=x` is in place, if both splits are equal.
    """
    if is_compiling():
        return outside_graphs(  # type: ignore[no-any-return]
            all_to_all,
            x,
            in_splits,
            out_splits,
            out=out,
            group=group,
            async_op=async_op,
            engine=engine,
        )
    channel = channel_of(group, x)
    if (
        out is not None
        and async_op is False
        and in_splits is out_splits is None
        and engine == "dma"
        and channel.quick(ALL_TO_ALL, x, out)
    ):
        increment_version(out)
        return out
    x, into, sent, got = checked(
        channel, async_op, _exchanged, channel, x, in_splits, out_splits, out, engine
    )
    if sent is None or got is None:
        bytes_each = x.nbytes // channel.world
        job = channel.run_even(ALL_TO_ALL, x, into, bytes_each, engine=engine, background=async_op)
    else:
        job = channel.run_uneven(
            ALL_TO_ALL, [], [x], sent, [into], got, by_pair=True, engine=engine, background=async_op
        )
    return answer(channel, job, into, out, "all_to_all", async_op)  # type: ignore[no-any-return]


def scatter(
    x: torch.Tensor | None,
    root: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    engine: str = "dma",
) -> TensorOrHandle:
    """Splits the tensor of the root by rows, and returns this rank's part. Equals

        parts = list(x.chunk(world)) if rank == root else None
        dist.scatter(out, parts, group_src=root)

    x: [rows, ...] on the root. Other ranks pass None with `out=`, or any tensor of the same shape
    and dtype. The rows are split as by `torch.tensor_split`, or into `sizes[r]` rows for rank r.
    """
    if is_compiling():
        return outside_graphs(  # type: ignore[no-any-return]
            scatter, x, root, sizes=sizes, out=out, group=group, async_op=async_op, engine=engine
        )
    channel = channel_of(group, out if x is None else x)
    source, into, counts = checked(
        channel, async_op, _scattered, channel, x, root, sizes, out, engine
    )
    here = [] if source is None else [source]
    job = channel.run_uneven(
        SCATTER,
        counts,
        here,
        counts if here else [],
        [into],
        [into.nbytes],
        root=root,
        engine=engine,
        background=async_op,
    )
    return answer(channel, job, into, out, "scatter", async_op)  # type: ignore[no-any-return]


def _exchanged(
    channel: AnyChannel,
    x: object,
    in_splits: Sequence[int] | None,
    out_splits: Sequence[int] | None,
    out: torch.Tensor | None,
    engine: str,
) -> tuple[torch.Tensor, torch.Tensor, list[int] | None, list[int] | None]:
    check_engine(engine)
    tensor = check_input(x)
    row, rows, world = row_bytes(tensor), tensor.shape[0], channel.world
    if (in_splits is None) != (out_splits is None):
        raise Unsupported("give both in_splits and out_splits, or neither")
    if in_splits is None:
        if rows % world:
            raise Unsupported(
                f"{rows} rows cannot be shared out evenly among {world} ranks; give in_splits and "
                "out_splits"
            )
        sent = got = None
        total = rows
    else:
        sent = [n * row for n in check_sizes("in_splits", in_splits, world, rows, row)]
        expected = check_sizes("out_splits", out_splits, world, -1, row)
        got, total = [n * row for n in expected], sum(expected)
    shape = (total, *tensor.shape[1:])
    into = result_for(tensor, shape, out)
    if out is None:
        return tensor, into, sent, got
    if into.data_ptr() == tensor.data_ptr() and sent == got:
        return tensor.clone(), into, sent, got  # rows arrive before others were sent
    check_in_place(tensor, into, None)
    return tensor, into, sent, got


def _scattered(
    channel: AnyChannel,
    x: object,
    root: int,
    sizes: Sequence[int] | None,
    out: torch.Tensor | None,
    engine: str,
) -> tuple[torch.Tensor | None, torch.Tensor, list[int]]:
    check_engine(engine)
    check_root(root, channel.world)
    rank, world = channel.rank, channel.world
    if x is None and rank == root:
        raise Unsupported(f"rank {root} is the root of the scatter, so its x must be a tensor")
    if x is None and out is None:
        raise Unsupported("a rank that is not the root must give out=, or x for its shape")
    tensor = None if x is None else check_input(x)
    if tensor is None:
        into = check_input(out, "out")
        if into is not out:
            raise Unsupported("out must be contiguous")
        row = row_bytes(into)
        if sizes is None:  # this rank knows only its own size, and takes it for all
            return None, into, [into.nbytes] * world
        counts = [n * row for n in check_sizes("sizes", sizes, world, -1, row)]
        if counts[rank] != into.nbytes:
            raise Unsupported(
                f"sizes gives {counts[rank] // max(1, row)} rows to rank {rank}, but out has "
                f"{into.shape[0]}"
            )
        return None, into, counts
    row, rows = row_bytes(tensor), tensor.shape[0]
    if sizes is None:
        listed = [rows // world + (r < rows % world) for r in range(world)]
    else:
        listed = check_sizes("sizes", sizes, world, rows, row)
    shape = (listed[rank], *tensor.shape[1:])
    into = result_for(tensor, shape, out)
    if rank == root and out is not None:
        check_in_place(into, tensor, row * sum(listed[:rank]))
    return tensor if rank == root else None, into, [n * row for n in listed]
