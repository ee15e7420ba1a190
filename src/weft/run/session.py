"""What a group keeps between calls: prepared plans, known calls, decisions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from weft.fabric import Fabric
from weft.fabric.interface import Program
from weft.plan.lane_parts import LanePart
from weft.plan.tasks import Plan
from weft.timeline import Timeline

MAX_RUNNERS = 512
MAX_KNOWN = 1024
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Runner:
    """A plan prepared for this rank. parts: its compute lane, if the program does not run it. why:
    the reason for its schedule, if rank 0's header has one."""

    plan: Plan
    program: Program
    parts: list[LanePart]
    why: str
    asked: str
    tally: Tally


@dataclass(slots=True)
class Tally:
    """All calls of an operator with one schedule in this process."""

    name: str
    schedule: str
    asked: str
    why: str = ""
    """The reason of the last plan."""
    calls: int = 0
    seconds: float = 0.0


class Finished(NamedTuple):
    """A call that has ended, for `weft.explain`."""

    plan: Plan
    rank: int
    fabric: str
    asked: str
    """The schedule as the caller gave it."""
    why: str
    seconds: float
    timeline: Timeline
    ended: float
    """By `time.perf_counter`."""
    way: str = ""
    """How its program carried it out, if not task by task."""


class Session:
    """The state of one fabric above it. It exists as long as the fabric is open."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.runners: dict[Any, Runner] = {}
        """By a rank's signature, and by the signatures of all ranks."""
        self.known: dict[Any, Any] = {}
        """Calls that are recognised by their arguments alone."""
        self._last: tuple[Runner, str, float, float, Timeline] | None = None
        self._parts: dict[type, Any] = {}

    def keep(self, key: object, runner: Runner) -> None:
        """Keeps a runner. Every batch size has one, so the oldest is dropped if there are too
        many."""
        runners = self.runners
        runners.pop(key, None)
        if len(runners) >= MAX_RUNNERS:
            del runners[next(iter(runners))]
        runners[key] = runner

    def remember(self, arguments: object, call: object) -> None:
        """Recognises a call by its arguments from now on."""
        if len(self.known) >= MAX_KNOWN:
            self.known.clear()
        self.known[arguments] = call

    def part(self, kind: type[T], make: Callable[[Session], T]) -> T:
        """The one object of a kind that another layer keeps here, e.g. the decisions of `auto`."""
        found: T | None = self._parts.get(kind)
        if found is None:
            found = self._parts[kind] = make(self)
        return found

    def finished(self, runner: Runner, why: str, started: float, timeline: Timeline) -> float:
        """Keeps a call that has just ended, for `weft.explain`; returns its seconds."""
        ended = time.perf_counter()
        seconds, tally = ended - started, runner.tally
        tally.calls += 1
        tally.seconds += seconds
        self._last = runner, why, started, ended, timeline
        return seconds

    @property
    def last(self) -> Finished | None:
        """The last call that has ended."""
        if self._last is None:
            return None
        runner, why, started, ended, timeline = self._last
        rank, name, seconds = self.fabric.rank, self.fabric.can.name, ended - started
        plan, asked, way = runner.plan, runner.asked, runner.program.way
        return Finished(plan, rank, name, asked, why, seconds, timeline, ended, way)


_tallies: dict[tuple[str, str, str], Tally] = {}
_sessions: dict[int, Session] = {}
_closed: list[Finished] = []
"""The last call of groups that have been closed."""


def of(fabric: Fabric) -> Session:
    """The session of a fabric."""
    session = _sessions.get(id(fabric))
    if session is None or session.fabric is not fabric:
        key = id(fabric)
        session = _sessions[key] = Session(fabric)
        fabric.on_close(lambda: _end(key))
    return session


def _end(key: int) -> None:
    session = _sessions.pop(key, None)
    last = None if session is None else session.last
    if last is not None:
        _closed[:] = [max([last, *_closed], key=_ended)]


def tally_of(plan: Plan, asked: str) -> Tally:
    """The tally of the calls that a plan belongs to."""
    key = (plan.operation.name, str(plan.schedule), asked)
    found = _tallies.get(key)
    if found is None:
        found = _tallies[key] = Tally(*key)
    return found


def tallies() -> list[Tally]:
    """All calls of this process, by operator and schedule."""
    return [tally for tally in _tallies.values() if tally.calls]


def last_finished() -> Finished | None:
    """The last call of a plan in this process."""
    found = [session.last for session in list(_sessions.values())]
    return max([one for one in [*found, *_closed] if one is not None], key=_ended, default=None)


def _ended(finished: Finished) -> float:
    return finished.ended
