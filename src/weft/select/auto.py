"""`schedule="auto"`: a fixed rule, a tuned result, or the heuristic for this machine.

Rank 0 of a group chooses, its header carries the choice, and every rank runs that choice. Only rank
0 reads tuned results, describes the machine and measures calls, so ranks cannot differ. All headers
must ask for "auto", or the call is a `Mismatch`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch

from weft.errors import Unsupported, nearest
from weft.fabric import VERSION, Fabric
from weft.machine import Machine
from weft.run.call import meet
from weft.run.session import Session
from weft.schedule import Schedule
from weft.select import between_machines, heuristic, model, on_device, store, this_host
from weft.select.decision import AUTO, Decision
from weft.select.fixed import fixed, fused
from weft.select.guard import Guard
from weft.select.heuristic import Choice
from weft.select.sizes import NoRule

MODES = ("auto", "heuristic", "model")
MAX_SHAPES = 4096

_SERIAL = Schedule.parse("serial")


def check_mode(mode: object) -> None:
    """Raises unless this is a way to select."""
    if not isinstance(mode, str) or mode not in MODES:
        raise Unsupported(
            f"there is no way to select {mode!r}{nearest(str(mode), MODES)}; "
            f"the ways are {', '.join(MODES)}"
        )


_IN_HEADER = Decision(AUTO, AUTO, None, "")
"""The decision of all ranks but the first: rank 0's header carries the schedule."""


