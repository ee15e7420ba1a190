"""The tables and the page of `weft c3`: results per strategy, from concurrent to dma+trimmed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from weft.operation import ranks_label
from weft.report import c3_figures as figures
from weft.report import cells
from weft.report.page import Page
from weft.report.units import duration
from weft.study.c3.cases import KINDS
from weft.study.c3.findings import Study
from weft.timeline import Timeline

RULE_HEADERS = ("rule", "picked the best", "mean loss", "worst loss")
SHORT = {
    "concurrent": "con-\ncurr.",
    "prioritized": "prior-\nitized",
    "partitioned": "parti-\ntioned",
    "prioritized+partitioned": "both",
    "dma": "dma",
    "dma+trimmed": "dma+\ntrimmed",
}

Timelines = Callable[[str], tuple[list[Timeline], float]]
"""Returns the timelines of a scenario by its label, and its ideal in seconds."""


def ladder_headers(study: Study) -> tuple[str, ...]:
    published = ("pub-\nlished",) if study.published else ()
    percents = ("share of\ngain", *published)
    return ("strategy", *percents, "mean\nspeedup", "most", "GEMM", "collec-\ntive", *KINDS)


def ladder_rows(study: Study) -> list[list[cells.Cell]]:
    """One row per strategy, under `ladder_headers`. The last three are by kind."""
    known = study.published
    return [
        [
            mean.name,
            f"{mean.percent_of_ideal:.0f} %",
            *([f"{known[mean.name]:.0f} %" if mean.name in known else None] if known else []),
            f"{mean.speedup:.2f}x",
            f"{mean.most:.2f}x",
            f"{mean.gemm_slowdown:.2f}x",
            f"{mean.collective_slowdown:.2f}x",
            *(f"{mean.by_kind[kind]:.0f} %" if kind in mean.by_kind else None for kind in KINDS),
        ]
        for mean in study.means()
    ]


def scenario_headers(study: Study) -> tuple[str, ...]:
    names = (SHORT.get(mean.name, mean.name) for mean in study.means())
    return ("scenario", "kind", "GEMM\nms", "coll.\nms", "ideal", *names)


def scenario_rows(study: Study) -> list[list[cells.Cell]]:
    """One row per scenario, under `scenario_headers`: times alone, and shares of the gain."""
    names = [mean.name for mean in study.means()]
    rows: list[list[cells.Cell]] = []
    for scenario in study.scenarios:
        found = [scenario.outcomes.get(name) for name in names]
        rows.append(
            [
                scenario.case.label,
                scenario.kind,
                1e3 * scenario.compute,
                1e3 * scenario.communication,
                f"{scenario.serial / scenario.ideal:.2f}x" if scenario.ideal else None,
                *(None if one is None else round(one.percent_of_ideal) for one in found),
            ]
        )
    return rows


def rule_rows(study: Study) -> list[list[cells.Cell]]:
    """One row per rule, under `RULE_HEADERS`."""
    return [
        [
            rule.question.replace("units", "compute units"),
            f"{rule.num_best} of {rule.of}",
            f"{100 * rule.mean_loss:.1f} %",
            f"{100 * rule.worst_loss:.1f} %",
        ]
        for rule in study.rules()
    ]


def summary_of(study: Study) -> str:
    """The result in a few sentences."""
    means = {mean.name: mean for mean in study.means()}
    first, last = study.means()[0], study.means()[-1]
    how = "measured" if study.measured else "simulated"
    said = (
        f"On {ranks_label(study.world)} of {study.title} ({how}), independent GEMMs and "
        f"collectives reach {first.percent_of_ideal:.0f} % of the possible gain as they come "
        f"({first.name}) and {last.percent_of_ideal:.0f} % under {last.name}, up to "
        f"{last.most:.2f}x over serial."
    )
    if "dma" in means:
        said += (
            f" Under dma a GEMM takes {means['dma'].gemm_slowdown:.2f}x as long as alone, "
            f"under {first.name} {first.gemm_slowdown:.2f}x."
        )
    if study.pays_from:
        sizes = ", ".join(
            f"{kind} {size >> 20} MiB" if size >= 1 << 20 else f"{kind} {size >> 10} KiB"
            for kind, size in study.pays_from.items()
        )
        said += f" Alone, copy engines are no slower than cores from: {sizes}."
    return said


def verdict_of(study: Study) -> str:
    """Which strategy to use, in one sentence."""
    best = max(study.means(), key=lambda mean: mean.percent_of_ideal)
    first = study.means()[0]
    return (
        f"Use {best.name}: {best.speedup:.2f}x over serial on average, "
        f"{best.percent_of_ideal:.0f} % of the possible gain, against "
        f"{first.percent_of_ideal:.0f} % as they come ({first.name})."
    )


def write_c3_page(
    path: str | os.PathLike[str], study: Study, timelines: Timelines | None = None
) -> Path:
    """Writes the page atomically. timelines: the timelines of a scenario, if there are any."""
    how = "measured" if study.measured else "simulated"
    page = Page(
        f"Compute beside communication on {study.machine}, {how}",
        f"{verdict_of(study)} {summary_of(study)}",
    )
    _ladder(page, study)
    _sides(page, study)
    spec, height = figures.heat_map(study)
    page.section(
        "Every scenario",
        "Share of the possible gain: blue is near all, orange is no gain over serial. Names say "
        "what bounds the GEMM (cb: arithmetic, mb: memory), the bytes or time of the collective, "
        "and whether it is an all-gather (ag) or an all-to-all (a2a).",
    )
    page.figure(spec, height=height, min_width=480)
    if study.units is not None:
        _units(page, study)
    if study.rules():
        page.section(
            "Rules",
            "What to do, from sizes and the machine's numbers alone, against trying everything. A "
            "loss is how much longer the rule's pick takes than the best of its sweep.",
        )
        page.table(RULE_HEADERS, rule_rows(study))
    if timelines is not None:
        _timelines(page, study, timelines)
    page.section(
        "All numbers", "Times alone in milliseconds; strategies in percent of the possible gain."
    )
    headers = [header.replace("-\n", "").replace("\n", " ") for header in scenario_headers(study)]
    page.table(headers, scenario_rows(study))
    for strategy, reason in {n: r for s in study.scenarios for n, r in s.refused.items()}.items():
        page.text(f"{strategy} is left out: {reason}.")
    return page.write(path)


def _ladder(page: Page, study: Study) -> None:
    means = study.means()
    best = max(means, key=lambda mean: mean.percent_of_ideal)
    page.facts(
        {
            "scenarios": str(len(study.scenarios)),
            means[0].name: f"{means[0].percent_of_ideal:.0f} % of the gain",
            best.name: f"{best.percent_of_ideal:.0f} % of the gain",
            "most": f"{max(mean.most for mean in means):.2f}x over serial",
        }
    )
    page.section(
        "The ladder",
        "Ideal is the longer of GEMM and collective, each alone; 0 % is serial. Bars are means "
        "over all scenarios, dots those of one kind.",
    )
    kinds = {kind for mean in means for kind in mean.by_kind}
    colours: dict[str, str] = {kind: figures.KIND_COLOURS[kind] for kind in KINDS if kind in kinds}
    if study.published:
        colours["measured on the real machine (arXiv 2412.14335)"] = figures.PUBLISHED_COLOUR
    page.legend(colours)
    page.figure(figures.ladder(study), height=340)
    headers = [header.replace("-\n", "").replace("\n", " ") for header in ladder_headers(study)]
    page.table(headers, ladder_rows(study))


def _sides(page: Page, study: Study) -> None:
    page.section(
        "Who slows whom",
        "The GEMM from its start to its end, the collective from the call to its end, however "
        "late it could start: each against the same alone.",
    )
    page.legend(figures.SIDE_COLOURS)
    page.figure(figures.sides(study), height=340)


def _units(page: Page, study: Study) -> None:
    page.section(
        "What compute units are worth",
        "GEMMs alone with some of the units taken away, collectives alone with few of them, and "
        "both side by side with units reserved.",
    )
    names = figures.UNIT_COLOURS
    page.legend({name: colour for name, colour in names.items() if name.endswith("GEMMs")})
    page.figure(figures.units(study), height=300)
    page.legend({name: colour for name, colour in names.items() if not name.endswith("GEMMs")})
    page.figure(figures.given(study), height=300)
    page.legend(figures.KIND_COLOURS)
    page.figure(figures.partitions(study), height=380)


def _timelines(page: Page, study: Study, timelines: Timelines) -> None:
    page.section(
        "Timelines",
        "Rank 0 under every strategy, for the first scenario of each kind. All share one axis.",
    )

    def fill(label: str) -> Callable[[Page], object]:
        drawn, ideal = timelines(label)
        return lambda page: page.timelines(drawn, ideal=ideal)

    panels: dict[str, Callable[[Page], object]] = {}
    for kind in KINDS:
        scenario = next((s for s in study.scenarios if s.kind == kind), None)
        if scenario is not None:
            head = f"{kind}: {scenario.case.label}, {duration(scenario.compute)} beside "
            panels[head + duration(scenario.communication)] = fill(scenario.case.label)
    page.choices("Scenario", panels)


def rank_zero(timeline: Timeline, title: str) -> Timeline:
    """Rank 0 of a timeline, with a title."""
    return replace(timeline.of(0), title=title)
