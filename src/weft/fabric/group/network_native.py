"""The methods of the native fabric (`fabric/native.py`), where some ranks are on other machines.

Inside the machine it uses the native fabric. Between machines it adds headers that are sent over
the network, and transfers beside the copy engines. A header goes to every other rank. A rank has
one listener thread per peer, which receives headers. The listener that receives the last header of
a call starts its transfers if all headers agree, so a known call communicates while its local
matmul runs.

A rank is never two calls ahead of another: it enters call e+1 only after it has finished e, for
which it needed every header of e. So when data of a call moves, every rank has finished the call
before, and the tags of transfers can be the same in every call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import cycle
from types import MappingProxyType

import torch

from weft.fabric import _native
from weft.fabric.group.headers import (
    BYE,
    HEADER_BYTES,
    HEADER_TAG,
    NOTHING,
    Header,
    read_header,
    write_header,
)
from weft.fabric.group.responsive import become_responsive
from weft.fabric.group.transfers import NetworkFlight, NetworkProgram, Payload, Poster
from weft.fabric.group.transport import Posted, Transport, wait
from weft.fabric.outcomes import (
    AGAIN,
    CANCELLED,
    CORRUPT,
    DISAGREE,
    OK,
    PEER_LEFT,
    PEER_LOST,
    TIMEOUT,
    Outcome,
)

_GRACE = 0.5
"""Seconds to wait for the end of lanes whose connections are closed."""
_SLICE = 0.05
"""The longest wait before Python handles its signals, in seconds."""


class NetworkNative:
    """The native fabric of the ranks of this machine (`members`), and a transport to all ranks."""

    def __init__(
        self,
        native: _native.Fabric,
        transport: Transport,
        rank: int,
        world: int,
        members: Sequence[int],
    ) -> None:
        self.inner = native
        self.transport = transport
        self._rank, self._world, self._members = rank, world, list(members)
        self._peers = [peer for peer in range(world) if peer != rank]
        self._changed = threading.Condition()
        self._headers: dict[int, dict[int, Header]] = {}
        self._entered = [0] * world
        self._failed_in = 0
        self._gone: dict[int, int] = {}
        self._waiting: NetworkFlight | None = None
        self._flying: NetworkFlight | None = None
        self._stuck: set[int] = set()
        self._lanes: dict[tuple[int, bool], Poster] = {}
        self._sent: deque[tuple[Mapping[int, torch.Tensor], list[Posted]]] = deque(maxlen=3)
        self._poster = Poster("weft posts")
        self._starting: NetworkFlight | None = None
        self._closed = False
        self._listeners = [
            threading.Thread(target=self._listen, args=(peer,), daemon=True, name=f"weft {peer}")
            for peer in self._peers
        ]
        for listener in self._listeners:
            listener.start()

    # -- headers -----------------------------------------------------------------------------------

    def enter(
        self,
        call: int,
        signature: int,
        offsets: Sequence[int],
        blob: bytes,
        eager: int = 0,
        payloads: Mapping[int, Sequence[Payload]] = MappingProxyType({}),
    ) -> None:
        """Sends this rank's header. eager: the number of the plan that payloads were made for."""
        self._send(call, signature, blob, eager, payloads)
        self.inner.enter(call, signature, offsets, blob)
        with self._changed:
            self._headers.pop(call - 2, None)
            self._note(call, self._rank, Header(signature, blob, eager, NOTHING))

    def _send(
        self,
        call: int,
        signature: int,
        blob: bytes,
        eager: int = 0,
        payloads: Mapping[int, Sequence[Payload]] = MappingProxyType({}),
    ) -> None:
        messages = {
            peer: write_header(call, signature, blob, eager, payloads.get(peer, ()))
            for peer in self._peers
        }
        self._poster.push(lambda: self._post(messages))

    def _post(self, messages: Mapping[int, torch.Tensor]) -> None:
        works = []
        for peer, message in messages.items():
            # A lost peer is detected when its own header does not arrive.
            with suppress(RuntimeError):
                works.append(self.transport.send(message, peer, HEADER_TAG))
        self._sent.append((messages, works))

    def _listen(self, peer: int) -> None:
        """Receives the headers of a peer until it leaves or is lost."""
        become_responsive()
        # Two buffers take turns: when the next header but one arrives, this rank has finished the
        # call of this one. Pages that no payload has reached take no memory.
        buffers = [torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2)]
        try:
            for buffer in cycle(buffers):
                wait(self.transport.receive(buffer, peer, HEADER_TAG))
                found = read_header(buffer.numpy())
                with self._changed:
                    if found is None or found[0] == BYE:
                        self._gone[peer] = CORRUPT if found is None else PEER_LEFT
                        break
                    self._note(found[0], peer, found[1])
        except RuntimeError:
            with self._changed:
                self._gone.setdefault(peer, PEER_LOST)
        with self._changed:
            self._changed.notify_all()
            flight = self._flying
        if flight is not None and self._gone[peer] == PEER_LOST and flight.lost(peer, _GRACE):
            self._stuck.add(peer)

    def _note(self, call: int, rank: int, header: Header) -> None:
        """Keeps a header. The last header of a call starts its flight."""
        self._headers.setdefault(call, {})[rank] = header
        self._entered[rank] = call
        flight = self._waiting
        if flight is not None and flight.call == call and self._complete(call):
            self._waiting = None
            self._start(flight)
        self._changed.notify_all()

    def _start(self, flight: NetworkFlight, computes: bool = False) -> None:
        """Starts a flight if the headers, which have all arrived, are those that it was made for.
        computes: whether this is a compute thread, which does not post transfers itself (see
        `Poster`)."""
        if not self._agrees(flight.call, flight.signatures):
            return
        headers, eager = self._headers[flight.call], flight.program.eager
        came = None
        if eager and all(header.eager == eager for header in headers.values()):
            came = {peer: headers[peer].payload for peer in self._peers}
        if computes and came is None and flight.program.transfers:
            self._starting = flight
            self._poster.push(self._start_here)
        else:
            flight.start(self._lane, came)

    def _start_here(self) -> None:
        with self._changed:
            flight, self._starting = self._starting, None
            if flight is not None and not flight.cancelled:
                flight.start(self._lane)
            self._changed.notify_all()

    def _complete(self, call: int) -> bool:
        return len(self._headers.get(call, ())) == self._world

    def _agrees(self, call: int, signatures: Sequence[int]) -> bool:
        headers = self._headers[call]
        return all(headers[rank].signature == own for rank, own in enumerate(signatures))

    def agree(self, call: int, signatures: Sequence[int], deadline: int) -> Outcome:
        until = time.monotonic() + _SLICE
        with self._changed:
            while self._starting is not None or not self._complete(call):
                headers = self._headers.get(call, {})
                missing = [rank for rank in self._peers if rank not in headers]
                for rank in missing:
                    if rank in self._gone:
                        return (self._gone[rank], rank)
                if missing and _native.now_ns() > deadline:
                    return (TIMEOUT, missing[0])
                left = until - time.monotonic()
                if left <= 0:
                    return (AGAIN, -1)
                self._changed.wait(left)
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
        """A flight that starts as soon as all headers are known to agree."""
        inside = [signatures[rank] for rank in self._members]
        flight = NetworkFlight(
            self.inner,
            self.transport,
            program,
            call,
            deadline,
            tensors,
            signatures,
            inside,
            record,
        )
        with self._changed:
            self._flying = flight
            if not self._complete(call):
                self._waiting = flight
            else:
                self._start(flight, computes=True)
        return flight

    def _lane(self, peer: int, sends: bool) -> Poster:
        lane = self._lanes.get((peer, sends))
        if lane is None:
            name = f"weft {'to' if sends else 'from'} {peer}"
            lane = self._lanes[(peer, sends)] = Poster(name)
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
            self.transport.abort()
            with flight.changed:
                flight.changed.wait_for(lambda: flight.left == 0, _GRACE)
            if flight.left:
                self._stuck.update(self._peers)
                flight.forget()
        with flight.changed:
            flight.changed.wait_for(lambda: flight.left == 0, _SLICE)
            if flight.left:
                if not flight.cancelled and flight.outcome[0] != OK:
                    return flight.outcome
                return (AGAIN, -1)
        self._flying = None
        inside = self.inner.finish(flight.inner)
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
        return self._of_group(self.inner.done(call))

    def wait_released(self, call: int, deadline: int) -> Outcome:
        return self._of_group(self.inner.wait_released(call, deadline))

    # -- the end -----------------------------------------------------------------------------------

    def fail(self, call: int, why: int) -> None:
        """Ends the group for this rank. Closing the connections informs its peers."""
        self._failed_in = call
        self.inner.fail(call, why)
        self.transport.abort()

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
        if not self.transport.aborted:
            self._send(BYE, 0, b"")
            self._poster.close()
            for work in self._sent[-1][1] if self._sent else ():
                with suppress(RuntimeError):
                    wait(work, 1.0)
        self.transport.abort()
        self._poster.close(wait=False)
        for listener in self._listeners:
            listener.join(timeout=5.0)
        for (peer, _), lane in self._lanes.items():
            lane.close(wait=peer not in self._stuck)
        self._lanes.clear()
