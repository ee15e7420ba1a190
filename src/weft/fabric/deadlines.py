"""Deadlines of waits: seconds, or infinity for none."""

from __future__ import annotations

import math
import os

import torch.distributed as dist

from weft.errors import Unsupported

DEFAULT = 60.0
LONGEST = 1e9
"""Thirty years, in seconds. A longer deadline is a mistake, unless it is infinite."""
FOREVER_NS = 2**62
"""What an infinite deadline is in nanoseconds: a century, and the moment after it still has 64
bits."""


def seconds_of(deadline: object, name: str) -> float:
    """A deadline that a user has set, in seconds; raises unless it can be one."""
    try:
        seconds = float(deadline)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
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
