"""Checks that all collectives share. A refusal is one sentence, and every rank receives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.graph import increment_version

from weft import fabric as fabrics
from weft.collectives.device_channel import AnyChannel
from weft.collectives.handle import Handle
from weft.dtype import name_of
from weft.errors import Unsupported
from weft.run.call import check_memory, check_modes, refusal
from weft.run.results import empty_as

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")
TensorOrHandle = torch.Tensor | Handle[torch.Tensor]


def checked(
    channel: AnyChannel,
    async_op: object,
    check: Callable[Parameters, Value],
    *arguments: Parameters.args,
    **keywords: Parameters.kwargs,
) -> Value:
    """Returns what a check returns. If it raises, the reason goes to every rank first."""
    background = False
    try:
        background = bool(async_op)
        check_modes("a collective")
        return check(*arguments, **keywords)
    except Exception as error:
        refused = refusal(error)
        channel.refuse(refused, background)
        raise refused from refused.__cause__


def check_input(x: object, name: str = "x") -> torch.Tensor:
    """Returns a contiguous tensor whose memory holds its values as they are."""
    if not isinstance(x, torch.Tensor):
        raise Unsupported(f"{name} must be a tensor, not {type(x).__name__}")
    fabrics.check_device(name, x)
    if x.layout is not torch.strided or x.is_nested:
        raise Unsupported(f"{name} is sparse or nested; collectives take dense tensors")
    check_memory(name, x)
    if x.is_contiguous() and not (x.is_conj() or x.is_neg()):
        return x
    return x.contiguous().resolve_conj().resolve_neg()


def check_out(out: object, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Raises unless `out` is a contiguous tensor of that shape and dtype."""
    tensor = check_input(out, "out")
    if tensor is not out:
        raise Unsupported("out must be contiguous, and no conjugate or negative view")
    if tuple(tensor.shape) != tuple(shape):
        raise Unsupported(f"out has shape {tuple(tensor.shape)}, but the result has {tuple(shape)}")
    if tensor.dtype != dtype:
        raise Unsupported(f"out is {name_of(tensor.dtype)}, but the result is {name_of(dtype)}")
    return tensor


def result_for(x: torch.Tensor, shape: Sequence[int], out: object) -> torch.Tensor:
    """The tensor for a result: a new one, or `out`, checked."""
    if out is not None:
        return check_out(out, shape, x.dtype)
    try:
        return empty_as(x, shape)
    except (MemoryError, OverflowError, RuntimeError):
        raise Unsupported(f"there is no memory for a result of shape {tuple(shape)}") from None


def check_in_place(x: torch.Tensor, out: torch.Tensor, place: int | None) -> None:
    """Raises if input and result overlap, unless the input lies where it may.

    place: the offset, in bytes from the start of the result, at which the input may lie. None: the
    input must not lie in the result at all.
    """
    start, end = x.data_ptr(), x.data_ptr() + x.nbytes
    first, last = out.data_ptr(), out.data_ptr() + out.nbytes
    if start >= last or first >= end or start == end or first == last:
        return
    if place is None or start - first != place:
        raise Unsupported("x and out share memory; pass a clone of x, or leave out= away")


def check_root(root: object, world: int) -> int:
    """Raises unless the root is a rank of the group."""
    if not isinstance(root, int) or not 0 <= root < world:
        raise Unsupported(f"root must be a rank of the group, from 0 to {world - 1}, not {root!r}")
    return root


def check_sizes(
    name: str, sizes: Sequence[int] | None, world: int, rows: int, row: int
) -> list[int]:
    """Raises unless there is one number of rows per rank, and they add up to `rows`. A negative
    `rows` allows any sum. row: the bytes of one."""
    try:
        listed = [] if sizes is None else [index(size) for size in sizes]
    except TypeError:
        raise Unsupported(f"{name} must be a list with one size per rank, not {sizes!r}") from None
    if len(listed) != world:
        raise Unsupported(f"{name} has {len(listed)} sizes, but the group has {world} ranks")
    if min(listed) < 0:
        raise Unsupported(f"{name} has a size below zero: {listed}")
    if rows >= 0 and sum(listed) != rows:
        raise Unsupported(f"{name} {listed} adds up to {sum(listed)}, but there are {rows} rows")
    if sum(listed) * row >= 2**63:
        raise Unsupported(f"{name} {listed} is more than any memory")
    return listed


def row_bytes(x: torch.Tensor) -> int:
    """Bytes of one row: one index of the first dimension."""
    if x.dim() == 0:
        raise Unsupported("x has no rows to share out; use x.view(1)")
    count = x.element_size()
    for size in x.shape[1:]:
        count *= size
    return count


def answer(
    channel: AnyChannel, job: Any, result: Any, out: object, name: str, background: bool
) -> Any:
    """The result, or in the background the handle that will return it. out: as the caller gave it.
    Autograd is told of what native code writes there, as by torch's own `out`."""
    if out is not None and result is not None:
        increment_version(result)
    if not background:
        return result
    assert job is not None
    return channel.handle(job, result, name)
