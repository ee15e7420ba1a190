"""A process that computes answers, so that the server stays responsive, and one lane of waiting
questions per process: of one tab's questions of one kind, only the newest is answered."""

from __future__ import annotations

import asyncio
import gc
import importlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from weft.errors import Error, Unsupported
from weft.measure.stopping import without_interrupts

LIMIT = 60.0
"""The most seconds of a processor that an answer may take."""
WAIT = 600.0
"""The most seconds until a process is ready or answers, however busy the computer is."""


class Stale(Exception):
    """A newer question of the same tab and kind has come."""


class WorkerQueue:
    """One process and the questions that wait for it, in the order in which they came."""

    def __init__(self, limit: float = LIMIT) -> None:
        self._limit = limit
        self._free = asyncio.Lock()
        self._number = itertools.count(1)
        self._newest: dict[str, int] = {}
        self._context = multiprocessing.get_context("spawn")
        self._cancelled = self._context.Value("q", 0, lock=False)  # a killed reader holds no lock
        self._running: tuple[str, int] | None = None
        self._start()

    async def ask(self, key: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """The answer of `function(*arguments, check)`. key: the tab and the kind of question.
        A question that waits or runs when a newer one of its key comes is dropped."""
        number = next(self._number)
        self._newest[key] = number
        if self._running is not None and self._running[0] == key:
            self._cancelled.value = self._running[1]
        async with self._free:
            if self._newest.get(key) != number:
                raise Stale
            self._running = (key, number)
            try:
                kind, value = await asyncio.to_thread(self._exchange, number, function, arguments)
            finally:
                self._running = None
                if self._newest.get(key) == number:
                    del self._newest[key]
        if kind == "stale":
            raise Stale
        if kind == "error":
            raise value
        return value

    def cancel(self, tab: str) -> None:
        """Drops all questions of a tab."""
        for key in self._newest:
            if key.startswith(f"{tab} "):
                self._newest[key] = 0
        if self._running is not None and self._running[0].startswith(f"{tab} "):
            self._cancelled.value = self._running[1]

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _start(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        arguments = (theirs, self._cancelled, os.getpid())
        self._process = self._context.Process(target=_serve, args=arguments, daemon=True)
        with without_interrupts():  # the server handles Ctrl-C and ends its processes
            self._process.start()
        self._ready = False
        theirs.close()

    def _exchange(
        self, number: int, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> tuple[str, Any]:
        try:
            if not self._ready:
                self._ready = self._pipe.poll(WAIT) and bool(self._pipe.recv())
            self._pipe.send((number, function, arguments))
            if self._answers():
                answer: tuple[str, Any] = self._pipe.recv()
                return answer
            text = f"the answer took more than {self._limit:.0f} s; ask for less"
        except (EOFError, OSError):
            text = "the process that simulates has ended; ask again"
        self.close()
        self._start()
        return "error", Unsupported(text)

    def _answers(self) -> bool:
        """Waits for an answer; False if it takes too much."""
        begun, until = _processor_seconds(self._process.pid), time.monotonic() + WAIT
        while not self._pipe.poll(min(1.0, self._limit)):
            used = _processor_seconds(self._process.pid) - begun
            if used > self._limit or time.monotonic() > until:
                return False
        return True


def _processor_seconds(process: int | None) -> float:
    """What a process has used since it started."""
    try:
        said = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it has ended, which its pipe says
    return (int(said[11]) + int(said[12])) / os.sysconf("SC_CLK_TCK")


def _serve(pipe: Connection, cancelled: Any, parent: int) -> None:
    importlib.import_module("weft.studio.answers")  # takes seconds, which are not an answer's
    gc.freeze()  # what is imported stays: it need not be scanned between answers
    pipe.send(True)
    while True:
        try:
            number, function, arguments = pipe.recv()
        except (EOFError, OSError):
            return

        def check(number: int = number) -> None:
            if cancelled.value == number or os.getppid() != parent:
                raise Stale

        try:
            answer = ("answer", function(*arguments, check=check))
        except Stale:
            answer = ("stale", None)
        except Error as error:
            answer = ("error", Unsupported(str(error)))
        except Exception as error:
            answer = ("error", Unsupported(f"this cannot be simulated: {error!r}"))
        pipe.send(answer)
