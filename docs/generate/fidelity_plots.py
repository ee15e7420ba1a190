"""The plots of docs/fidelity.md, and the selection of rows for each."""

from __future__ import annotations

from collections.abc import Iterator

from generate.svg import Axis, Series, bars, chart
from weft.report.units import duration, scaled
from weft.simulate.cost.fidelity import Fidelity, FidelityRow
from weft.study.ficco import FiccoEvaluation

MEASURED, MODEL, OTHER, FOURTH = "#d55e00", "#0072b2", "#009e73", "#8a9bab"


def _short(text: str) -> str:
    """`10 ms` instead of `10.0 ms`, for the ticks of an axis."""
    return text.replace(".00 ", " ").replace(".0 ", " ")


def _time(seconds: float) -> str:
    return _short(duration(seconds))


BYTES = Axis("bytes", True, lambda value: _short(scaled(value, "B")))


def rows_of(found: Fidelity, what: str) -> list[FidelityRow]:
    """The rows of one comparison."""
    return [row for row in found.rows if row.what == what]


def gemms(found: Fidelity) -> dict[str, list[tuple[int, FidelityRow]]]:
    """The rows of every source, with their m."""
    by_what: dict[str, list[tuple[int, FidelityRow]]] = {}
    for row in found.rows:
        if row.what.startswith("GEMM "):
            by_what.setdefault(row.what, []).append((int(row.size.split(" x ")[-3]), row))
    return by_what


def copies(found: Fidelity) -> list[FidelityRow]:
    """The rows of single copies on engines."""
    return [row for row in found.rows if row.what.startswith(("DMA copy", "DMA put"))]


def variants(found: Fidelity) -> dict[tuple[str, str, int], list[tuple[str, FidelityRow]]]:
    """The rows by collective, size, and whether fitted or held out, with their variants."""
    by_size: dict[tuple[str, str, int], list[tuple[str, FidelityRow]]] = {}
    for row in found.rows:
        if row.what.startswith("DMA variants"):
            kind, size, variant = row.size.split(" ", 2)
            source = "held out" if "held out" in row.what else "fitted"
            by_size.setdefault((source, kind, int(size)), []).append((variant, row))
    return by_size


def units_taken(found: Fidelity) -> list[FidelityRow]:
    """The rows of GEMMs with fewer compute units."""
    return [row for row in found.rows if "units taken" in row.what]


def gemm_plots(found: Fidelity) -> Iterator[tuple[str, str]]:
    """The plot of each machine, with its name."""
    axes = Axis("measured", True, _time), Axis("model", True, _time)
    colours = (MODEL, MEASURED, OTHER)
    for machine in ("h100", "mi300x", "b200"):
        some = {w: rows for w, rows in gemms(found).items() if w.split()[1] == machine}
        series = [
            Series(
                what.removeprefix(f"GEMM {machine} "),
                colour,
                [(row.reference, row.model) for _, row in rows],
            )
            for (what, rows), colour in zip(some.items(), colours, strict=False)
        ]
        yield machine, chart(series, *axes, title=f"GEMMs on {machine}", diagonal=True)


def over_size(found: Fidelity, named: dict[str, str], title: str) -> str:
    """Times over bytes of the named comparisons, from 1 MiB up."""
    series = []
    for (name, what), colour in zip(named.items(), (MODEL, OTHER, MEASURED), strict=False):
        rows = [row for row in rows_of(found, what) if float(row.size) >= 1 << 20]
        series.append(Series("", colour, [(float(r.size), r.model) for r in rows], line=True))
        series.append(Series(name, colour, [(float(r.size), r.reference) for r in rows]))
    return chart(series, BYTES, Axis("points: measured, line: model", True, _time), title=title)


def copy_plots(found: Fidelity) -> Iterator[tuple[str, str]]:
    """The plot of each kind of copy, with its name."""
    for name, head, axis in (
        ("copy", "DMA copy", Axis("share not copying", text=lambda v: f"{100 * v:.0f} %")),
        ("put", "DMA put", Axis("rate", text=lambda v: _short(scaled(v, "B/s")))),
    ):
        rows = [row for row in copies(found) if row.what.startswith(head)]
        series = [
            Series("model", MODEL, [(float(r.size), r.model) for r in rows], line=True),
            Series("measured", MEASURED, [(float(r.size), r.reference) for r in rows]),
        ]
        yield name, chart(series, BYTES, axis, title=head)


def variants_plot(found: Fidelity) -> str:
    """Speedups over pcpy, model against measurement."""
    named = (("fitted", "fitted", MODEL), ("held out", "held out", MEASURED))
    series = [
        Series(
            name,
            colour,
            [
                (row.reference, row.model)
                for (kind, _, _), some in variants(found).items()
                if kind == source
                for _, row in some
            ],
        )
        for name, source, colour in named
    ]
    times = Axis("measured speedup over pcpy", True, lambda v: f"{v:g}x")
    model = Axis("model", True, lambda v: f"{v:g}x")
    return chart(series, times, model, title="DMA collective variants", diagonal=True)


def units_plot(found: Fidelity) -> str:
    """The measured and simulated slowdown with fewer compute units."""
    rows = units_taken(found)
    labels = [f"{row.what.split('-')[0]}-bound, {row.size} taken" for row in rows]
    groups = [
        ("measured", MEASURED, [1.0 + row.reference for row in rows]),
        ("model", MODEL, [1.0 + row.model for row in rows]),
    ]
    axis = Axis("times as long", text=lambda v: f"{v:g}x")
    return bars(labels, groups, axis, title="GEMMs with fewer compute units", line=1.0)


def ficco_plot(ficco: FiccoEvaluation) -> str:
    """The speedups of the scenarios, with shard-p2p on both machines, and the ideal."""
    scenarios = ficco.mesh.scenarios
    groups = [
        ("best", MODEL, [s.best.speedup for s in scenarios]),
        ("shard-p2p", MEASURED, [s.outcome("shard-p2p@dma").speedup for s in scenarios]),
        (
            "shard-p2p, switch",
            OTHER,
            [s.outcome("shard-p2p@dma").speedup for s in ficco.switch.scenarios],
        ),
    ]
    return bars(
        [s.shape.label for s in scenarios],
        groups,
        Axis("speedup over serial", text=lambda v: f"{v:g}x"),
        title="FiCCO's scenarios",
        marks=("ideal", FOURTH, [s.serial / s.ideal for s in scenarios]),
        line=1.0,
    )
