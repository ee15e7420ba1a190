"""`weft.summary`: what the calls of a model did, by layer and operator, as a table, JSON and
a page.

    with weft.record():
        model(batch)
    print(weft.summary())

Without a recording, a summary has only the number and the time of calls by operator and schedule.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import wrap

import torch

from weft.report.cells import Cell
from weft.report.page import Page
from weft.report.units import duration
from weft.run import record
from weft.run.record import Called, Recording
from weft.run.session import tallies
from weft.select import this_host
from weft.timeline import Timeline

WIDTH = 80
OUTSIDE = "-"
"""The layer of calls outside of any module."""


@dataclass(frozen=True)
class Row:
    """All calls of one operator in one layer with one schedule, on this rank. Times are sums.

    exposed: how long the rank waited for data or for peers instead of computing. serial: how long
    the calls would have taken if communication had not been hidden behind computation, estimated
    as their time plus what was hidden. Both are None if they are unknown: without a recording, and
    for collectives in the background.
    """

    layer: str
    operation: str
    """The operator; with "(backward)" if a backward pass called it."""
    schedule: str
    asked: str
    """The schedule as the caller gave it; "auto" if it was chosen."""
    why: str
    calls: int
    seconds: float
    exposed: float | None
    serial: float | None


@dataclass(frozen=True)
class Summary:
    """The calls of this rank. `print` shows a table of at most 80 columns."""

    rows: tuple[Row, ...]
    recorded: bool
    """Whether it is of a recording. Otherwise it counts all operator calls of this process."""
    timelines: tuple[Timeline, ...] = field(default=(), repr=False)

    @property
    def seconds(self) -> float:
        """The time of all calls."""
        return sum(row.seconds for row in self.rows)

    def verdict(self) -> str:
        """What the calls did, in a sentence or two."""
        calls = sum(row.calls for row in self.rows)
        if not calls:
            what = "the recording has" if self.recorded else "this process has made"
            return f"{what.capitalize()} no weft calls."
        text = f"{calls} calls took {duration(self.seconds)}"
        if not self.recorded:
            return (
                f"{text}. Call inside `with weft.record():` to see layers and what was hidden; "
                "that also counts collectives."
            )
        known = [row for row in self.rows if row.serial is not None and row.exposed is not None]
        exposed = sum(row.exposed or 0.0 for row in known)
        taken, serial = sum(row.seconds for row in known), sum(row.serial or 0.0 for row in known)
        if not known or not taken:
            return f"{text}; none of them can be compared with serial."
        return (
            f"{text}. Communication was exposed for {duration(exposed)} and hidden for "
            f"{duration(serial - taken)}: without overlap, the calls would have taken "
            f"{serial / taken:.2f} times as long."
        )

    def json(self) -> str:
        """The rows and the verdict as JSON."""
        made = {
            "recorded": self.recorded,
            "seconds": self.seconds,
            "rows": [asdict(row) for row in self.rows],
            "verdict": self.verdict(),
        }
        return json.dumps(made, indent=2)

    def page(self, path: str | Path) -> Path:
        """Writes a page that opens without a network: the table, and the timelines of the first
        calls."""
        page = Page("Summary of weft calls", self.verdict())
        page.section("Calls", "Times are sums over the calls of this rank, in milliseconds.")
        rows = [[*self._cells(row, 1e3), row.asked, row.why] for row in self.rows]
        page.table([*HEADERS, "asked for", "why"], rows)
        shown = [timeline for timeline in self.timelines if timeline.spans][:MOST_TIMELINES]
        if shown:
            page.section("Timelines", f"The first {len(shown)} calls of the recording.")
            page.timelines(shown)
        return page.write(Path(path))

    def __str__(self) -> str:
        notes = list(dict.fromkeys(map(_note, self.rows)))
        lines = _lines(self.rows, notes)
        for number, note in enumerate(notes, 1):
            lines += wrap(f"({number}) {note}", WIDTH, subsequent_indent="    ")
        return "\n".join([*lines, *wrap(self.verdict(), WIDTH)])

    def _cells(self, row: Row, scale: float) -> list[Cell]:
        return [
            row.layer,
            row.operation,
            row.schedule,
            row.calls,
            row.seconds * scale,
            None if row.exposed is None else row.exposed * scale,
            None if row.serial is None else row.serial * scale,
        ]


def _note(row: Row) -> str:
    """The schedule and its reason, which are below the table, because both can be long."""
    return f"{row.schedule}: {row.why}" if row.why else row.schedule


def _lines(rows: Sequence[Row], notes: Sequence[str]) -> list[str]:
    """The table: a line for each layer, and below it a line for each of its operators."""
    if not rows:
        return []
    heads = [*HEADERS[3:], "schedule"]
    numbers = [
        [
            f"{row.calls:,}",
            *map(_milliseconds, (row.seconds, row.exposed, row.serial)),
            f"({notes.index(_note(row)) + 1})",
        ]
        for row in rows
    ]
    widths = [max(map(len, [head, *(some[i] for some in numbers)])) for i, head in enumerate(heads)]
    name = WIDTH - sum(width + 2 for width in widths)

    def line(operation: str, cells: Sequence[str]) -> str:
        filled = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        return f"{operation:<{name}}{filled}"

    lines = [line("layer, operator", heads), "-" * WIDTH]
    layer = None
    for row, cells in zip(rows, numbers, strict=True):
        if row.layer != layer:
            layer = row.layer
            lines += wrap(layer, WIDTH)
        first, *more = wrap(row.operation, name, initial_indent="  ", subsequent_indent="    ")
        lines += [line(first, cells), *more]
    return [*lines, "-" * WIDTH, "Times are in ms."]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.3f}"


HEADERS = ("layer", "operator", "schedule", "calls", "time", "exposed", "serial")
MOST_TIMELINES = 24


def summary(recording: Recording | None = None) -> Summary:
    """What the weft calls of this rank did, by layer and operator: calls, schedule and reason,
    time, exposed communication, and what serial would have taken.

        with weft.record():
            model(batch)
        print(weft.summary())

    Args:
        recording: what `weft.record()` gave. None is the recording that is active or has ended
            last. If there was none, the summary counts all operator calls of this process, which
            costs nothing to keep; it then knows neither layers nor what was hidden.

    Returns:
        A `Summary`: `print` it, or use its `rows`, `json()` and `page(path)`.
    """
    found = next((r for r in (recording, record.active, record.last) if r is not None), None)
    if found is not None:
        return _of_recording(found)
    rows = [
        Row(OUTSIDE, t.name, t.schedule, t.asked, t.why, t.calls, t.seconds, None, None)
        for t in tallies()
    ]
    return Summary(tuple(rows), False)


def _of_recording(recording: Recording) -> Summary:
    recording.settle()
    rows: dict[tuple[object, ...], Row] = {}
    for called, timeline in zip(recording.calls, recording.timelines, strict=True):
        made = _row(called, timeline)
        key = (made.layer, made.operation, made.schedule, made.asked)
        known = rows.get(key)
        rows[key] = made if known is None else _added(known, made)
    return Summary(tuple(rows.values()), True, tuple(recording.timelines))


def _row(called: Called, timeline: Timeline) -> Row:
    rank, name = called.rank, called.name + (" (backward)" if called.backward else "")
    own = timeline.of(rank)
    compute = own.compute_seconds(rank)
    exposed: float | None = max(0.0, own.seconds - compute)
    serial: float | None = None
    seconds = called.seconds
    if seconds is None:  # a collective
        seconds = own.seconds
        exposed = serial = seconds if called.waited else None
    else:
        moved = _moving_seconds(called)
        if moved is not None:
            serial = seconds + timeline.overlap_seconds(rank) + moved
    return Row(
        called.layer or OUTSIDE,
        name,
        called.schedule,
        called.asked,
        called.why,
        1,
        seconds,
        exposed,
        serial,
    )


def _moving_seconds(called: Called) -> float | None:
    """How long a copy engine would need for what products read or stored in the memory of peers;
    None if links are paced, where the products themselves took longer for it."""
    if not called.stored:
        return 0.0
    if called.link.paced:
        return None
    machine = this_host.with_link(this_host.description(torch.get_num_threads()), called.link)
    return called.stored / machine.links.bandwidth


def _added(one: Row, other: Row) -> Row:
    def total(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) else None

    return Row(
        one.layer,
        one.operation,
        one.schedule,
        one.asked,
        other.why,
        one.calls + other.calls,
        one.seconds + other.seconds,
        total([one.exposed, other.exposed]),
        total([one.serial, other.serial]),
    )
