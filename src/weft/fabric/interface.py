"""What weft asks of a fabric: where ranks are, what they can do, and how a plan runs there.

A fabric speaks of tasks and regions of a plan, never of addresses. Everything above `weft.fabric`
is written against these protocols, so a fabric for another device is a package of its own that
registers itself with `weft.fabric.register`.

    with fabric.call(proposal, exposed) as call:          the ranks meet and compare proposals
        program = fabric.prepare(plan, slots, signatures) copies and signals, compiled once
        flight = program.start(call, tensors, record)     copies and signals are under way
        flight.before(task); ...compute...; flight.after(task)
        timeline = flight.end().timeline()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from weft.errors import Error
from weft.fabric.link import Link
from weft.fabric.proposal import Proposal
from weft.plan.tasks import AnyTask, Plan, Plannable, Region
from weft.schedule import Schedule
from weft.strategy import Strategy
from weft.timeline import Timeline


@dataclass(frozen=True)
class Capabilities:
    """What a fabric can do. `weft.select` chooses by these; lowering refuses what is missing."""

    name: str
    """The fabric's name in `weft.explain()`: host, group, or a device's."""
    direct: bool = False
    """Compute can read and write the memory of peers in place."""
    adaptive: bool = False
    """The host sees which chunks have arrived, and can choose the next task by that."""
    in_kernel: bool = False
    """Kernels can store into the memory of peers."""
    two_level: bool = False
    """Some ranks are on other machines, so plans may have two levels."""
    collectives: bool = False
    """The native collectives of `weft.collectives` work here."""
    paced: bool = False
    """Links can be slowed down to behave like those of another machine."""
    capture: bool = False
    """Calls can be captured into a graph and replayed."""


class Disagree(Exception):
    """The headers of a call are not those that its program was made for: plan the call anew.
    Nothing has moved."""


class PeerOutput(NamedTuple):
    """A result in shared memory into which peers store, and its place in this rank's memory."""

    tensor: torch.Tensor
    offset: int


@dataclass(frozen=True)
class Exposed:
    """The memory of this rank that peers may touch in a call.

    inputs: tensors that peers read. workspaces: bytes by name; a call places them before the ranks
    agree, because headers carry their addresses, so names are the same on all ranks and sizes
    follow from the rank's own arguments. outputs: results into which peers store.
    """

    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    workspaces: Mapping[str, int] = field(default_factory=dict)
    outputs: Mapping[str, PeerOutput] = field(default_factory=dict)


NOTHING_EXPOSED = Exposed()


