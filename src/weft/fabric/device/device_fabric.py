"""The fabric of tensors on a device: plans become programs of streams.

It stands beside the host fabric of the same group, which introduces the ranks to each other and
notices a rank that dies. Headers are on boards in host memory, data and words in symmetric memory
of the device. A known call is enqueued at once; `watch.py` looks after it.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import Error, PeerLost, Timeout, Unsupported
from weft.fabric.deadlines import nap, own_time
from weft.fabric.device.board import Board
from weft.fabric.device.claim_program import ClaimProgram
from weft.fabric.device.device_call import DeviceCall
from weft.fabric.device.device_driver import Driver, driver_of
from weft.fabric.device.measured_rates import measured
from weft.fabric.device.program import MAX_WORDS, DeviceProgram
from weft.fabric.device.symmetric import Slab, SlabMemory
from weft.fabric.device.watch import Watchdog
from weft.fabric.interface import NOTHING_EXPOSED, Capabilities, Exposed, Program
from weft.fabric.link import Link
from weft.fabric.outcomes import (
    AGAIN,
    OK,
    PEER_FAILED,
    PEER_LEFT,
    PEER_LOST,
    TIMEOUT,
    Outcome,
    peer_error,
)
from weft.fabric.processes import ProcessFabric, over
from weft.fabric.proposal import Proposal
from weft.fabric.rendezvous import listed
from weft.plan import claims
from weft.plan.planned import Rates, planned
from weft.plan.tasks import Plan, Plannable
from weft.schedule import Schedule
from weft.strategy import Strategy

_WORD = 4
_TURNS = 2
_LOOK = 1e-4
"""Seconds between two looks at the boards, while the host waits for headers."""
_LOOK_AT_THE_END = 2e-3
"""The same while it waits for its peers to end, which is nobody's hurry."""


