"""The interface of a fabric: the ranks, what they can do, and how a plan runs there.

Its methods take tasks and regions of a plan, never addresses. Everything above `weft.fabric`
is written against these protocols, so a fabric for another device is a package of its own that
registers itself with `weft.fabric.register`.

    with fabric.call(proposal, exposed) as call:          this rank posts its header
        program = fabric.prepare(plan, slots, signatures) copies and signals, compiled once
        flight = program.start(call, tensors, record)     copies and signals are under way
        flight.before(task); ...compute...; flight.after(task)
        timeline = flight.end().timeline()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from weft.errors import Error
from weft.fabric import _native
from weft.fabric.link import Link
from weft.fabric.outcomes import Outcome
from weft.fabric.proposal import Proposal
from weft.plan.tasks import AnyTask, Plan, Plannable, Region
from weft.schedule import Schedule
from weft.strategy import Strategy
from weft.timeline import Timeline


@dataclass(frozen=True)
class Capabilities:
    """What a fabric can do. `weft.select` considers these; lowering refuses what is missing."""

    name: str
    """The fabric's name in `weft.explain()`: host, group, or a device's."""
    direct: bool = False
    """Compute can read and write the memory of peers in place."""
    adaptive: bool = False
    """The host can see which chunks have arrived, and choose the next task accordingly."""
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
    """The headers of a call differ from those that its program was made for. Nothing has moved, and
    the call must be planned again."""


class NotShared(Error):
    """The ranks agree on a plan that needs memory that a rank has not exposed, because it expected
    another plan. Nothing has moved, and all ranks make the call again."""


class PeerOutput(NamedTuple):
    """A result in shared memory into which peers store, and its place in this rank's memory."""

    tensor: torch.Tensor
    offset: int


class Exposed(NamedTuple):
    """The memory of this rank that peers may touch in a call.

    inputs: tensors that peers read. workspaces: bytes by name. They are placed before the ranks
    agree, because headers carry their addresses. So their names are the same on all ranks, and
    their sizes follow from the rank's own arguments. outputs: results into which peers store.
    """

    inputs: Mapping[str, torch.Tensor] = MappingProxyType({})
    workspaces: Mapping[str, int] = MappingProxyType({})
    outputs: Mapping[str, PeerOutput] = MappingProxyType({})


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
        """Memory for a result into which peers store; it is `out` if peers can reach that."""

    def abandon(self, output: PeerOutput) -> None:
        """Never reuses an output, because its call failed and a peer may still store into it."""


class Completion(Protocol):
    """The end of a call on this rank."""

    def wait(self) -> None:
        """Waits until the results are complete. On the host they already are."""

    def timeline(self) -> Timeline:
        """The spans of this rank; empty unless the call was recorded."""


class Flight(Protocol):
    """One call under way on one rank."""

    def end(self) -> Completion:
        """Waits for the end of every copy of the call, or enqueues that wait."""

    def cancel(self) -> None:
        """Stops the call after an error. When it returns, nothing touches the call's buffers."""


class StepFlight(Flight, Protocol):
    """A flight whose compute lane runs task by task."""

    paced: bool
    """Whether accesses to peers' memory take the time of a paced link."""

    def view(self, region: Region) -> torch.Tensor:
        """A region of this rank's or a peer's memory, in place."""

    def before(self, task: AnyTask) -> None:
        """Called before a task starts. Blocks until its inputs are complete, or enqueues a wait."""

    def after(self, task: AnyTask) -> None:
        """Called after a task has ended. Sets its counter, or enqueues that."""

    def touched(self, task: AnyTask, since: int) -> None:
        """Waits until a paced link would have transferred what a task read or stored in place.
        since: when the task started, in nanoseconds."""

    def ready(self, tasks: Sequence[AnyTask]) -> list[bool]:
        """Which tasks may start now. Called only if the fabric can be adaptive."""

    def wait_any(self, waiting: AnyTask) -> None:
        """Waits for a signal since the last call of `ready`. waiting: a task that could not start,
        for the error message."""

    def ran(self, task: AnyTask, start: int, end: int) -> None:
        """Records a task of the compute lane, in nanoseconds."""


class Repeat(Protocol):
    """A call that can be repeated with other operands in one native step."""

    def run(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        scale: torch.Tensor | None,
        workspace: Mapping[str, int],
        output: PeerOutput,
    ) -> bool:
        """Runs the whole call. Returns False if the proposals of the ranks differ from the last
        time. This rank has then entered the call, and nothing has moved."""


