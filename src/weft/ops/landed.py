"""Results into which peers store: in shared memory, and the caller's once the call is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weft.fabric import HostFabric
from weft.fabric.landing import Landing
from weft.plan.tasks import Plannable
from weft.run.call import Combine, Tensors, carry_out
from weft.run.proposal import Proposal
from weft.select.auto import Decision


def in_kernel(fabric: HostFabric, decision: Decision) -> bool:
    """Whether a call communicates from inside its kernel, into landings."""
    schedule = decision.schedule
    return schedule is not None and schedule.fusion == "kernel" and fabric.world > 1


def landing_for(
    fabric: HostFabric, shape: Sequence[int], dtype: torch.dtype, out: torch.Tensor | None
) -> Landing:
    """Where peers store a result: in `out` if that is in shared memory, else in a new landing."""
    if out is not None and out.is_contiguous():
        offset = fabric.native.offset_of(out.data_ptr())
        if offset >= 0:
            return Landing(out, offset)
    return fabric.land(shape, dtype)


def carry_out_landed(
    fabric: HostFabric,
    proposal: Proposal,
    decision: Decision,
    inputs: Tensors,
    combine: Combine,
    workspaces: Mapping[str, int],
    landing: Landing | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    out: torch.Tensor | None,
    entered: bool = False,
) -> torch.Tensor:
    """Carries out a call with one output, y, and gives it where the caller wants it. landing: where
    peers store it; None where they do not. entered: see `carry_out`."""

    def outputs(operation: Plannable, rank: int) -> Tensors:
        if landing is not None:
            return {"y": landing.tensor}
        if out is not None and out.is_contiguous():  # engines copy rows that lie together
            return {"y": out}
        return {"y": torch.empty(shape, dtype=dtype)}

    try:
        y = carry_out(
            fabric,
            proposal,
            decision.schedule,
            decision.why,
            inputs,
            (),
            combine,
            outputs,
            workspaces,
            decision.observe,
            {} if landing is None else {"y": landing.offset},
            entered,
        )["y"]
    except BaseException:
        if landing is not None and fabric.broken is not None:
            # A peer may still store into it, so it is never used again.
            fabric.landings.lose(landing.tensor)
        raise
    return y if out is None or out is y else out.copy_(y)
