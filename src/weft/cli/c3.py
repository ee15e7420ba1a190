"""`weft c3`: independent GEMMs and collectives at the same time, under every strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.asked import machines_of, size_of
from weft.cli.c3_case import ask_case
from weft.cli.console import Json, PerRank, console, print_json, progress, say_written
from weft.dtype import ITEM_BYTES
from weft.errors import Unsupported
from weft.files import check_targets
from weft.machine import Machine, load, names
from weft.report.c3_page import (
    RULE_HEADERS,
    Timelines,
    ladder_headers,
    ladder_rows,
    rank_zero,
    rule_rows,
    scenario_headers,
    scenario_rows,
    summary_of,
    verdict_of,
    write_c3_page,
)
from weft.report.cells import Cell
from weft.report.terminal_table import table
from weft.study.c3 import measured, simulated
from weft.study.c3.cases import KINDS as KINDS_OF_SCENARIO
from weft.study.c3.findings import Study
from weft.study.c3.own import KINDS, CaseQuestion
from weft.timeline import Timeline

HOST = "cpu"
_ROOMY, _WIDE = 100, 112
"""Columns of a terminal with room for all of the table of scenarios, and of the ladder."""


def register(app: typer.Typer) -> None:
    app.command()(c3)


def c3(
    machine: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(n for n in names() if n != HOST)}, the path of a TOML file, "
            f"or {HOST}: this host, measured. Several for a case of your own: mi300x,h100."
        ),
    ] = "mi300x",
    world: Annotated[
        int | None,
        typer.Option(
            help=f"Number of ranks. [default: {simulated.WORLD}, or {measured.WORLD} here]"
        ),
    ] = None,
    m: Annotated[int | None, typer.Option("--m", help="Your own GEMM: rows of A and C.")] = None,
    n: Annotated[
        int | None,
        typer.Option("--n", help="Columns of B and C over all ranks; each has N / world of them."),
    ] = None,
    n_per_rank: PerRank = None,
    k: Annotated[int | None, typer.Option("--k", help="Columns of A, rows of B.")] = None,
    collective: Annotated[
        str | None,
        typer.Option(help=f"Your own collective: {', '.join(KINDS)}. [default: all_gather]"),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="What each rank sends, e.g. 64MiB: its shard for an all-gather, its whole input "
            "for the others."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"Of your own GEMM: {', '.join(ITEM_BYTES)}. [default: bfloat16]"),
    ] = None,
    repeat: Annotated[
        int, typer.Option(help=f"Rounds of every scenario (only {HOST}).", min=1)
    ] = measured.REPEAT,
    interference: Annotated[
        float | None,
        typer.Option(
            help="What if GEMM and full links slowed each other by this share, instead of what the "
            "machine says? (simulated)",
            min=0.0,
            max=10.0,
        ),
    ] = None,
    json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a page of the ladder.")] = None,
) -> None:
    """How much do a GEMM and a collective gain side by side that do not need each other?

    Simulated: 30 scenarios of Llama-3 70B and 405B. On cpu: 12 scenarios of that kind, scaled to
    this machine and run for real, on links as slow as the collective should be.

    With --m, --n, --k and --size: your own GEMM on every rank beside your own collective, simulated
    under every strategy, and which one to use.
    """
    case = _case(m, n if n_per_rank is None else n_per_rank, k, collective, size, dtype)
    if case is not None:
        if html is not None:
            raise Unsupported("there is no page of a case of your own; use --json")
        found_machines = [] if machine == HOST else machines_of(machine)
        if not found_machines:
            raise Unsupported(
                f"a case of your own is simulated, and {HOST} measures scenarios of its own; "
                "name a machine, e.g. --machine mi300x"
            )
        asked = [_disturbed(one, interference) for one in found_machines]
        ask_case(asked, case, world, (n, n_per_rank), json)
        return
    described = None if machine == HOST else load(machine)
    if interference is not None:
        if described is None:
            raise Unsupported(f"on {HOST} interference is what it is; leave out --interference")
        described = _disturbed(described, interference)
    check_targets(html)
    doing = "measuring" if described is None else "simulating"
    with progress(f"{doing} {machine}", quiet=json) as report:
        if described is None:
            found = measured.measure(world=world or measured.WORLD, repeat=repeat, report=report)
        else:
            found = simulated.study(described, world=world, report=report)
        if html is not None:
            write_c3_page(html, found, None if described is None else _drawn(found, described))
    if json:
        print_json({**found.to_json(), "verdict": verdict_of(found)})
        return
    show(found)
    say_written(html)
    console.print(verdict_of(found))


def _print(
    headers: Sequence[str], rows: Sequence[Sequence[Cell]], left_out: Sequence[str], caption: str
) -> None:
    """A table without some of its columns; names in the first are never broken."""
    keep = [place for place, header in enumerate(headers) if header not in left_out]
    kept = [[row[place] for place in keep] for row in rows]
    names = [headers[place] for place in keep]
    console.print(table(names, kept, caption=caption, width=console.width, whole=(0,)))


def _case(
    m: int | None,
    n: int | None,
    k: int | None,
    collective: str | None,
    size: str | None,
    dtype: str | None,
) -> CaseQuestion | None:
    """The user's own case, or None where nothing was said about one."""
    if all(given is None for given in (m, n, k, collective, size, dtype)):
        return None
    if m is None or n is None or k is None or size is None:
        raise Unsupported("a case of your own needs all of --m, --n, --k and --size")
    kind = collective or "all_gather"
    return CaseQuestion(m, n, k, kind, size_of(size), dtype or "bfloat16")  # type: ignore[arg-type]


def _disturbed(machine: Machine, interference: float | None) -> Machine:
    """The machine with another interference, where one was asked for."""
    if interference is None:
        return machine
    return replace(machine, links=replace(machine.links, interference=interference))


def show(found: Study) -> None:
    """Prints the scenarios, the strategies, the rules, and a summary."""
    caption = (
        "Milliseconds alone, the speedup of ideal over serial, and percent of the possible gain by "
        "strategy (0: as slow as one after the other, 100: as fast as the longer of the two alone)."
    )
    width = console.width
    left_out: tuple[str, ...] = () if width >= _ROOMY else ("kind", "ideal")
    _print(scenario_headers(found), scenario_rows(found), left_out, caption)
    caption = (
        "Means over all scenarios: share of the possible gain, speedup over serial and its most, "
        "how many times as long as alone GEMM and collective take, share of the gain by kind of "
        "scenario."
    )
    left_out = () if width >= _WIDE else KINDS_OF_SCENARIO
    _print(ladder_headers(found), ladder_rows(found), left_out, caption)
    if found.rules():
        caption = "Rules from sizes and the machine's numbers alone, against the best of all tried."
        console.print(table(RULE_HEADERS, rule_rows(found), caption=caption, width=console.width))
    for name, reason in {n: r for s in found.scenarios for n, r in s.refused.items()}.items():
        console.print(f"{name} is left out: {reason}")
    console.print(summary_of(found))


def _drawn(found: Study, machine: Machine) -> Timelines:
    def timelines(label: str) -> tuple[list[Timeline], float]:
        scenario = next((s for s in found.scenarios if s.case.label == label), None)
        if scenario is None:
            raise Unsupported(f"there is no scenario {label!r}")
        drawn = [
            rank_zero(simulated.timeline(machine, scenario, name, found.world), name)
            for name in scenario.outcomes
        ]
        return drawn, scenario.ideal

    return timelines