class Auto:
    """The choices of one group. `forced` is the candidate that `weft.tune` measures now, and
    `observer` receives its times."""

    def __init__(self, session: Session) -> None:
        self.fabric: Fabric = session.fabric
        self.mode = "auto"
        self.forced: Choice | None = None
        self.observer: Callable[[Any, float], None] | None = None
        self.guards: dict[Hashable, Guard] = {}
        self._settled: dict[Hashable, Decision] = {}
        self._fused: dict[Hashable, Choice | None] = {}
        """What a rule of `fixed.py` prefers to serial, by key."""
        self._link = self.fabric.link
        self._tuned: frozenset[str] | None = None
        self._machine: Machine | None = None
        self._threads = 0
        self._met = False
        self._on_device = self.fabric.device.type != "cpu"

    def meet(self, key: Hashable) -> None:
        """Begins the first auto call of a group. The ranks check that all of them make it, and
        calibrate together if rank 0 has no description of the machine yet. If a rule of `fixed.py`
        applies, no description is needed."""
        if self._fused.get(key) is not None:
            return
        if self._met or self.fabric.world == 1 or self.fabric.can.two_level or self._on_device:
            return
        wanted = self.fabric.rank == 0 and this_host.must_calibrate(torch.get_num_threads())
        first = meet(self.fabric, "the choice of a schedule", (("calibrate", wanted),))[0]
        self._met = True
        if dict(first)["calibrate"]:
            self._machine = this_host.calibrate(self.fabric)
            self._threads = torch.get_num_threads()

    def settled(self, key: Hashable) -> Decision | None:
        """The decision for this key if it will not change any more."""
        if self.fabric.link is not self._link or self.forced is not None:
            return None
        return self._settled.get(key)

    def current(self, key: Hashable) -> Decision | None:
        """The decision for the next call with this key, if it is one that was made before: it is
        settled, or the guard goes on with its turn."""
        found = self.settled(key)
        if found is None and self.fabric.link is self._link and self.forced is None:
            guard = self.guards.get(key)
            if guard is not None and not guard.settled:
                found = guard.decisions.get(guard.arm)
        return found

    def fixed(self, key: Hashable, operation: Callable[[], Any]) -> Decision | None:
        """The decision of a fixed rule for the operation with this key; None if no fixed rule
        applies."""
        if self.fabric.link is not self._link:
            self._link = self.fabric.link
            self.forget()
        if key in self._fused:
            return None
        found = self._settled.get(key)
        if found is not None:
            return found
        made = operation()
        choice = fixed(self.fabric.can, made)
        if choice is not None:
            name = choice.schedule.name
            return self._settle(key, Decision(name, AUTO, choice.schedule, choice.why))
        if len(self._fused) >= MAX_SHAPES:
            self.forget()
        self._fused[key] = fused(self.fabric.can, self._link, made)
        return None

    def _settle(self, key: Hashable, decision: Decision) -> Decision:
        """Keeps a decision that will not change any more."""
        if len(self._settled) >= MAX_SHAPES:
            self._settled.clear()
        self._settled[key] = decision
        return decision

    def choose(self, key: Hashable, operation: Callable[[], Any], work: int = 1) -> Decision:
        """The decision for a call, which rank 0 takes for all. See `select.decide`."""
        preferred, first = self._fused.get(key), self.fabric.rank == 0
        if preferred is None and not first:
            return self._settle(key, _IN_HEADER)
        inside = None if preferred is None else preferred.schedule
        # All ranks place memory for the same schedules, or the call is a `Mismatch`.
        header = AUTO if inside is None else f"{AUTO}, which may be {inside}"
        if self.forced is not None and preferred is None:
            made, observer = operation(), self.observer
            assert observer is not None
            refuses = getattr(made, "refuses", None)
            if refuses is None or refuses(self.forced.schedule) is None:
                return Decision(
                    AUTO, AUTO, None, "", self.forced.in_header, lambda s: observer(made, s)
                )
        found = self._settled.get(key)
        if found is not None:
            return found
        guard = self.guards.get(key)
        if guard is None:
            if len(self.guards) >= MAX_SHAPES:
                self.forget()
            if preferred is None:
                guard = self._guard(operation())
            else:  # other ranks only count, so that all settle at the same call
                guard = Guard(preferred, watch=_guarded())
            guard.work = work
            self.guards[key] = guard
        chosen = guard.next.in_header if first else None
        if not guard.settled:
            observe, share = guard.observe, guard.work / max(work, 1)
            if share == 1.0:
                decision = guard.decisions.get(guard.arm)
                if decision is None:
                    decision = Decision(header, AUTO, None, "", chosen, observe, inside)
                    guard.decisions[guard.arm] = decision
                return decision
            share_of = partial(_scaled, observe, share)
            return Decision(header, AUTO, None, "", chosen, share_of, inside)
        return self._settle(key, Decision(header, AUTO, None, "", chosen, None, inside))

    def set_mode(self, mode: str) -> None:
        """Sets what chooses if there is no tuned result: the heuristic, or simulation."""
        check_mode(mode)
        self.mode = mode
        self.forget()

    def forget(self) -> None:
        """Drops all choices, e.g. because something was tuned."""
        self.guards.clear()
        self._fused.clear()
        self._settled.clear()
        self._tuned = None

    @property
    def machine(self) -> Machine:
        """The description of this machine for the threads that this rank has now, with the group's
        links."""
        threads = torch.get_num_threads()
        if self._machine is None or self._threads != threads:
            self._machine, self._threads = this_host.description(threads), threads
        return this_host.with_link(self._machine, self.fabric.link)

    def _guard(self, operation: Any) -> Guard:
        if operation.world == 1:
            return Guard(Choice(_SERIAL, "one rank has nothing to overlap"))
        if self.fabric.can.two_level:
            return Guard(between_machines.choose(operation), watch=False)
        if self._on_device:
            return Guard(on_device.choose(self.fabric.device, operation), watch=False)
        found = self._find(operation) if self.mode == "auto" else None
        if found is not None:
            why = (
                f"tuned here: {found.seconds * 1e3:.3g} ms against "
                f"{found.serial_seconds * 1e3:.3g} ms for serial"
            )
            return Guard(Choice(found.schedule, why), watch=False)
        by = model.choose if self.mode == "model" else heuristic.choose
        try:
            return Guard(by(self.machine, operation), watch=_guarded())
        except NoRule as unknown:
            return Guard(Choice(_SERIAL, f"{unknown} to overlap"), watch=False)

    def _find(self, operation: Any) -> store.Answer | None:
        """A tuned result, if there is one. The list of results is read once, so that a choice does
        not wait for a disk in the usual case without any."""
        if self._tuned is None:
            self._tuned = store.listed()
        if not self._tuned:
            return None
        asked = store.question(operation, str(self.fabric.link), VERSION)
        return store.find(asked) if asked.file in self._tuned else None


def of(session: Session) -> Auto:
    """The choices of a group."""
    return session.part(Auto, Auto)


def _scaled(observe: Callable[[float], None], share: float, seconds: float) -> None:
    """Observes a call that does more or less than the first one, in proportion."""
    observe(seconds * share)


def _guarded() -> bool:
    return os.environ.get("WEFT_GUARD", "1") != "0"
