"""The fast path of `matmul_all_reduce` for few rows, as in decoding.

With few rows, reading w takes most of the time. Each block of the product is sent when it is made.
The owner of a block adds the parts of all ranks, in the order of ranks, and stores the sum into
everyone's y. A call with the same sizes as an earlier one is one native step
(`fabric.interface.Repeat`).
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import NamedTuple

import torch

from weft.dtype import kernel_numbers, name_of
from weft.errors import Unsupported
from weft.fabric.interface import PeerOutput, Repeat
from weft.ops.known import Known
from weft.ops.operands import DTYPES, as_rows
from weft.ops.operator import into
from weft.plan.matmul_all_reduce import FEW_ROWS
from weft.run import record
from weft.run.call import Request, Tensors, check_memory
from weft.run.ranges import profiled, range_of
from weft.run.session import Runner, Session
from weft.schedule import Schedule
from weft.select.decide import AnySchedule
from weft.timeline import Timeline

NARROW = tuple(dtype for dtype in kernel_numbers() if dtype.itemsize < 4)
"""The dtypes of weights that are narrower than x."""

_NOTHING = Timeline(())


class Repeated(NamedTuple):
    """A known call that is one native step, without its operands."""

    known: Known
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
        known = ", ".join(map(name_of, NARROW))
        raise Unsupported(
            f"x is {DTYPES[x.dtype]} and w is {name_of(w.dtype)}; "
            f"w must have the dtype of x, or a narrower one of {known}"
        )
    if w.dtype == torch.int8 and scale is None:
        raise Unsupported("w is int8 and needs its scale=, one number for each of its columns")
    if scale is not None:
        if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
            raise Unsupported("scale must be a float32 tensor with one number per column of w")
        check_memory("scale", scale)
        if scale.device.type != "cpu" or tuple(scale.shape) != (w.shape[1],):
            raise Unsupported(
                f"scale has the shape {tuple(scale.shape)} on {scale.device}; it must be "
                f"({w.shape[1]},) on the CPU, one number per column of w"
            )


def prepared(schedule: AnySchedule | None, inputs: Tensors) -> Tensors:
    """The inputs of a product for a schedule. The kernel for few rows takes w in its own dtype,
    with its scale; all others take it in the dtype of x."""
    x, scale = inputs["x"], inputs.get("scale")
    inside = isinstance(schedule, Schedule) and schedule.fusion == "kernel"
    if inside and x.shape[0] <= FEW_ROWS and x.dtype != torch.float64:
        return inputs if scale is None else {**inputs, "scale": scale.contiguous()}
    return {"x": x, "w": widened(x, inputs["w"], scale)}


def remember(
    session: Session, key: Hashable | None, request: Request, x: torch.Tensor, w: torch.Tensor
) -> None:
    """Keeps the call that has just been made, so that its repetitions are one native step."""
    n = w.shape[1]
    plain = w.dtype == x.dtype and "scale" not in request.inputs
    if request.inputs["w"] is not w or not (plain or as_rows(x, 0)[0].shape[0] <= FEW_ROWS):
        return  # it is converted in every call
    remembered = session.known.get(key)
    if type(remembered) is not Known or remembered.proposal is not request.proposal:
        return
    if 0 in x.shape or n == 0:
        return
    if record.active is not None or not x.is_cpu:
        return
    if not (x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1)):
        return
    runner = session.runners.get(request.proposal.signature)
    repeat = None if runner is None else runner.program.repeat(request.proposal)
    if runner is not None and repeat is not None:
        shape, workspaces = (*x.shape[:-1], n), dict(request.exposed.workspaces)
        why = request.why or runner.why
        session.remember(key, Repeated(remembered, runner, repeat, why, workspaces, shape))


def again(
    session: Session,
    key: Hashable | None,
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> torch.Tensor | PeerOutput | None:
    """The sum, if it can be made in one native step; None if it cannot. A `PeerOutput` if the
    proposals of the ranks differ from the last time: this rank has then entered the call with it,
    and the call must be planned again. The caller holds the lock of the fabric."""
    known = session.known.get(key)
    if type(known) is not Repeated or record.active is not None or not known.known.holds():
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
    seconds = session.finished(known.runner, known.why, started, _NOTHING)
    observe = known.known.decision.observe
    if observe is not None:
        observe(seconds)
    return output.tensor if out is None else into(out, output.tensor)


def widened(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """w in the dtype of x, scaled."""
    if scale is None:
        return w.to(x.dtype)
    return (w.to(torch.float32) * scale).to(x.dtype)
