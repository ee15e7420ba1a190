"""The fused path of `matmul_all_reduce`: what it needs besides that of the other schedules.

With few rows the product is bound by reading w. Blocks of it leave as they are made, the owner of a
block adds what all ranks made of it, in the order of ranks, and stores the sum into everyone's y.
"""

from __future__ import annotations

import os

import torch

from weft.errors import Unsupported
from weft.fabric import HostFabric, _native
from weft.fabric.landing import Landing
from weft.ops.common import DTYPES, differentiated
from weft.ops.landed import landing_for
from weft.ops.packing import packed
from weft.plan.matmul_all_reduce import FEW_ROWS
from weft.run import record
from weft.run.proposal import Proposal
from weft.run.repeat import known_of, repeat
from weft.schedule import Schedule
from weft.select.auto import AUTO, Decision

_FUSED = Schedule.parse("fused")

NARROW = (torch.bfloat16, torch.float16, torch.int8)
"""What a weight may be kept in, beside the dtype of x."""


def few_rows(fabric: HostFabric, m: int, dtype: torch.dtype) -> Decision | None:
    """What `auto` is for an all-reduce of few rows; None where there is a choice to make."""
    if fabric.network or fabric.world == 1 or m > FEW_ROWS or dtype == torch.float64:
        return None
    why = f"{m} rows: reading w is all, and blocks leave as they are made"
    return Decision(_FUSED.name, _FUSED, why)


def check_weight(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None) -> None:
    """That w may be multiplied with x as it is: of x's dtype, or narrower, with a scale if int8."""
    if w.dtype == x.dtype and scale is None:
        return
    if x.dtype not in DTYPES or x.dtype == torch.float64:
        raise Unsupported(f"x is {x.dtype}; weights of another dtype go with float32 and halves")
    if w.dtype != x.dtype and (w.dtype not in NARROW or w.element_size() > x.element_size()):
        known = ", ".join(str(d).removeprefix("torch.") for d in NARROW)
        raise Unsupported(
            f"x is {DTYPES[x.dtype]} and w is {str(w.dtype).removeprefix('torch.')}; "
            f"w must have the dtype of x, or a narrower one of {known}"
        )
    if w.dtype == torch.int8 and scale is None:
        raise Unsupported("w is int8 and needs its scale=, one number for each of its columns")
    if scale is not None:
        if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
            raise Unsupported("scale must be a float32 tensor with one number per column of w")
        if scale.device.type != "cpu" or tuple(scale.shape) != (w.shape[1],):
            raise Unsupported(
                f"scale has the shape {tuple(scale.shape)} on {scale.device}; it must be "
                f"({w.shape[1]},) on the CPU, one number per column of w"
            )


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NAMED = (str, Schedule)
_MOST_KNOWN = 1024

Arguments = tuple[object, ...]


def arguments_of(
    x: object,
    w: object,
    reduce_op: object,
    schedule: object,
    out: object,
    scale: object,
) -> Arguments | None:
    """All that decides how a product is made, but for where its operands are: calls in which these
    are equal are alike. None where they need a closer look."""
    if type(x) not in _PLAIN or type(w) not in _PLAIN or record.active is not None:
        return None
    a: torch.Tensor = x  # type: ignore[assignment]
    b: torch.Tensor = w  # type: ignore[assignment]
    if not (a.is_cpu and b.is_cpu and isinstance(schedule, _NAMED) and isinstance(reduce_op, str)):
        return None
    named = None
    if schedule == AUTO and _native.is_set("WEFT_SCHEDULE"):
        named = os.environ["WEFT_SCHEDULE"]
    shapes = (a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype)
    both = (shapes, reduce_op, schedule, named)
    if out is None and scale is None:
        return both
    return _more_arguments(both, [x, w], out, scale)


def _more_arguments(
    both: Arguments, inputs: list[object], out: object, scale: object
) -> Arguments | None:
    for optional in (out, scale):
        if optional is not None and (type(optional) not in _PLAIN or not optional.is_cpu):  # type: ignore[attr-defined]
            return None
    if out is not None and differentiated([*inputs, out]):
        return None
    options = [None if optional is None else _layout(optional) for optional in (out, scale)]
    return (*both, *options)


def _layout(tensor: object) -> Arguments:
    t: torch.Tensor = tensor  # type: ignore[assignment]
    return t.shape, t.stride(), t.dtype


def remember(
    fabric: HostFabric,
    arguments: Arguments | None,
    proposal: Proposal,
    why: str,
    inbox: int,
    x: torch.Tensor,
    n: int,
) -> None:
    """Keeps what a call was that has just been made, so that the next one like it is quick."""
    if arguments is None or 0 in x.shape or n == 0:
        return
    if not (x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1)):
        return
    k, item = x.shape[-1], x.element_size()
    pitch = x.stride(0) * item if x.dim() == 2 else k * item
    runner = fabric.runners.get(proposal.signature)
    shape = (*x.shape[:-1], n)
    known = known_of(runner, proposal, why, inbox, shape, x.numel() // k, pitch)
    if known is not None:
        if len(fabric.repeats) >= _MOST_KNOWN:
            fabric.repeats.clear()
        fabric.repeats[arguments] = known


def again(
    fabric: HostFabric,
    arguments: Arguments,
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> torch.Tensor | Landing | None:
    """The sum, if calls like this one are known; None if not. A landing if the ranks do not mean
    what they meant the last time: the call has been entered with it, and must be planned anew.
    The caller holds the lock of the fabric."""
    known = fabric.repeats.get(arguments)
    if known is None:
        return None
    try:
        kept, place = packed(w)
        if scale is not None:
            scale = scale.contiguous()
        y, at = landing = landing_for(fabric, known.shape, x.dtype, out)
    except Exception:  # no memory: whoever looks closely finds it too, and tells all ranks
        return None
    try:
        pointer = 0 if scale is None else scale.data_ptr()
        made = repeat(fabric, known, x.data_ptr(), place, pointer, y.data_ptr(), at)
    except BaseException:
        if fabric.broken is not None:
            # A peer may still store into it, so it is never used again.
            fabric.landings.lose(y)
        raise
    del kept  # until here, the weight had to stay where it is
    if not made:
        return landing
    return y if out is None or out is y else out.copy_(y)


def widened(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """w in the dtype of x, scaled."""
    if scale is None:
        return w.to(x.dtype)
    return (w.to(torch.float32) * scale).to(x.dtype)
