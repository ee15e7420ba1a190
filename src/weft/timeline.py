"""Timelines: spans of (rank, lane, task, start, end).

Real runs and simulations return the same type, so every metric, table, page and trace works on
both. Times are in seconds, and only their differences are meaningful.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from weft import html

COMPUTE = "compute"
"""The lane of a rank's compute worker. Every other lane is a copy engine."""

COMMUNICATION = "copy"
"""The kind of spans that move bytes between ranks."""

_COLOURS = {"matmul": "#0072b2", COMMUNICATION: "#e69f00", "reduce": "#882255"}
_OTHER = "#8a9099"
_MOST_LANES, _MOST_SPANS = 24, 4000
"""What a notebook draws of a timeline."""


@dataclass(frozen=True, slots=True)
class Span:
    """One task on one lane of one rank, from start to end."""

    rank: int
    lane: str
    task: str
    kind: str
    start: float
    end: float
    num_bytes: int = 0
    num_flops: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """All spans of one call on all ranks."""

    spans: tuple[Span, ...]
    title: str = ""

    @classmethod
    def merge(cls, parts: Iterable[Timeline]) -> Timeline:
        """One timeline of all ranks, from the part that each rank recorded."""
        parts = list(parts)
        spans = sorted(
            (span for part in parts for span in part.spans), key=lambda s: (s.rank, s.lane, s.start)
        )
        return cls(tuple(spans), parts[0].title if parts else "")

    def __repr__(self) -> str:
        count, ranks = len(self.spans), len(self.ranks)
        return (
            f"<Timeline {self.title or 'without a title'}: {self.seconds * 1e3:.3f} ms, "
            f"{count} span{'s'[: count != 1]} of {ranks} rank{'s'[: ranks != 1]}>"
        )

    def _repr_html_(self) -> str:
        """Drawn by notebooks: one bar per task, the first lanes if there are many."""
        lanes = self.lanes()[:_MOST_LANES]
        bars: dict[tuple[int, str], list[html.Bar]] = {lane: [] for lane in lanes}
        for s in self.spans[:_MOST_SPANS]:
            if (s.rank, s.lane) in bars and s.kind != "wait":
                said = f"{s.task}: {s.seconds * 1e3:.3f} ms"
                colour = _COLOURS.get(s.kind, _OTHER)
                bars[s.rank, s.lane].append(
                    (s.start - self.start, s.end - self.start, colour, said)
                )
        shown = [(f"rank {rank}, {lane}", bars[rank, lane]) for rank, lane in lanes]
        return html.drawing(shown, self.seconds, self.title)

    @property
    def ranks(self) -> list[int]:
        return sorted({span.rank for span in self.spans})

    @property
    def start(self) -> float:
        return min((span.start for span in self.spans), default=0.0)

    @property
    def end(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @property
    def seconds(self) -> float:
        """The time from the first start to the last end, over all ranks."""
        return self.end - self.start

    def of(self, rank: int) -> Timeline:
        return replace(self, spans=tuple(s for s in self.spans if s.rank == rank))

    def lanes(self) -> list[tuple[int, str]]:
        """All (rank, lane) pairs. The compute lane of a rank comes first."""
        return sorted(
            {(s.rank, s.lane) for s in self.spans}, key=lambda x: (x[0], x[1] != COMPUTE, x[1])
        )

    def shifted(self) -> Timeline:
        """The same timeline with the first start at zero."""
        zero = self.start
        moved = (replace(s, start=s.start - zero, end=s.end - zero) for s in self.spans)
        return replace(self, spans=tuple(moved))

    def compute_seconds(self, rank: int) -> float:
        """How long the rank's compute lane was busy."""
        return covered(self._intervals(rank, compute=True))

    def communication_seconds(self, rank: int) -> float:
        """How long at least one of the rank's copies was running."""
        return covered(self._intervals(rank, compute=False))

    def overlap_seconds(self, rank: int) -> float:
        """How long the rank computed and communicated at the same time."""
        both = covered([*self._intervals(rank, True), *self._intervals(rank, False)])
        return self.compute_seconds(rank) + self.communication_seconds(rank) - both

    def exposed_communication(self, rank: int) -> float:
        """How long the rank communicated while its compute lane was idle."""
        return self.communication_seconds(rank) - self.overlap_seconds(rank)

    def matmul_seconds(self, rank: int) -> float:
        """The total time of the rank's matmul spans. Divided by the time of the same GEMM alone, it
        gives the slowdown."""
        return sum(s.seconds for s in self.spans if s.rank == rank and s.kind == "matmul")

    def _intervals(self, rank: int, compute: bool) -> list[tuple[float, float]]:
        return [
            (s.start, s.end)
            for s in self.spans
            if s.rank == rank
            and (s.lane == COMPUTE if compute else s.kind == COMMUNICATION and s.lane != COMPUTE)
        ]


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def percent_of_ideal(
    serial: float, overlapped: float, compute: float, communication: float
) -> float:
    """(S - 1) / (S_ideal - 1) in percent, with S = serial / overlapped and
    S_ideal = serial / max(compute, communication). 0 is no gain over serial, 100 is complete
    overlap.
    """
    ideal = max(compute, communication)
    if overlapped <= 0.0 or ideal <= 0.0 or serial <= ideal:
        return 100.0 if overlapped <= serial else 0.0
    return 100.0 * (serial / overlapped - 1.0) / (serial / ideal - 1.0)