class Program(Protocol):
    """The copies and signals of a plan for one rank, compiled once and started at every call."""

    plan: Plan
    computes: bool
    """Whether the executor runs the tasks of the compute lane; False if the program does."""
    shares: bool
    """Whether peers touch memory that this rank exposes. If not, known calls expose nothing."""
    quick: bool
    """Whether a known call can be made in one step: the program is a `QuickProgram`."""

    @property
    def way(self) -> str:
        """How the program carries out its plan, if not task by task, for `weft.explain()`."""

    def start(self, call: Any, tensors: dict[str, torch.Tensor], record: bool) -> Flight:
        """Starts the copies of a call. call: a call of this fabric. tensors: this rank's buffers by
        name; workspace is added. Returns a `StepFlight` if `computes`. Raises `Disagree`, here or
        from the flight, if the headers of the ranks differ from those that the program was
        prepared for."""

    def repeat(self, proposal: Proposal) -> Repeat | None:
        """A way to run the same call again in one native step; None if there is none."""


class Alone(NamedTuple):
    """A known call that native code makes from its arguments on. call: without its operands.
    block, between: the memory between the product and the collective. w, y: the names of its one
    weight and its one result. go_on: goes on with a call that has not ended yet, from its number
    and its outcome so far (or the words of an error); returns as `QuickProgram.once` does.
    break_off: ends a call of this number after an exception."""

    call: _native.SerialCall
    block: object
    between: torch.Tensor
    w: str
    y: str
    go_on: Callable[[int, Outcome | str], bool]
    break_off: Callable[[int, BaseException], None]


class QuickProgram(Program, Protocol):
    """A program that makes a known call in one step, without a call object and a flight."""

    def once(self, proposal: Proposal, tensors: dict[str, torch.Tensor], exposed: Exposed) -> bool:
        """Enters a call, runs it and ends it. tensors: this rank's inputs and outputs by buffer
        name. Returns False if the headers of the ranks differ from those that the program was
        prepared for. This rank has then entered the call, and nothing has moved."""

    def alone(self, proposal: Proposal, tensors: dict[str, torch.Tensor]) -> Alone | None:
        """The call with these tensors as native code repeats it; None if it cannot."""


class Call(Protocol):
    """A call that this rank has entered."""

    number: int
    label: str
    """The name of this call in error messages."""

    def proposals(self) -> list[Proposal]:
        """The proposals of all ranks, in their order. Raises `Mismatch`, on all ranks, unless they
        propose the same call."""

    def addresses(self, slot: int) -> list[int]:
        """The addresses, in this process, of one exposed memory of every rank. slot: its place in
        the header."""

    def peer_failure(self) -> tuple[int, int] | None:
        """The outcome if a peer was lost since the call began, otherwise None."""


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
    in_background: list[Callable[[], bool]]
    """Functions that return whether something still runs in the background. A group that
    torch.distributed has destroyed is left when nothing does."""

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
        """One call. It enters with a header, and is done at the end of the `with` block. Raises on
        all ranks if the memory of one rank does not suffice. expected: the program that this rank
        expects to run. entered: this rank has already entered the call (see `Repeat`)."""

    def refuse(self, operation: str, error: Exception) -> None:
        """Enters the next call with an error instead of a proposal, so that every rank raises."""

    def slots(self, exposed: Exposed) -> list[str]:
        """The names of the memory whose addresses headers carry, in their order."""

    def lower(self, operation: Plannable, schedule: Schedule | Strategy) -> Plan:
        """The plan of an operation on this fabric. Raises `Unsupported`, with the reason, if the
        schedule cannot run here."""

    def prepare(self, plan: Plan, slots: Sequence[str], signatures: Sequence[int]) -> Program:
        """Compiles a plan for this rank. signatures: those that the headers of all ranks must
        have."""

    def channels(self) -> tuple[Any, Any]:
        """The channels of native collectives and messages. Raises `Unsupported` unless
        `can.collectives`."""

    def set_link(self, link: Link) -> None: ...

    def failure(self, outcome: tuple[int, int], doing: str, waiting_for: str) -> Error:
        """The error for a wait that failed. The group cannot be used afterwards."""

    def give_up(self, error: Error) -> None:
        """Ends the group for this rank, and informs the others."""

    def on_close(self, callback: Callable[[], Any]) -> None:
        """Calls back when the fabric is closed."""

    def close(self) -> None:
        """Leaves the group."""
