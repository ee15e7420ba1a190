"""A comparison of ways to carry out a collective in words and rows: the table, why, the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from weft.operation import ranks_label
from weft.report.cells import Cell
from weft.report.units import byte_size, duration
from weft.study.collective_comparison import Comparison

COLUMNS = 4
"""So many sizes fit beside the names of ways in 80 columns."""

Page = tuple[tuple[str, ...], list[list[Cell]]]
"""Headers and rows of a table."""


def tables_of(found: Comparison) -> Iterator[Page]:
    """Tables with a row per way and a column per size; `*` marks the fastest of each size."""
    for first in range(0, len(found.collectives), COLUMNS):
        indices = range(first, min(first + COLUMNS, len(found.collectives)))
        sizes = (byte_size(found.collectives[i].total_bytes) for i in indices)
        rows: list[list[Cell]] = []
        for times in found.found:
            cells = [
                f"{duration(times.seconds[i]):>8}{' *' if found.best(i) is times else ''}"
                for i in indices
            ]
            rows.append([times.way.name, times.way.by, *cells])
        yield ("way", "by", *(f"{size:>8}" for size in sizes)), rows


def refused_of(found: Comparison) -> list[str]:
    """One sentence per reason, with the ways that it keeps out."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in found.refused:
        by_reason.setdefault(reason, []).append(name)
    return [f"{', '.join(names)}: {reason}." for reason, names in by_reason.items()]


def why(found: Comparison, index: int) -> str:
    """Why the fastest way at one size is the fastest, in a sentence."""
    first, *others = found.ranked(index)
    taken = first.seconds[index]
    size = byte_size(found.collectives[index].total_bytes)
    text = f"{size}: {first.way.name} takes {duration(taken)}"
    if first.fixed >= taken / 2:
        text += f", of which {duration(first.fixed)} are the fixed cost to start and end"
    else:
        text += f" and moves {found.bus_bandwidth(first, index) / 1e9:.3g} GB/s"
    if others and taken:
        other = others[0]
        text += f"; next is {other.way.name}, which takes {other.seconds[index] / taken:.2f}x"
    return text + "."


def verdict(found: Comparison) -> str:
    """Which way is the fastest at which sizes, and where copy engines beat cores."""
    parts = []
    for name, run in groupby(
        range(len(found.collectives)), key=lambda index: found.best(index).way.name
    ):
        same = list(run)
        low, high = (byte_size(found.collectives[i].total_bytes) for i in (same[0], same[-1]))
        parts.append(f"{name} at {low}" if low == high else f"{name} from {low} to {high}")
    where = f"{ranks_label(found.world)} of {found.place.name}"
    text = f"Fastest for {found.kind} on {where}: {', '.join(parts)}."
    against = _against_cores(found)
    return text if against is None else f"{text} {against}"


def _against_cores(found: Comparison) -> str | None:
    """At which sizes copy engines beat a library that cores drive."""
    cores = [times for times in found.found if times.way.by == "cores"]
    engines = [times for times in found.found if times.way.by == "engines"]
    if not cores or not engines:
        return None
    wins = [
        byte_size(one.total_bytes)
        for i, one in enumerate(found.collectives)
        if min(times.seconds[i] for times in engines) < cores[0].seconds[i]
    ]
    if len(wins) == len(found.collectives):
        return "Copy engines beat cores at every size."
    if not wins:
        return "Cores beat copy engines at every size."
    return f"Copy engines beat cores at {', '.join(wins)}."
