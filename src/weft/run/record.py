"""Recording: with it on, every task of every call becomes a span."""

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
        """A place for a call that goes on in the background, empty until `made` gives its timeline:
        so the calls of all ranks are in the same order, whichever end first."""
        self._open[len(self.timelines)] = made
        self.timelines.append(Timeline((), title))

    def settle(self) -> None:
        """Fills the places of those calls that are over by now."""
        for place, made in list(self._open.items()):
            timeline = made()
            if timeline is not None:
                self.timelines[place] = timeline
                del self._open[place]

    def gather(self, group: dist.ProcessGroup | None = None) -> list[Timeline]:
        """The timelines of all ranks, merged call by call; every rank of the group must ask."""
        self.settle()
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, self.timelines, group=group)
        return [Timeline.merge(calls) for calls in zip(*parts, strict=True)]


active: Recording | None = None
"""The recording that is on, if any."""


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
