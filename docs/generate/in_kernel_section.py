"""The section of docs/fidelity.md about communication inside a kernel: the simulated savings, and
those that the paper reports."""

from __future__ import annotations

from pathlib import Path

from weft.machine import load
from weft.study.in_kernel_savings import Saving, savings

MACHINE = "mi300x"


def section() -> str:
    """Simulates the sizes and writes the section."""
    found = savings(load(MACHINE))
    text = Path(__file__).with_suffix(".md").read_text("utf-8")
    return text.format(table="\n".join(map(_row, found)))


def _row(saving: Saving) -> str:
    scenario, chunked = saving.scenario, saving.chunked
    times = (scenario.compute, scenario.communication, scenario.serial)
    cells = [
        saving.size.what,
        *(f"{1e3 * seconds:.3f}" for seconds in times),
        f"{1e3 * chunked.seconds:.3f} ({chunked.schedule})",
        f"{1e3 * saving.fused:.3f}",
        f"{saving.percent:.0f} %",
        saving.size.paper,
    ]
    return f"| {' | '.join(cells)} |"
