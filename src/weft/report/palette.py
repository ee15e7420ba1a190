"""How each kind of task looks, alike in terminal and page, and in which order lanes come.

Colours are those of Okabe and Ito with three more that keep apart for colour-blind eyes, in mid
lightness so that they hold on light and on dark ground. Without colour the fill character tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from weft.timeline import COMMUNICATION, COMPUTE, Span, Timeline

COMPUTE_WIDTH, ENGINE_WIDTH = 0.78, 0.5
"""How much of its row a bar takes on the page: compute is what one looks at first."""

WAIT = "wait"
"""The kind of spans in which a lane only waits: drawn as nothing, or nearly so."""


@dataclass(frozen=True, slots=True)
class Fill:
    """The look of one kind of task: colour, fill character without colour, and without Unicode."""

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
"""The order in which a chart without kinds takes colours."""


def peer_of(span: Span) -> int | None:
    """The peer at the other end of a copy, which gives an engine's lane its name."""
    numbers = _NUMBER.findall(span.lane)
    return int(numbers[-1]) if numbers and span.lane != COMPUTE else None


def fill_of(span: Span) -> Fill:
    """The look of a span: by kind, and for copies by peer."""
    if span.kind != COMMUNICATION:
        return KINDS.get(span.kind) or Fill(span.kind, *_OTHER)
    peer = peer_of(span)
    return COPY if peer is None else peer_fill(peer)


def peer_fill(peer: int) -> Fill:
    """The look of copies that come from, or go to, a peer."""
    colour = PEER_COLOURS[peer % len(PEER_COLOURS)]
    digit = _DIGITS[peer % len(_DIGITS)]
    return Fill(f"copy · peer {peer}", colour, digit, digit, COPY.order + 1 + peer)


def fills_of(timelines: Iterable[Timeline]) -> list[Fill]:
    """Every look the timelines need, in the order of a legend."""
    fills = {fill_of(span) for timeline in timelines for span in timeline.spans}
    return sorted(fills, key=lambda fill: (fill.order, fill.name))


def lanes_of(timeline: Timeline) -> list[tuple[int, str]]:
    """Every (rank, lane): compute first, then engines by number rather than by letter."""
    return sorted(timeline.lanes(), key=lambda lane: lane_key(*lane))


def lane_key(rank: int, lane: str) -> tuple[int, bool, int, str]:
    """What lanes are sorted by: rank, compute before engines, the engine's number, its name."""
    numbers = _NUMBER.findall(lane)
    return (rank, lane != COMPUTE, int(numbers[-1]) if numbers else -1, lane)


def lighter(colour: str, share: float) -> str:
    """The colour mixed with a share of white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
