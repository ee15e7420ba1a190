"""The look of each kind of task, in the terminal and on pages, and the order of lanes.

Colours are those of Okabe and Ito and three more that colour-blind readers can distinguish. Their
lightness is medium, so that they are visible on light and dark backgrounds. Without colour, the
fill character distinguishes kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from weft.timeline import COMMUNICATION, COMPUTE, Span, Timeline

COMPUTE_WIDTH, ENGINE_WIDTH = 0.78, 0.5
"""The width of bars, as a share of their row. Compute is wider, because it matters most."""

WAIT = "wait"
"""The kind of spans in which a lane only waits. They are hardly drawn."""


@dataclass(frozen=True, slots=True)
class Fill:
    """The look of one kind of task: its colour, and its fill characters in Unicode and ASCII."""

    name: str
    colour: str
    glyph: str
    ascii: str
    order: int = 0


PEER_COLOURS = (
    "#009e73",
    "#e69f00",
    "#56b4e9",
    "#cc79a7",
    "#b8a800",
    "#7d5ba6",
    "#a65628",
    "#5f7d8c",
)

KINDS: dict[str, Fill] = {
    "matmul": Fill("matmul", "#0072b2", "█", "#", 0),
    "permute": Fill("permute", "#d55e00", "▒", "+", 1),
    "reduce": Fill("reduce", "#882255", "▓", "%", 2),
    "lookup": Fill("lookup", "#6a8f3c", "▚", "=", 3),
    WAIT: Fill(WAIT, "#8a9099", " ", " ", 2000),
}
COPY = Fill("copy", "#9aa3ad", "░", "-", 1000)
_OTHER = ("#8a9099", "▞", "?", 500)
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_NUMBER = re.compile(r"\d+")

COLOURS = (KINDS["matmul"].colour, *PEER_COLOURS[1::-1], *PEER_COLOURS[2:])
"""The order of colours in charts without kinds."""


def peer_of(span: Span) -> int | None:
    """The peer of a copy, which names the lane of its engine."""
    numbers = _NUMBER.findall(span.lane)
    return int(numbers[-1]) if numbers and span.lane != COMPUTE else None


def fill_of(span: Span) -> Fill:
    """The look of a span, by its kind and, for copies, by its peer."""
    if span.kind != COMMUNICATION:
        return KINDS.get(span.kind) or Fill(span.kind, *_OTHER)
    peer = peer_of(span)
    return COPY if peer is None else peer_fill(peer)


def peer_fill(peer: int) -> Fill:
    """The look of copies from or to a peer."""
    colour = PEER_COLOURS[peer % len(PEER_COLOURS)]
    digit = _DIGITS[peer % len(_DIGITS)]
    return Fill(f"copy · peer {peer}", colour, digit, digit, COPY.order + 1 + peer)


def fills_of(timelines: Iterable[Timeline]) -> list[Fill]:
    """All looks in the timelines, in the order of a legend."""
    fills = {fill_of(span) for timeline in timelines for span in timeline.spans}
    return sorted(fills, key=lambda fill: (fill.order, fill.name))


def lanes_of(timeline: Timeline) -> list[tuple[int, str]]:
    """All (rank, lane) pairs: compute first, then engines in numeric order."""
    return sorted(timeline.lanes(), key=lambda lane: lane_key(*lane))


def lane_key(rank: int, lane: str) -> tuple[int, bool, int, str]:
    """The sort key of lanes: rank, compute before engines, number of the engine, name."""
    numbers = _NUMBER.findall(lane)
    return (rank, lane != COMPUTE, int(numbers[-1]) if numbers else -1, lane)


def lighter(colour: str, share: float) -> str:
    """The colour, mixed with a share of white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
