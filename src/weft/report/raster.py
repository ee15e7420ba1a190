"""Converts the spans of a lane to the cells of a terminal row. A cell has eight parts.

A cell with at most one change shows it exactly. A cell with several short spans shows the kind that
covers most of it, so that busy lanes do not flicker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.report.palette import WAIT, Fill, fill_of
from weft.timeline import Span, covered

EIGHTHS = 8
Key = tuple[Fill, int]
"""A look and its shade. Neighbours of one kind alternate in shade, so that they can be counted."""


@dataclass(frozen=True, slots=True)
class Cell:
    """`eighths` parts of the left look, then the right look. None means empty."""

    left: Key | None
    eighths: int = EIGHTHS
    right: Key | None = None


def rasterize(spans: Iterable[Span], origin: float, seconds: float, num_cells: int) -> list[Cell]:
    """The cells of a lane on an axis of `seconds` from `origin` on."""
    per_eighth = seconds / (num_cells * EIGHTHS) if seconds > 0.0 else 1.0
    parts: list[dict[Key, float]] = [{} for _ in range(num_cells * EIGHTHS)]
    shades: dict[Fill, int] = {}
    for span in sorted(spans, key=lambda s: s.start):
        if span.kind == WAIT:
            continue
        fill = fill_of(span)
        shade = 0
        if span.seconds > 2 * EIGHTHS * per_eighth:
            shade = shades[fill] = 1 - shades.get(fill, 1)
        begin = (span.start - origin) / per_eighth
        end = (span.end - origin) / per_eighth
        for index in range(max(int(begin), 0), min(int(end) + 1, len(parts))):
            share = min(end, index + 1) - max(begin, index)
            if share > 0.0:
                part = parts[index]
                part[fill, shade] = part.get((fill, shade), 0.0) + share
    return [_cell(parts[i : i + EIGHTHS]) for i in range(0, len(parts), EIGHTHS)]


def busy_shares(
    lanes: Sequence[Sequence[Span]], origin: float, seconds: float, num_cells: int
) -> list[tuple[float, Fill | None]]:
    """For several lanes in one row: per cell, the busy share of all lanes (0 to 1), and the look
    with the largest part of it, if there is one."""
    per_cell = seconds / num_cells if seconds > 0.0 else 1.0
    shares = [0.0] * num_cells
    looks: list[dict[Fill, float]] = [{} for _ in range(num_cells)]
    for lane in lanes:
        per_lane: list[list[tuple[float, float]]] = [[] for _ in range(num_cells)]
        for span in lane:
            begin, end = (span.start - origin) / per_cell, (span.end - origin) / per_cell
            if span.kind == WAIT:
                continue
            for index in range(max(int(begin), 0), min(int(end) + 1, num_cells)):
                piece = (max(begin, index), min(end, index + 1))
                if piece[1] > piece[0]:
                    per_lane[index].append(piece)
                    look, fill = looks[index], fill_of(span)
                    look[fill] = look.get(fill, 0.0) + piece[1] - piece[0]
        for index, pieces in enumerate(per_lane):
            shares[index] += covered(pieces) / len(lanes)
    return [(share, _dominant(look)) for share, look in zip(shares, looks, strict=True)]


def _dominant(look: dict[Fill, float]) -> Fill | None:
    best = max(look, key=lambda fill: look[fill], default=None)
    return best if best is not None and look[best] > 0.5 * sum(look.values()) else None


def majority(parts: Sequence[dict[Key, float]]) -> Key | None:
    """The key that covers most of the parts; None if they are mostly empty."""
    sums: dict[Key, float] = {}
    for part in parts:
        for key, share in part.items():
            sums[key] = sums.get(key, 0.0) + share
    if not sums:
        return None
    best = max(sums, key=lambda key: sums[key])
    idle = len(parts) - sum(sums.values())
    return best if sums[best] >= idle - 1e-9 else None


def _cell(parts: Sequence[dict[Key, float]]) -> Cell:
    runs = _runs([majority([part]) for part in parts])
    if len(runs) > 2:
        # Shades only help to count spans, so they are dropped before other details.
        parts = [_plain(part) for part in parts]
        runs = _runs([majority([part]) for part in parts])
    if len(runs) == 1:
        return Cell(runs[0][0])
    if len(runs) == 2:
        return Cell(runs[0][0], runs[0][1], runs[1][0])
    if len(runs) == 3 and runs[0][0] is None and runs[2][0] is None:
        return Cell(runs[1][0], runs[1][1])  # a single short span keeps its true size
    return Cell(majority(parts))


def _runs(keys: Sequence[Key | None]) -> list[tuple[Key | None, int]]:
    runs: list[tuple[Key | None, int]] = []
    for key in keys:
        if runs and runs[-1][0] == key:
            runs[-1] = (key, runs[-1][1] + 1)
        else:
            runs.append((key, 1))
    return runs


def _plain(part: dict[Key, float]) -> dict[Key, float]:
    sums: dict[Key, float] = {}
    for (fill, _), share in part.items():
        sums[fill, 0] = sums.get((fill, 0), 0.0) + share
    return sums