class DeviceFabric:
    """Implements `weft.fabric.Fabric` for the tensors of one kind of device."""

    def __init__(self, device: torch.device, host: ProcessFabric) -> None:
        if host.can.two_level:
            raise Unsupported(
                f"the ranks of this group are on several machines, and {device.type} tensors are "
                "exchanged on one machine only; use a group of the ranks of one machine"
            )
        index = torch.accelerator.current_device_index()
        self.device = torch.device(device.type, index)
        self.driver: Driver = driver_of(device)
        self.host = host
        self.group_ref = host.group_ref
        self.in_background = host.in_background
        self.pid = os.getpid()
        self.rank, self.world = host.rank, host.world
        self.peers = [rank for rank in range(self.world) if rank != self.rank]
        self.link = Link()
        self.lock = threading.RLock()
        self.number = 0
        self.broken: Error | None = None
        self.pending: Error | None = None
        """The error of a call that has ended. The next call takes part, and then raises it."""
        self.closed = False
        self.trusting = agrees_once()
        self.can = Capabilities(self.driver.name, direct=True, capture=True)
        self.memory = SlabMemory(lambda: self.group, self.device, self._look_after)
        self._callbacks: list[Callable[[], Any]] = []
        self._lanes: dict[tuple[int, bool], torch.Stream] = {}
        self.last_end: tuple[torch.Stream, torch.Event] | None = None
        """The stream of the last eager call, and its end there."""
        self.board = Board(host)
        # By weft's deadline, which names who is missing: torch waits for the memory of a peer by a
        # deadline of its own.
        self._meet("opening a device", ())
        self._words = self._open_words()
        self.rates = self._agreed_rates()
        self.watchdog = Watchdog(self)
        atexit.register(self.close)  # before the device is shut down, and before the host fabric

    def _open_words(self) -> Slab:
        """The words of every rank: for eager and for captured calls, those of meetings first."""
        size = 2 * (_TURNS * self.world + MAX_WORDS) * _WORD
        return Slab(self.group, self.device, size, self._look_after_host, zeroed=True)

    def _look_after_host(self) -> None:
        """Raises if a peer is lost, before this fabric is open."""
        state = self._host_state()
        if state[0] not in (OK, AGAIN, TIMEOUT):
            doing = f"the first call on {self.device.type}"
            raise self.host.failure(state, doing, "the memory of its peers")

    def _look_after(self) -> None:
        """Raises if a peer is lost, while a call waits for the memory of its peers."""
        state = self.peer_state()
        if self.broken is not None:
            raise over(self.broken, self.number)
        if state[0] != OK:
            raise self.failure(state, "more memory", "the memory of its peers")

    def _agreed_rates(self) -> Rates:
        """Rank 0 measures its device for all ranks, which must decide alike."""
        found = measured(self.device) if self.rank == 0 else None
        items = () if found is None else (("rates", tuple(found)),)
        own = self._meet("the rates of a device", items)[0]
        return Rates(*dict(own)["rates"])

    def _meet(self, what: str, own: tuple[tuple[str, Any], ...]) -> list[Any]:
        with self.host.call(Proposal(what, own=own).checked()) as call:
            return [proposal.own for proposal in call.proposals()]

    @property
    def group(self) -> dist.ProcessGroup:
        return self.host.group

    @property
    def deadline(self) -> float:
        """That of the host fabric: a group has one deadline."""
        return self.host.deadline

    @deadline.setter
    def deadline(self, seconds: float) -> None:
        self.host.deadline = seconds

    # -- places ------------------------------------------------------------------------------------

    def meeting_word(self, owner: int, peer: int, captured: bool = False, turn: int = 0) -> int:
        """The address of the word in the memory of `owner` that `peer` posts when it enters a
        call. A captured call has two."""
        return self._word(owner, captured, turn * self.world + peer)

    def word(self, owner: int, number: int, captured: bool) -> int:
        """The address of a word of a program in the memory of `owner`."""
        return self._word(owner, captured, _TURNS * self.world + number)

    def own_words(self, captured: bool) -> torch.Tensor:
        """The words of programs in this rank's memory, for kernels that poll them."""
        begin = self.word(self.rank, 0, captured) - self._words.pointer(self.rank, 0)
        return self._words.own[begin : begin + MAX_WORDS * _WORD].view(torch.int32)

    def _word(self, owner: int, captured: bool, number: int) -> int:
        place = captured * (_TURNS * self.world + MAX_WORDS) + number
        return self._words.pointer(owner, place * _WORD)

    def captured_words(self, num_words: int) -> list[int]:
        """The own words of captured calls: those of meetings, and the first of programs."""
        return [
            self._word(self.rank, True, number) for number in range(_TURNS * self.world + num_words)
        ]

    def lane(self, number: int, captured: bool) -> torch.Stream:
        """The stream of an engine lane. A graph has streams of its own."""
        key = (number, captured)
        if key not in self._lanes:
            self._lanes[key] = torch.Stream(self.device)
        return self._lanes[key]

    def clock(self, event: torch.Event) -> int:
        """The moment of an event that has passed, in nanoseconds of the host's clock."""
        now = torch.Event(self.device, enable_timing=True)
        now.record(torch.accelerator.current_stream(self.device))
        now.synchronize()
        return time.monotonic_ns() - int(event.elapsed_time(now) * 1e6)

    # -- plans -------------------------------------------------------------------------------------

    def slots(self, exposed: Exposed) -> list[str]:
        return list(exposed.inputs)

    def lower(self, operation: Plannable, schedule: Schedule | Strategy) -> Plan:
        if isinstance(schedule, Schedule) and schedule.fusion == "kernel":
            return claims.lower(operation, schedule)
        return planned(operation.lower(schedule), self.rates)

    def prepare(self, plan: Plan, slots: Sequence[str], signatures: Sequence[int]) -> DeviceProgram:
        kind = ClaimProgram if plan.one_launch else DeviceProgram
        return kind(plan, self, signatures, len(set(signatures)) == 1)

    def channels(self) -> tuple[Any, Any]:
        raise Unsupported(f"the native collectives take CPU tensors, not {self.device.type}")

    def set_link(self, link: Link) -> None:
        pace = getattr(self.driver, "pace", None)
        if pace is None:
            raise Unsupported(f"the links of {self.device.type} have their own speed")
        if link.topology != "mesh" or link.latency:
            raise Unsupported(f"links of {self.device.type} have a rate only, and are a mesh")
        pace(link.bandwidth or 0.0)
        self.link = link
        if link.bandwidth:
            self.rates = self.rates._replace(link=link.bandwidth)

    # -- calls -------------------------------------------------------------------------------------

    def call(
        self,
        proposal: Proposal,
        exposed: Exposed = NOTHING_EXPOSED,
        expected: Program | None = None,
        entered: bool = False,
    ) -> DeviceCall:
        return DeviceCall(self, proposal, expected)

    def refuse(self, operation: str, error: Exception) -> None:
        with self.lock:
            if self.world == 1 or self.broken is not None:
                return
            with self.call(Proposal.of_error(operation, error)) as call:
                call.headers()

    def next_call(self) -> int:
        if self.broken is not None:
            raise over(self.broken, self.number)
        self.number += 1
        until = own_time() + self.deadline
        while not self.board.has_room(self.number):
            self.wait_a_moment(until, "its peers to catch up", "a call")
        return self.number

    def wait_a_moment(self, until: float, waiting_for: str, doing: str) -> None:
        """One step of a wait of the host; raises if it cannot succeed any more."""
        outcome = self.peer_state()
        if outcome[0] != OK:
            raise self.failure(outcome, doing, waiting_for)
        if own_time() > until:
            raise self.failure((TIMEOUT, -1), doing, waiting_for)
        nap(_LOOK)

    # -- faults ------------------------------------------------------------------------------------

    def peer_state(self) -> Outcome:
        """The outcome if a peer was lost or gave up, otherwise OK. A rank that died is named before
        those that gave up because of it."""
        outcome = self._host_state()
        if outcome[0] == PEER_LEFT and self.board.ended(outcome[1]) >= self.watchdog.last:
            outcome = (OK, -1)  # it left after the last call, as ranks do
        if outcome[0] not in (OK, AGAIN, TIMEOUT):
            return outcome
        failed = self.board.failed()
        return (OK, -1) if failed is None else (PEER_FAILED, failed[0])

    def _host_state(self) -> Outcome:
        """What the host fabric knows of the peers."""
        if self.world == 1:
            return OK, -1
        # With a deadline in the past this does not wait: it only returns the peers' state.
        return self.host.native.wait_released(self.host.number + 1, 0)

    def failure(self, outcome: Outcome, doing: str, waiting_for: str) -> Error:
        where = f"in call {self.number} ({doing}) on {self.device.type}"
        error: Error | None = peer_error(outcome, self.rank, where)
        if error is None:
            late = self.board.missing(self.number)
            if late:
                waiting_for = f"{listed(late)} to enter the call"
            error = Timeout(
                f"rank {self.rank} waited {self.deadline:g} s {where} for {waiting_for}; "
                "see what that rank is doing, or allow more with weft.configure(deadline=...)"
            )
        self.give_up(error)
        return error

    def give_up(self, error: Error, release: bool = True) -> None:
        """Ends the group. release: whether waits on the device are released."""
        if self.broken is None:
            self.broken = copy(error)  # without a traceback, whose frames would keep the group
            self.board.fail(max(1, self.number))
            if release:
                self.watchdog.release_all()

    def device_failed(self, error: RuntimeError) -> None:
        """The device itself has failed: nothing of it can be released or waited for any more. A
        peer that died is named, for that may be the reason."""
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        text = (
            f"the device of rank {self.rank} has failed in call {self.number}: {reason}; start the "
            "process again"
        )
        code, peer = self.peer_state()
        died = code == PEER_LOST
        found = PeerLost(f"rank {peer} died, and {text}", peer) if died else Error(text)
        self.give_up(found, release=False)

    def check(self, synchronize: bool) -> None:
        """Raises the error of a call that has ended."""
        if synchronize and self.broken is None:
            try:
                torch.accelerator.synchronize(self.device)
                self.watchdog.look()
            except RuntimeError as failed:  # an error of torch, not of weft
                self.device_failed(failed)
        if self.broken is not None:
            raise over(self.broken, self.number)
        error, self.pending = self.pending, None
        if error is not None:
            raise error

    # -- the end -----------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Waits until no peer reads this rank's memory any more."""
        if self.broken is not None or self.world == 1:
            return
        until = own_time() + self.deadline
        try:
            self.watchdog.finish()
        except RuntimeError as error:
            return self.device_failed(error)
        while any(self.board.ended(peer) < self.watchdog.last for peer in self.peers):
            if self.peer_state()[0] != OK or own_time() > until:
                return
            nap(_LOOK_AT_THE_END)

    def on_close(self, callback: Callable[[], Any]) -> None:
        self._callbacks.append(callback)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self.pid == os.getpid():
            self._leave()
            self.watchdog.stop()
            atexit.unregister(self.close)
        self.broken = self.broken or Error("the group was closed")
        for callback in self._callbacks:
            callback()
        self._callbacks.clear()
        self.memory.clear()


def agrees_once() -> bool:
    """Whether the host compares the headers of a call only the first time (WEFT_AGREE)."""
    asked = os.environ.get("WEFT_AGREE", "once")
    if asked not in ("once", "each"):
        raise Unsupported(f"WEFT_AGREE must be once or each, not {asked!r}")
    return asked == "once"
