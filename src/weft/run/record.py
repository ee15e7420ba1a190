"""Recording: with it on, every task of every call becomes a span."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from weft.timeline import Timeline


@dataclass
class Recording:
    """The timelines of this rank's calls, in order."""

    timelines: list[Timeline] = field(default_factory=list)

    def gather(self, group: dist.ProcessGroup | None = None) -> list[Timeline]:
        """The timelines of all ranks, merged call by call; every rank of the group must ask."""
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
        active = before
