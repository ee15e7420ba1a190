"""Strategies on a host: the cores and priorities of its threads.

A rank computes on one thread (or a few) and has an engine thread per peer, which spins (`cores`) or
sleeps (`dma`) while its link is busy. Beyond that:

    prioritized     compute runs on a thread of the lowest priority, so that engines run first
    partitioned:K   engines have the last K cores alone, compute has the others
    both            engines have the last K cores; compute has all, with the lowest priority
    dma+trimmed:K   compute does not use the last K of its rank's cores

This needs no privilege. A thread cannot raise its priority again, so compute of the lowest priority
has a thread of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from weft.errors import Unsupported
from weft.strategy import Strategy

T = TypeVar("T")

LOWEST = 19
"""The nice value of the lowest priority."""
_TASKS = Path("/proc/self/task")
_ENGINE = "weft-engine"


class Placement:
    """Places the threads of this rank for one strategy after the other. `cores` are the cores of
    all ranks together; the rank's own are those to which it is confined when this is created."""

    def __init__(self, cores: Sequence[int]) -> None:
        self.cores = sorted(cores)
        self.own = sorted(os.sched_getaffinity(0))
        self._threads = torch.get_num_threads()
        self._background: ThreadPoolExecutor | None = None
        self._engines: list[int] = []

    def impossible(self, strategy: Strategy) -> str | None:
        """The reason why a strategy is not possible with these cores; None if it is."""
        if strategy.reserved >= len(self.cores):
            return (
                f"{strategy.reserved} of {len(self.cores)} cores for engines leave none to compute"
            )
        if strategy.trimmed >= len(self.own):
            return f"a rank computes on {len(self.own)} of the cores and cannot go without them"
        return None

    def run(self, strategy: Strategy, work: Callable[[], T]) -> T:
        """Does the work with threads placed by the strategy, then moves them back."""
        reason = self.impossible(strategy)
        if reason is not None:
            raise Unsupported(f"{strategy} cannot be had here: {reason}")
        engines, compute = self._cores_of(strategy)
        if strategy.prioritized:
            if self._background is None:
                self._background = ThreadPoolExecutor(1, "weft-background", self._step_back)
            background = self._background
            return self._placed(
                engines, lambda: background.submit(self._confined, compute, work).result()
            )
        return self._placed(engines, lambda: self._confined(compute, work))

    def close(self) -> None:
        if self._background is not None:
            self._background.shutdown()

    def _cores_of(self, strategy: Strategy) -> tuple[list[int], list[int]]:
        """The cores of engines, and those of compute."""
        if strategy.reserved:
            last = self.cores[-strategy.reserved :]
            return last, self.cores if strategy.prioritized else self.cores[: -len(last)]
        if strategy.trimmed:
            return self.own, self.own[: -strategy.trimmed]
        return self.own, self.own

    def _placed(self, cores: list[int], work: Callable[[], T]) -> T:
        moved = self.engines() if cores != self.own else []
        for thread in moved:
            os.sched_setaffinity(thread, cores)
        try:
            return work()
        finally:
            for thread in moved:
                os.sched_setaffinity(thread, self.own)

    def _confined(self, cores: list[int], work: Callable[[], T]) -> T:
        if cores == self.own:
            return work()
        os.sched_setaffinity(0, cores)
        try:
            return work()
        finally:
            os.sched_setaffinity(0, self.own)

    def engines(self) -> list[int]:
        """The engine threads of this process. They start when first used, and do not end."""
        if not self._engines:
            self._engines = [
                int(task.name)
                for task in _TASKS.iterdir()
                if (task / "comm").read_text().strip() == _ENGINE
            ]
        return self._engines

    def _step_back(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        torch.set_num_threads(self._threads)
