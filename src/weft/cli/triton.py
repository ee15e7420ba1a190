"""`weft triton report`: compiles the Triton kernels for GPUs, which need not be present."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.console import Json, console, print_json, progress
from weft.errors import Unsupported, nearest
from weft.files import write_atomically
from weft.report.terminal_table import table

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Names = Annotated[str, typer.Option(help="`all`, or names separated by commas.")]


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="triton", help="Triton kernels that communicate: what they take.")


@app.callback()
def _group() -> None:
    """Resources of the Triton kernels that communicate."""


@dataclass(frozen=True)
class KernelResult:
    """The resources of one kernel on one target. None if a number is not available."""

    kernel: str
    target: str
    dtype: str
    registers: int | None
    spilled: int | None
    shared_bytes: int
    warps: int
    programs_per_unit: int
    releases: int
    acquires: int
    faults: tuple[str, ...]


@app.command()
def report(
    kernels: Names = "all",
    targets: Names = "all",
    dtypes: Names = "all",
    assembly: Annotated[
        Path | None, typer.Option(help="Also write the assembly of each into this folder.")
    ] = None,
    json: Json = False,
) -> None:
    """Compile the kernels and report their resources; exits with 1 if the code has a fault."""
    from weft.triton import ahead
    from weft.triton.audit import audit
    from weft.triton.residency import programs_per_unit, unit_of

    wanted = [
        (kernel, target, dtype)
        for kernel in _names(kernels, list(ahead.KERNELS), "kernel")
        for target in _names(_by_machine(targets), list(ahead.TARGETS), "target")
        for dtype in _names(dtypes, list(ahead.DTYPE_NAMES), "dtype")
    ]
    rows: list[KernelResult] = []
    with progress("compiling", quiet=json) as shown:
        for number, (kernel, target, dtype) in enumerate(wanted):
            shown(number / len(wanted), f"{kernel} for {target}, {dtype}")
            built = ahead.build(kernel, target, dtype)
            if assembly is not None:
                _write(assembly / f"{kernel}-{target}-{dtype}.s", built.assembly)
            found, taken = audit(built), built.resources
            rows.append(
                KernelResult(
                    kernel,
                    target,
                    dtype,
                    taken.registers,
                    taken.spilled,
                    taken.shared,
                    taken.warps,
                    programs_per_unit(taken, unit_of(target)),
                    found.releases,
                    found.acquires,
                    found.faults,
                )
            )
    faulty = [row for row in rows if row.faults]
    if json:
        print_json({"kernels": [asdict(row) for row in rows], "ok": not faulty})
    else:
        _show(rows)
        for row in faulty:
            console.print(f"{row.kernel} on {row.target}, {row.dtype}: {'; '.join(row.faults)}")
    if faulty:
        raise typer.Exit(1)


def _show(rows: list[KernelResult]) -> None:
    headers = ["target", "dtype", "registers", "spilled", "shared", "warps", "per unit"]
    headers += ["releases", "acquires", "code"]
    for kernel in dict.fromkeys(row.kernel for row in rows):
        cells = [
            [
                row.target,
                row.dtype,
                "unknown" if row.registers is None else row.registers,
                "unknown" if row.spilled is None else row.spilled,
                f"{row.shared_bytes / 1024:.1f} KiB",
                row.warps,
                row.programs_per_unit,
                row.releases,
                row.acquires,
                "ok" if not row.faults else "FAULT",
            ]
            for row in rows
            if row.kernel == kernel
        ]
        console.print(table(headers, cells, title=kernel, drop=(5, 3)))
    console.print(
        "registers: per lane. spilled: registers (AMD) or bytes of stack (NVIDIA). shared: LDS on "
        "AMD.\nper unit: programs that fit on a CU or SM. releases, acquires: system-scope flags "
        "in the code."
    )
    faulty = sum(bool(row.faults) for row in rows)
    what = f"{faulty} of {len(rows)} have faults" if faulty else "none of them has a fault"
    number = "1 kernel was" if len(rows) == 1 else f"{len(rows)} kernels were"
    console.print(f"{number} compiled here with the tiles of a launch, but not run; {what}.")


MACHINES = {"mi300x": "gfx942", "mi355x": "gfx950", "h100": "sm_90", "b200": "sm_100"}
"""Targets by the machines that have them."""


def _by_machine(text: str) -> str:
    """Names of machines count as their targets."""
    return ",".join(dict.fromkeys(MACHINES.get(name, name) for name in text.split(",")))


def _names(text: str, known: list[str], what: str) -> list[str]:
    if text == "all":
        return known
    for name in text.split(","):
        if name not in known:
            raise Unsupported(
                f"there is no {what} {name!r}{nearest(name, known)}; use {', '.join(known)}"
            )
    return text.split(",")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise Unsupported(f"cannot write {path}: {failure.strerror}") from None
    write_atomically(path, [text])
