"""What torch.distributed gets for a call of the weft backend: a Work object and its future."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.futures import Future

from weft import fabric as fabrics
from weft.collectives.group_channel import FOREVER, GroupChannel, Message, now_ns
from weft.collectives.handle import Handle
from weft.errors import Mismatch
from weft.fabric.deadlines import nanoseconds
from weft.fabric.outcomes import AGAIN, DISAGREE, OK, TIMEOUT

Finish = Callable[[], None]


class Pending(Protocol):
    """A collective or a message that runs in the background."""

    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> Any: ...


class PendingMessage:
    """A message that is being sent or received."""

    def __init__(
        self, channel: GroupChannel, message: Message, tensor: torch.Tensor, what: str
    ) -> None:
        self._channel = channel
        self._message = message
        self._tensor = tensor
        self._what = what

    def done(self) -> bool:
        return self._message.done

    @property
    def source(self) -> int:
        return self._message.source

    def wait(self, timeout: float | None = None) -> None:
        channel, message = self._channel, self._message
        until = FOREVER if timeout is None else now_ns() + nanoseconds(timeout)
        try:
            while True:
                outcome = channel.messages.wait(message, until)
                if outcome[0] != AGAIN:
                    break
                if now_ns() >= until:
                    outcome = (TIMEOUT, -1)
                    break
        except BaseException as interrupt:
            channel.interrupted(interrupt)
            raise
        if outcome[0] == OK:
            return
        if outcome[0] == DISAGREE:
            raise Mismatch(
                f"rank {message.source} sent {message.total} bytes, but rank {channel.rank} "
                f"receives into {self._tensor.nbytes}"
            )
        raise channel.message_error(outcome, self._what)


class WeftWork(dist.Work):
    """A call of the weft backend. `wait` raises its error."""

    def __init__(
        self,
        pending: Sequence[Pending],
        result: Any,
        finish: Sequence[Finish] = (),
    ) -> None:
        super().__init__()
        self._pending = pending
        self._result = result
        self._finish: list[Finish] = list(finish)
        self._error: Exception | None = None
        self._future: Future[Any] | None = None
        self._lock = threading.Lock()

    def is_completed(self) -> bool:
        return all(one.done() for one in self._pending)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        if self._error is None and self.is_completed():
            try:
                self.wait()
            except Exception as error:
                return error
        return self._error

    def source_rank(self) -> int:
        first = self._pending[0] if self._pending else None
        return first.source if isinstance(first, PendingMessage) else -1

    _source_rank = source_rank

    def result(self) -> Any:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._error is not None:
            raise self._error
        seconds = timeout.total_seconds() if timeout else 0.0
        try:
            for one in self._pending:
                one.wait(seconds if seconds > 0 else None)
            with self._lock:
                while self._finish:
                    self._finish.pop(0)()
        except Exception as error:
            self._error = error
            raise
        return True

    def get_future(self) -> Future[Any]:
        if self._future is None:
            self._future = Future()
            if self.is_completed():
                _complete(self)
            else:
                _watch(self)
        return self._future


_IDLE = 5.0
"""Seconds after which a watcher that has nothing to wait for ends, as groups come and go."""

_watching = threading.Lock()
_watchers: dict[int, _Watcher] = {}
_messages: set[threading.Thread] = set()
_ending = False


class _Watcher(threading.Thread):
    """Completes the futures of a channel in the order in which its collectives end."""

    def __init__(self, key: int) -> None:
        super().__init__(name="weft-futures", daemon=True)
        self.key = key
        self.works: queue.SimpleQueue[WeftWork | None] = queue.SimpleQueue()

    def run(self) -> None:
        while True:
            try:
                work = self.works.get(timeout=_IDLE)
            except queue.Empty:
                with _watching:
                    if not self.works.empty():
                        continue
                    _watchers.pop(self.key, None)
                return
            if work is None:
                return
            _complete(work)


def _complete(work: WeftWork) -> None:
    future = work._future
    assert future is not None
    try:
        work.wait()
    except Exception as error:
        if not _ending:  # the process ends, and nobody reads the future
            future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
    else:
        future.set_result(work._result)


def _complete_message(work: WeftWork) -> None:
    _complete(work)
    with _watching:
        _messages.discard(threading.current_thread())


def _watch(work: WeftWork) -> None:
    """Completes a future in the background. Every channel has its own watcher, so that no group
    waits for another."""
    first = work._pending[0]
    with _watching:
        if not isinstance(first, Handle):  # messages end in any order
            thread = threading.Thread(target=_complete_message, args=(work,), daemon=True)
            _messages.add(thread)
            thread.start()
            return
        key = id(first.channel)
        watcher = _watchers.get(key)
        if watcher is None or not watcher.is_alive():
            watcher = _watchers[key] = _Watcher(key)
            watcher.start()
        watcher.works.put(work)


@atexit.register
def _end_watchers() -> None:
    """Ends all groups, and then the threads that wait for them. A thread that returns from native
    code while Python exits would be unwound by Python, and C++ would abort the process."""
    global _ending
    _ending = True
    fabrics._close_all()
    with _watching:
        watchers, messages = list(_watchers.values()), list(_messages)
    for watcher in watchers:
        watcher.works.put(None)
    until = time.monotonic() + _IDLE
    for thread in (*watchers, *messages):
        thread.join(max(0.0, until - time.monotonic()))
