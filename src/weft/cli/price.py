"""`weft price`: what one GEMM, one collective or one copy takes, and what that time is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from weft.cli.asked import machines_of, size_of
from weft.cli.console import Json, PerRank, columns_per_rank, console, n_said, print_json
from weft.dtype import ITEM_BYTES
from weft.errors import Unsupported
from weft.machine import all_names
from weft.plan.collective import UNROOTED
from weft.report.cells import Cell
from weft.report.terminal_table import table
from weft.report.units import byte_size, duration
from weft.study.price import ENGINES, Price, price_collective, price_copy, price_gemm

Machines = Annotated[
    str,
    typer.Option(
        "--machine",
        help=f"One or several of {', '.join(all_names())}, cpu (this host, once calibrated), or "
        "paths of TOML files, separated by commas.",
    ),
]
Units = Annotated[
    int | None, typer.Option(help="Compute units that it may use. [default: all it wants]")
]
Engine = Annotated[
    str | None,
    typer.Option(help="Who moves the bytes: cores (NCCL, RCCL) or dma. [default: both]"),
]
Size = Annotated[str, typer.Option(help="Bytes, e.g. 64MiB, 1GB or 65536.")]
Prelaunched = Annotated[
    bool,
    typer.Option("--prelaunched", help="dma: commands wait in the queue, one write starts them."),
]

COLUMNS = 4
"""So many prices fit side by side into 80 columns; more follow below."""

_price = typer.Typer(
    help="What one GEMM, one collective or one copy takes on a machine, what that time is made "
    "of, and the measurement nearest to it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def register(app: typer.Typer) -> None:
    app.add_typer(_price, name="price")


@_price.command("gemm")
def gemm(
    m: Annotated[int, typer.Option("--m", help="Rows of A and C.")],
    k: Annotated[int, typer.Option("--k", help="Columns of A, rows of B.")],
    n: Annotated[
        int | None,
        typer.Option("--n", help="Columns of B over all ranks; each has N / world of them."),
    ] = None,
    n_per_rank: PerRank = None,
    world: Annotated[int, typer.Option(help="Ranks that share the columns of B.", min=1)] = 1,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(ITEM_BYTES)}.")] = "bfloat16",
    batch: Annotated[int, typer.Option(help="Equal GEMMs in one kernel.")] = 1,
    units: Units = None,
    machine: Machines = "mi300x",
    json: Json = False,
) -> None:
    """One GEMM, C[m, n] = A[m, k] B[k, n], on one device with nothing beside it; with --world, that
    of one rank."""
    if n is None and n_per_rank is None:
        raise Unsupported("a GEMM needs --n (over all ranks) or --n-per-rank")
    own = columns_per_rank(n, n_per_rank, world)
    found = [
        price_gemm(one, m, own, k, dtype, batch=batch, units=units) for one in machines_of(machine)
    ]
    _answer(found, json, sizes=n_said(own, world) if world > 1 else "")


@_price.command("collective")
def collective(
    size: Annotated[
        str,
        typer.Option(
            help="What each rank puts in, e.g. 64MiB: its shard for an all-gather, its whole "
            "input for the others."
        ),
    ],
    collective: Annotated[str, typer.Option(help=f"One of {', '.join(UNROOTED)}.")] = "all_gather",
    world: Annotated[
        int | None, typer.Option(help="Number of ranks. [default: 8, or all where fewer]")
    ] = None,
    engine: Engine = None,
    variant: Annotated[
        str | None,
        typer.Option(
            help="dma: pcpy (an engine per peer), bcst (all-gather: one copy to two peers), swap "
            "(all-to-all: in place), b2b (one engine after the other). [default: the quickest]"
        ),
    ] = None,
    prelaunched: Prelaunched = False,
    units: Units = None,
    machine: Machines = "mi300x",
    json: Json = False,
) -> None:
    """One collective of a node, by a library on the compute units or by copy engines."""
    total = size_of(size)
    if engine is None:
        engine = "dma" if variant is not None or prelaunched else engine
        engine = "cores" if units is not None else engine
    found = [
        price_collective(
            one,
            collective,
            total,
            min(8, one.links.world) if world is None else world,
            engine=by,
            variant=variant,
            prelaunched=prelaunched,
            units=units,
        )
        for one in machines_of(machine)
        for by in (ENGINES if engine is None else (engine,))
    ]
    _answer(found, json, sizes=f"{byte_size(total)} from each rank")


@_price.command("copy")
def copy(
    size: Size,
    rows: Annotated[int, typer.Option(help="Equal runs of bytes that it consists of.")] = 1,
    engine: Engine = None,
    prelaunched: Prelaunched = False,
    local: Annotated[
        bool, typer.Option("--local", help="Inside one device instead of to a peer.")
    ] = False,
    machine: Machines = "mi300x",
    json: Json = False,
) -> None:
    """One copy to one peer, or inside a device, by a copy engine or by compute units."""
    total = size_of(size)
    if engine is None and prelaunched:
        engine = "dma"
    found = [
        price_copy(one, total, engine=by, rows=rows, prelaunched=prelaunched, local=local)
        for one in machines_of(machine)
        for by in (ENGINES if engine is None else (engine,))
    ]
    _answer(found, json, sizes=byte_size(total))


def _answer(found: Sequence[Price], json: bool, sizes: str = "") -> None:
    if json:
        answers: list[dict[str, Any]] = [one.to_json() for one in found]
        single = len(answers) == 1
        print_json(answers[0] if single else {"prices": answers, "verdict": _verdict(found)})
        return
    console.print(found[0].what + (f" ({sizes})" if sizes else "") + ", simulated")
    for start in range(0, len(found), COLUMNS):
        some = found[start : start + COLUMNS]
        headers = ("", *(one.head for one in some))
        console.print(table(headers, _rows(some), width=min(console.width, 80)))
    for one in found:
        label = one.head.replace("\n", ", ")
        if one.said:
            console.print(f"{label}: {one.said}.")
        near = "weft has none like it" if one.nearest is None else one.nearest.text()
        console.print(f"Nearest measurement, {label}: {near}.")
    console.print(_verdict(found))


def _rows(found: Sequence[Price]) -> list[list[Cell]]:
    """The parts, their sum, and the facts, a column for each price."""
    rows: list[list[Cell]] = []
    for name in dict.fromkeys(name for one in found for name, _ in one.parts):
        cells = (sum(t for part, t in one.parts if part == name) for one in found)
        rows.append([name, *(duration(seconds) if seconds else None for seconds in cells)])
    rows.append(["in all", *(duration(one.seconds) for one in found)])
    for fact in dict.fromkeys(fact for one in found for fact in one.facts):
        rows.append([fact, *(one.facts.get(fact) for one in found)])
    return rows


def _verdict(found: Sequence[Price]) -> str:
    """What dominates, or who is quickest."""
    best = min(found, key=lambda one: one.seconds)
    label = best.head.replace("\n", ", ")
    if len(found) > 1:
        worst = max(found, key=lambda one: one.seconds)
        other = worst.head.replace("\n", ", ")
        return (
            f"{label} is the quickest: {duration(best.seconds)}, "
            f"{worst.seconds / best.seconds:.2f}x as fast as {other}."
        )
    name, seconds = max(best.parts, key=lambda part: part[1])
    return (
        f"{duration(best.seconds)} on {label}, of which {100 * seconds / best.seconds:.0f} % is "
        f"{name}."
    )
