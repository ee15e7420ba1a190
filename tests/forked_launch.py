"""Ranks of `weft run` and of other measurements that tests make in their own process: forked from
the server that has torch imported (`rank_pools.py`), which is two seconds of processor time less
for each than a new interpreter.

Ranks of `weft.launch`, and of commands that tests start as processes, are new interpreters.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkServerProcess

from rank_pools import _forking_from, _server

from weft.measure import rank_process, rank_processes
from weft.measure.rank_process import Start
from weft.measure.rank_processes import Group

_new_interpreter = rank_processes._start


class _Process:
    """A forked process, with those methods of `subprocess.Popen` that are used of a rank."""

    stdout = stderr = None

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


class _Rank(rank_processes._Rank):
    def tell(self, start: Start, content: bytes) -> None:
        super().tell(replace(start, parent=_server(())._forkserver_pid), content)


def start(group: Group, number: int) -> rank_processes._Rank:
    """What `rank_processes._start` does, but for what the rank prints: that does not come here."""
    if group.labelled:
        return _new_interpreter(group, number)
    ours, theirs = Pipe()
    process = get_context("forkserver").Process(
        target=_boot, args=(theirs, dict(os.environ)), daemon=True
    )
    with _forking_from(()):
        process.start()
    theirs.close()
    return _Rank(number, _Process(process), ours)  # type: ignore[arg-type]


def _boot(pipe: Connection, environment: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # what was imported before the fork is shared, and never garbage
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:], sys.argv[:] = pipe.recv()
    rank_process.main(pipe)
