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
    measured_until_stopped,
    n_said,
    print_json,
    progress,
    topology_of,
)
from weft.fabric import VERSION, Link, of
from weft.measure.arms import arms_of
from weft.measure.launch import Report, launch
from weft.measure.stopping import stop_asked
from weft.operation import find
from weft.schedule import Schedule
from weft.select import store


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
    """Measure every schedule for these sizes, and save the fastest for schedule="auto".

    Ctrl-C ends it after the round that is running, and saves the fastest until then.
    """
    columns = columns_per_rank(n, n_per_rank, world)
    asked = find(operation).of(m, columns, k, world, dtype_of(dtype))
    joined = Link.parse(link, topology_of(topology))
    with progress(f"tuning {asked.label}", quiet=json) as report:
        (found, _), stopping = measured_until_stopped(
            lambda stop: launch(world, _tune, asked, joined, repeat, stop, report=report)[0],
            lambda tuned: f"{tuned[1]} of {repeat} rounds",
        )
    tuned = {label: schedule for label, (schedule, _) in found.items()}
    sentences = [_verdict(label, *one) for label, one in found.items()]
    if json:
        times = {
            label: {"ms": 1e3 * one.seconds, "serial_ms": 1e3 * one.serial_seconds}
            for label, (_, one) in found.items()
            if one is not None
        }
        said = {"tuned": tuned, "times": times, "verdict": " ".join(sentences)}
        print_json({"operation": asked.label, "link": str(joined), **said, **stopping.json})
        stopping.end()
        return
    console.print(f"{asked.label}, links: {joined}\n{n_said(columns, world)}")
    for sentence in sentences:
        console.print(sentence)
    stopping.end()


Tuned = dict[str, tuple[str, store.Answer | None]]
"""By the label of an operation: its schedule, and what was measured."""


def _verdict(label: str, schedule: str, answer: store.Answer | None) -> str:
    name = label.split(" ")[0]
    text = f"auto uses {schedule} from now on for {name} of sizes near these"
    if answer is None:
        return f"{text}."
    serial = answer.serial_seconds
    if Schedule.parse(schedule).serial:
        return f"{text}: nothing is measurably faster than its {serial * 1e3:.3g} ms."
    return (
        f"{text}: {answer.seconds * 1e3:.3g} ms against {serial * 1e3:.3g} ms for serial, "
        f"{serial / answer.seconds:.2f}x (medians of the measured calls)."
    )


def _tune(report: Report, operation: Any, link: Link, repeat: int, path: str) -> tuple[Tuned, int]:
    """What was found, and in how many rounds."""
    import weft

    rounds = 0

    def stop() -> bool:
        nonlocal rounds
        rounds += 1
        return stop_asked(path)

    weft.configure(link=link)
    fabric = of(None)
    call = arms_of(operation, fabric).call("auto")
    found = weft.tune(call, repeat=repeat, report=report, stop=stop)
    answer = store.find(store.question(operation, str(fabric.link), VERSION))
    tuned = {
        label: (schedule, answer if label == operation.label else None)
        for label, schedule in found.items()
    }
    return tuned, rounds
