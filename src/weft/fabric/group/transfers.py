"""The network part of a call: its transfers, and the threads that make them.

A copy from another machine is a matched pair: the rank that has the source sends it when its
dependencies have ended, and the rank that pulls receives it. Between two ranks both make their
transfers in the order of the plan, so no other message is needed. A transfer never waits for a
later one, as every dependency in a plan is on an earlier task.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from weft.fabric import _native
from weft.fabric.group.responsive import become_responsive
from weft.fabric.group.streams import Lost, Streams
from weft.fabric.outcomes import (
    AGAIN,
    CANCELLED,
    CORRUPT,
    OK,
    PEER_LOST,
    TIMEOUT,
    Outcome,
)
from weft.fabric.reach import Transfer
from weft.plan.tasks import Region

Payload = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


@dataclass(frozen=True)
class NetworkProgram:
    """The copies of a plan for one rank: inside the machine, and transfers between machines."""

    native: _native.Program
    transfers: tuple[Transfer, ...]
    serial: bool = False
    eager: int = 0
    """The number of the plan if its bytes travel with the headers, else 0: see `eager.py`."""

    @cached_property
    def late(self) -> bool:
        """Whether some of its sends wait for products."""
        return any(transfer.sends and transfer.waits for transfer in self.transfers)

    @cached_property
    def meets_first(self) -> bool:
        """Whether compute has nothing to do, or nobody to send to, before the ranks agree."""
        receives = any(not transfer.sends for transfer in self.transfers)
        return self.serial and (self.late or receives)

    def by_lane(self) -> dict[tuple[int, bool], list[Transfer]]:
        """The transfers of every (peer, whether they are sent), in the order of the plan."""
        lanes: dict[tuple[int, bool], list[Transfer]] = {}
        for transfer in self.transfers:
            lanes.setdefault((transfer.peer, transfer.sends), []).append(transfer)
        return lanes


class Worker:
    """A thread that runs jobs one after the other."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def push(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Ends the thread after its jobs."""
        self._jobs.put(None)
        self._thread.join(timeout=5.0)

    def _loop(self) -> None:
        become_responsive()
        while (job := self._jobs.get()) is not None:
            job()


