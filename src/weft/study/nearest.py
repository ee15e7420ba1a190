"""The measurement nearest to what was asked, and what the model says of that measurement.

Files are found by name: `gemm_h100*.csv` holds GEMMs of `h100`, `nccl_h100*.csv` its collectives.
Distances are counted in doublings: 8192 is one doubling away from 4096.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import hypot, log2
from typing import Any

from weft.dtype import PUBLISHED
from weft.machine import Machine, measurements
from weft.machine.measurements import names
from weft.simulate.cost import collective, copy, gemm
from weft.simulate.cost.collective_cost import VARIANTS, dma_variants

ALSO = {"mi300x": ("gfx942",), "mi325x": ("gfx942",)}
"""Names in file names under which a machine was measured, besides its own."""
KINDS = {"alltoall": "all_to_all"}

Row = dict[str, str]


@dataclass(frozen=True)
class Nearest:
    """A measurement `far` doublings away. `measured` and `model` are in `unit`."""

    what: str
    source: str
    measured: float
    model: float
    unit: str
    far: float

    @property
    def error(self) -> float:
        """How far the model is off, as a share of the measurement."""
        return self.model / self.measured - 1.0

    def text(self) -> str:
        away = "at this very size" if self.far < 0.005 else f"{self.far:.1f} doublings away"
        return (
            f"{self.what}, {away}: measured {self.measured:.4g} {self.unit}, "
            f"model {self.model:.4g} {self.unit} ({100 * self.error:+.1f} %; {self.source})"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "source": self.source,
            "measured": self.measured,
            "model": self.model,
            "unit": self.unit,
            "error_percent": 100.0 * self.error,
            "doublings_away": self.far,
        }


def nearest_gemm(
    machine: Machine, m: int, n: int, k: int, dtype: str, batch: int = 1
) -> Nearest | None:
    """The nearest measured GEMM of the same dtype, on all compute units."""

    def shape(row: Row) -> tuple[int, int, int, int]:
        return int(row["m"]), int(row["n"]), int(row["k"]), int(row.get("batch", "1"))

    found = _nearest(
        (r for r in _rows(machine, "gemm") if PUBLISHED.get(r["dtype"]) == dtype),
        shape,
        (m, n, k, batch),
    )
    if found is None:
        return None
    row, far = found
    sizes = shape(row)
    seconds = gemm(machine, *sizes[:3], dtype, batch=sizes[3]).seconds
    what = " x ".join(map(str, sizes[:3])) + (f" in batches of {sizes[3]}" if sizes[3] > 1 else "")
    return Nearest(what, row["source"], float(row["us"]), 1e6 * seconds, "us", far)


def nearest_collective(machine: Machine, kind: str, total: float, world: int) -> Nearest | None:
    """The nearest measured collective of a library: of the same kind, of as many devices if there
    are such, of the nearest size."""
    rows = []
    for row in (*_rows(machine, "nccl"), *_rows(machine, "rccl")):
        named = row.get("collective") or next((k for k in _COLLECTIVES if k in row["source"]), "")
        if KINDS.get(named, named) == kind:
            rows.append({"world": str(machine.links.world), **row})
    if not rows:
        return None
    counts = {int(row["world"]) for row in rows}
    count = min(counts, key=lambda some: abs(log2(some / world)))
    same = [row for row in rows if int(row["world"]) == count]
    found = _nearest(same, lambda row: (int(row["bytes"]),), (total,))
    assert found is not None
    row, far = found
    size = int(row["bytes"])
    seconds = collective(machine, kind, size, count)
    what = f"{kind} of {size} bytes in all on {count} devices"
    return Nearest(what, row["source"], float(row["us"]), 1e6 * seconds, "us", far)


def nearest_variant(
    machine: Machine, kind: str, total: float, variant: str | None, prelaunch: bool
) -> Nearest | None:
    """The nearest measured collective on copy engines. What was published are ratios: how many
    times as fast as plain copies side by side, one engine per peer."""
    if kind not in VARIANTS:
        return None
    rows = [r for r in _rows(machine, "dma_collective_variants") if r["collective"] == kind]
    found = _nearest(rows, lambda row: (int(row["total_bytes"]),), (total,))
    if found is None:
        return None
    row, far = found
    size = int(row["total_bytes"])
    times = dma_variants(machine, kind, size, machine.links.world)
    special = VARIANTS[kind][1]
    published = {
        ("pcpy", True): "pcpy_prelaunch",
        (special, False): "bcst_or_swap",
        (special, True): "bcst_or_swap_prelaunch",
        ("b2b", False): "b2b",
        ("b2b", True): "b2b_prelaunch",
    }
    if variant is None:
        wanted = min((key for key in times if key[1] == prelaunch), key=lambda key: times[key])
    else:
        wanted = (variant, prelaunch)
    if wanted == ("pcpy", False):  # what the others were published against
        wanted = ("pcpy", True)
    plain = times["pcpy", False]
    what = f"{kind} of {size} bytes in all, {wanted[0]}{' prelaunched' if wanted[1] else ''}"
    measured = float(row[published[wanted]])
    return Nearest(
        what, row["source"], measured, plain / times[wanted], "x the speed of plain copies", far
    )


def nearest_copy(machine: Machine, size: float) -> Nearest | None:
    """The nearest measured copy by one engine to one peer: its rate, or which share of it passes
    without bytes."""
    found = _nearest(_rows(machine, "dma_put"), lambda row: (int(row["bytes"]),), (size,))
    if found is not None:
        row, far = found
        number = int(row["bytes"])
        rate = number / copy(machine, number, prelaunched=True).seconds / 1e9
        what = f"put of {number} bytes, prelaunched"
        return Nearest(what, row["source"], float(row["gb_per_s"]), rate, "GB/s", far)
    found = _nearest(_rows(machine, "dma_copy"), lambda row: (int(row["bytes"]),), (size,))
    if found is None:
        return None
    row, far = found
    number = int(row["bytes"])
    cost = copy(machine, number)
    # What the source calls copying starts when the engine has the command.
    moving = machine.engines.packet + cost.bytes / cost.rate
    share = 100.0 * (1.0 - moving / cost.seconds)
    what = f"copy of {number} bytes, share of its time before and after copying"
    return Nearest(what, row["source"], float(row["non_copy_percent"]), share, "%", far)


_COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")


def _rows(machine: Machine, kind: str) -> list[Row]:
    """All rows about a machine, with the name of their file as `source`."""
    known = (machine.name, *ALSO.get(machine.name, ()))
    wanted = [f"{kind}_{name}" for name in known]
    files = [
        file
        for file in names()
        if any(file == start or file.startswith(start + "_") for start in wanted)
    ]
    return [{**row, "source": f"{file}.csv"} for file in files for row in measurements(file)]


def _nearest(
    rows: Iterable[Row], sizes: Callable[[Row], Sequence[float]], wanted: Sequence[float]
) -> tuple[Row, float] | None:
    best: tuple[Row, float] | None = None
    for row in rows:
        far = hypot(*(log2(a / b) for a, b in zip(sizes(row), wanted, strict=True)))
        if best is None or far < best[1]:
            best = (row, far)
    return best
