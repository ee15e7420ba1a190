"""The never-slower rule: the first calls of a shape try its choice against serial, and the faster
stays.

Only rank 0 has a guard. What it wants next goes into its header, and every rank runs what that
header says, so all of them switch at the same call.
"""

from __future__ import annotations

from weft.select.heuristic import Choice

BLOCK = 4
"""Calls in a row of each arm. The first of them makes plans and finds peers that expected the
other arm, so it does not count; of the rest the quickest does, which no passing noise can fake."""

TOLERANCE = 0.03
"""How much slower than serial a choice may be measured, for a difference that is none."""


class Guard:
    """One shape of one group: what it runs next, and what was measured of it."""

    def __init__(self, choice: Choice, watch: bool = True) -> None:
        self.choice = choice
        self.settled = not watch or choice.schedule.serial
        self._arms = (
            choice,
            Choice(choice.serial, f"tried against {choice.schedule} in the first calls"),
        )
        self._samples: tuple[list[float], list[float]] = ([], [])

    @property
    def next(self) -> Choice:
        """What the next call is to run."""
        if self.settled:
            return self.choice
        return self._arms[len(self._samples[0]) >= BLOCK]

    def observe(self, seconds: float) -> None:
        """Hears how long the call took that ran `next`."""
        if self.settled:
            return
        samples = self._samples[len(self._samples[0]) >= BLOCK]
        samples.append(seconds)
        if len(self._samples[1]) < BLOCK:
            return
        overlapped, serial = (min(arm[1:]) for arm in self._samples)
        self.settled = True
        if overlapped > serial * (1.0 + TOLERANCE):
            self.choice = Choice(
                self._arms[1].schedule,
                f"{self._arms[0].schedule} was chosen, but measured slower here than serial: "
                f"{overlapped * 1e3:.3g} ms against {serial * 1e3:.3g} ms",
            )
