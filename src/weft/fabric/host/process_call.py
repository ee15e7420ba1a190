"""One call of a fabric of processes: enter with a header, agree, be done.

Two headers per rank are enough: a rank enters call e+1 only after it has finished call e, and
finishes call e only after every rank has entered it. So when it writes its header for e+2 over the
one for e, every rank has entered e+1 and read what it needed of e.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from weft.errors import Error, interrupted_by
from weft.fabric.interface import Exposed, Program
from weft.fabric.outcomes import AGAIN, CORRUPT, OK, TIMEOUT, Outcome
from weft.fabric.proposal import Proposal, check_same
from weft.fabric.reach import WorkspaceBlock

if TYPE_CHECKING:
    from weft.fabric.processes import ProcessFabric


class Placed(NamedTuple):
    """The memory of a call that peers may touch. offsets: for the header. shared: workspaces by
    name. in_place: whether peers read an input of the caller itself."""

    offsets: list[int]
    shared: dict[str, WorkspaceBlock]
    in_place: bool


def place(fabric: ProcessFabric, exposed: Exposed, number: int, proposal: Proposal) -> Placed:
    """Places the memory that peers may touch in a call. If it does not suffice, all ranks raise."""
    try:
        return _place(fabric, exposed, number)
    except Error as error:
        # This rank enters the call with the error in place of its proposal.
        refused = Proposal.of_error(proposal.operation, error)
        fabric.reach.enter(number, refused.signature, [], refused.blob, None)
        fabric.agree(number, (), fabric.deadline_ns(), proposal.operation)
        raise


def _place(fabric: ProcessFabric, exposed: Exposed, number: int) -> Placed:
    offsets: list[int] = []
    shared: dict[str, WorkspaceBlock] = {}
    if fabric.world == 1:
        return Placed(offsets, shared, False)
    inputs, workspaces, outputs = exposed
    memory, turn, in_place = fabric.memory, number % 2, False
    for tensor in inputs.values():
        offset, read_in_place = memory.share(tensor, turn)
        offsets.append(offset)
        in_place = in_place or read_in_place
    for name, size in workspaces.items():
        shared[name] = block = memory.workspace(name, size, turn)
        offsets.append(block.offset)
    for name, block in fabric.reach.relays(number).items():
        shared[name] = block
        offsets.append(block.offset)
    if outputs:
        offsets += [output.offset for output in outputs.values()]
    return Placed(offsets, shared, in_place)


def wait_released(fabric: ProcessFabric, number: int, label: str) -> None:
    """Waits until no peer reads this rank's memory in a call: the caller may write its symmetric
    input as soon as the call returns."""
    deadline = fabric.deadline_ns()
    fabric.wait(
        lambda: fabric.native.wait_released(number, deadline),
        label,
        "peers to finish reading this rank's symmetric memory",
    )


class ProcessCall:
    """A call under way on this rank. Made by `fabric.call`, as a context."""

    __slots__ = (
        "_entered",
        "_expected",
        "_exposed",
        "_in_place",
        "_proposal",
        "fabric",
        "label",
        "number",
        "shared",
    )

    def __init__(
        self,
        fabric: ProcessFabric,
        proposal: Proposal,
        exposed: Exposed,
        expected: Program | None,
        entered: bool,
    ) -> None:
        self.fabric = fabric
        self.label = proposal.operation
        """The name of this call in error messages."""
        self.shared: dict[str, WorkspaceBlock] = {}
        """The workspaces that peers touch."""
        self._proposal = proposal
        self._exposed = exposed
        self._expected = expected
        self._entered = entered
        self._in_place = False

    def __enter__(self) -> ProcessCall:
        fabric = self.fabric
        fabric.lock.acquire()
        entering = False
        try:
            self.number = fabric.number if self._entered else fabric.next_call()
            entering = True
            self._enter()
        except BaseException as error:
            if entering:
                self._break_off(error)
            fabric.lock.release()
            raise
        return self

    def _enter(self) -> None:
        proposal, fabric = self._proposal, self.fabric
        placed = place(fabric, self._exposed, self.number, proposal)
        self.shared, self._in_place = placed.shared, placed.in_place
        if not self._entered:
            engines = None if self._expected is None else getattr(self._expected, "engines", None)
            fabric.reach.enter(
                self.number, proposal.signature, placed.offsets, proposal.blob, engines
            )

    def meet(self) -> None:
        """Waits until every rank has entered the call."""
        self.fabric.agree(self.number, (), self.fabric.deadline_ns(), self.label)

    def proposals(self) -> list[Proposal]:
        self.meet()
        found = [self._proposal_of(rank) for rank in range(self.fabric.world)]
        check_same(found, self.number)
        return found

    def _proposal_of(self, rank: int) -> Proposal:
        try:
            return Proposal.read(self.fabric.native.header(self.number, rank))
        except ValueError:
            raise self.fabric.failure((CORRUPT, rank), self.label, "its header") from None

    def addresses(self, slot: int) -> list[int]:
        heap = self.fabric.heap
        return [heap.peer_pointer(self.number, rank, slot) for rank in range(self.fabric.world)]

    def peer_failure(self) -> Outcome | None:
        # With a deadline in the past this does not wait: it only returns the state of the peers.
        outcome = self.fabric.native.wait_released(self.number, 0)
        return outcome if outcome[0] not in (OK, AGAIN, TIMEOUT) else None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        fabric = self.fabric
        try:
            if error is not None:
                self._break_off(error)
                return
            try:
                self._finish()
            except BaseException as failure:
                self._break_off(failure)
                raise
        finally:
            fabric.lock.release()

    def _finish(self) -> None:
        fabric = self.fabric
        outcome = fabric.native.done(self.number)
        if outcome[0] != OK:
            raise fabric.failure(outcome, self.label, "its end")
        if self._in_place:
            wait_released(fabric, self.number, self.label)

    def _break_off(self, error: BaseException) -> None:
        break_off(self.fabric, self.number, error)


def break_off(fabric: ProcessFabric, call: int, error: BaseException) -> None:
    """Ends a call after an error on this rank. The group fails, unless the error is a `weft.Error`,
    which all ranks raise."""
    if not isinstance(error, Error):
        fabric.give_up(interrupted_by(error, fabric.rank))
    fabric.native.done(call)
