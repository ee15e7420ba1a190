"""Public collectives that give a rank whole tensors: all_gather, gather, broadcast."""

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
from weft.collectives.kinds import ALL_GATHER, BROADCAST, GATHER
from weft.errors import Unsupported

Prepared = tuple[torch.Tensor, torch.Tensor, list[int] | None]
"""Input, result, and the bytes of every rank if they differ."""


@overload
def all_gather(
    x: torch.Tensor,
    *,
    sizes: Sequence[int] | None = ...,
    out: torch.Tensor | None = ...,
    group: dist.ProcessGroup | None = ...,
    async_op: Literal[False] = ...,
    engine: str = ...,
) -> torch.Tensor: ...
@overload
def all_gather(
    x: torch.Tensor,
    *,
    sizes: Sequence[int] | None = ...,
    out: torch.Tensor | None = ...,
    group: dist.ProcessGroup | None = ...,
    async_op: Literal[True],
    engine: str = ...,
) -> Handle[torch.Tensor]: ...
def all_gather(
    x: torch.Tensor,
    *,
    sizes: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    engine: str = "dma",
) -> TensorOrHandle:
    """Concatenates the tensors of all ranks along the first dimension, on every rank. Equals

        out = x.new_empty(world * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x)

    x: [rows, ...], of the same shape on all ranks, or with `sizes[r]` rows on rank r. out: the
    tensor for the result; x may be this rank's rows of it (in place). async_op: returns a `Handle`
    at once. engine: `dma` leaves the core while a paced link is busy, `cores` holds it.
    """
    if is_compiling():
        return outside_graphs(  # type: ignore[no-any-return]
            all_gather, x, sizes=sizes, out=out, group=group, async_op=async_op, engine=engine
        )
    channel = channel_of(group, x)
    if (
        out is not None
        and async_op is False
        and sizes is None
        and engine == "dma"
        and channel.quick(ALL_GATHER, x, out)
    ):
        increment_version(out)
        return out
    x, into, counts = checked(channel, async_op, _gathered, channel, x, sizes, out, True, engine)
    if counts is None:
        job = channel.run_even(ALL_GATHER, x, into, x.nbytes, engine=engine, background=async_op)
    else:
        job = channel.run_uneven(
            ALL_GATHER, counts, [x], [x.nbytes], [into], counts, engine=engine, background=async_op
        )
    return answer(channel, job, into, out, "all_gather", async_op)  # type: ignore[no-any-return]


def gather(
    x: torch.Tensor,
    root: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    engine: str = "dma",
) -> torch.Tensor | Handle[torch.Tensor | None] | None:
    """Concatenates the tensors of all ranks on the root; returns None on the others. Equals

        parts = [torch.empty_like(x) for _ in range(world)] if rank == root else None
        dist.gather(x, parts, group_dst=root)
        out = torch.cat(parts) if rank == root else None

    The keywords are those of `all_gather`.
    """
    if is_compiling():
        return outside_graphs(  # type: ignore[no-any-return]
            gather, x, root, sizes=sizes, out=out, group=group, async_op=async_op, engine=engine
        )
    channel = channel_of(group, x)
    checked(channel, async_op, check_root, root, channel.world)
    here = channel.rank == root
    x, made, counts = checked(channel, async_op, _gathered, channel, x, sizes, out, here, engine)
    result = made if here else None
    if counts is None:
        job = channel.run_even(
            GATHER, x, result, x.nbytes, root=root, engine=engine, background=async_op
        )
    else:
        into = [made] if here else []
        job = channel.run_uneven(
            GATHER,
            counts,
            [x],
            [x.nbytes],
            into,
            counts if here else [],
            root=root,
            engine=engine,
            background=async_op,
        )
    return answer(channel, job, result, out, "gather", async_op)  # type: ignore[no-any-return]


def broadcast(
    x: torch.Tensor,
    root: int = 0,
    *,
    out: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    engine: str = "dma",
) -> TensorOrHandle:
    """Copies the tensor of the root to every rank. Equals

        out = x.clone()
        dist.broadcast(out, group_src=root)

    x: of the same shape and dtype on all ranks; `out=x` is in place.
    """
    if is_compiling():
        return outside_graphs(  # type: ignore[no-any-return]
            broadcast, x, root, out=out, group=group, async_op=async_op, engine=engine
        )
    channel = channel_of(group, x)
    known = type(root) is int and 0 <= root < channel.world
    if (
        out is not None
        and async_op is False
        and engine == "dma"
        and known
        and channel.quick(BROADCAST, x, out, root=root)
    ):
        increment_version(out)
        return out
    x, into = checked(channel, async_op, _broadcast, channel, x, root, out, engine)
    job = channel.run_even(
        BROADCAST, x, into, x.nbytes, root=root, engine=engine, background=async_op
    )
    return answer(channel, job, into, out, "broadcast", async_op)  # type: ignore[no-any-return]


def _gathered(
    channel: AnyChannel,
    x: object,
    sizes: Sequence[int] | None,
    out: torch.Tensor | None,
    here: bool,
    engine: str,
) -> Prepared:
    """The checked input and result of a gather, and the bytes of every rank if they differ."""
    check_engine(engine)
    tensor = check_input(x)
    row = row_bytes(tensor)
    rows = tensor.shape[0]
    counts = None
    if sizes is not None:
        listed = check_sizes("sizes", sizes, channel.world, -1, row)
        if listed[channel.rank] != rows:
            raise Unsupported(
                f"sizes gives {listed[channel.rank]} rows to rank {channel.rank}, but its tensor "
                f"has {rows}"
            )
        counts = [size * row for size in listed]
        total, before = sum(listed), sum(counts[: channel.rank])
    else:
        total, before = rows * channel.world, channel.rank * tensor.nbytes
    if not here:
        return tensor, tensor, counts
    shape = (total, *tensor.shape[1:])
    into = result_for(tensor, shape, out)
    if out is not None:
        check_in_place(tensor, into, before)
    return tensor, into, counts


def _broadcast(
    channel: AnyChannel, x: object, root: int, out: torch.Tensor | None, engine: str
) -> tuple[torch.Tensor, torch.Tensor]:
    check_engine(engine)
    check_root(root, channel.world)
    tensor = check_input(x)
    into = result_for(tensor, tensor.shape, out)
    if out is not None:
        check_in_place(tensor, into, 0)
    return tensor, into
