"""The page of `weft explore`: an overview of all scenarios, then the details of each."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from weft.report import cells
from weft.report.explore_figures import (
    COMPARED,
    IDEAL_COLOUR,
    LOSSES,
    axis_end,
    bars,
    heat_map,
    known,
    where,
)
from weft.report.page import Page
from weft.report.units import duration, share
from weft.schedule import Schedule
from weft.study.exploration import Exploration, Scenario
from weft.timeline import Timeline

MOST_CLOSELY = 24
"""The most scenarios with details. Each has timelines, and the page must stay small."""

HEADERS = (
    "scenario",
    "compute",
    "comm.",
    "serial",
    "ideal",
    "best schedule",
    "speedup",
    "share of gain",
    "auto",
    "auto's speedup",
    "adaptive",
    "shard-p2p",
)
_ON_PAGE = 10
"""So many columns fit at 1366 pixels; the figures have the others."""
_THE_BEST = "the best"


def rows_of(exploration: Exploration) -> list[list[cells.Cell]]:
    """One row per scenario, under `HEADERS`. Times are in milliseconds."""
    return [
        [
            scenario.shape.label,
            1e3 * scenario.compute,
            1e3 * scenario.communication,
            1e3 * scenario.serial,
            1e3 * scenario.ideal,
            scenario.best.schedule.name,
            f"{scenario.best.speedup:.2f}x",
            share(scenario.best.percent_of_ideal),
            None if scenario.auto is None else _chosen(scenario, scenario.auto.outcome.schedule),
            None if scenario.auto is None else f"{scenario.auto.outcome.speedup:.2f}x",
            _times(scenario, "adaptive@dma"),
            _times(scenario, "shard-p2p@dma"),
        ]
        for scenario in exploration.scenarios
    ]


def _chosen(scenario: Scenario, schedule: Schedule) -> str:
    return _THE_BEST if schedule == scenario.best.schedule else schedule.name


def summary_of(exploration: Exploration) -> str:
    """The result in one or two sentences."""
    scenarios = exploration.scenarios
    top = max(scenarios, key=lambda scenario: scenario.best.speedup)
    least = min(scenarios, key=lambda scenario: scenario.best.speedup)
    said = (
        f"On {exploration.machine.title}, overlap gives up to {top.best.speedup:.2f}x over serial "
        f"({top.shape.label}, {top.best.schedule}), of {top.serial / top.ideal:.2f}x at best"
    )
    if len(scenarios) > 1:
        said += f"; the least is {least.best.speedup:.2f}x ({least.shape.label})"
    slow = [(o.speedup, s) for s in scenarios if (o := known(s, "shard-p2p@dma")) is not None]
    if slow and (worst := min(slow, key=lambda pair: pair[0]))[0] < 0.95:
        said += (
            f". Whole shards from one peer at a time (shard-p2p) are up to {1 / worst[0]:.1f}x "
            "slower than serial"
        )
    return said + "."


def verdict_of(exploration: Exploration) -> str:
    """Which schedule to use, in one sentence; over several shapes, how good `auto` is."""
    scenarios = exploration.scenarios
    if len(scenarios) == 1:
        return _verdict(scenarios[0])
    gains = [scenario.best.speedup for scenario in scenarios]
    text = (
        f"Overlap gives {min(gains):.2f}x to {max(gains):.2f}x over serial under the best schedule "
        "of each shape"
    )
    behind = [
        (slower, scenario)
        for scenario in scenarios
        if (slower := scenario.auto_percent_slower) is not None
    ]
    if not behind:
        return f"{text}."
    near = sum(slower <= NEAR for slower, _ in behind)
    worst, where = max(behind, key=lambda pair: pair[0])
    text += f"; auto is within {NEAR:g} % of it in {near} of {len(behind)}"
    return text + (
        f", at worst {worst:.0f} % slower ({where.shape.label})." if worst > NEAR else "."
    )


NEAR = 2.0
"""Choices that are slower than the best by less than this percentage count as the best."""


def _verdict(scenario: Scenario) -> str:
    best = scenario.best
    if best.speedup < 1.01:
        text = "Do not overlap this: no schedule is more than 1 % faster than serial"
    else:
        text = (
            f"Use {best.schedule}: {best.speedup:.2f}x over serial, "
            f"{best.percent_of_ideal:.0f} % of the possible gain"
        )
    if scenario.auto is None:
        return f"{text}."
    chosen, slower = scenario.auto.outcome, scenario.auto_percent_slower or 0.0
    if chosen.schedule == best.schedule:
        return f"{text}; auto chooses it."
    if slower <= NEAR:
        return f"{text}; auto chooses {chosen.schedule}, which is as fast within {NEAR:g} %."
    return f"{text}; auto chooses {chosen.schedule}, which is {slower:.0f} % slower than best."


def write_explore_page(
    path: str | os.PathLike[str],
    exploration: Exploration,
    report: Callable[[float, str], None] | None = None,
) -> Path:
    """Writes the page atomically."""
    scenarios = exploration.scenarios
    title = f"{exploration.operation} on {exploration.world} x {exploration.machine.name}"
    page = Page(f"{title}, simulated", f"{verdict_of(exploration)} {summary_of(exploration)}")
    if len(scenarios) > 1:
        _at_a_glance(page, exploration)
    close = scenarios[:MOST_CLOSELY]
    text = "Ideal is the longer of compute and communication; the losses are what comes on top."
    if len(close) < len(scenarios):
        text += f" The first {len(close)} scenarios are here."
    page.section("Where the time goes", text)
    panels = {}
    for number, scenario in enumerate(close):
        if report is not None:
            report(number / len(close), f"timelines of {scenario.shape.label}")
        timelines = _timelines(exploration, scenario)
        panels[_headline(scenario)] = _closely(scenario, timelines)
    page.choices("Scenario", panels)
    page.section(
        "All numbers",
        "Times are milliseconds. Serial is the faster of gathering with copy engines and with "
        "cores; speedups are against it.",
    )
    page.table(HEADERS[:_ON_PAGE], [row[:_ON_PAGE] for row in rows_of(exploration)])
    return page.write(path)


def _at_a_glance(page: Page, exploration: Exploration) -> None:
    scenarios = exploration.scenarios
    ideal = max(scenario.serial / scenario.ideal for scenario in scenarios)
    median = statistics.median(scenario.best.percent_of_ideal for scenario in scenarios)
    page.facts(
        {
            "scenarios": str(len(scenarios)),
            "largest ideal": f"{ideal:.2f}x",
            "best reached": f"{max(s.best.speedup for s in scenarios):.2f}x",
            "median share of the possible gain": f"{median:.0f} %",
        }
    )
    spec, height, width = heat_map(exploration)
    page.section(
        "Speedup over serial",
        "Blue is faster than communicating first and computing then, orange is slower. "
        "A click picks the scenario and the schedule below.",
    )
    page.figure(spec, height=height, min_width=width)
    spec, width = bars(exploration)
    page.text("Against serial (the dotted line at 1x) and ideal:")
    page.legend({**{name or "best": colour for name, colour in COMPARED}, "ideal": IDEAL_COLOUR})
    page.figure(spec, height=340, min_width=width)


def _closely(scenario: Scenario, timelines: list[Timeline]) -> Callable[[Page], object]:
    def fill(page: Page) -> None:
        if scenario.shape.note:
            page.text(scenario.shape.note)
        page.facts(
            {
                "compute alone": duration(scenario.compute),
                "communication alone": duration(scenario.communication),
                "serial": duration(scenario.serial),
                scenario.best.schedule.name: duration(scenario.best.seconds),
            }
        )
        if scenario.auto is not None:
            page.text(f"auto chooses {scenario.auto.outcome.schedule}: {scenario.auto.why}.")
        page.legend({"ideal": IDEAL_COLOUR, **{name: colour for _, name, colour in LOSSES}})
        spec, height = where(scenario)
        page.figure(spec, height=height)
        page.text(
            "Timelines of rank 0, and of the rank that ends last where that is another: two of "
            "them laid over each other, then each by itself. All share one axis; zooming into one "
            "zooms into all, and a double click goes back."
        )
        page.timelines(timelines, ideal=scenario.ideal, seconds=axis_end(scenario))

    return fill


def _timelines(exploration: Exploration, scenario: Scenario) -> list[Timeline]:
    """Every schedule on copy engines, and the best one on cores; all if there is only one
    scenario."""
    twin = scenario.best.schedule.with_engine("cores").name
    shown = []
    for outcome in scenario.outcomes:
        name = outcome.schedule.name
        if len(exploration.scenarios) == 1 or outcome.schedule.engine == "dma" or name == twin:
            timeline = exploration.timeline(scenario.shape.label, outcome.schedule)
            shown.append(replace(_few_ranks(timeline), title=name))
    return shown


def _few_ranks(timeline: Timeline) -> Timeline:
    """Rank 0, and the rank that ends last if it is another one."""
    first = timeline.of(0)
    last = max(timeline.spans, key=lambda span: span.end)
    if last.end <= first.end:
        return first
    return replace(timeline, spans=(*first.spans, *timeline.of(last.rank).spans))


def _headline(scenario: Scenario) -> str:
    shape = scenario.shape
    sizes = f"{shape.m} x {shape.n} x {shape.k}"
    return f"{shape.id}: {sizes}" if shape.id else sizes


def _times(scenario: Scenario, name: str) -> str | None:
    outcome = known(scenario, name)
    return None if outcome is None else f"{outcome.speedup:.2f}x"
