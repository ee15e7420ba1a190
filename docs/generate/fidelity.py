"""Makes docs/fidelity.md and its plots from the results of `weft bench fidelity`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from generate import (
    c3_section,
    cluster_section,
    contention_section,
    host_section,
    in_kernel_section,
)
from generate.fidelity_plots import (
    copies,
    copy_plots,
    ficco_plot,
    gemm_plots,
    gemms,
    over_size,
    rows_of,
    units_plot,
    units_taken,
    variants,
    variants_plot,
)
from weft.benchmarks.fidelity import FidelityFindings
from weft.report.units import duration, scaled
from weft.simulate.cost.fidelity import Fidelity, FidelityFigure, FidelityRow
from weft.study.ficco import FiccoEvaluation, best_fixed

COMMAND = "weft bench fidelity --write docs"
TALL = ((1, 16), (16, 128), (128, 1024), (1024, 8192), (8192, 1 << 40))
"""Classes of m in the tables of GEMMs."""

NCCL = ("all_gather", "reduce_scatter", "all_to_all")

Cells = Sequence[str]


def documents(findings: FidelityFindings) -> dict[str, str]:
    """The text and its plots, by path."""
    found, ficco = findings.costs, findings.ficco
    plots: dict[str, str] = {}

    def plot(name: str, alternative: str, svg: str) -> str:
        plots[f"images/fidelity-{name}.svg"] = svg
        return f"![{alternative}](images/fidelity-{name}.svg)\n"

    text = Path(__file__).with_name("fidelity.md").read_text("utf-8")
    parts = {
        "command": COMMAND,
        "checks": _promises(findings.promises),
        "gemm_table": _gemm_table(found),
        "gemm_plots": "\n".join(
            plot(f"gemm-{name}", f"GEMMs of {name}, model against measurement", svg)
            for name, svg in gemm_plots(found)
        ),
        "rccl_table": _by_size(rows_of(found, "RCCL mi300x all_reduce")),
        "rccl_plot": plot(
            "rccl",
            "RCCL on 8 x MI300X",
            over_size(found, {"all_reduce": "RCCL mi300x all_reduce"}, "RCCL on 8 x MI300X"),
        ),
        "nccl_table": _summaries(s for s in found.summaries if s.what.startswith("NCCL")),
        "nccl_plot": plot(
            "nccl",
            "NCCL on 8 x H100",
            over_size(
                found,
                {kind: f"NCCL 8 x h100 {kind}" for kind in NCCL},
                "NCCL on 8 x H100",
            ),
        ),
        "copy_table": _copy_table(found),
        "copy_plots": "\n".join(
            plot(name, f"One DMA {name}, model and measurement", svg)
            for name, svg in copy_plots(found)
        ),
        "variants_table": _variants_table(found),
        "variants_plot": plot("variants", "Speedups of variants", variants_plot(found)),
        "units_table": _units_table(found),
        "units_plot": plot("units", "GEMMs with fewer units", units_plot(found)),
        "ficco_table": _ficco_table(ficco),
        "ficco_plot": plot("ficco", "Speedups of the 16 scenarios", ficco_plot(ficco)),
        **_ficco(ficco),
        "contention": contention_section.section(found, ficco),
        "c3": c3_section.section(),
        "in_kernel": in_kernel_section.section(),
        "host": host_section.section(),
        "clusters": cluster_section.section(),
    }
    for name, value in parts.items():
        assert f"<!-- {name} -->" in text, name
        text = text.replace(f"<!-- {name} -->", value.strip())
    return {"fidelity.md": text, **plots}


def _markdown(headers: Cells, rows: Iterable[Cells]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:z.1f} %"


def _size(num_bytes: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes:g} B"


def _promises(promises: Sequence[tuple[str, float, str, bool]]) -> str:
    rows = [
        [name, f"{value:.3g}", bounds, "yes" if kept else "**no**"]
        for name, value, bounds, kept in promises
    ]
    return _markdown(["comparison", "value", "promised", "kept"], rows)


def _summaries(some: Iterable[FidelityFigure]) -> str:
    """One row per comparison, with its worst and its mean error."""
    by_what: dict[str, dict[str, FidelityFigure]] = {}
    for summary in some:
        by_what.setdefault(summary.what, {})[summary.measure.split()[0]] = summary
    rows = [
        [what, _percent(of["worst"].value), _percent(of["mean"].value), _bar(of["worst"])]
        for what, of in by_what.items()
    ]
    return _markdown(["collective, 1 MiB up", "worst error", "mean error", "promised"], rows)


def _bar(summary: FidelityFigure) -> str:
    return "" if summary.most is None else f"{100 * summary.most:.0f} %"


def _gemm_table(found: Fidelity) -> str:
    rows = []
    for what, lines in gemms(found).items():
        means = []
        for least, below in TALL:
            errors = [abs(row.error) for m, row in lines if least <= m < below]
            mean = _percent(sum(errors) / len(errors)) if errors else "-"
            means.append(f"{mean} ({len(errors)})" if errors else "-")
        whole = [abs(row.error) for _, row in lines]
        rows.append([what.removeprefix("GEMM "), *means, _percent(sum(whole) / len(whole))])
    classes = [f"m < {below:,}" if below < 1 << 40 else "above" for _, below in TALL]
    return _markdown(["mean error (rows)", *classes, "all"], rows)


def _by_size(rows: Sequence[FidelityRow]) -> str:
    return _markdown(
        ["size", "measured", "model", "error"],
        [
            [_size(float(r.size)), duration(r.reference), duration(r.model), _percent(r.error)]
            for r in rows
        ],
    )


def _copy_table(found: Fidelity) -> str:
    rows = []
    for row in copies(found):
        share = row.what.startswith("DMA copy")
        values = [_percent(v) if share else scaled(v, "B/s") for v in (row.reference, row.model)]
        error = f"{100 * row.error:z.1f} points" if share else _percent(row.error)
        what = "mi300x, share not copying" if share else "mi355x, rate of a put"
        rows.append([what, _size(float(row.size)), *values, error])
    return _markdown(["copy", "size", "measured", "model", "error"], rows)


def _variants_table(found: Fidelity) -> str:
    rows = []
    for (source, kind, size), some in variants(found).items():
        won = max(some, key=lambda pair: pair[1].reference)
        said = max(some, key=lambda pair: pair[1].model)
        rows.append(
            [
                kind,
                _size(size),
                source,
                f"{won[0]} ({won[1].reference:.2f}x)",
                f"{said[0]} ({said[1].model:.2f}x)",
                "yes" if won[0] == said[0] else "**no**",
            ]
        )
    return _markdown(["collective", "size", "sizes", "measured best", "model best", "same"], rows)


def _units_table(found: Fidelity) -> str:
    rows = [
        [row.what.split()[0], row.size, _percent(row.reference), _percent(row.model)]
        for row in units_taken(found)
    ]
    other = [
        [s.what.split()[0] + " (FiCCO shapes)", s.measure.split()[-1], "", _percent(s.value)]
        for s in found.summaries
        if s.what.endswith("FiCCO shapes")
    ]
    return _markdown(["GEMMs", "units taken", "measured slowdown", "model"], [*rows, *other])


def _ficco_table(ficco: FiccoEvaluation) -> str:
    rows = []
    for mesh, switch in zip(ficco.mesh.scenarios, ficco.switch.scenarios, strict=True):
        rows.append(
            [
                mesh.shape.label,
                f"{mesh.serial / mesh.ideal:.2f}x",
                f"{mesh.best.speedup:.2f}x",
                mesh.best.schedule.name,
                best_fixed(mesh).schedule.name,
                f"{mesh.outcome('adaptive@dma').speedup:.2f}x",
                f"{mesh.outcome('shard-p2p@dma').speedup:.2f}x",
                f"{switch.outcome('shard-p2p@dma').speedup:.2f}x",
            ]
        )
    headers = ["scenario", "ideal", "best", "schedule", "best fixed", "adaptive@dma"]
    return _markdown([*headers, "shard-p2p, mesh", "shard-p2p, switch"], rows)


def _ficco(ficco: FiccoEvaluation) -> dict[str, str]:
    winners = ", ".join(f"`{name}` in {n}" for name, n in ficco.winners.most_common())
    ahead = ", ".join(f"`{name}` in {n}" for name, n in ficco.cores_ahead.items()) or "none"
    top = ficco.top
    return {
        "ideal": f"{ficco.largest_ideal:.2f}x",
        "best": f"{top.best.speedup:.2f}x ({top.shape.label}, `{top.best.schedule}`)",
        "best_of_ideal": f"{top.best.percent_of_ideal:.0f} %",
        "best_losses": ", ".join(
            f"{name} {duration(seconds)}"
            for name, seconds in (
                ("decomposition", top.best.losses.decomposition),
                ("launch", top.best.losses.launch),
                ("contention", top.best.losses.contention),
            )
        ),
        "winners": winners,
        "shard": f"{min(ficco.shard_slowdowns):.1f}x to {max(ficco.shard_slowdowns):.1f}x",
        "shard_switch": f"{ficco.shard_on_switch:.2f}x",
        "engines": f"{100 * (ficco.engines_over_cores - 1):.0f} %",
        "cores_ahead": ahead,
    }
