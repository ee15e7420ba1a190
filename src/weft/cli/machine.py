"""`weft machine`: the machines that weft knows, a file for one of your own, and what is wrong with
it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.console import Json, console, print_json
from weft.errors import Unsupported
from weft.files import check_target, write_atomically
from weft.machine import Machine, all_names, load, load_cluster
from weft.machine.checking import Remark, check
from weft.machine.loading import file_of, read_table
from weft.machine.template import template
from weft.report.cells import Cell
from weft.report.terminal_table import table
from weft.report.units import duration
from weft.study.price import price_collective, price_copy, price_gemm

_machine = typer.Typer(
    help="Machines to simulate: list them, begin a file for your own, check it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
PROBE = 8192
"""M, N and K of the GEMM that a check shows."""
PROBE_BYTES = 64 << 20
"""What each rank puts into the all-gather that a check shows, and a copy moves."""


def register(app: typer.Typer) -> None:
    app.add_typer(_machine, name="machine")


@_machine.command("list")
def list_machines(json: Json = False) -> None:
    """The machines that come with weft, and the numbers that matter most."""
    found = [load(name) for name in all_names()]
    if json:
        print_json([{"name": one.name, "title": one.title, **_facts(one)} for one in found])
        return
    rows: list[list[Cell]] = [
        [
            one.name,
            one.links.world,
            one.links.topology,
            round(one.compute.rate.get("bfloat16", 0.0) / 1e12),
            one.memory.bandwidth / 1e12,
            round(one.memory.capacity / 1e9),
            round(one.links.out_of_device(one.links.world) / 1e9),
        ]
        for one in found
    ]
    headers = ("name", "devices", "links", "TFLOP/s\nbf16", "memory\nTB/s", "GB", "out of it\nGB/s")
    caption = (
        "Per device, as GEMMs, streams and transfers reach it; not the data sheet. A device of a "
        "CPU server is a rank: a socket, or a NUMA node."
    )
    console.print(table(headers, rows, caption=caption, width=min(80, console.width)))
    console.print(
        "Each is a file that says where its numbers come from. "
        "`weft machine new --from NAME` begins one of your own."
    )


@_machine.command("new")
def new(
    file: Annotated[
        Path | None, typer.Argument(help="Where to write it. [default: my-NAME.toml]")
    ] = None,
    begin: Annotated[
        str,
        typer.Option(
            "--from", help=f"One of {', '.join(all_names())}, or the path of a TOML file."
        ),
    ] = "h100",
    json: Json = False,
) -> None:
    """Writes a machine file to edit: every number with what it means and where it came from."""
    known = load(begin)
    target = Path(f"my-{known.name}.toml") if file is None else file
    if os.path.exists(target):
        raise Unsupported(f"{target} is there already; give another name, or remove it first")
    if target.suffix != ".toml":
        raise Unsupported(f"a machine file ends in .toml; {target} does not")
    check_target(target)
    text = template(
        file_of(begin).read_text(encoding="utf-8"), known.name, known.title, str(target)
    )
    write_atomically(target, [text])
    if json:
        print_json({"file": str(target), "from": known.name})
        return
    console.print(
        f"wrote {target}, begun from {known.name} ({known.title}). Change its title and what you "
        f"know of your machine, then: weft machine check {target}"
    )


@_machine.command("check")
def check_file(
    file: Annotated[Path, typer.Argument(help="A machine file, or the file of a cluster.")],
    json: Json = False,
) -> None:
    """What is wrong with a machine file, and what in it is hard to believe."""
    content = read_table(file)
    if "compute" not in content and "nodes" in content:
        cluster = load_cluster(file)
        said = (
            f"{file} is a cluster of {cluster.nodes} x {cluster.devices} devices that can be used."
        )
        if json:
            print_json({"file": str(file), "ok": True, "errors": [], "doubts": [], "verdict": said})
        else:
            console.print(said)
        return
    machine, findings = check(content, file.stem)
    verdict = _verdict(file, machine, findings)
    if json:
        print_json(
            {
                "file": str(file),
                "ok": machine is not None,
                "errors": [one.to_json() for one in findings if one.error],
                "doubts": [one.to_json() for one in findings if not one.error],
                "figures": {} if machine is None else _figures(machine),
                "verdict": verdict,
            }
        )
    else:
        for one in findings:
            label = "wrong" if one.error else "doubtful"
            text = one.text if one.text.startswith(one.key) else f"{one.key}: {one.text}"
            console.print(f"{label}: {text}")
        if machine is not None:
            said = "; ".join(f"{what} {value}" for what, value in _figures(machine).items())
            console.print(f"What weft makes of it: {said}.")
        console.print(verdict)
    if machine is None:
        raise typer.Exit(2)


def _verdict(file: Path, machine: Machine | None, findings: list[Remark]) -> str:
    if machine is None:
        which = "this is" if len(findings) == 1 else f"these {len(findings)} are"
        return f"{file} cannot be used until {which} put right."
    if findings:
        number = f"{len(findings)} numbers" if len(findings) > 1 else "one number"
        return f"{file} can be used, but {number} of it should be looked at again."
    return f"{file} can be used: nothing in it is wrong, and nothing looks implausible."


def _figures(machine: Machine) -> dict[str, str]:
    """What the numbers lead to, for a look at whether that is so."""
    dtype = "bfloat16" if "bfloat16" in machine.compute.rate else next(iter(machine.compute.rate))
    gemm = price_gemm(machine, PROBE, PROBE, PROBE, dtype)
    found = {
        f"a {dtype} GEMM of {PROBE}^3": f"{duration(gemm.seconds)} "
        f"({gemm.numbers['tflops']:.0f} TFLOP/s)"
    }
    if machine.links.world > 1:
        ranks = min(8, machine.links.world)
        gathered = price_collective(machine, "all_gather", PROBE_BYTES, ranks)
        moved = price_copy(machine, PROBE_BYTES)
        found[f"an all-gather of 64 MiB from each of {ranks} ranks"] = (
            f"{duration(gathered.seconds)} ({gathered.numbers['bus_gb_per_s']:.0f} GB/s)"
        )
        found["a copy of 64 MiB to a peer"] = (
            f"{duration(moved.seconds)} ({moved.numbers['gb_per_s']:.0f} GB/s)"
        )
    return found


def _facts(machine: Machine) -> dict[str, Any]:
    return {
        "devices": machine.links.world,
        "links": machine.links.topology,
        "bfloat16_tflops": machine.compute.rate.get("bfloat16", 0.0) / 1e12,
        "memory_tb_per_s": machine.memory.bandwidth / 1e12,
        "memory_gb": machine.memory.capacity / 1e9,
        "out_of_device_gb_per_s": machine.links.out_of_device(machine.links.world) / 1e9,
    }
