"""`weft demo`: a tour of weft in less than a minute."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weft.cli.console import WIDTH, Json, console, print_json, progress, say_written
from weft.cli.run import check_device
from weft.files import check_targets, write_atomically
from weft.measure.link_spec import LinkSpec
from weft.measure.measurement import Measurement, measure
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.report.run_page import run_page
from weft.report.run_report import verdict
from weft.report.terminal import draw
from weft.report.units import share
from weft.schedule import Schedule

SHOWN = ("serial@dma", "shard-p2p@dma", "adaptive@cores", "adaptive@dma")
ON_DEVICE = ("serial@dma", "shard-p2p@dma", "hetero-unfused-1d@dma", "adaptive@dma")


LANES = (
    "An engine is what moves bytes beside the compute cores: here a thread, on a GPU a copy engine "
    "(dma). A lighter shade is the next task of the same kind, so that tasks can be counted."
)


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    html: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("weft-demo.html"),
    svg: Annotated[Path | None, typer.Option(help="Also write the drawing as a picture.")] = None,
    repeat: Annotated[int, typer.Option(help="Measured rounds.", min=1)] = 9,
    device: Annotated[
        str, typer.Option(help="Where tensors are: cpu, or loom, an emulated device.")
    ] = "cpu",
    json: Json = False,
) -> None:
    """Run a balanced all-gather + matmul on 2 ranks, and draw how four schedules overlap it."""
    check_targets(html, svg)
    operation = AllGatherMatmul.of(2048, 1024, 2048, world=2)
    check_device(device, predict=False)
    shown = SHOWN if device == "cpu" else ON_DEVICE
    schedules = [Schedule.parse(name) for name in shown]
    with progress("measuring", quiet=json) as report:
        result = measure(
            operation,
            LinkSpec.parse("balanced"),
            schedules,
            repeat=repeat,
            device=device,
            report=report,
        )
    arms = [result.arm(name) for name in shown]
    timelines = [
        replace(a.timeline, title=f"{a.name}, {a.speedup:.2f}x over serial in the median")
        for a in arms
    ]
    summary = _summary(result, device)
    title = "How four schedules overlap an all-gather with a matmul"
    path = run_page(html, result, title=title, summary=summary)
    if svg is not None:
        picture = Console(width=WIDTH, record=True, file=StringIO(), force_terminal=True)
        picture.print(draw(timelines))
        # rich refers to fonts on the internet. Without them, a viewer uses its own monospace font.
        drawing = re.sub(
            r"@font-face \{.*?\}", "", picture.export_svg(title="weft demo"), flags=re.S
        )
        write_atomically(svg, [drawing])
    if json:
        found = {"said": summary, "verdict": verdict(result), "html": str(path)}
        print_json({**result.to_json(), **found})
        return
    console.print(f"{operation.label}, links: {result.link}\n")
    console.print(draw(timelines))
    console.print(
        f"\n{LANES}\nEach drawing is one recorded call; the times below are medians of {repeat} "
        "calls.\n"
        f"{summary}\n"
    )
    say_written(path)
    console.print(verdict(result))


def _summary(result: Measurement, device: str) -> str:
    adaptive, shard = (result.arm(f) for f in ("adaptive@dma", "shard-p2p@dma"))
    said = (
        f"With a link as slow as compute, one after the other takes {result.serial * 1e3:.0f} ms, "
        f"fetching whole shards {shard.seconds * 1e3:.0f} ms, and multiplying whatever has arrived "
        f"(adaptive@dma) {adaptive.seconds * 1e3:.0f} ms: {adaptive.speedup:.2f}x, "
        f"{share(adaptive.percent_of_ideal)} of the possible gain. "
    )
    if device != "cpu":
        return said + (
            f"The tensors were on {device}: copies by its engines, ordered by events and words. It "
            "is emulated, so this shows the order of work and not a GPU's speed."
        )
    cores = result.arm("adaptive@cores")
    return said + (
        f"The same chunks moved by the compute cores instead of copy engines take "
        f"{cores.seconds * 1e3:.0f} ms, for a core that moves bytes does not multiply."
    )
