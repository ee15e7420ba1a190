"""Runs a function on new ranks of this machine, for weft's own measurements: with a report of
progress, and on emulated hosts where wanted. `weft.launch` runs functions of users, on the same
ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from weft.measure.hosts import Hosts
from weft.measure.rank_process import Report as Report
from weft.measure.rank_process import join as join
from weft.measure.rank_processes import Group, run
from weft.measure.rank_processes import cores_of as cores_of


def launch(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    threads: int = 1,
    pin: bool = True,
    hosts: Hosts | None = None,
    report: Report | None = None,
) -> list[Any]:
    """Runs `function(report, *arguments)` on every rank of a new gloo group. Returns the results.

    threads: compute threads per rank. pin: whether each rank is pinned to its share of the cores.
    hosts: emulated hosts, over which the ranks are distributed evenly (None: this machine).
    report: receives the progress of rank 0.
    """
    return run(Group(world, threads, pin, hosts), function, arguments, report=report)


all_gather_flat: Callable[[torch.Tensor, torch.Tensor], Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
"""torch's all-gather into one tensor, whose name depends on the version of torch."""
