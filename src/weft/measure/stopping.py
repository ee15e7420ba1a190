"""Ctrl-C during a measurement on ranks: the first ends it after the round that is running, so that
what was measured until then can be shown; the second ends it at once.

Ranks ignore the signal of a terminal. The process that started them makes a file, and the ranks
look for it between rounds, together, so that all of them stop after the same round.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist


@contextmanager
def stop_file() -> Iterator[str]:
    """The path of a file that Ctrl-C makes. Nothing makes it elsewhere than in the main thread,
    which alone receives signals, and where the shell ignores Ctrl-C, as for background jobs."""
    with tempfile.TemporaryDirectory(prefix="weft-stop-") as folder:
        path = os.path.join(folder, "stop")
        here = threading.current_thread() is threading.main_thread()
        if not here or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            yield path
            return

        def stop(number: int, frame: FrameType | None) -> None:
            if os.path.exists(path):
                raise KeyboardInterrupt
            with open(path, "w"):
                pass
            said = "weft: stopping after this round; press Ctrl-C again to stop at once\n"
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, said.encode())

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield path
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes that are started inside do not get the Ctrl-C of a terminal, not even while they
    import what they need. This one gets it at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_asked(path: str | None) -> bool:
    """Whether to stop: the same answer on every rank. Collective if there is a path."""
    if path is None:
        return False
    asked = torch.tensor([int(os.path.exists(path))])
    dist.all_reduce(asked, dist.ReduceOp.MAX)
    return bool(asked.item())
