"""Formats numbers for people: durations, bytes, rates, and round axis ticks."""

from __future__ import annotations

import math
from typing import Literal

Unit = Literal["s", "ms", "us", "ns"]

SECONDS: dict[Unit, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""The seconds of each unit."""

_STEPS = (1.0, 2.0, 5.0, 10.0)


def unit_of(seconds: float) -> Unit:
    """The unit in which a duration has one to three digits before the decimal point."""
    for unit, size in SECONDS.items():
        if abs(seconds) >= size:
            return unit
    return "ms" if seconds == 0.0 else "ns"


def duration(seconds: float, unit: Unit | None = None) -> str:
    """For example `61.2 ms`: at least three digits, in the given unit or the best one."""
    unit = unit or unit_of(seconds)
    return f"{digits(seconds / SECONDS[unit])} {unit}"


def digits(value: float) -> str:
    """A number with three significant digits, or more if it has more before the decimal point."""
    if value == 0.0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(decimals, 0), 9)}f}" if abs(value) >= 1e-6 else f"{value:.2e}"


SLOWER = "slower"


def share(percent: float) -> str:
    """The share of the possible gain as text: 100 % is complete overlap, and below 0 it is slower
    than doing one thing after the other."""
    return SLOWER if percent < -0.5 else f"{percent:z.0f} %"


def scaled(value: float, unit: str) -> str:
    """For example `8.39 MB`: a number of `unit` with the best decimal prefix."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{digits(value / size)} {prefix}{unit}"
    return f"{value:g} {unit}"


def byte_size(total: float) -> str:
    """`256 MiB`: an amount of bytes with the binary prefix that suits."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if total >= size:
            return f"{total / size:.4g} {unit}"
    return f"{total:g} B"


def ticks(end: float, at_most: int) -> list[float]:
    """Round, evenly spaced values from 0 to `end`, with at most `at_most` steps."""
    if end <= 0.0 or at_most < 1:
        return [0.0]
    least = end / at_most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(s * power for s in _STEPS if s * power >= least * (1 - 1e-9))
    return [i * step for i in range(int(end / step * (1 + 1e-9)) + 1)]
