"""`weft judge`: how often the heuristic is right, on random scenarios."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.console import (
    Json,
    console,
    measured_until_stopped,
    print_json,
    progress,
    say_written,
    until_stopped,
)
from weft.machine import calibrated, load
from weft.report.judge_page import judged, judgement_page, kind_rows, most_missed, score_rows
from weft.report.terminal_table import table
from weft.study.judge_host import judge_host
from weft.study.judgement import Judgement, judge

TITLES = {
    "heuristic": "all candidates",
    "fixed": "without adaptive",
    "paper": "FiCCO's four, its kind of rule",
}


def register(app: typer.Typer) -> None:
    app.command(name="judge")(command)


def command(
    machine: Annotated[
        str, typer.Option(help="A machine of `weft explore`, a TOML file, or cpu for this one.")
    ] = "mi300x",
    random: Annotated[int, typer.Option(help="How many scenarios to draw.", min=1)] = 500,
    seed: Annotated[int, typer.Option(help="Which ones: the same seed draws the same.")] = 1000,
    json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page.")] = None,
) -> None:
    """Compare the choice made from static sizes with the best of all candidates.

    Simulated machines take about a minute for 500 scenarios on two cores. `--machine cpu` measures
    instead, about four seconds for each scenario.
    """

    def done(found: Judgement) -> str:
        return f"{len(found.verdicts)} of {random} scenarios"

    with progress(f"judging on {machine}", quiet=json) as report:
        if machine == calibrated.NAME:
            judgement, stopping = measured_until_stopped(
                partial(judge_host, random, seed, report), done
            )
        else:
            judgement, stopping = until_stopped(
                partial(judge, load(machine), random, seed, report=report), done
            )
    if html is not None:
        judgement_page(html, judgement)
    if json:
        page = {} if html is None else {"html": str(html)}
        names = ("kind", "scenarios", "missed", "share", "mean_regret")
        kinds = [dict(zip(names, row, strict=True)) for row in kind_rows(judgement)]
        found = {**judgement.to_json(), "kinds": kinds, **page}
        print_json({**found, "verdict": judged(judgement), **stopping.json})
        stopping.end()
        return
    console.print(_table(judgement))
    console.print(most_missed(judgement))
    say_written(html)
    console.print(judged(judgement))
    stopping.end()


def _table(judgement: Judgement) -> object:
    rows = [[str(cell) for cell in row] for row in score_rows(judgement, TITLES)]
    headers = [
        "chosen from",
        "exact",
        "in 2 %",
        "in 10 %",
        "mean\nslower",
        "at\nworst",
        "slower than serial",
    ]
    title = f"{judgement.machine}, {len(judgement.verdicts)} scenarios of seed {judgement.seed}"
    caption = (
        "Shares of the scenarios in which the choice is the best of its set, or at most 2 % or "
        "10 % slower than best; then how much slower than best it is, and how many scenarios are "
        "slower than serial."
    )
    return table(headers, rows, title=title, caption=caption)
