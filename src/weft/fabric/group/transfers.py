"""The network part of a call: its transfers, and the threads that wait for them.

A copy from another machine is a matched pair: the rank that pulls posts a receive, and the rank
that has the source posts a send when its dependencies have ended. The number of the task is the tag
of both, so no other message is needed. Transfers without dependencies are posted when the ranks
agree; the others follow in the order of the plan.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.fabric import _native
from weft.fabric.group.responsive import become_responsive
from weft.fabric.group.transport import Posted, Transport, wait
from weft.fabric.outcomes import (
    AGAIN,
    CANCELLED,
    CORRUPT,
    OK,
    PEER_FAILED,
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

    @property
    def late(self) -> bool:
        """Whether some of its sends wait for products."""
        return any(transfer.sends and transfer.waits for transfer in self.transfers)

    def by_lane(self) -> dict[tuple[int, bool], list[Transfer]]:
        """The transfers of every (peer, whether they are sent), in the order of the plan."""
        lanes: dict[tuple[int, bool], list[Transfer]] = {}
        for transfer in self.transfers:
            lanes.setdefault((transfer.peer, transfer.sends), []).append(transfer)
        return lanes


class Poster:
    """A thread that runs jobs one after the other. Transfers are posted by such threads. While one
    posts, it holds a lock of gloo. If gloo's own thread wakes on the same core, it would preempt a
    compute thread and spin on that lock until the next scheduler tick. It does not preempt a thread
    that is as responsive and has just started to run."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def push(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self, wait: bool = True) -> None:
        """Ends the thread after its jobs. wait: whether to wait for that."""
        self._jobs.put(None)
        if wait:
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
        transport: Transport,
        program: NetworkProgram,
        call: int,
        deadline: int,
        tensors: Sequence[torch.Tensor],
        signatures: Sequence[int],
        node_signatures: Sequence[int],
        record: bool,
    ) -> None:
        self.native, self.transport, self.program = native, transport, program
        self.call, self.deadline, self.record = call, deadline, record
        self.tensors, self.signatures = tensors, list(signatures)
        self._node_signatures = list(node_signatures)
        self.inner: _native.Call | None = None
        self.outcome: Outcome = (OK, -1)
        self.cancelled = False
        self._open: set[tuple[int, bool]] = set()
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
        self, lane_of: Callable[[int, bool], Poster], came: Mapping[int, Payload] | None = None
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
        # Receives first: a peer's send starts at once if its receive is posted.
        for (peer, sends), transfers in sorted(lanes.items(), key=lambda lane: lane[0][1]):
            try:
                posted = [None if t.waits else self._post(t) for t in transfers]
            except RuntimeError as failure:
                self.fail(_meaning(failure), peer)
                self._ended(peer, sends)
                continue
            lane_of(peer, sends).push(
                lambda p=peer, t=transfers, w=posted: self._run(p, t, w)  # type: ignore[misc]
            )

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

    def lost(self, peer: int, grace: float) -> bool:
        """Called when the connection to a peer is closed. Returns whether one of its lanes still
        waits after `grace` seconds. gloo fails all that is posted on the connection, except a
        receive of which it has read a part. The lane of such a receive would wait forever. It
        counts as ended, because nothing touches its buffers any more."""
        lanes = {(peer, False), (peer, True)}
        with self.changed:
            if self.changed.wait_for(lambda: not self._open & lanes, grace):
                return False
        self.fail(PEER_LOST, peer)
        self.forget(lanes)
        return True

    def forget(self, lanes: Iterable[tuple[int, bool]] | None = None) -> None:
        """Counts lanes (None: all) as ended; their connections are closed."""
        with self.changed:
            self._open -= set(self._open if lanes is None else lanes)
            self.changed.notify_all()

    def _ended(self, peer: int, sends: bool) -> None:
        self.forget([(peer, sends)])

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
                max(0.0, (self.deadline - _native.now_ns()) / 1e9),
            )

    def _run(
        self, peer: int, transfers: Sequence[Transfer], posted: list[_UnderWay | None]
    ) -> None:
        """Waits for the transfers of a lane, and posts those that have dependencies."""
        try:
            if transfers[0].sends:
                for number, transfer in enumerate(transfers):
                    if posted[number] is None:
                        self._wait_for(transfer)
                        posted[number] = self._post(transfer)
            free_at = _native.now_ns() if self.record else 0
            for transfer, under_way in zip(transfers, posted, strict=True):
                if under_way is None:
                    self._wait_for(transfer)
                    under_way = self._post(transfer)
                    free_at = _native.now_ns() if self.record else 0
                wait(under_way.work, (self.deadline - _native.now_ns()) / 1e9)
                if transfer.sends:
                    continue
                under_way.unpack()
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
        except RuntimeError as failure:
            self.fail(_meaning(failure), peer)
        except BaseException:
            self.fail(PEER_FAILED, peer)
            raise
        finally:
            posted.clear()
            self._ended(peer, transfers[0].sends)

    def _wait_for(self, transfer: Transfer) -> None:
        assert self.inner is not None
        for rank, counter in transfer.waits:
            while (outcome := self.native.wait(self.inner, rank, counter))[0] == AGAIN:
                pass
            if outcome[0] != OK:
                if outcome[0] != CANCELLED:
                    self.fail(*outcome)
                raise _Stopped

    def _post(self, transfer: Transfer) -> _UnderWay:
        view = self.view(transfer)
        tag = transfer.task
        flat = view if view.is_contiguous() else torch.empty_like(view).contiguous()
        if transfer.sends:
            if flat is not view:
                np.copyto(bytes_of(flat), bytes_of(view))
            return _UnderWay(self.transport.send(flat, transfer.peer, tag), flat, view)
        return _UnderWay(self.transport.receive(flat, transfer.peer, tag), flat, view)


class _Stopped(Exception):
    """The call was stopped while a lane waited for a task."""


@dataclass(slots=True)
class _UnderWay:
    """A posted transfer between a peer and `flat`, a contiguous copy of `view` or `view` itself."""

    work: Posted
    flat: torch.Tensor
    view: torch.Tensor

    def unpack(self) -> None:
        if self.flat is not self.view:
            np.copyto(bytes_of(self.view), bytes_of(self.flat))


def view_of(whole: torch.Tensor, region: Region) -> torch.Tensor:
    """The part of a buffer that a region covers."""
    rows = whole[region.row : region.row + region.rows]
    return rows[:, region.column : region.column + region.columns]


def bytes_of(matrix: torch.Tensor) -> Payload:
    """A matrix as bytes, for numpy to copy: threads of torch would take cores from compute. It is
    detached, because gradient mode differs between threads."""
    return matrix.detach().view(torch.uint8).numpy()


def _meaning(failure: RuntimeError) -> int:
    return TIMEOUT if "Timed out waiting" in str(failure) else PEER_LOST