class NetworkFlight:
    """One running call: its copies inside the machine and its transfers."""

    def __init__(
        self,
        native: _native.Fabric,
        streams: Streams,
        program: NetworkProgram,
        call: int,
        deadline: int,
        tensors: Sequence[torch.Tensor],
        signatures: Sequence[int],
        node_signatures: Sequence[int],
        record: bool,
    ) -> None:
        self.native, self.streams, self.program = native, streams, program
        self.call, self.deadline, self.record = call, deadline, record
        self.tensors, self.signatures = tensors, list(signatures)
        self._node_signatures = list(node_signatures)
        self.inner: _native.Call | None = None
        self.outcome: Outcome = (OK, -1)
        self.cancelled = False
        self._open: set[tuple[int, bool]] = set()
        self._begun: set[tuple[int, bool]] = set()
        self.failure: BaseException | None = None
        """What a thread of this rank raised in a transfer."""
        self._awaits_sends = False
        self.changed = threading.Condition()
        self._spans: list[tuple[int, int, int]] = []
        self._launched_at = _native.now_ns()

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        return [*(self.inner.spans if self.inner is not None else ()), *self._spans]

    @property
    def left(self) -> int:
        """The number of lanes that have not ended."""
        return len(self._open)

    def start(
        self, lane_of: Callable[[int, bool], Worker], came: Mapping[int, Payload] | None = None
    ) -> None:
        """Starts all copies and transfers, after the ranks have agreed. came: the bytes that came
        with the headers of the peers, if no transfers follow."""
        pointers = [tensor.data_ptr() for tensor in self.tensors]
        lanes = self.program.by_lane() if came is None else {}
        self._open = set(lanes)
        # Compute must not wait for sends that wait for sums or for received data.
        self._awaits_sends = self.program.serial and not any(
            t.waits for t in self.program.transfers if t.sends
        )
        self.inner = self.native.launch(
            self.program.native,
            self.call,
            self.deadline,
            pointers,
            self._node_signatures,
            self.record,
        )
        if came is not None:
            self._unpack(came)
        try:
            for (peer, sends), transfers in lanes.items():
                lane_of(peer, sends).push(
                    lambda p=peer, t=transfers: self._run(p, t)  # type: ignore[misc]
                )
        except BaseException:  # there is no other thread to be had, or this one is interrupted
            with self.changed:
                self._open &= self._begun
            raise

    def _unpack(self, came: Mapping[int, Payload]) -> None:
        """Copies the bytes that came with the headers into their buffers. A peer that sent fewer or
        more than the plan says ends the call."""
        at = dict.fromkeys(came, 0)
        for transfer in self.program.transfers:
            if transfer.sends:
                continue
            peer, target = transfer.peer, bytes_of(self.view(transfer))
            begin = at[peer]
            at[peer] += target.nbytes
            flat = came[peer][begin : at[peer]]
            if flat.nbytes != target.nbytes:
                break
            target[...] = flat.reshape(target.shape)
            if self.record:
                self._spans.append((transfer.task, self._launched_at, _native.now_ns()))
            if transfer.counter >= 0:
                self.native.signal(self.call, transfer.counter, transfer.rings)
        for peer, sent in came.items():
            if sent.nbytes != at[peer]:
                self.fail(CORRUPT, peer)

    def view(self, transfer: Transfer) -> torch.Tensor:
        return view_of(self.tensors[transfer.buffer], transfer.region)

    def fail(self, code: int, rank: int) -> None:
        """Stops the call, unless it has already been stopped."""
        with self.changed:
            if self.outcome[0] == OK and not self.cancelled:
                self.outcome = (code, rank)
            self.changed.notify_all()
        if self.inner is not None:
            self.native.cancel(self.inner)

    def _wait_until_sent(self) -> None:
        """Waits for this rank's own sends. In a serial call compute starts after them, because it
        would take the core from the threads that a peer waits for."""
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    not any(sends for _, sends in self._open)
                    or self.cancelled
                    or self.outcome[0] != OK
                ),
                max(0.0, (self.deadline - _native.own_now_ns()) / 1e9),
            )

    def _run(self, peer: int, transfers: Sequence[Transfer]) -> None:
        """Makes the transfers of a lane."""
        sends = transfers[0].sends
        with self.changed:
            if (peer, sends) not in self._open:
                return
            self._begun.add((peer, sends))
        try:
            free_at = _native.now_ns() if self.record else 0
            for transfer in transfers:
                self._wait_for(transfer)
                if sends:
                    self._send(transfer)
                    continue
                self._receive(transfer)
                if self.record:
                    now = _native.now_ns()
                    self._spans.append((transfer.task, free_at, now))
                    free_at = now
                if self._awaits_sends and transfer is transfers[-1]:
                    self._wait_until_sent()
                if transfer.counter >= 0:
                    self.native.signal(self.call, transfer.counter, transfer.rings)
        except _Stopped:
            pass
        except Lost:
            self.fail(PEER_LOST, peer)
        except BaseException as error:
            self.failure = error
            self.fail(CANCELLED, -1)
        finally:
            with self.changed:
                self._open.discard((peer, sends))
                self.changed.notify_all()

    def _wait_for(self, transfer: Transfer) -> None:
        assert self.inner is not None
        for rank, counter in transfer.waits:
            while (outcome := self.native.wait(self.inner, rank, counter))[0] == AGAIN:
                pass
            if outcome[0] != OK:
                if outcome[0] != CANCELLED:
                    self.fail(*outcome)
                raise _Stopped

    def _send(self, transfer: Transfer) -> None:
        flat = np.ascontiguousarray(bytes_of(self.view(transfer)))
        self.streams.send(transfer.peer, _line(flat), lambda: self._go_on(transfer.peer))

    def _receive(self, transfer: Transfer) -> None:
        target = bytes_of(self.view(transfer))
        flat = target if target.flags.c_contiguous else np.empty_like(target, order="C")
        self.streams.receive(transfer.peer, _line(flat), lambda: self._go_on(transfer.peer))
        if flat is not target:
            np.copyto(target, flat)

    def _go_on(self, peer: int) -> None:
        """Ends a transfer if its call is stopped or its deadline has passed."""
        if _native.own_now_ns() > self.deadline:
            self.fail(TIMEOUT, peer)
        if self.cancelled or self.outcome[0] != OK:
            raise _Stopped


class _Stopped(Exception):
    """The call was stopped while a lane waited."""


def view_of(whole: torch.Tensor, region: Region) -> torch.Tensor:
    """The part of a buffer that a region covers."""
    rows = whole[region.row : region.row + region.rows]
    return rows[:, region.column : region.column + region.columns]


def bytes_of(matrix: torch.Tensor) -> Payload:
    """A matrix as bytes, for numpy to copy: threads of torch would take cores from compute. It is
    detached, because gradient mode differs between threads."""
    matrix = matrix.detach()
    if matrix.shape[1] == 1:  # its last stride may be anything, and a view of bytes needs 1
        matrix = matrix.as_strided(matrix.shape, (matrix.stride(0), 1))
    return matrix.view(torch.uint8).numpy()


def _line(flat: Payload) -> memoryview:
    """Contiguous bytes as one line of them."""
    return flat.reshape(-1).data
