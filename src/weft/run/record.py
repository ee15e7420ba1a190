"""Recording: while it is active, every task of every call becomes a span, and every call is noted
with its layer, schedule and reason, for `weft.summary`."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from weft.fabric import Link
from weft.run.layers import Layers
from weft.timeline import Timeline


class Called(NamedTuple):
    """A call in a recording.

    operation: with its sizes. layer: "" outside of any module. backward: whether it was made in a
    backward pass. asked: the schedule as the caller gave it. seconds: None for a collective, whose
    timeline has its time. stored: the bytes that moved without a span of their own, because a
    product read or stored them in the memory of a peer. link: of the group. waited: whether the
    caller waited for it; False for a collective in the background.
    """

    name: str
    operation: str
    layer: str
    backward: bool
    rank: int
    schedule: str
    asked: str
    why: str
    seconds: float | None
    stored: int
    link: Link
    waited: bool = True


@dataclass
class Recording:
    """The timelines of this rank's calls, in order. `calls` says for each what it was."""

    timelines: list[Timeline] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)
    layers: Layers = field(default_factory=Layers, repr=False)
    _open: dict[int, Callable[[], Timeline | None]] = field(default_factory=dict, repr=False)

    def add(
        self,
        called: Called,
        timeline: Timeline,
        made: Callable[[], Timeline | None] | None = None,
    ) -> None:
        """Adds a call. made: of one that may still run, returns its timeline when it has ended, and
        None before. So the calls of all ranks are in the same order, whichever ends first."""
        with _changing:
            if made is not None:
                self._open[len(self.timelines)] = made
            self.timelines.append(timeline)
            self.calls.append(called)

    def settle(self) -> None:
        """Puts the timelines of calls that have ended in their places."""
        with _changing:
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


_changing = threading.RLock()
_recordings: list[Recording] = []
"""Those that are active, the newest last. They begin and end in any order, in any threads."""

active: Recording | None = None
"""The newest of the active recordings, if any, in which calls are noted."""

last: Recording | None = None
"""The recording that ended last."""


@contextmanager
def record() -> Iterator[Recording]:
    """Records every weft call of this process inside the `with` block; where several are active,
    the newest does. `weft.summary()` then shows what each layer of a model did."""
    global active, last
    recording = Recording()
    with _changing:
        if _recordings:
            recording.layers = _recordings[-1].layers
        else:
            recording.layers.start()
        _recordings.append(recording)
        active = recording
    try:
        with warnings.catch_warnings():
            # The hooks of layers do nothing in a graph, so what torch warns of cannot happen.
            warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
            yield recording
    finally:
        recording.settle()
        with _changing:
            _recordings[:] = [one for one in _recordings if one is not recording]
            if not _recordings:
                recording.layers.stop()
            active, last = (_recordings[-1] if _recordings else None), recording
