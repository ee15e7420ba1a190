"""One call under way on one rank of a fabric of processes: waits and signals of its compute lane.

Until all headers are known to agree, a rank touches only its own memory and signals nothing. Its
plan may have to be replaced, and peers must not take a counter of the old plan for one of the new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from weft.fabric import _native
from weft.fabric.interface import Disagree
from weft.fabric.native import Native
from weft.fabric.outcomes import AGAIN, CANCELLED, DISAGREE, OK, Outcome
from weft.fabric.spans import span_of
from weft.plan.tasks import AnyTask, Plan, Region
from weft.timeline import COMPUTE, Span, Timeline

if TYPE_CHECKING:
    from weft.fabric.host.engine_program import EngineProgram, Signals

NOTHING = Timeline(())


class Ended:
    """The end of a call on the host, where the results are complete when the flight has ended."""

    __slots__ = ("_timeline",)

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def wait(self) -> None:
        """Does nothing: the results are complete."""

    def timeline(self) -> Timeline:
        return self._timeline


UNRECORDED = Ended(NOTHING)


class ProcessFlight:
    """Implements `weft.fabric.Flight`."""

    __slots__ = (
        "_agreed",
        "_call",
        "_deadline",
        "_fabric",
        "_flight",
        "_native",
        "_pending",
        "_program",
        "_record",
        "_seen",
        "_signals",
        "_spans",
        "_tensors",
        "paced",
    )

    def __init__(
        self, program: EngineProgram, call: int, tensors: dict[str, torch.Tensor], record: bool
    ) -> None:
        fabric = program.fabric
        self._program = program
        self._signals = program.signals
        self._fabric = fabric
        self._native = fabric.native
        self._call = call
        self._tensors = tensors
        self._record = record
        self._spans: list[Span] = []
        self._deadline = fabric.deadline_ns()
        self._agreed = fabric.world == 1
        self._pending: list[Signals] = []
        self._seen = 0
        self._flight: Any = None
        self.paced = fabric.link.paced
        if program.flies:
            buffers = [tensors[b.name] for b in program.buffers]
            self._flight = fabric.reach.launch(
                program.engines, call, self._deadline, buffers, program.signatures, record
            )

    # -- waits and signals -------------------------------------------------------------------------

    def _agree(self) -> None:
        """Waits until every rank has entered, with the headers that the plan was made for."""
        if self._agreed:
            return
        program = self._program
        if not self._fabric.agree(self._call, program.signatures, self._deadline, program.label):
            self._quiesce()
            raise Disagree
        self._agreed = True
        for signals in self._pending:
            self._native.signal(self._call, signals.counter, signals.rings)

    def before(self, task: AnyTask) -> None:
        signals = self._signals[task.id]
        if signals.remote:
            self._agree()
        if signals.waits:
            self._wait_for(task, signals)

    def _wait_for(self, task: AnyTask, signals: Signals) -> None:
        flight, native = self._flight, self._native
        self._agree()
        for rank, counter in signals.waits:
            outcome = native.wait(flight, rank, counter)
            if outcome[0] != OK:
                outcome = self._fabric.wait(
                    lambda r=rank, c=counter: native.wait(flight, r, c),  # type: ignore[misc]
                    self._program.label,
                    f"what {task.label!r} needs",
                    outcome,
                )
            if outcome[0] == CANCELLED:
                self._engine_failed(task.label)

    def after(self, task: AnyTask) -> None:
        signals = self._signals[task.id]
        if signals.counter >= 0:
            self._signal(signals)

    def _signal(self, signals: Signals) -> None:
        if self._agreed:
            self._native.signal(self._call, signals.counter, signals.rings)
            return
        # Delayed until the ranks are known to agree.
        self._pending.append(signals)
        native, call = self._native, self._call
        if all(native.entered(rank) >= call for rank in range(self._fabric.world)):
            self._agree()

    def ready(self, tasks: Sequence[AnyTask]) -> list[bool]:
        self._seen = self._native.doorbell()
        waits = [self._signals[task.id].waits for task in tasks]
        if not self._agreed:  # until then the counters may be those of another plan
            return [not some for some in waits]
        nothing = (self._program.here, 0)
        first = self._native.reached(self._call, [some[0] if some else nothing for some in waits])
        return [
            not some
            or (reached and (len(some) == 1 or all(self._native.reached(self._call, some))))
            for some, reached in zip(waits, first, strict=True)
        ]

    def wait_any(self, waiting: AnyTask) -> None:
        if not self._agreed:
            self._agree()
            return
        flight, native, seen = self._flight, self._native, self._seen
        outcome = native.wait_doorbell(flight, seen)
        if outcome[0] != OK:
            outcome = self._fabric.wait(
                lambda: native.wait_doorbell(flight, seen),
                self._program.label,
                f"what {waiting.label!r} needs",
                outcome,
            )
        if outcome[0] == CANCELLED or native.outcome(flight)[0] != OK:
            self._engine_failed(waiting.label)

    def _engine_failed(self, label: str) -> None:
        """Raises the error for which an engine stopped the call, or `Disagree`."""
        outcome = self._quiesce()
        if outcome[0] == DISAGREE:
            raise Disagree
        raise self._fabric.failure(outcome, self._program.label, f"what {label!r} needs")

    # -- memory ------------------------------------------------------------------------------------

    def view(self, region: Region) -> torch.Tensor:
        if region.rank == self._fabric.rank:
            tensor = self._tensors[region.buffer]
        else:
            tensor = self._program.peer_tensor(self._call, region)
        rows, columns = tensor.shape
        if region.columns != columns:
            tensor = tensor.narrow(1, region.column, region.columns)
        if region.rows != rows:
            tensor = tensor.narrow(0, region.row, region.rows)
        return tensor

    def touched(self, task: AnyTask, since: int) -> None:
        program, rank = self._program, self._fabric.rank
        for regions, stores in ((task.reads(), False), (task.writes(), True)):
            for region in regions:
                if region.rank == rank:
                    continue
                ends = (program.places[region.rank], program.here)
                ends = ends[::-1] if stores else ends
                size = program.plan.num_bytes(region)
                self._pace(self._fabric.heap.reserve(*ends, size, since), region)

    def _pace(self, until: int, region: Region) -> None:
        """Holds the compute thread until the link would have transferred a region."""
        self._hold(until, f"{region} to come through the link")

    def _hold(self, until: int, waiting_for: str) -> None:
        self._fabric.wait(
            lambda: self._fabric.heap.hold(self._call, until, self._deadline),
            self._program.label,
            waiting_for,
        )

    # -- the end -----------------------------------------------------------------------------------

    def ran(self, task: AnyTask, start: int, end: int) -> None:
        self._spans.append(
            span_of(self._program.plan, task, self._fabric.rank, COMPUTE, start, end)
        )

    def end(self) -> Ended:
        self._agree()
        flight = self._flight
        if flight is not None:
            # Copies that no task of this rank waits for may still run.
            outcome = self._native.finish(flight)
            if outcome[0] != OK:
                outcome = self._fabric.wait(
                    lambda: self._native.finish(flight),
                    self._program.label,
                    "its own copy engines",
                    outcome,
                )
            if outcome[0] != OK:
                self._engine_failed("the end of the call")
        return Ended(self._timeline()) if self._record else UNRECORDED

    def cancel(self) -> None:
        self._quiesce()

    def _quiesce(self) -> Outcome:
        """Waits until no engine touches a buffer of this call. This must be so before an error is
        raised."""
        return (OK, -1) if self._flight is None else quiesce(self._native, self._flight)

    def _timeline(self) -> Timeline:
        plan, rank, flight = self._program.plan, self._fabric.rank, self._flight
        copied = [] if flight is None else copy_spans(plan, rank, flight)
        return Timeline((*self._spans, *copied), str(plan.schedule))


def quiesce(native: Native, copies: Any) -> Outcome:
    """Cancels the copies of a call, and waits until no engine touches its buffers."""
    native.cancel(copies)
    while (outcome := native.finish(copies))[0] == AGAIN:
        pass
    return outcome


def copy_spans(plan: Plan, rank: int, copies: Any) -> list[Span]:
    """The spans of the copies of a recorded call."""
    return [
        span_of(plan, plan.tasks[task], rank, plan.tasks[task].lane, start, end)
        for task, start, end in copies.spans
    ]


class StoringFlight(ProcessFlight):
    """A plan of one launch that runs task by task. On a paced link, compute continues while its
    stores are in transfer, and the counter of a task is set when they would have arrived."""

    __slots__ = ("_due", "_under_way")

    def __init__(
        self, program: EngineProgram, call: int, tensors: dict[str, torch.Tensor], record: bool
    ) -> None:
        super().__init__(program, call, tensors, record)
        self._due = 0
        self._under_way: list[tuple[int, AnyTask]] = []

    def _pace(self, until: int, region: Region) -> None:
        self._due = max(self._due, until)

    def after(self, task: AnyTask) -> None:
        if self._due and self._signals[task.id].counter >= 0:
            self._under_way.append((self._due, task))
        else:
            super().after(task)
        self._due = 0
        while self._under_way and self._under_way[0][0] <= _native.now_ns():
            super().after(self._under_way.pop(0)[1])

    def _wait_for(self, task: AnyTask, signals: Signals) -> None:
        self._deliver()
        super()._wait_for(task, signals)

    def end(self) -> Ended:
        self._deliver()
        return super().end()

    def _deliver(self) -> None:
        """Sets all delayed counters before this rank waits, because its peers may wait for them."""
        while self._under_way:
            until, task = self._under_way.pop(0)
            self._hold(until, f"{task.label!r} to come through the link")
            super().after(task)
