"""Interpreted kernels: the programs of a grid run one after another, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NAP = 1e-4
"""Seconds that an interpreted program sleeps between two polls of a counter."""

_watch: Callable[[], bool] | None = None


@contextmanager
def watched(watch: Callable[[], bool]) -> Iterator[None]:
    """In this context, waits of interpreted kernels continue as long as `watch` returns True."""
    global _watch
    before, _watch = _watch, watch
    try:
        yield
    finally:
        _watch = before


def patience() -> bool:
    """Sleeps a moment; returns whether a wait may continue."""
    time.sleep(NAP)
    return _watch is None or _watch()
