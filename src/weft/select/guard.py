"""The guard: the first calls of a shape compare its choice with serial and with near rivals of
other kinds, and the fastest is kept.

Only rank 0 has a guard. Its header carries the schedule of the next call, and every rank runs that
schedule, so all ranks switch at the same call.
"""

from __future__ import annotations

from functools import cached_property
from operator import truediv
from statistics import median, median_low

from weft.select.decision import Decision
from weft.select.heuristic import MOST_RIVALS, Choice

TURNS = 3
"""Turns of every arm. The arms alternate, so that a slow moment does not affect only one."""
CALLS = 5
"""Calls in a row of each turn."""
UNCOUNTED = 2
"""The first calls of a turn, which do not count: they make plans, meet peers that expect another
arm, and touch the memory of both stages."""

MOST_CALLS = TURNS * CALLS * (2 + MOST_RIVALS)
"""The number of calls after which it has settled."""

TOLERANCE = 0.03
"""How much faster than the choice another arm must be in most turns, and than serial the one that
is kept; less is noise."""


class Guard:
    """The guard of one shape of one group: its next schedule, and its measurements."""

    def __init__(self, choice: Choice, watch: bool = True) -> None:
        self.choice = choice
        self.settled = not watch or not (choice.rivals or choice.schedule != choice.serial)
        self._first = choice
        self._calls = 0
        self.work = 1  # of the first call: times are proportional to it
        self.decisions: dict[int, Decision] = {}
        """By arm, so that the calls of one turn have the same decision."""

    # The following is computed after the first call, so that its choice does not wait for it.

    @cached_property
    def _arms(self) -> tuple[Choice, ...]:
        first = self._first
        others = [s for s in (first.serial, *first.rivals) if s != first.schedule]
        tried = f"tried against {first.schedule} in the first calls"
        return (first, *(Choice(schedule, tried) for schedule in others))

    @cached_property
    def _samples(self) -> list[list[list[float]]]:
        return [[[] for _ in range(TURNS)] for _ in self._arms]

    @property
    def next(self) -> Choice:
        """The choice for the next call."""
        if self.settled or self._calls < CALLS:
            return self.choice
        return self._arms[self.arm]

    @property
    def arm(self) -> int:
        """The number of the arm that the next call runs."""
        return self._calls // CALLS % len(self._arms)

    def observe(self, seconds: float) -> None:
        """Adds the seconds of the call that ran `next`."""
        if self.settled:
            return
        if self._calls % CALLS >= UNCOUNTED:
            turn = self._calls // CALLS // len(self._arms)
            self._samples[self.arm][turn].append(seconds)
        self._calls += 1
        if self._calls == TURNS * CALLS * len(self._arms):
            self._settle()

    def _settle(self) -> None:
        """Keeps the choice, unless another arm was faster in most turns, which noise seldom causes.
        What is not faster than serial gives way to it. The best calls are compared for this, too:
        a slow moment can make serial slow in most turns, but not in all calls."""
        self.settled = True
        medians = [[median(turn) for turn in turns] for turns in self._samples]

        def gains(over: int, arm: int) -> list[float]:
            return list(map(truediv, medians[over], medians[arm]))

        def gain(over: int, arm: int) -> float:
            return median_low(gains(over, arm))

        arms = range(len(self._arms))
        kept = max(arms, key=lambda arm: median(gains(0, arm)))
        if gain(0, kept) <= 1.0 + TOLERANCE:
            kept = 0
        serial = next(arm for arm in arms if self._arms[arm].schedule.serial)
        best = [min(map(min, turns)) for turns in self._samples]
        if min(gain(serial, kept), best[serial] / best[kept]) <= 1.0 + TOLERANCE:
            kept = serial
        if kept == 0:
            return
        turn = gains(0, kept).index(gain(0, kept))  # one turn that decides is reported
        found = self._arms[kept].schedule
        name = "serial" if found.serial else str(found)
        first, other = (medians[arm][turn] * 1e3 for arm in (0, kept))
        slower = "slower" if gain(0, kept) > 1.0 + TOLERANCE else "no faster"
        self.choice = Choice(
            found,
            f"{self._arms[0].schedule} was chosen, but measured {slower} here than {name}: "
            f"{first:.3g} ms against {other:.3g} ms",
        )
