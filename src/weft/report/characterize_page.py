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
    "beside cores": "#882255",
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
    """One row per shape, under `HEADERS`. Losses are percent of the time of the GEMM alone."""
    return [
        [
            character.shape.m,
            character.shape.n,
            character.shape.k,
            round(character.op_to_byte),
            digits(character.num_bytes / 1e6),
            digits(1e3 * character.seconds),
            *(f"{100 * character.decomposition[cut]:z.0f} %" for cut in CUTS),
            *(f"{100 * character.contention[engine]:z.0f} %" for engine in DRIVERS),
        ]
        for character in found.characters
    ]


def summary_of(found: Characterization) -> str:
    """The medians over all shapes, in two sentences."""

    def medians(losses: Losses) -> str:
        return ", ".join(
            f"{name} {100 * statistics.median(map(loss, found.characters)):z.0f} %"
            for name, loss in losses.items()
        )

    how = "measured" if found.measured else "simulated"
    return (
        f"On {found.title} ({how}), a GEMM takes longer if it is cut into parts (medians over the "
        f"shapes): {medians(DECOMPOSITION)}. During communication: {medians(CONTENTION)}."
    )


def write_characterize_page(path: str | os.PathLike[str], found: Characterization) -> Path:
    """Writes the page atomically."""
    page = Page(f"The cost of cutting and of contention on {found.machine}", summary_of(found))
    sections = (
        (
            "Decomposition loss",
            "The time of all parts of a GEMM, one after the other, relative to the whole GEMM.",
            DECOMPOSITION,
        ),
        (
            "Contention loss",
            "The time of a GEMM during copies, relative to the GEMM alone.",
            CONTENTION,
        ),
    )
    for title, text, losses in sections:
        page.section(title, text)
        page.legend({name: COLOURS[name] for name in losses})
        for label, measure in AGAINST.items():
            page.figure(_scatter(found, losses, label, measure), height=330)
    page.section("All numbers", "Losses in percent of the GEMM's own time, by cut and by driver.")
    page.table(HEADERS, rows_of(found))
    return page.write(path)


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
    ticks = _WIDE_TICKS if most > 3.0 else _FINE_TICKS
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "markers",
                "x": [measure(c) for c in ordered],
                "y": [round(1.0 + loss(c), 5) for c in ordered],
                "marker": {"color": COLOURS[name], "size": 9, "symbol": _SYMBOLS[number % 4]},
                "customdata": hover,
                "hovertemplate": f"<b>{name}: %{{y:.3~g}}x</b><br>%{{customdata}}<extra></extra>",
            }
            for number, (name, loss) in enumerate(losses.items())
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
