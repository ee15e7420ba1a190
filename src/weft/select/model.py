"""Chooses by simulation: slower than the rule, but without its small errors."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from weft.errors import Unsupported
from weft.machine import Machine
from weft.schedule import Schedule
from weft.select.heuristic import Choice, estimates
from weft.simulate import run

BOUND = 1.25
"""Candidates with more than this many times the least predicted time are not simulated."""


@lru_cache(maxsize=1024)
def choose(machine: Machine, operation: Any) -> Choice:
    """The candidate with the least simulated time, among those that the rule does not exclude."""
    predicted = estimates(machine, operation)
    most = min(predicted.values()) * BOUND
    seconds: dict[Schedule, float] = {}
    for schedule, time in predicted.items():
        if time <= most or schedule.serial:
            try:
                seconds[schedule] = run(operation.lower(schedule), machine).seconds
            except Unsupported:
                continue  # it does not fit the machine
    if not seconds:
        raise Unsupported(f"no schedule of {operation.label} fits {machine.name}")
    best = min(seconds, key=seconds.__getitem__)
    serial = min((s for s in seconds if s.serial), key=seconds.__getitem__, default=best)
    why = (
        f"simulated on {machine.name}: {seconds[best] * 1e6:.0f} us against "
        f"{seconds[serial] * 1e6:.0f} us for serial, {len(seconds)} of {len(predicted)} candidates"
    )
    return Choice(best, why, serial)
