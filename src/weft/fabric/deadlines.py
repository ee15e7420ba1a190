"""Deadlines of waits: seconds, or infinity for none.

They are counted in own time (`native/clock.h`), which stands still while this process does. So a
job that was suspended goes on, however long that was.
"""

from __future__ import annotations

import math
import os
import time

import torch.distributed as dist

from weft.errors import Unsupported
from weft.fabric import _native

DEFAULT = 60.0
LONGEST = 1e9
"""Thirty years, in seconds. A longer deadline is a mistake, unless it is infinite."""
FOREVER_NS = 2**62
"""What an infinite deadline is in nanoseconds: a century, and the moment after it still has 64
bits."""


def seconds_of(deadline: object, name: str) -> float:
    """A deadline that a user has set, in seconds; raises unless it can be one."""
    try:
        seconds = math.nan if isinstance(deadline, bool) else float(deadline)  # type: ignore[arg-type]
    except Exception:  # of any kind: a tensor without a value raises its own
        seconds = math.nan
    if 0 < seconds <= LONGEST or seconds == math.inf:
        return seconds
    raise Unsupported(
        f"{name} must be a number of seconds above zero and up to {LONGEST:g}, or inf for none, "
        f"not {deadline!r}"
    )


def nanoseconds(seconds: float) -> int:
    """A duration for native code."""
    return FOREVER_NS if seconds * 1e9 >= FOREVER_NS else int(seconds * 1e9)


def default_deadline() -> float:
    """The deadline of a wait, in seconds, unless another one is configured."""
    text = os.environ.get("WEFT_DEADLINE", "")
    return seconds_of(text, "WEFT_DEADLINE") if text else DEFAULT


def deadline_of(group: dist.ProcessGroup) -> float:
    """The deadline of waits in a new fabric of a group, in seconds."""
    own: float | None = getattr(group, "deadline", None)  # a group of weft's backend has one
    return default_deadline() if own is None or "WEFT_DEADLINE" in os.environ else own


def own_time() -> float:
    """The own time of this process, in seconds."""
    return _native.own_now_ns() * 1e-9


def nap(seconds: float) -> None:
    """Sleeps for a moment; own time does not count what it takes too long."""
    began = _native.now_ns()
    time.sleep(seconds)
    _native.slept(began, began + nanoseconds(seconds))
