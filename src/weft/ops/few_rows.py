"""The fast path of `matmul_all_reduce` for few rows, as in decoding.

With few rows, reading w takes most of the time. Each block of the product is sent when it is made.
The owner of a block adds the parts of all ranks, in the order of ranks, and stores the sum into
everyone's y. A call with the same sizes as an earlier one is one native step
(`fabric.interface.Repeat`).
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import torch

from weft.errors import Unsupported
from weft.fabric.interface import PeerOutput, Repeat
from weft.ops.operands import DTYPES, differentiated
from weft.ops.operator import into
from weft.plan.matmul_all_reduce import FEW_ROWS
from weft.run import record
from weft.run.call import Request, layout
from weft.run.ranges import profiled, range_of
from weft.run.session import Runner, Session
from weft.schedule import Schedule
from weft.select.decide import AUTO, AnySchedule
from weft.timeline import Timeline

NARROW = (torch.bfloat16, torch.float16, torch.int8)
"""The dtypes of weights that are narrower than x."""

_NOTHING = Timeline(())


class Known(NamedTuple):
    """A call without its operands."""

    runner: Runner
    repeat: Repeat
    why: str
    workspaces: dict[str, int]
    shape: tuple[int, ...]
    """Of the result."""


def check_weight(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Raises unless x can be multiplied by w: w has the dtype of x or a narrower one, and a scale
    if it is int8."""
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


def prepared(
    schedule: AnySchedule | None,
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor | None,
    m: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """w and its scale for a schedule. The kernel for few rows takes w in its own dtype, with its
    scale; all others take it in the dtype of x."""
    inside = isinstance(schedule, Schedule) and schedule.fusion == "kernel"
    if inside and m <= FEW_ROWS and x.dtype != torch.float64:
        return w, None if scale is None else scale.contiguous()
    return widened(x, w, scale), None


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NAMED = (str, Schedule)

Arguments = tuple[object, ...]


def arguments_of(
    x: object,
    w: object,
    reduce_op: object,
    schedule: object,
    out: object,
    scale: object,
) -> Arguments | None:
    """Everything that decides how a product is made, except the addresses of its operands. Calls
    with equal values are repetitions. None if the arguments must be checked one by one."""
    if type(x) not in _PLAIN or type(w) not in _PLAIN or record.active is not None:
        return None
    a: torch.Tensor = x  # type: ignore[assignment]
    b: torch.Tensor = w  # type: ignore[assignment]
    if not (a.is_cpu and b.is_cpu and isinstance(schedule, _NAMED) and isinstance(reduce_op, str)):
        return None
    named = None
    if schedule == AUTO and "WEFT_SCHEDULE" in os.environ:
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
    options = [None if optional is None else layout(optional) for optional in (out, scale)]
    return (*both, *options)


def remember(
    session: Session, arguments: Arguments | None, request: Request, x: torch.Tensor, n: int
) -> None:
    """Keeps the call that has just been made, so that its repetitions are known calls."""
    if arguments is None or 0 in x.shape or n == 0 or request.observe is not None:
        return
    if not (x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1)):
        return
    runner = session.runners.get(request.proposal.signature)
    repeat = None if runner is None else runner.program.repeat(request.proposal)
    if runner is not None and repeat is not None:
        shape, workspaces = (*x.shape[:-1], n), dict(request.exposed.workspaces)
        known = Known(runner, repeat, request.why or runner.why, workspaces, shape)
        session.remember(arguments, known)


def again(
    session: Session,
    arguments: Arguments,
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> torch.Tensor | PeerOutput | None:
    """The sum, if this is a known call; None if it is not. A `PeerOutput` if the proposals of the
    ranks differ from the last time: this rank has then entered the call with it, and the call must
    be planned again. The caller holds the lock of the fabric."""
    known: Known | None = session.known.get(arguments)
    if known is None:
        return None
    started = time.perf_counter()
    memory = session.fabric.memory
    try:
        output = memory.output(known.shape, x.dtype, out)
    except Exception:  # no memory: the usual path fails too, and informs all ranks
        return None
    try:
        if profiled():
            with range_of(known.runner.plan.operation.name):
                made = known.repeat.run(x, w, scale, known.workspaces, output)
        else:
            made = known.repeat.run(x, w, scale, known.workspaces, output)
    except BaseException:
        if session.fabric.broken is not None:
            memory.abandon(output)
        raise
    if not made:
        return output
    session.finished(known.runner, known.why, started, _NOTHING)
    return into(out, output.tensor)


def widened(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """w in the dtype of x, scaled."""
    if scale is None:
        return w.to(x.dtype)
    return (w.to(torch.float32) * scale).to(x.dtype)
