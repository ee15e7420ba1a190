"""Live runs seen from the server: each is a process with its ranks, which lives as long as somebody
listens to it. A tab has at most one, and so has the computer."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.studio.live_case import LiveCase, limits_here

LIMIT = 300.0
"""The most seconds of a live run, however slow the computer is meanwhile."""
BEAT = 1.0
"""Seconds after which an empty line is sent, so that a reader who has gone is noticed."""
OTHER = (
    "Another live run is going on on this computer, and two at once would disturb each other; "
    "start this one when that has ended."
)
_GRACE = 5.0
_LONGEST = 64 << 20
"""Bytes of an answer."""


@dataclass(frozen=True)
class _Run:
    """A run: its process, and the lock that keeps others out meanwhile."""

    process: Process
    lock: int


class LiveRuns:
    """The live runs of a server, by tab."""

    def __init__(self) -> None:
        self._running: dict[str, _Run] = {}
        self._ending: dict[_Run, asyncio.Task[None]] = {}

    async def stream(self, tab: str, case: LiveCase) -> AsyncIterator[bytes]:
        """Runs a case and yields lines of JSON. The run ends when nobody takes the next line."""
        if tab in self._running:
            await self._end(self._running[tab])
        refused = await asyncio.to_thread(refusal, case)
        if refused is not None:
            yield _line(refused)
            return
        await asyncio.gather(*self._ending.values())
        lock = _alone()
        if lock is None:
            yield _line({"error": OTHER})
            return
        try:
            process = await _started()
        except BaseException:
            os.close(lock)
            raise
        run = self._running[tab] = _Run(process, lock)
        try:
            async for line in _lines(process, case):
                yield line
        finally:
            self._end(run)

    async def close(self) -> None:
        """Ends all runs."""
        await asyncio.gather(*map(self._end, [*self._running.values(), *self._ending]))

    def _end(self, run: _Run) -> asyncio.Task[None]:
        """Ends a run in the background: whoever listened may be gone already."""
        self._running = {tab: one for tab, one in self._running.items() if one is not run}
        if run not in self._ending:
            self._ending[run] = asyncio.create_task(_end(run))
            self._ending[run].add_done_callback(lambda _: self._ending.pop(run))
        return self._ending[run]


def refusal(case: LiveCase) -> dict[str, Any] | None:
    """Why a case cannot be run here and what could be; None if it can."""
    limits = limits_here(case.state.dtype)
    reason = case.refused(limits)
    if not reason:
        return None
    fits = case.fitting(limits)
    names = ("m", "n", "k", "world", "dtype")
    changed = {} if fits is None else {name: getattr(fits, name) for name in names}
    differing = {k: v for k, v in changed.items() if v != getattr(case.state, k)}
    return {"error": f"{reason[0].upper()}{reason[1:]}.", "fits": differing}


async def _started() -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "weft.studio.live_run",
        stdin=PIPE,
        stdout=PIPE,
        start_new_session=True,  # a group of processes that ends as a whole
        limit=_LONGEST,
    )


async def _lines(process: Process, case: LiveCase) -> AsyncIterator[bytes]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(_line(case.to_query()))
    clock = asyncio.get_running_loop().time
    until = clock() + LIMIT
    reading: asyncio.Task[bytes] | None = None
    try:
        while clock() < until:
            reading = reading or asyncio.create_task(process.stdout.readline())
            done, _ = await asyncio.wait({reading}, timeout=BEAT)
            if not done:
                yield b"\n"
                continue
            line, reading = reading.result(), None
            if not line:
                return
            yield line
        yield _line({"error": f"The run took more than {LIMIT:.0f} s and was ended; ask for less."})
    finally:
        if reading is not None:
            reading.cancel()


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _alone() -> int | None:
    """A lock that no other live run of this user has; None if one has it."""
    path = Path(tempfile.gettempdir()) / f"weft-live-{os.getuid()}.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


async def _end(run: _Run) -> None:
    """Terminates the process, which ends its ranks, and kills what is left of its group."""
    process = run.process
    try:
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    finally:
        os.close(run.lock)
