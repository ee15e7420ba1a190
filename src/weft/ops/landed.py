"""Results into which peers store: in shared memory, and the caller's once the call is over."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.fabric import HostFabric
from weft.fabric.landing import Landing
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
    return fabric.landings.make(shape, dtype)


def give_up(fabric: HostFabric, landing: Landing) -> None:
    """After a failed call: a peer may still store into the landing, so it is never used again."""
    if fabric.broken is not None:
        fabric.landings.lose(landing.tensor)


def handed_over(landing: Landing, out: torch.Tensor | None) -> torch.Tensor:
    """The result where the caller wants it."""
    if out is None or out is landing.tensor:
        return landing.tensor
    return out.copy_(landing.tensor)
