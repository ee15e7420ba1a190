"""Interpreted runs: the programs of a grid one after another, in this process, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NAP = 1e-4
"""Seconds that an interpreted program sleeps between two looks at a counter."""

_watch: Callable[[], bool] | None = None


@contextmanager
def watched(watch: Callable[[], bool]) -> Iterator[None]:
    """While this lasts, waits of interpreted kernels go on as long as `watch` says so."""
    global _watch
    before, _watch = _watch, watch
    try:
        yield
    finally:
        _watch = before


def patience() -> bool:
    """Sleeps a moment; whether a wait may go on."""
    time.sleep(NAP)
    return _watch is None or _watch()
