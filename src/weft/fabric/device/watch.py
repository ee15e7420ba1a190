"""Looks after the calls that are under way on a device.

A stream that waits for a word cannot give up by itself. So a thread compares the headers of known
calls, and notices a lost peer or a deadline that has passed. Then it writes the words that this
rank's streams wait for, the streams run to their end on data that nobody uses, and the error comes
at the next call or at `weft.check()`. The device itself stays usable.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weft.errors import Mismatch
from weft.fabric.deadlines import nap, own_time
from weft.fabric.outcomes import OK, TIMEOUT
from weft.fabric.proposal import check_same

if TYPE_CHECKING:
    from weft.fabric.device.device_call import DeviceCall
    from weft.fabric.device.device_fabric import DeviceFabric
    from weft.fabric.device.program import DeviceProgram

_LOOK, _LOOK_LONG = 0.002, 0.02
_LOOK_AT_GRAPHS = 0.05
"""Seconds between two looks at the peers. While the same call runs, looks become rarer: they take
time from the process. Replays of a graph are not announced to the host."""


@dataclass
class _UnderWay:
    """A call that is enqueued. since: when it was first seen to have started on the device."""

    number: int
    label: str
    program: DeviceProgram | None
    began: torch.Event
    ended: torch.Event
    compared: bool
    since: float = 0.0
    released: bool = False


class Watchdog:
    """The thread that looks after the calls of one fabric. It sleeps while there are none."""

    def __init__(self, fabric: DeviceFabric) -> None:
        self._fabric = fabric
        self._calls: deque[_UnderWay] = deque()
        self._looking = threading.Lock()
        self._wake = threading.Event()
        self._over = False
        self.last = 0
        """The last call that was added."""
        self._graph_words = 0
        """How many words the programs in graphs wait for, and whether there are graphs at all."""
        self._thread: threading.Thread | None = None

    def add(self, call: DeviceCall, program: DeviceProgram | None, ended: torch.Event) -> None:
        """Looks after a call from now on. program: None if the call was refused. ended: its end."""
        fabric = self._fabric
        if fabric.world == 1:
            return
        compared = not call.known or program is None or self._agrees(call.number, program)
        self.last = call.number
        if compared and not self._calls:
            fabric.board.seen(call.number)
        self._calls.append(_UnderWay(call.number, call.label, program, call.began, ended, compared))
        self._begin()

    def add_graph(self, program: DeviceProgram) -> None:
        """Looks after the peers from now on, for a graph may be replayed at any time."""
        if self._fabric.world > 1:
            self._graph_words = max(1, self._graph_words, program.num_words)
            self._begin()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weft watchdog", daemon=True)
            self._thread.start()
        self._wake.set()

    def finish(self) -> None:
        """Waits until the calls of this rank have ended."""
        for call in list(self._calls):
            if self._fabric.broken is None:
                call.ended.synchronize()
        self.look()

    def _run(self) -> None:
        pause, first = _LOOK, None
        while not self._over:
            if not self._calls:
                self._wake.clear()
                if not self._calls:
                    self._wake.wait(_LOOK_AT_GRAPHS if self._graph_words else None)
            try:
                self.look()
            except RuntimeError as error:
                self._fabric.device_failed(error)
                return
            before, first = first, self._calls[0] if self._calls else None
            pause = min(2 * pause, _LOOK_LONG) if first is before else _LOOK
            nap(pause)

    def look(self) -> None:
        """Looks at all calls once."""
        fabric = self._fabric
        with self._looking:
            if fabric.broken is not None:
                self._release(fabric.number)
                self._drop_ended()
                return
            for call in list(self._calls):
                if not call.compared:
                    call.compared = self._compare(call)
            self._note_seen()
            self._drop_ended()
            if not self._calls and not self._graph_words:
                return
            state = fabric.peer_state()
            first = self._calls[0] if self._calls else None
            if state[0] != OK:
                fabric.failure(state, first.label if first else "a graph", "its peers")
            elif first is None:
                return
            elif not first.since:
                if first.began.query():
                    first.since = own_time()
            elif own_time() - first.since > fabric.deadline:
                fabric.failure((TIMEOUT, -1), first.label, "a signal of its peers")

    def _note_seen(self) -> None:
        """Tells the peers up to which call this rank has compared all headers."""
        for call in self._calls:
            if not call.compared:
                return
            self._fabric.board.seen(call.number)

    def _drop_ended(self) -> None:
        while self._calls and self._calls[0].compared and self._calls[0].ended.query():
            call = self._calls.popleft()
            if call.program is not None and call.program.gave_up() and self._fabric.broken is None:
                self._fabric.failure((TIMEOUT, -1), call.label, "a chunk of its peers")
            self._fabric.board.end(call.number)
            if self._calls:  # its time began when the one before it ended
                self._calls[0].since = 0.0

    # -- disagreement ------------------------------------------------------------------------------

    def _agrees(self, number: int, program: DeviceProgram) -> bool:
        """Whether all peers have already posted what was expected."""
        board = self._fabric.board
        return all(
            board.signature(number, peer) == program.signatures[peer] for peer in self._fabric.peers
        )

    def _compare(self, call: _UnderWay) -> bool:
        """Compares the headers of a call, if all are there. If they differ, its waits are released
        and its error is kept for the next call."""
        fabric = self._fabric
        if fabric.board.missing(call.number):
            return False
        assert call.program is not None
        if self._agrees(call.number, call.program):
            return True
        proposals = [header.proposal() for header in fabric.board.headers(call.number)]
        try:
            check_same(proposals, call.number)
            raise Mismatch(
                f"ranks disagree in call {call.number} of {call.label}: this rank repeated its "
                "last sizes, and a peer has others; set WEFT_AGREE=each if the sizes of single "
                "ranks change between calls"
            )
        except Mismatch as error:
            fabric.pending = Mismatch(f"{error}; the result of that call is not valid")
        self._release(call.number, call.program)
        return True

    # -- release -----------------------------------------------------------------------------------

    def release_all(self) -> None:
        """Releases every wait of this rank, for the group is over."""
        self._release(self._fabric.number)
        self._wake.set()

    def _release(self, number: int, program: DeviceProgram | None = None) -> None:
        """Writes the words that streams of this rank may wait for. number: the last call whose
        waits are released. program: only the words of this program, otherwise all."""
        fabric, driver = self._fabric, self._fabric.driver
        programs = (
            [program]
            if program is not None
            else [c.program for c in self._calls if c.program is not None]
        )
        words = [
            fabric.word(fabric.rank, word, False)
            for word in range(max((p.num_words for p in programs), default=0))
        ]
        if program is None:
            words += [fabric.meeting_word(fabric.rank, peer) for peer in fabric.peers]
        for word in words:
            if driver.read(word) < number:
                driver.release(word, number)
        if program is None and self._graph_words:
            for word in fabric.captured_words(self._graph_words):
                driver.release(word, 1)

    def stop(self) -> None:
        self._over = True
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5.0)
