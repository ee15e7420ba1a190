"""Checks that all collectives share. A refusal is one sentence, and every rank receives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from weft import fabric as fabrics
from weft.collectives.device_channel import AnyChannel
from weft.collectives.handle import Handle
from weft.dtype import name_of
from weft.errors import Error, Unsupported

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")
TensorOrHandle = torch.Tensor | Handle[torch.Tensor]


def checked(
    channel: AnyChannel,
    background: bool,
    check: Callable[Parameters, Value],
    *arguments: Parameters.args,
    **keywords: Parameters.kwargs,
) -> Value:
    """Returns what a check returns. If it raises, the reason goes to every rank first."""
    try:
        return check(*arguments, **keywords)
    except Error as error:
        channel.refuse(error, background)
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        channel.refuse(error, background)
        raise Unsupported(str(error)) from None


def check_input(x: object, name: str = "x") -> torch.Tensor:
    """Returns a contiguous tensor whose memory holds its values as they are."""
    if not isinstance(x, torch.Tensor):
        raise Unsupported(f"{name} must be a tensor, not {type(x).__name__}")
    fabrics.check_device(name, x)
    if x.layout is not torch.strided:
        raise Unsupported(f"{name} is {x.layout}; collectives take dense tensors")
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


def check_sizes(name: str, sizes: Sequence[int] | None, world: int, rows: int) -> list[int]:
    """Raises unless there is one number of rows per rank, and they add up to `rows`. A negative
    `rows` allows any sum."""
    try:
        listed = [int(size) for size in sizes or ()]
    except (TypeError, ValueError):
        raise Unsupported(f"{name} must be a list with one size per rank, not {sizes!r}") from None
    if len(listed) != world:
        raise Unsupported(f"{name} has {len(listed)} sizes, but the group has {world} ranks")
    if min(listed) < 0:
        raise Unsupported(f"{name} has a size below zero: {listed}")
    if rows >= 0 and sum(listed) != rows:
        raise Unsupported(f"{name} {listed} adds up to {sum(listed)}, but there are {rows} rows")
    return listed


def row_bytes(x: torch.Tensor) -> int:
    """Bytes of one row: one index of the first dimension."""
    if x.dim() == 0:
        raise Unsupported("x has no rows to share out; use x.view(1)")
    count = x.element_size()
    for size in x.shape[1:]:
        count *= size
    return count


def answer(channel: AnyChannel, job: Any, result: Any, name: str, background: bool) -> Any:
    """The result, or in the background the handle that will return it."""
    if not background:
        return result
    assert job is not None
    return channel.handle(job, result, name)
