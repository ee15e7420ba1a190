"""Timelines as a Chrome trace for ui.perfetto.dev: one process per rank, one thread per lane."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.files import write_atomically
from weft.report.palette import lanes_of
from weft.timeline import Span, Timeline

Event = dict[str, object]


def write_trace(path: str | os.PathLike[str], timelines: Sequence[Timeline]) -> Path:
    """Writes all timelines to one trace. Each starts at zero and has its own processes."""
    return write_atomically(path, _document(timelines))


def trace_events(timelines: Sequence[Timeline]) -> Iterator[Event]:
    """The events of the trace: names and order of processes and threads, then all spans."""
    process = 0
    for timeline in timelines:
        origin = timeline.start
        lanes = lanes_of(timeline)
        for rank in timeline.ranks:
            process += 1
            name = f"{timeline.title} · rank {rank}" if timeline.title else f"rank {rank}"
            yield _metadata("process_name", process, 0, name=name)
            yield _metadata("process_sort_index", process, 0, sort_index=process)
            thread = 0
            for lane in (lane for lane_rank, lane in lanes if lane_rank == rank):
                spans = [s for s in timeline.spans if s.rank == rank and s.lane == lane]
                for number, track in enumerate(_tracks(spans, origin)):
                    thread += 1
                    label = lane if number == 0 else f"{lane} ({number + 1})"
                    yield _metadata("thread_name", process, thread, name=label)
                    yield _metadata("thread_sort_index", process, thread, sort_index=thread)
                    for span in track:
                        yield _complete(span, origin, process, thread)


def _document(timelines: Sequence[Timeline]) -> Iterator[str]:
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    for number, event in enumerate(trace_events(timelines)):
        yield ",\n" if number else ""
        yield json.dumps(event, ensure_ascii=False)
    yield "\n]}\n"


def _tracks(spans: Sequence[Span], origin: float) -> list[list[Span]]:
    """Splits a lane into tracks without overlapping spans, because viewers drop slices that
    overlap partially."""
    tracks: list[list[Span]] = []
    ends: list[int] = []
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        start, end = _nanoseconds(span.start - origin), _nanoseconds(span.end - origin)
        free = next((i for i, reached in enumerate(ends) if reached <= start), len(ends))
        if free == len(ends):
            tracks.append([])
            ends.append(0)
        tracks[free].append(span)
        ends[free] = end
    return tracks


def _complete(span: Span, origin: float, process: int, thread: int) -> Event:
    # Start and end are rounded, not the length, so that neighbours touch but never overlap.
    start, end = _nanoseconds(span.start - origin), _nanoseconds(span.end - origin)
    arguments: Event = {"kind": span.kind}
    if span.num_bytes:
        arguments["bytes"] = span.num_bytes
        if span.seconds > 0.0:
            arguments["GB/s"] = round(span.num_bytes / span.seconds / 1e9, 3)
    if span.num_flops:
        arguments["flops"] = span.num_flops
        if span.seconds > 0.0:
            arguments["GFLOP/s"] = round(span.num_flops / span.seconds / 1e9, 3)
    return {
        "name": span.task,
        "cat": span.kind,
        "ph": "X",
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "pid": process,
        "tid": thread,
        "args": arguments,
    }


def _metadata(what: str, process: int, thread: int, **arguments: object) -> Event:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
