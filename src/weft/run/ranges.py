"""Ranges for torch.profiler: every call of an operator, a collective or a message is one range.

A range costs microseconds, so callers ask `profiled()` first, which costs 60 ns:

    with range_of("all_reduce") if profiled() else NOTHING:
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether torch.profiler or torch.autograd.profiler records this thread."""

NOTHING: AbstractContextManager[None] = nullcontext()


def range_of(name: str) -> AbstractContextManager[object]:
    """A range `weft.NAME` in the trace of the profiler. The dispatcher of torch has its own ranges,
    `weft::NAME`, for calls that go through it."""
    return torch.autograd.profiler.record_function(f"weft.{name}")
