"""weft hides communication behind computation in distributed ML: run it, explain it, explore it."""

from __future__ import annotations

import importlib as _importlib
from collections.abc import Iterable as _Iterable
from collections.abc import Sequence as _Sequence
from typing import TYPE_CHECKING

from weft import plugins as _plugins
from weft.collectives import (
    Handle,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
    scatter,
)
from weft.collectives.group_channel import explain_collective as _explain_collective
from weft.errors import (
    Cancelled,
    Error,
    InvalidPlan,
    Mismatch,
    PeerLost,
    RankFailed,
    Timeout,
    Unsupported,
)
from weft.fabric import Link
from weft.fabric import check as _check_fabrics
from weft.fabric import of as _fabric_of
from weft.fabric.deadlines import seconds_of as _seconds_of
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.all_gather_scaled_matmul import all_gather_scaled_matmul
from weft.ops.all_to_all_matmul import all_to_all_matmul
from weft.ops.embedding_all_to_all import embedding_all_to_all
from weft.ops.matmul_all_reduce import matmul_all_reduce
from weft.ops.matmul_all_to_all import matmul_all_to_all
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
from weft.ops.scaled_matmul_reduce_scatter import scaled_matmul_reduce_scatter
from weft.run.explain import Explanation
from weft.run.explain import explain_plan as _explain_plan
from weft.run.record import Recording, record
from weft.run.session import of as _session_of
from weft.schedule import Schedule
from weft.select import this_host as _this_host
from weft.select.auto import check_mode as _check_mode
from weft.select.auto import of as _auto_of
from weft.select.tune import tune
from weft.timeline import Span, Timeline

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from weft import loom, nn
    from weft.fabric import Fabric
    from weft.machine import Machine
    from weft.measure.user_launch import launch
    from weft.nn import compile, symm_mem_compat
    from weft.report.summary import Summary, summary

    __version__: str


_LAZY = {
    "compile": "weft.nn",
    "launch": "weft.measure.user_launch",
    "loom": "weft.loom",
    "nn": "weft.nn",
    "Summary": "weft.report.summary",
    "summary": "weft.report.summary",
    "symm_mem_compat": "weft.nn",
}
"""Names that are imported on first use, and from where: importing DTensor takes long, and few
programs need the others."""


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _importlib.import_module("importlib.metadata").version("weft")
    if name not in _LAZY:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    module = _importlib.import_module(_LAZY[name])
    return module if module.__name__ == f"weft.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)


@_this_host.register_calibrator
def _calibrate(fabric: Fabric) -> Machine:
    """Calibrates this machine quickly with the ranks of a group, and saves the description."""
    from weft.measure.calibration import QUICK, here, keep

    machine = here(fabric, QUICK)
    if fabric.rank == 0:
        try:
            keep(machine, QUICK)
        except Error as error:
            import warnings

            warnings.warn(f"the calibration cannot be kept: {error}", stacklevel=2)
    return machine


def explain() -> Explanation | None:
    """Explains the last weft call of this process, an operator or a collective. Returns None if
    there was none."""
    found = [last for last in (_explain_plan(), _explain_collective()) if last is not None]
    return max(found, key=lambda last: last[0])[1] if found else None


