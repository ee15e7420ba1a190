"""Reads the logs of ranks: one line of JSON for each thing that happened, in the order of time.

The kinds of lines (native/loom/log.cpp writes them): `o` an operation with the bytes it touched,
`r` and `w` an event recorded and waited for, `p` and `f` a word posted and waited for, `h` what the
host of a rank learnt, `n` a finding of the runtime itself, `t` a touch of device memory by the
host, `x` why a device failed, and `q` what was then still queued.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.timeline import COMMUNICATION, COMPUTE, Span, Timeline

_ORDER = {"r": 0, "p": 0, "h": 1, "o": 2, "w": 3, "f": 3}


@dataclass(slots=True)
class Line:
    """One line of a log. rest: what its kind has beyond time, stream, host, name, label, origin."""

    rank: int
    kind: str
    time: int
    stream: int
    host: int
    name: str
    label: str
    origin: str
    rest: list[Any]


@dataclass(slots=True)
class Rect:
    """Bytes: `rows` runs of `width`, `pitch` apart, in a rank's heap (or host memory, below 0)."""

    space: int
    offset: int
    width: int
    rows: int
    pitch: int

    @property
    def end(self) -> int:
        return self.offset + (self.rows - 1) * self.pitch + self.width


def read(logs: Sequence[bytes]) -> list[Line]:
    """The lines of all ranks in the order in which they happened. A line that was not finished,
    because its process was killed, is left out."""
    lines: list[Line] = []
    for rank, log in enumerate(logs):
        strings: dict[int, str] = {}
        for text in log.split(b"\n"):
            if not text:
                continue
            try:
                values = json.loads(text)
            except ValueError:
                continue
            kind = values[0]
            if kind == "s":
                strings[values[1]] = values[2]
            elif kind in "orwpfq":
                name, label, origin = (strings.get(n, "") for n in values[4:7])
                time, stream, host = values[1:4]
                line = Line(rank, kind, time, stream, host, name, label, origin, values[7:])
                lines.append(line)
            else:
                lines.append(Line(rank, kind, values[1], -1, 0, "", "", "", values[2:]))
    lines.sort(key=lambda line: (line.time, _ORDER.get(line.kind, 4)))
    return lines


def timeline_of(logs: Sequence[bytes], title: str = "loom") -> Timeline:
    """What ran when: kernels on their streams, copies between ranks on the engines of their peers.
    The stream with the most kernels of a rank is its compute lane."""
    spans = []
    kernels: dict[tuple[int, int], int] = {}
    for line in read(logs):
        if line.kind == "o" and line.rest[3] == 0:
            kernels[line.rank, line.stream] = kernels.get((line.rank, line.stream), 0) + 1
    compute = {
        rank: max((n, -s) for (r, s), n in kernels.items() if r == rank)[1] * -1
        for rank in {r for r, _ in kernels}
    }
    for line in read(logs):
        if line.kind != "o":
            continue
        end, engine, num_bytes = line.rest[:3]
        if engine >= 0:
            lane, what = f"engine of rank {engine}", COMMUNICATION
        else:
            own = compute.get(line.rank) == line.stream
            lane = COMPUTE if own else f"stream {line.stream}"
            what = "matmul" if line.name in ("mm", "addmm") else line.name
        task = line.label or line.name
        spans.append(Span(line.rank, lane, task, what, line.time * 1e-9, end * 1e-9, num_bytes))
    return Timeline(tuple(spans), title).shifted()
