"""The methods of the native fabric (`fabric/native.py`), where some ranks are on other machines.

Inside the machine it uses the native fabric. Between machines it adds headers that are sent over
the network, and transfers beside the copy engines. A header goes to every other rank. Whoever needs
the headers of a call reads them: the rank itself, if it has nothing else to do before they agree;
otherwise a thread, which then starts the transfers, so that a known call communicates while its
local matmul runs.

A rank is never two calls ahead of another: it enters call e+1 only after it has finished e, for
which it needed every header of e. So when data of a call moves, every rank has finished the call
before, and the bytes of two calls never mix.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import torch

from weft.fabric import _native
from weft.fabric.group import eager as eagerly
from weft.fabric.group.headers import BYE, NOTHING, Header, write_header
from weft.fabric.group.streams import Streams
from weft.fabric.group.transfers import NetworkFlight, NetworkProgram, Payload, Worker
from weft.fabric.group.wires import Wires
from weft.fabric.outcomes import (
    AGAIN,
    CANCELLED,
    DISAGREE,
    OK,
    TIMEOUT,
    Outcome,
)

Parts = Mapping[int, Sequence[Payload]]
"""The bytes that go with the header to every peer."""
_SLICE = 0.05
"""The longest wait before Python handles its signals, in seconds."""


class NetworkNative:
    """The native fabric of the ranks of this machine (`members`), and the connections to all other
    ranks."""

    def __init__(
        self,
        native: _native.Fabric,
        streams: Streams,
        wires: Wires,
        rank: int,
        world: int,
        members: Sequence[int],
    ) -> None:
        self.inner = native
        self.streams = streams
        self.wires = wires
        self._rank, self._world, self._members = rank, world, list(members)
        self._peers = [peer for peer in range(world) if peer != rank]
        self._changed = threading.Condition()
        self._headers: dict[int, dict[int, Header]] = {}
        self._entered = [0] * world
        self._failed_in = 0
        self._gone: dict[int, int] = {}
        self._held: tuple[int, int, bytes, int] | None = None
        """The header that waits for the bytes that go with it."""
        self._waiting: NetworkFlight | None = None
        """The flight that this rank starts itself when it has read all headers."""
        self._starting: NetworkFlight | None = None
        """The flight that the thread starts."""
        self._failure: BaseException | None = None
        """Why the thread could not start a flight, e.g. because there was no memory. It ends the
        call, and with it the group."""
        self._lanes: dict[tuple[int, bool], Worker] = {}
        self._starter = Worker("weft starts")
        self._disconnected = self._closed = False

    # -- headers -----------------------------------------------------------------------------------

    def enter(
        self,
        call: int,
        signature: int,
        offsets: Sequence[int],
        blob: bytes,
        eager: int = 0,
        parts: Parts | None = None,
    ) -> None:
        """Enters a call. eager: the number of the plan whose bytes go with the header. parts: these
        bytes; None if the header waits for them, and is sent by `launch` or `agree`."""
        if eager and parts is None:
            self._held = call, signature, blob, eager
        else:
            self._send(call, signature, blob, eager, parts)
        self.inner.enter(call, signature, offsets, blob)
        with self._changed:
            self._headers.pop(call - 2, None)
            self._note(call, self._rank, Header(signature, blob, eager, NOTHING))

    def _send(
        self, call: int, signature: int, blob: bytes, eager: int = 0, parts: Parts | None = None
    ) -> None:
        """Sends a header to all peers, with the bytes for each."""
        with self._changed:
            for peer in self._peers:
                own = parts.get(peer, ()) if parts else ()
                size = sum(part.nbytes for part in own)
                head = write_header(call, signature, blob, eager, size)
                self.wires.send(peer, [head, *(part.data for part in own)])

    def _send_held(self, flight: NetworkFlight | None = None) -> None:
        """Sends the header that was held back, with the bytes of a flight; None: without any, as
        the call has ended."""
        if self._held is None:
            return
        call, signature, blob, eager = self._held
        self._held = None
        if flight is None:
            self._send(call, signature, blob)
        else:
            parts = eagerly.pack(flight.program.transfers, flight.view)
            self._send(call, signature, blob, eager, parts)

    def came(self, call: int, eager: int) -> Mapping[int, Payload] | None:
        """The bytes that came with the headers of the peers; None if not all ranks have sent them
        for this plan."""
        headers = self._headers[call]
        if not eager or any(header.eager != eager for header in headers.values()):
            return None
        return {peer: headers[peer].payload for peer in self._peers}

    def _receive(self, call: int, seconds: float) -> None:
        """Waits for headers of a call, and sends what is left of this rank's own."""
        headers = self._headers.get(call, {})
        missing = [peer for peer in self._peers if peer not in headers and peer not in self._gone]
        ready = self.wires.wait(missing, seconds)
        with self._changed:
            self.wires.flush()
            for peer in ready:
                self._read(peer)

    def _read(self, peer: int) -> None:
        """Takes the next message of a peer, if it is complete."""
        found = self.wires.read(peer)
        if isinstance(found, int):
            self._gone[peer] = found
        elif found is not None:
            self._note(found[0], peer, found[1])

    def _note(self, call: int, rank: int, header: Header) -> None:
        """Keeps a header."""
        self._headers.setdefault(call, {})[rank] = header
        self._entered[rank] = call

    def _start(self, flight: NetworkFlight) -> None:
        """Starts a flight if the headers, which have all arrived, are those that it was made
        for."""
        if not self._agrees(flight.call, flight.signatures):
            return
        flight.start(self._lane, self.came(flight.call, flight.program.eager))

    def _meet_and_start(self, flight: NetworkFlight) -> None:
        """Reads the headers of a call until all have come, and starts its flight."""
        failure: BaseException | None = None
        try:
            while not self._met_and_started(flight):
                self._receive(flight.call, _SLICE)
        except BaseException as error:
            failure = error
        with self._changed:
            if self._starting is flight:
                self._starting, self._failure = None, failure
                self._changed.notify_all()

    def _met_and_started(self, flight: NetworkFlight) -> bool:
        """Starts a flight if all headers have come. Returns whether nothing is left to wait for."""
        with self._changed:
            if self._starting is not flight:
                return True
            if self._complete(flight.call):
                self._start(flight)
                return True
            return self._hopeless(flight.call, flight.deadline) is not None

    def _complete(self, call: int) -> bool:
        """Whether this rank has all headers of a call, and its own are on their way."""
        return len(self._headers.get(call, ())) == self._world and not self.wires.unsent

    def _hopeless(self, call: int, deadline: int) -> Outcome | None:
        """Why no more headers of a call will come, or None."""
        headers = self._headers.get(call, {})
        missing = [rank for rank in self._peers if rank not in headers]
        for rank in missing:
            if rank in self._gone:
                return (self._gone[rank], rank)
        if _native.own_now_ns() > deadline:
            return (TIMEOUT, next(iter([*missing, *self.wires.unsent]), -1))
        return None

    def _agrees(self, call: int, signatures: Sequence[int]) -> bool:
        headers = self._headers[call]
        return all(headers[rank].signature == own for rank, own in enumerate(signatures))

    def agree(self, call: int, signatures: Sequence[int], deadline: int) -> Outcome:
        until = time.monotonic() + _SLICE
        self._send_held(self._waiting)
        while True:
            with self._changed:
                if self._starting is None and self._complete(call):
                    flight, self._waiting = self._waiting, None
                    if flight is not None:
                        self._start(flight)
                if self._starting is None:
                    if self._failure is not None:
                        raise self._failure
                    if self._complete(call):
                        break
                    hopeless = self._hopeless(call, deadline)
                    if hopeless is not None:
                        return hopeless
                left = until - time.monotonic()
                if left <= 0:
                    return (AGAIN, -1)
                if self._starting is not None:
                    self._changed.wait(left)
                    continue
            self._receive(call, left)
        if signatures and not self._agrees(call, signatures):
            return (DISAGREE, -1)
        return (OK, -1)

    def header(self, call: int, rank: int) -> bytes:
        return self._headers[call][rank].blob

    def entered(self, rank: int) -> int:
        return self._entered[rank]

    # -- flights -----------------------------------------------------------------------------------

    def launch(
        self,
        program: NetworkProgram,
        call: int,
        deadline: int,
        tensors: Sequence[torch.Tensor],
        signatures: Sequence[int],
        record: bool,
    ) -> NetworkFlight:
        """A flight that starts as soon as all headers are known to agree. If compute has nothing to
        do before that, it reads them itself."""
        inside = [signatures[rank] for rank in self._members]
        flight = NetworkFlight(
            self.inner,
            self.streams,
            program,
            call,
            deadline,
            tensors,
            signatures,
            inside,
            record,
        )
        if self._held is not None and not program.late:
            self._send_held(flight)
        if program.meets_first:
            self._waiting = flight
        else:
            self._starting = flight
            self._starter.push(lambda: self._meet_and_start(flight))
        return flight

    def _lane(self, peer: int, sends: bool) -> Worker:
        lane = self._lanes.get((peer, sends))
        if lane is None:
            name = f"weft {'to' if sends else 'from'} {peer}"
            lane = self._lanes[(peer, sends)] = Worker(name)
        return lane

    def cancel(self, flight: NetworkFlight) -> None:
        with self._changed:
            self._waiting = self._starting = None
            flight.cancelled = True
        if flight.inner is not None:
            self.inner.cancel(flight.inner)

    def finish(self, flight: NetworkFlight) -> Outcome:
        """Waits until all copies and transfers of the call have ended. After a cancellation,
        transfers end only when their connections are closed, which ends the group."""
        if flight.inner is None:
            return flight.outcome
        if flight.cancelled and flight.left:
            self._disconnect()
        with flight.changed:
            flight.changed.wait_for(lambda: flight.left == 0, _SLICE)
        if flight.left:
            if not flight.cancelled and flight.outcome[0] != OK:
                return flight.outcome
            return (AGAIN, -1)
        inside = self.inner.finish(flight.inner)
        if flight.failure is not None and not flight.cancelled:
            raise flight.failure
        return flight.outcome if flight.outcome[0] != OK else inside

    def outcome(self, flight: NetworkFlight) -> Outcome:
        if flight.outcome[0] != OK or flight.inner is None:
            return flight.outcome
        return self.inner.outcome(flight.inner)

    def wait(self, flight: NetworkFlight, rank: int, counter: int) -> Outcome:
        assert flight.inner is not None
        return self._first_hand(flight, self.inner.wait(flight.inner, rank, counter))

    def wait_doorbell(self, flight: NetworkFlight, seen: int) -> Outcome:
        assert flight.inner is not None
        return self._first_hand(flight, self.inner.wait_doorbell(flight.inner, seen))

    def _first_hand(self, flight: NetworkFlight, outcome: Outcome) -> Outcome:
        """Translates the rank in an outcome from its number in the machine to that in the group. If
        a transfer failed, its own outcome, which names the peer, takes precedence."""
        if flight.failure is not None:
            raise flight.failure
        if outcome[0] in (OK, AGAIN, CANCELLED):
            return outcome
        if flight.outcome[0] != OK:
            return flight.outcome
        return self._of_group(outcome)

    def _of_group(self, outcome: Outcome) -> Outcome:
        code, rank = outcome
        return (code, self._members[rank] if rank >= 0 else rank)

    # -- passed on to the native fabric ------------------------------------------------------------

    def allocate(self, size: int) -> _native.Block:
        return self.inner.allocate(size)

    @property
    def allocated(self) -> int:
        return self.inner.allocated

    def offset_of(self, pointer: int) -> int:
        return self.inner.offset_of(pointer)

    def stage(self, block: _native.Block, source: int, size: int) -> None:
        self.inner.stage(block, source, size)

    def set_link(self, bandwidth: float, latency_ns: int, topology: int) -> None:
        self.inner.set_link(bandwidth, latency_ns, topology)

    def doorbell(self) -> int:
        return self.inner.doorbell()

    def reached(self, call: int, counters: Sequence[tuple[int, int]]) -> list[bool]:
        return self.inner.reached(call, counters)

    def signal(self, call: int, counter: int, rings: Sequence[int]) -> int:
        return self.inner.signal(call, counter, rings)

    def done(self, call: int) -> Outcome:
        self._send_held()
        return self._of_group(self.inner.done(call))

    def wait_released(self, call: int, deadline: int) -> Outcome:
        return self._of_group(self.inner.wait_released(call, deadline))

    # -- the end -----------------------------------------------------------------------------------

    def fail(self, call: int, why: int) -> None:
        """Ends the group for this rank. Closing the connections informs its peers."""
        self._failed_in = call
        self.inner.fail(call, why)
        self._disconnect()

    def _disconnect(self) -> None:
        """Closes all connections. Transfers fail here and on the peers."""
        self._disconnected = True
        self.streams.close()
        self.wires.close()

    def failed(self, rank: int) -> int:
        if rank == self._rank:
            return self._failed_in
        return self.inner.failed(self._members.index(rank)) if rank in self._members else 0

    def leave(self) -> None:
        """Informs the peers that this rank leaves, and ends every thread."""
        if self._closed:
            return
        self._closed = True
        self.inner.leave()
        if not self._disconnected:
            self._send(BYE, 0, b"")
            until = time.monotonic() + 1.0
            while self.wires.unsent and time.monotonic() < until:
                self._receive(BYE, _SLICE)
        self._disconnect()
        self._starter.close()
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()
