"""The page of `weft characterize`: both losses over op-to-byte ratio and memory traffic."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

from weft.report import cells
from weft.report.figures import Spec
from weft.report.page import Page
from weft.report.units import digits, duration, scaled
from weft.study.characterization import CUTS, DRIVERS, Character, Characterization

HEADERS = (
    *("M", "N", "K", "op/byte", "MB", "ms"),
    *(f"{axis.upper()}/{pieces}" for axis, pieces in CUTS),
    *DRIVERS,
)
COLOURS = {
    "M cut 8 ways": "#56b4e9",
    "M cut 64 ways": "#0072b2",
    "K cut 8 ways": "#e69f00",
    "K cut 64 ways": "#d55e00",
    "beside dma": "#009e73",
    "beside cores": "#cc79a7",
}
_WIDE_TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)
_FINE_TICKS = (0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 3)
_SYMBOLS = ("circle", "circle-open", "diamond", "diamond-open")

Losses = Mapping[str, Callable[[Character], float]]

DECOMPOSITION: Losses = {
    f"{axis.upper()} cut {pieces} ways": lambda c, cut=(axis, pieces): c.decomposition[cut]  # type: ignore[misc]
    for axis, pieces in CUTS
}
CONTENTION: Losses = {
    f"beside {engine}": lambda c, engine=engine: c.contention[engine]  # type: ignore[misc]
    for engine in DRIVERS
}
AGAINST: Mapping[str, Callable[[Character], float]] = {
    "operations per byte": lambda c: c.op_to_byte,
    "memory traffic, MB": lambda c: c.num_bytes / 1e6,
}


def rows_of(found: Characterization) -> list[list[cells.Cell]]:
    """One row per shape, under `HEADERS`. Losses are multiples of the time of the GEMM alone."""
    return [
        [
            character.shape.m,
            character.shape.n,
            character.shape.k,
            round(character.op_to_byte),
            digits(character.num_bytes / 1e6),
            digits(1e3 * character.seconds),
            *(_times(character.decomposition[cut]) for cut in CUTS),
            *(_times(character.contention[engine]) for engine in DRIVERS),
        ]
        for character in found.characters
    ]


def summary_of(found: Characterization) -> str:
    """The medians over all shapes, in two sentences."""

    def medians(losses: Losses) -> str:
        return ", ".join(
            f"{name} {_times(statistics.median(map(loss, found.characters)))}"
            for name, loss in losses.items()
        )

    how = "measured" if found.measured else "simulated"
    return (
        f"On {found.title} ({how}), a GEMM cut into parts takes so many times as long (medians "
        f"over the shapes): {medians(DECOMPOSITION)}. During communication: {medians(CONTENTION)}."
    )


def _times(loss: float) -> str:
    """A loss as a multiple of the time of the whole GEMM alone: `1.21x`, `22x`."""
    return f"{1 + loss:.2f}x" if loss < 9 else f"{1 + loss:.0f}x"


def verdict_of(found: Characterization) -> str:
    """Whether a GEMM is safe to cut, in one sentence: from which work on it is, by measurement or
    simulation of the shapes."""
    axis, pieces = CUTS[0]
    name = f"{axis.upper()} into {pieces} parts"
    ordered = sorted(found.characters, key=lambda c: c.seconds)
    unsafe = [c.seconds for c in ordered if c.decomposition[CUTS[0]] > SAFE]
    safe = [c for c in ordered if not unsafe or c.seconds > max(unsafe)]
    if not safe:
        return (
            f"Is my GEMM safe to cut? On {found.title}, none of these shapes surely is: cutting "
            f"{name} makes even some of the longest more than {100 * SAFE:.0f} % longer."
        )
    return (
        f"Is my GEMM safe to cut? On {found.title}, if it takes {duration(safe[0].seconds)} or "
        f"more: from there on, cutting {name} makes it at most {100 * SAFE:.0f} % longer."
    )


SAFE = 0.25
"""The cost of splitting up to which a GEMM counts as safe to cut."""


def write_characterize_page(path: str | os.PathLike[str], found: Characterization) -> Path:
    """Writes the page atomically."""
    page = Page(
        f"Cost of splitting and of sharing the GPU on {found.machine}",
        f"{verdict_of(found)} {summary_of(found)}",
    )
    sections = (
        (
            "Cost of splitting",
            "The time of all parts of a GEMM, one after the other, relative to the whole GEMM.",
            DECOMPOSITION,
        ),
        (
            "Cost of sharing the GPU with communication",
            "The time of a GEMM during copies, relative to the GEMM alone.",
            CONTENTION,
        ),
    )
    for title, text, losses in sections:
        page.section(title, text)
        page.legend({name: COLOURS[name] for name in losses}, symbols=_symbols(losses))
        for label, measure in AGAINST.items():
            page.figure(_scatter(found, losses, label, measure), height=330)
    page.section(
        "All numbers", "How many times as long as the whole GEMM alone, by cut and by driver."
    )
    page.table(HEADERS, rows_of(found))
    return page.write(path)


def _symbols(losses: Losses) -> dict[str, str]:
    """The marker of each loss; those of 64 parts, and of copies by cores, are open."""
    return {name: _SYMBOLS[number % 4] for number, name in enumerate(losses)}


def _scatter(
    found: Characterization, losses: Losses, label: str, measure: Callable[[Character], float]
) -> Spec:
    ordered = sorted(found.characters, key=measure)
    hover = [
        f"{c.shape.m} x {c.shape.n} x {c.shape.k} {c.shape.dtype}<br>{duration(c.seconds)} alone, "
        f"{c.op_to_byte:.0f} operations per byte, {scaled(c.num_bytes, 'B')}"
        for c in ordered
    ]
    most = max((loss(c) for c in ordered for loss in losses.values()), default=0.0)
    symbols = _symbols(losses)
    ticks = _WIDE_TICKS if most > 3.0 else _FINE_TICKS
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "markers",
                "x": [measure(c) for c in ordered],
                "y": [round(1.0 + loss(c), 5) for c in ordered],
                "marker": {"color": COLOURS[name], "size": 9, "symbol": symbols[name]},
                "customdata": hover,
                "hovertemplate": f"<b>{name}: %{{y:.3~g}}x</b><br>%{{customdata}}<extra></extra>",
            }
            for name, loss in losses.items()
        ],
        "layout": {
            "showlegend": False,
            "dragmode": False,
            "hovermode": "closest",
            "margin": {"l": 8, "r": 14, "t": 14, "b": 44},
            "xaxis": {"type": "log", "title": {"text": label}, "fixedrange": True, "dtick": 1},
            "yaxis": {
                "type": "log",
                "title": {"text": "times as long"},
                "tickvals": ticks,
                "ticktext": [f"{tick:g}x" for tick in ticks],
                "fixedrange": True,
            },
        },
    }
