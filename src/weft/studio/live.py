"""Live runs seen from the server: each is a process with its ranks, which lives as long as somebody
listens to it. A tab has at most one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

LIMIT = 300.0
"""The most seconds of a live run, however slow the computer is meanwhile."""
BEAT = 1.0
"""Seconds after which an empty line is sent, so that a reader who has gone is noticed."""
_GRACE = 5.0
_LONGEST = 64 << 20
"""Bytes of an answer."""


class LiveRuns:
    """The live runs of a server, by tab."""

    def __init__(self) -> None:
        self._running: dict[str, Process] = {}
        self._ending: dict[Process, asyncio.Task[None]] = {}

    async def stream(self, tab: str, query: Mapping[str, str]) -> AsyncIterator[bytes]:
        """Runs a case and yields its lines. The run ends when nobody takes the next line."""
        if tab in self._running:
            await self._end(self._running[tab])
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "weft.studio.live_run",
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,  # a group of processes that ends as a whole
            limit=_LONGEST,
        )
        self._running[tab] = process
        try:
            async for line in _lines(process, query):
                yield line
        finally:
            if self._running.get(tab) is process:
                del self._running[tab]
            self._end(process)

    async def close(self) -> None:
        """Ends all runs."""
        await asyncio.gather(*map(self._end, list(self._running.values())), *self._ending.values())

    def _end(self, process: Process) -> asyncio.Task[None]:
        """Ends a run in the background: whoever listened may be gone already."""
        task = self._ending.get(process)
        if task is None:
            task = self._ending[process] = asyncio.create_task(_end(process))
            task.add_done_callback(lambda _: self._ending.pop(process))
        return task


async def _lines(process: Process, query: Mapping[str, str]) -> AsyncIterator[bytes]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(dict(query)).encode() + b"\n")
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
        yield _error(f"the run took more than {LIMIT:.0f} s and was ended; ask for less")
    finally:
        if reading is not None:
            reading.cancel()


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode() + b"\n"


async def _end(process: Process) -> None:
    """Terminates the process, which ends its ranks, and kills what is left of its group."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
