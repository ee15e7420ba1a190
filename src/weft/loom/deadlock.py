"""What a run was found to do wrong, and the findings that the runtime's own lines tell of:
devices that stood still, captures that were not joined, device memory that the host touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.loom.read import Line

_WAIT, _POST, _HOLD, _HOST = 3, 4, 5, 6  # kinds of queued operations, as native/loom/core.h


@dataclass(frozen=True)
class QueuedOperation:
    """One side of a finding. line: of the program, `file:number`; label: the plan's task."""

    rank: int
    stream: int
    name: str
    label: str
    line: str
    access: str = ""

    def __str__(self) -> str:
        task = f" ({self.label})" if self.label else ""
        line = f" at {self.line}" if self.line else ""
        return f"the {self.access or 'operation'} by {self.name}{task} on stream {self.stream} " + (
            f"of rank {self.rank}{line}"
        )


@dataclass
class LoomFinding:
    """kind: race, reuse (freed while used), lost (a post), deadlock, aliasing (a deadlock that only
    sharing queues makes), stall, failure, unjoined (a capture), touch (by the host)."""

    kind: str
    operations: list[QueuedOperation]
    text: str
    place: str = ""
    times: int = 1

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "ranks": sorted({o.rank for o in self.operations}),
            "streams": sorted({(o.rank, o.stream) for o in self.operations}),
            "operations": [asdict(o) for o in self.operations],
            "lines": sorted({o.line for o in self.operations if o.line}),
            "text": self.text,
            "place": self.place,
            "times": self.times,
        }


def failures(lines: Sequence[Line]) -> list[LoomFinding]:
    """The findings of lines that are about no access."""
    found = []
    for line in lines:
        if line.kind == "n":
            kind, what, origin = line.rest
            operation = QueuedOperation(line.rank, -1, kind, "", origin)
            text = f"a capture ended with work that was not joined back: {what}"
            found.append(LoomFinding(kind, [operation], text))
        elif line.kind == "t":
            space, offset = line.rest
            operation = QueuedOperation(line.rank, -1, "host", "", "", "touch")
            text = f"the host of rank {line.rank} touched memory of the device"
            found.append(
                LoomFinding("touch", [operation], text, f"heap of rank {space}, byte {offset}")
            )
    return found + _stuck(lines)


@dataclass(frozen=True)
class _Queued:
    """An operation that was queued when its device failed."""

    line: Line
    queue: int
    kind: int
    signals: bool
    value: int
    word: tuple[int, int] | None

    @property
    def waits(self) -> bool:
        return self.kind == _HOLD or (self.signals and self.value == 0)

    @property
    def posts(self) -> bool:
        return self.kind == _POST or (self.signals and self.value == 1)

    @property
    def operation(self) -> QueuedOperation:
        line = self.line
        how = "wait" if self.waits else "post"
        return QueuedOperation(line.rank, line.stream, line.name, line.label, line.origin, how)


def _stuck(lines: Sequence[Line]) -> list[LoomFinding]:
    why = [line for line in lines if line.kind == "x"]
    if not why:
        return []
    queued = [_queued(line) for line in lines if line.kind == "q"]
    heads: dict[tuple[int, int], _Queued] = {}
    for item in queued:
        heads.setdefault((item.line.rank, item.queue), item)
    found = []
    for head in heads.values():
        if not head.waits:
            continue
        poster = next(
            (q for q in queued if q.posts and q.word == head.word and q is not head), None
        )
        if poster is None:
            text = f"{head.operation} waits for a word, and nobody is about to post it"
            found.append(LoomFinding("stall", [head.operation], text))
            continue
        blocker = heads[poster.line.rank, poster.queue]
        aliased = blocker.line.stream != poster.line.stream
        text = f"{head.operation} waits for {poster.operation}, which is queued behind " + (
            f"{blocker.operation}"
            + (": streams that share a hardware queue, so issue the post first" if aliased else "")
        )
        found.append(
            LoomFinding(
                "aliasing" if aliased else "deadlock", [head.operation, poster.operation], text
            )
        )
    if not found:
        line = why[0]
        operation = QueuedOperation(line.rank, -1, "device", "", "")
        found.append(LoomFinding("failure", [operation], line.rest[0]))
    return found


def _queued(line: Line) -> _Queued:
    queue, kind, signals, value, rects = line.rest
    word = (rects[0][0], rects[0][1]) if rects else None
    return _Queued(line, queue, kind, bool(signals), value, word)