def symmetric_empty(
    *shape: int | _Sequence[int],
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """A tensor like `torch.empty(*shape, dtype=dtype)` in memory that the ranks of a group share.
    weft's operators on that group read it in place instead of staging it."""
    import torch

    sizes: list[int] = []
    for size in shape:
        sizes.extend(size if isinstance(size, _Iterable) else [size])
    return _fabric_of(group).memory.empty(sizes, dtype or torch.get_default_dtype())


def check(group: dist.ProcessGroup | None = None, *, synchronize: bool = True) -> None:
    """Raises the error of an earlier call on a device, if there was one. Calls on CPU tensors raise
    their own errors, so there is nothing to check for them.

    A known call on a device returns before it has run. If a peer is lost, late or makes another
    call, the device goes on with data that is not valid, and the error is raised by the next call
    or here.

    Args:
        group: the process group (None: all ranks).
        synchronize: wait until the device has done everything that was enqueued, so that the
            results of all calls so far are known to be valid. Otherwise, look only at what is
            known by now.
    """
    import torch.distributed as dist

    if not isinstance(group, dist.ProcessGroup | None):  # torch gives a placeholder to outsiders
        raise Unsupported(
            "group must be a process group that this rank is in, or None for all ranks, "
            f"not {group!r}"
        )
    _check_fabrics(group, synchronize)


def workspace_bytes(
    operation: str,
    m: int,
    n: int,
    k: int,
    world: int,
    *,
    dtype: str | torch.dtype = "float32",
    schedule: str | Schedule = "auto",
) -> int:
    """The symmetric memory that a call on a device needs on every rank, in bytes.

    Calls share it, so a group needs that of its largest call. It is allocated at the first call of
    new sizes, which must not be captured into a graph.

    Args:
        operation: the name of the operator, e.g. `"all_gather_matmul"`.
        m, n, k: its sizes over all ranks, as `weft explore` takes them.
        world: the number of ranks.
        dtype: a dtype of torch, or its name.
        schedule: a schedule; `"auto"` is the largest of all that may be chosen.
    """
    import torch

    from weft.dtype import name_of
    from weft.fabric.device.program import needed_bytes
    from weft.operation import find
    from weft.plan import claims

    wanted = (
        ("operation", operation, str, "the name of an operator"),
        ("dtype", dtype, str | torch.dtype, "a dtype of torch or its name"),
        ("schedule", schedule, str | Schedule, "a name or a weft.Schedule"),
    )
    for name, value, kind, what in wanted:
        if not isinstance(value, kind):
            raise Unsupported(f"{name} must be {what}, not {value!r}")
    for name, size, least in (("m", m, 0), ("n", n, 0), ("k", k, 0), ("world", world, 1)):
        if isinstance(size, bool) or not isinstance(size, int) or size < least:
            raise Unsupported(f"{name} must be a whole number of at least {least}, not {size!r}")
    named = dtype if isinstance(dtype, str) else name_of(dtype)
    asked = find(operation).of(m, n, k, world, named)
    if schedule == "auto":
        some = [one for one in Schedule.space(asked) if one.fusion != "kernel"]
    else:
        some = [Schedule.parse(schedule) if isinstance(schedule, str) else schedule]
    plans = [claims.lower(asked, s) if s.fusion == "kernel" else asked.lower(s) for s in some]
    return max(map(needed_bytes, plans))


def configure(
    *,
    group: dist.ProcessGroup | None = None,
    deadline: float | None = None,
    link: str | Link | None = None,
    select: str | None = None,
) -> None:
    """Configures this rank of a group. If an argument is wrong, nothing is changed.

    Args:
        group: the process group (None: all ranks).
        deadline: how long a wait may take, in seconds; `float("inf")` for as long as it takes.
        link: the speed of links: `"memory"`, a rate such as `"0.1GB/s"`, or a `Link`. Set the same
            link on every rank.
        select: what chooses a schedule for `schedule="auto"`: `"auto"` (a tuned result, else the
            heuristic), `"heuristic"`, or `"model"` (simulation). The setting of rank 0 applies.
    """
    fabric = _fabric_of(group)
    if deadline is not None:
        deadline = _seconds_of(deadline, "deadline")
    if isinstance(link, str):
        link = Link.parse(link)
    if not isinstance(link, Link | None):
        raise Unsupported(
            f"link must be memory, a rate such as 0.1GB/s, or a weft.Link, not {link!r}"
        )
    if select is not None:
        _check_mode(select)
    # All is checked, so either everything is set or nothing.
    if link is not None:
        fabric.set_link(link)
    if deadline is not None:
        fabric.deadline = deadline
    if select is not None:
        _auto_of(_session_of(fabric)).set_mode(select)


_plugins.load()

__all__ = [
    "Cancelled",
    "Error",
    "Explanation",
    "Handle",
    "InvalidPlan",
    "Link",
    "Mismatch",
    "PeerLost",
    "RankFailed",
    "Recording",
    "Schedule",
    "Span",
    "Summary",
    "Timeline",
    "Timeout",
    "Unsupported",
    "all_gather",
    "all_gather_matmul",
    "all_gather_scaled_matmul",
    "all_reduce",
    "all_to_all",
    "all_to_all_matmul",
    "broadcast",
    "check",
    "compile",
    "configure",
    "embedding_all_to_all",
    "explain",
    "gather",
    "launch",
    "loom",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "nn",
    "record",
    "reduce_scatter",
    "scaled_matmul_reduce_scatter",
    "scatter",
    "summary",
    "symm_mem_compat",
    "symmetric_empty",
    "tune",
    "workspace_bytes",
]
