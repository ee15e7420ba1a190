"""The never-slower rule: the first calls of a shape try its choice against serial, and against what
is of another kind and near, and the fastest stays.

Only rank 0 has a guard. What it wants next goes into its header, and every rank runs what that
header says, so all of them switch at the same call.
"""

from __future__ import annotations

from statistics import median_low

from weft.select.heuristic import MOST_RIVALS, Choice

TURNS = 2
"""Turns of every arm: one after the other and again, so that a slow moment hits none alone."""
CALLS = 5
"""Calls in a row of each turn."""
UNCOUNTED = 2
"""The first of them: they make plans, find peers that expected another arm, and touch the memory of
both stages, which take turns."""

MOST_CALLS = TURNS * CALLS * (2 + MOST_RIVALS)
"""After so many calls it has settled."""

TOLERANCE = 0.02
"""How much faster than the choice another must be measured, for a difference that is none."""


class Guard:
    """One shape of one group: what it runs next, and what was measured of it."""

    def __init__(self, choice: Choice, watch: bool = True) -> None:
        self.choice = choice
        self.settled = not watch or not (choice.rivals or choice.schedule != choice.serial)
        others = [s for s in (choice.serial, *choice.rivals) if s != choice.schedule]
        tried = f"tried against {choice.schedule} in the first calls"
        self._arms = (choice, *(Choice(schedule, tried) for schedule in others))
        self._samples: list[list[float]] = [[] for _ in self._arms]
        self._calls = 0
        self.work = 1  # what the first call's time was in proportion to

    @property
    def next(self) -> Choice:
        """What the next call is to run."""
        return self.choice if self.settled else self._arms[self._turn]

    @property
    def _turn(self) -> int:
        return self._calls // CALLS % len(self._arms)

    def observe(self, seconds: float) -> None:
        """Hears how long the call took that ran `next`."""
        if self.settled:
            return
        arm = self._turn
        if self._calls % CALLS >= UNCOUNTED:
            self._samples[arm].append(seconds)
        self._calls += 1
        if self._calls < TURNS * CALLS * len(self._arms):
            return
        self.settled = True
        # Of all that counts the lower middle: slow moments are left out, and so are lucky ones, in
        # which a peer was early.
        seconds_of = [median_low(samples) for samples in self._samples]
        fastest = min(range(len(self._arms)), key=seconds_of.__getitem__)
        if seconds_of[fastest] * (1.0 + TOLERANCE) < seconds_of[0]:
            found, first = self._arms[fastest].schedule, self._arms[0].schedule
            name = "serial" if found.serial else str(found)
            self.choice = Choice(
                found,
                f"{first} was chosen, but measured slower here than {name}: "
                f"{seconds_of[0] * 1e3:.3g} ms against {seconds_of[fastest] * 1e3:.3g} ms",
            )
