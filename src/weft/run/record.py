"""Recording: while it is active, every task of every call becomes a span."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from weft.timeline import Timeline


@dataclass
class Recording:
    """The timelines of this rank's calls, in order."""

    timelines: list[Timeline] = field(default_factory=list)
    _open: dict[int, Callable[[], Timeline | None]] = field(default_factory=dict, repr=False)

    def reserve(self, title: str, made: Callable[[], Timeline | None]) -> None:
        """Reserves the place of a background call, which is empty until `made` returns its
        timeline. So the calls of all ranks are in the same order, whichever ends first."""
        self._open[len(self.timelines)] = made
        self.timelines.append(Timeline((), title))

    def settle(self) -> None:
        """Fills the reserved places of calls that have ended."""
        for place, made in list(self._open.items()):
            timeline = made()
            if timeline is not None:
                self.timelines[place] = timeline
                del self._open[place]

    def gather(self, group: dist.ProcessGroup | None = None) -> list[Timeline]:
        """The timelines of all ranks, merged call by call. Every rank of the group must call
        this."""
        self.settle()
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, self.timelines, group=group)
        return [Timeline.merge(calls) for calls in zip(*parts, strict=True)]


active: Recording | None = None
"""The active recording, if any."""


@contextmanager
def record() -> Iterator[Recording]:
    """Records every weft call of this process inside the `with` block."""
    global active
    before, active = active, Recording()
    try:
        yield active
    finally:
        active.settle()
        active = before
