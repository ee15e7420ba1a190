"""`weft tune`: measures every schedule of an operation here, and saves the fastest for `auto`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from weft.cli.console import (
    Columns,
    Dtype,
    Inner,
    Json,
    PerRank,
    Rows,
    TopologyName,
    World,
    columns_per_rank,
    console,
    dtype_of,
    print_json,
    progress,
    topology_of,
)
from weft.fabric import Link, of
from weft.measure.arms import arms_of
from weft.measure.launch import Report, launch
from weft.operation import find


def register(app: typer.Typer) -> None:
    app.command(name="tune")(command)


def command(
    operation: Annotated[str, typer.Argument(help="The operation, e.g. all_gather_matmul.")],
    m: Rows = 2048,
    n: Columns = None,
    n_per_rank: PerRank = None,
    k: Inner = 2048,
    world: World = 2,
    dtype: Dtype = "float32",
    link: Annotated[str, typer.Option(help="memory, or a rate (0.1GB/s).")] = "memory",
    topology: TopologyName = "mesh",
    repeat: Annotated[int, typer.Option(help="Measured calls of every schedule.", min=1)] = 5,
    json: Json = False,
) -> None:
    """Measure every schedule for these sizes, and save the fastest for schedule="auto"."""
    columns = columns_per_rank(n, n_per_rank, world)
    asked = find(operation).of(m, columns, k, world, dtype_of(dtype))
    joined = Link.parse(link, topology_of(topology))
    with progress(f"tuning {asked.label}", quiet=json) as report:
        found = launch(world, _tune, asked, joined, repeat, report=report)[0]
    if json:
        print_json({"operation": asked.label, "link": str(joined), "tuned": found})
        return
    for label, schedule in found.items():
        console.print(f"{label}, links: {joined}\n  {schedule} from now on, for sizes near these")


def _tune(report: Report, operation: Any, link: Link, repeat: int) -> dict[str, str]:
    import weft

    weft.configure(link=link)
    arms = arms_of(operation, of(None))
    return weft.tune(arms.call("auto"), repeat=repeat, report=report)
