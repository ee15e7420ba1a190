"""`weft characterize`: the cost of cutting a GEMM, and the cost of concurrent communication."""

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
from weft.files import check_targets
from weft.machine import load, names
from weft.report.characterize_page import (
    HEADERS,
    rows_of,
    summary_of,
    verdict_of,
    write_characterize_page,
)
from weft.report.terminal_table import table
from weft.study.characterization import Characterization
from weft.study.characterization import characterize as simulate
from weft.study.characterize_host import characterize_host

HOST = "cpu"


def register(app: typer.Typer) -> None:
    app.command()(characterize)


def characterize(
    machine: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(n for n in names() if n != HOST)}, the path of a TOML file, "
            f"or {HOST}: this host, measured."
        ),
    ] = "mi300x",
    json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a page of both losses.")] = None,
) -> None:
    """Is a GEMM safe to cut? The cost of splitting GEMMs into 8 and 64 parts along M and K, and the
    cost of sharing the device with copies by engines and by cores, over many shapes."""
    described = None if machine == HOST else load(machine)
    check_targets(html)
    doing = "measuring" if described is None else "simulating"
    with progress(f"{doing} {machine}", quiet=json) as report:
        if described is None:
            found, stopping = measured_until_stopped(
                lambda stop: characterize_host(report=report, stop=stop), _done
            )
        else:
            found, stopping = until_stopped(partial(simulate, described, report=report), _done)
        if html is not None:
            write_characterize_page(html, found)
    if json:
        print_json({**found.to_json(), "verdict": verdict_of(found), **stopping.json})
        stopping.end()
        return
    caption = (
        "MB: memory traffic if everything is read and written once. M/8 to K/64: how many times as "
        "long as the whole GEMM its parts take. dma, cores: the same of the whole GEMM during "
        "communication by engines and by cores."
    )
    console.print(table(HEADERS, rows_of(found), caption=caption, drop=(4, 3, 7, 9)))
    console.print(summary_of(found))
    say_written(html)
    console.print(verdict_of(found))
    stopping.end()


def _done(found: Characterization) -> str:
    return f"{len(found.characters)} shapes"