class Memory(Protocol):
    """The memory of this rank that peers can reach."""

    @property
    def allocated(self) -> int:
        """Bytes in use."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that peers read in place (`weft.symmetric_empty`)."""

    def output(
        self, shape: Sequence[int], dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> PeerOutput:
        """Memory for a result into which peers store: `out` if peers can reach it."""

    def abandon(self, output: PeerOutput) -> None:
        """Never reuses an output: its call failed, and a peer may still store into it."""


class Completion(Protocol):
    """The end of a call on this rank."""

    def wait(self) -> None:
        """Waits until the results are there. On the host they already are."""

    def timeline(self) -> Timeline:
        """The spans of this rank, if the call was recorded."""


class Flight(Protocol):
    """One call under way on one rank."""

    def end(self) -> Completion:
        """Waits for (or enqueues) the end of every copy of the call."""

    def cancel(self) -> None:
        """Stops the call after an error: when it returns nothing touches the call's buffers."""


class StepFlight(Flight, Protocol):
    """A flight whose compute lane runs task by task."""

    paced: bool
    """Whether accesses to peers' memory take the time of a paced link."""

    def view(self, region: Region) -> torch.Tensor:
        """A region of this rank's or a peer's memory, in place."""

    def before(self, task: AnyTask) -> None:
        """Lets a task start: blocks until what it needs is there, or enqueues a wait."""

    def after(self, task: AnyTask) -> None:
        """Signals that a task has ended."""

    def touched(self, task: AnyTask, since: int) -> None:
        """Waits until what a task read or stored in place would have come through a paced link.
        since: when the task started, in nanoseconds."""

    def ready(self, tasks: Sequence[AnyTask]) -> list[bool]:
        """Which tasks may start now; only where the fabric can be adaptive."""

    def wait_any(self, waiting: AnyTask) -> None:
        """Waits until a signal has come since `ready` was last asked. waiting: one of the tasks
        that could not start, for the error message."""

    def ran(self, task: AnyTask, start: int, end: int) -> None:
        """Records a task of the compute lane, in nanoseconds."""


class Repeat(Protocol):
    """A call that is made again and again with other operands, in one native step."""

    def run(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        scale: torch.Tensor | None,
        workspace: Mapping[str, int],
        output: PeerOutput,
    ) -> bool:
        """Runs the whole call. False if the ranks propose another call than the last time: this
        rank has entered the call then, and nothing has moved."""


class Program(Protocol):
    """The copies and signals of a plan for one rank, compiled once and started at every call."""

    plan: Plan
    computes: bool
    """Whether compute runs the tasks of the rank's compute lane; False where the program is one
    kernel that does."""

    def start(self, call: Any, tensors: dict[str, torch.Tensor], record: bool) -> Flight:
        """Sets the copies of a call going. call: this fabric's own. tensors: this rank's buffers by
        name; workspace is added. Raises `Disagree`, here or from the flight, if the headers of the
        ranks differ from
        those that the program was prepared for. A `StepFlight` where `computes`."""

    def repeat(self, proposal: Proposal) -> Repeat | None:
        """A way to run the same call again in one native step; None where there is none."""


class Call(Protocol):
    """A call that this rank has entered."""

    number: int
    label: str
    """What error messages call this call."""

    def proposals(self) -> list[Proposal]:
        """The proposals of all ranks, in their order; raises `Mismatch` on all ranks unless they
        propose the same call."""

    def addresses(self, slot: int) -> list[int]:
        """Where the exposed memory of every rank is in this process, by its place in the header."""

    def peer_failure(self) -> tuple[int, int] | None:
        """How a peer was lost since the call began; None while all are well."""


class Fabric(Protocol):
    """The ranks of a group and the memory between them. Opened by `weft.fabric.of(group)`."""

    rank: int
    world: int
    device: torch.device
    link: Link
    deadline: float
    lock: threading.RLock
    broken: Error | None
    closed: bool
    pid: int

    @property
    def can(self) -> Capabilities: ...

    @property
    def memory(self) -> Memory: ...

    @property
    def group(self) -> dist.ProcessGroup: ...

    def group_ref(self) -> dist.ProcessGroup | None:
        """The group, or None once torch.distributed has destroyed it."""

    def call(
        self,
        proposal: Proposal,
        exposed: Exposed = NOTHING_EXPOSED,
        expected: Program | None = None,
        entered: bool = False,
    ) -> AbstractContextManager[Call]:
        """One call: enters with a header, and is done at the end of the `with` block. The block
        raises on all ranks if one rank's memory does not suffice. expected: the program that this
        rank expects to run. entered: this rank has entered the call by other means already."""

    def refuse(self, operation: str, error: Exception) -> None:
        """Enters the next call with an error in place of a proposal, so that every rank raises."""

    def slots(self, exposed: Exposed) -> list[str]:
        """The names of the memory that headers carry the addresses of, in their order."""

    def lower(self, operation: Plannable, schedule: Schedule | Strategy) -> Plan:
        """The plan of an operation as it runs here; raises `Unsupported`, with the reason, where
        the schedule cannot run here."""

    def prepare(self, plan: Plan, slots: Sequence[str], signatures: Sequence[int]) -> Program:
        """Compiles a plan for this rank. signatures: what the headers of all ranks must carry."""

    def channels(self) -> tuple[Any, Any]:
        """What native collectives and messages go through; raises `Unsupported` unless
        `can.collectives`."""

    def set_link(self, link: Link) -> None: ...

    def failure(self, outcome: tuple[int, int], doing: str, waiting_for: str) -> Error:
        """The error for a wait that did not end well; the group is over after it."""

    def give_up(self, error: Error) -> None:
        """Ends the group for this rank, and informs the others."""

    def on_close(self, callback: Callable[[], Any]) -> None:
        """Calls back when the fabric is closed."""

    def close(self) -> None:
        """Leaves the group."""
