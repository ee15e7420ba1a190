"""What all operators share: groups by name, dtype names, and the choice of a schedule."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from weft.errors import Unsupported
from weft.fabric import HostFabric
from weft.schedule import Schedule
from weft.select.auto import AUTO, Decision

DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def dtype_name(dtype: torch.dtype) -> str:
    """The plain name of a dtype that operators take."""
    if dtype not in DTYPES:
        raise Unsupported(
            f"dtype {dtype} cannot be multiplied here; use {', '.join(DTYPES.values())}"
        )
    return DTYPES[dtype]


def group_name(group: dist.ProcessGroup | None) -> str:
    """The name by which graphs refer to a group."""
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise Unsupported(
            "there is no process group yet; call torch.distributed.init_process_group('gloo') first"
        )
    return str(found.group_name)


def resolve_group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]


def requested(schedule: str | Schedule) -> Decision | None:
    """The schedule that the caller or the environment asks for; None where it is to be chosen."""
    if isinstance(schedule, Schedule):
        return Decision(schedule.name, schedule, "asked for")
    if not isinstance(schedule, str):
        raise Unsupported(
            f"schedule must be a name or a weft.Schedule, not {type(schedule).__name__}"
        )
    override = os.environ.get("WEFT_SCHEDULE")
    found, why = (override, "WEFT_SCHEDULE is set") if override else (schedule, "asked for")
    if found == AUTO:
        return None
    parsed = Schedule.parse(found)
    return Decision(parsed.name, parsed, why)


def choose(fabric: HostFabric, schedule: str | Schedule) -> tuple[Schedule, str]:
    """The schedule of an operation that no rule chooses for yet, and why it is this one."""
    decision = requested(schedule)
    if decision is not None and decision.schedule is not None:
        return decision.schedule, decision.why
    if fabric.link.paced:
        return Schedule.parse("adaptive@dma"), "links are paced, so copies run beside compute"
    return Schedule.parse("adaptive@direct"), "links are as fast as memory, so nothing is copied"


def check_group_rank(name: str, sizes: Sequence[int], world: int, rank: int, actual: int) -> None:
    """That a list with one size per rank fits the group and this rank."""
    if len(sizes) != world:
        raise Unsupported(f"{name} has {len(sizes)} sizes, but the group has {world} ranks")
    if sizes[rank] != actual:
        raise Unsupported(f"{name} says {sizes[rank]} for rank {rank}, but its tensor has {actual}")
