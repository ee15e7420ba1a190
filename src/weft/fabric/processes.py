"""The fabric of ranks that are processes: calls are numbered, compared and ended here.

torch.distributed only introduces the ranks to each other. From then on every rank enters a call
with a header that carries its proposal and the addresses of its buffers. Engines and compute of
each rank start as soon as all headers agree, and a rank is done when it no longer touches the
memory of other ranks. Every counter is compared with the number of the call, so nothing is ever
reset and no call ends with a barrier.

How ranks reach each other is the `Reach` that the fabric is composed with (`weft.fabric.reach`).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import Error, PeerLost, Timeout, Unsupported
from weft.fabric import _native
from weft.fabric.deadlines import deadline_of, nanoseconds
from weft.fabric.group.eager_program import EagerProgram
from weft.fabric.host.collective_program import CollectiveProgram, collective_of
from weft.fabric.host.engine_program import EngineProgram
from weft.fabric.host.heap_memory import HeapMemory
from weft.fabric.host.kernel_program import KernelProgram, is_native
from weft.fabric.host.lane_program import LaneProgram, runs_natively
from weft.fabric.host.process_call import ProcessCall
from weft.fabric.interface import NOTHING_EXPOSED, Exposed, Program
from weft.fabric.link import TOPOLOGIES, Link
from weft.fabric.outcomes import (
    AGAIN,
    CANCELLED,
    DISAGREE,
    OK,
    OUTSIDE,
    PEER_FAILED,
    TIMEOUT,
    Outcome,
    peer_error,
    why,
)
from weft.fabric.proposal import Proposal
from weft.fabric.reach import Reach
from weft.fabric.rendezvous import listed
from weft.plan.tasks import Plan, Plannable
from weft.schedule import Schedule
from weft.strategy import Strategy


class ProcessFabric:
    """Implements `weft.fabric.Fabric` for processes on one machine or on several."""

    def __init__(self, group: dist.ProcessGroup, reach: Reach) -> None:
        # A weak reference, so that destroy_process_group ends the threads of the backend in time.
        self.group_ref = weakref.ref(group)
        self.pid = os.getpid()
        self.rank: int = dist.get_rank(group)
        self.world: int = dist.get_world_size(group)
        self.device = torch.device("cpu")
        self.deadline = deadline_of(group)
        self.link = Link()
        self.lock = threading.RLock()
        self.number = 0
        """The number of the last call that this rank has entered."""
        self.broken: Error | None = None
        self.closed = False
        self.reach = reach
        self.native = reach.native
        self.heap = reach.heap
        self.can = reach.can
        self.memory = HeapMemory(reach.heap, self.lock, alone=len(reach.members) == 1)
        self._callbacks: list[Callable[[], Any]] = []
        self.in_background: list[Callable[[], bool]] = []

    @property
    def group(self) -> dist.ProcessGroup:
        group = self.group_ref()
        if group is None:
            raise Unsupported("the process group was destroyed; form a new group")
        return group

    def channels(self) -> tuple[_native.Channel, _native.Messages]:
        return self.reach.channels()

    def set_link(self, link: Link) -> None:
        """Sets the speed of the links. Every rank sets the same."""
        topology = TOPOLOGIES.index(link.topology)
        self.heap.set_link(link.bandwidth or 0.0, int(link.latency * 1e9), topology)
        self.link = link

    # -- calls -------------------------------------------------------------------------------------

    def call(
        self,
        proposal: Proposal,
        exposed: Exposed = NOTHING_EXPOSED,
        expected: Program | None = None,
        entered: bool = False,
    ) -> ProcessCall:
        return ProcessCall(self, proposal, exposed, expected, entered)

    def refuse(self, operation: str, error: Exception) -> None:
        with self.lock:
            if self.world == 1 or self.broken is not None:
                return
            with self.call(Proposal.of_error(operation, error)) as call:
                call.meet()

    def slots(self, exposed: Exposed) -> list[str]:
        if self.world == 1:
            return list(exposed.inputs)
        return [
            *exposed.inputs,
            *exposed.workspaces,
            *self.reach.relays(self.number),
            *exposed.outputs,
        ]

    def lower(self, operation: Plannable, schedule: Schedule | Strategy) -> Plan:
        return self.reach.lower(operation, schedule)

    def prepare(self, plan: Plan, slots: Sequence[str], signatures: Sequence[int]) -> Program:
        channel, collective = self.reach.call_channel, collective_of(plan, self.rank)
        if collective is not None and channel is not None:
            return CollectiveProgram(plan, self, channel, collective, signatures)
        if collective is not None and self.reach.apart:
            return EagerProgram(plan, self, slots, signatures, collective)
        kind = EngineProgram
        if self.can.in_kernel and is_native(plan):
            kind = KernelProgram
        elif len(self.reach.members) == self.world and runs_natively(plan, self.rank):
            kind = LaneProgram
        return kind(plan, self, slots, signatures)

    def next_call(self) -> int:
        """The number of the call that starts now; raises if the group has failed. What follows at
        once is the `try` that breaks the call off: an interrupt before it would leave this rank one
        call ahead of its peers."""
        if self.broken is not None:
            raise over(self.broken, self.number)
        self.number += 1
        return self.number

    def deadline_ns(self) -> int:
        return _native.own_now_ns() + nanoseconds(self.deadline)

    def wait(
        self,
        what: Callable[[], Outcome],
        doing: str,
        waiting_for: str,
        first: Outcome | None = None,
    ) -> Outcome:
        """Repeats a native wait until it has an outcome; Python handles its signals in between.
        Raises if the call cannot go on. first: the outcome of a wait that was already made."""
        while True:
            outcome, first = first or what(), None
            if outcome[0] in (OK, DISAGREE, CANCELLED, OUTSIDE):
                return outcome
            if outcome[0] != AGAIN:
                raise self.failure(outcome, doing, waiting_for)

    def agree(self, call: int, signatures: Sequence[int], deadline: int, doing: str) -> bool:
        """Waits until every rank has entered a call. Returns whether with these signatures, if any
        are given."""
        native = self.native
        outcome = native.agree(call, signatures, deadline)
        if outcome[0] != OK:
            outcome = self.wait(
                lambda: native.agree(call, signatures, deadline),
                doing,
                "all ranks to enter the call",
                outcome,
            )
        return outcome[0] != DISAGREE

    # -- faults ------------------------------------------------------------------------------------

    def failure(self, outcome: Outcome, doing: str, waiting_for: str) -> Error:
        code, rank = outcome
        where = f"in call {self.number} ({doing})"
        error: Error
        if code == TIMEOUT:
            late = [
                r
                for r in range(self.world)
                if r != self.rank and self.native.entered(r) < self.number
            ]
            if late:
                waiting_for = f"{listed(late)} to enter the call"
            error = Timeout(
                f"rank {self.rank} waited {self.deadline:g} s {where} for {waiting_for}; "
                "see what that rank is doing, or allow more with weft.configure(deadline=...)"
            )
        else:
            there = f"in call {self.native.failed(rank)}" if code == PEER_FAILED else ""
            stopped = f"rank {self.rank} was stopped {where} while it waited for {waiting_for}"
            error = (
                self.reach.loss(outcome, f"rank {self.rank} was {where}")
                or peer_error(outcome, self.rank, where, there)
                or Error(stopped)
            )
        self.give_up(error)
        return error

    def give_up(self, error: Error) -> None:
        if self.broken is None:
            # A copy has no traceback, whose frames would keep the group and its threads.
            self.broken = copy(error)
            try:
                self.reach.leave_word(self.number, error)
            finally:  # also if this is interrupted once more
                self.native.fail(max(1, self.number), why(error))
                self._end_channels()

    def _end_channels(self) -> None:
        """Ends the collectives and messages that are running."""
        if self.reach.call_channel is not None:
            self.reach.call_channel.abort()
        if self.can.collectives:
            for channel in self.reach.channels():
                channel.abort()

    # -- the end -----------------------------------------------------------------------------------

    def on_close(self, callback: Callable[[], Any]) -> None:
        self._callbacks.append(callback)

    def close(self) -> None:
        """Leaves the group. Peers that still read this rank's memory in the last call are not
        disturbed: it is freed when the last rank has left and the last tensor on it is gone."""
        if self.pid != os.getpid():
            return  # a forked child is no rank, and has nothing to end that is not its parent's
        self.broken = self.broken or Error("the group was closed")
        self.closed = True
        self.reach.close()
        self._end_channels()
        for callback in self._callbacks:
            callback()
        self._callbacks.clear()
        self.in_background.clear()
        self.memory.clear()


def over(broken: Error, call: int) -> Error:
    """The error of every call on a group that has failed in a call."""
    message = f"this group is over since call {call} ({broken}); form a new group"
    return PeerLost(message, broken.rank) if isinstance(broken, PeerLost) else type(broken)(message)
