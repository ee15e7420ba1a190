"""What one GEMM, one collective or one copy takes on a machine, what that time is made of, and the
measurement nearest to it. The same costs that the simulator gives to tasks which run alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.errors import Unsupported, nearest
from weft.machine import Machine
from weft.operation import ranks_label
from weft.plan.collective import UNROOTED
from weft.simulate.cost import collective, copy, gemm
from weft.simulate.cost.collective_cost import VARIANTS, parts
from weft.study.nearest import (
    Nearest,
    nearest_collective,
    nearest_copy,
    nearest_gemm,
    nearest_variant,
)

MOST = 1 << 48
ENGINES = ("cores", "dma")


@dataclass(frozen=True)
class Price:
    """`parts` follow each other and add up to `seconds`. `facts` are further numbers as text, by
    name; `said` is what is no number, and `numbers` all of it as plain data."""

    machine: Machine
    head: str
    what: str
    seconds: float
    parts: tuple[tuple[str, float], ...]
    facts: dict[str, str]
    numbers: dict[str, Any]
    nearest: Nearest | None
    said: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data, times in milliseconds."""
        return {
            "machine": self.machine.name,
            "what": self.what,
            "ms": 1e3 * self.seconds,
            "parts": [{"name": name, "ms": 1e3 * seconds} for name, seconds in self.parts],
            **self.numbers,
            "nearest_measurement": None if self.nearest is None else self.nearest.to_json(),
        }


def price_gemm(
    machine: Machine,
    m: int,
    n: int,
    k: int,
    dtype: str = "bfloat16",
    *,
    batch: int = 1,
    units: int | None = None,
) -> Price:
    """C[m, n] = A[m, k] B[k, n] on all compute units or on so many."""
    _positive(m=m, n=n, k=k, batch=batch)
    cost = gemm(machine, m, n, k, dtype, units=units, batch=batch)
    start = machine.launch.kernel
    arithmetic, memory = cost.compute_seconds, cost.memory_seconds
    bound = "memory" if memory > arithmetic else "arithmetic"
    pieces = [("kernel start and end", start)]
    if cost.launch > start:
        pieces.append(("second pass over split K", cost.launch - start))
    pieces.append((f"body ({bound})", max(arithmetic, memory)))
    rate = 2.0 * batch * m * n * k / cost.seconds
    peak = machine.compute.peak.get(dtype)
    held = machine.compute.units if units is None else units
    facts = {
        "arithmetic, ms": f"{1e3 * arithmetic:.4f}",
        "memory traffic, ms": f"{1e3 * memory:.4f}",
        "memory traffic, MB": f"{cost.bytes / 1e6:.1f}",
        "TFLOP/s": f"{rate / 1e12:.1f}",
    }
    if peak is not None:
        facts["of the data sheet"] = f"{100 * rate / peak:.0f} %"
    facts["compute units"] = str(held)
    said = ""
    if machine.compute.tiling is not None:
        said = f"tiles of {cost.tile[0]} x {cost.tile[1]} in {_count(cost.waves, 'wave')}"
        said += f", K split in {cost.split_k}" if cost.split_k > 1 else ""
    numbers: dict[str, Any] = {
        "gemm": {"m": m, "n": n, "k": k, "batch": batch, "dtype": dtype},
        "units": held,
        "arithmetic_ms": 1e3 * arithmetic,
        "memory_ms": 1e3 * memory,
        "bound": bound,
        "bytes": cost.bytes,
        "tflops": rate / 1e12,
        "percent_of_peak": None if peak is None else 100.0 * rate / peak,
        "tile": list(cost.tile),
        "waves": cost.waves,
        "split_k": cost.split_k,
    }
    if units is not None and units < machine.compute.units:
        whole = gemm(machine, m, n, k, dtype, batch=batch).seconds
        facts["against all units"] = f"{cost.seconds / whole:.2f}x"
        numbers["times_all_units"] = cost.seconds / whole
    what = f"GEMM {m} x {n} x {k} {dtype}" + (f", batch {batch}" if batch > 1 else "")
    near = nearest_gemm(machine, m, n, k, dtype, batch)
    return Price(
        machine, machine.name, what, cost.seconds, tuple(pieces), facts, numbers, near, said
    )


def price_collective(
    machine: Machine,
    kind: str,
    size: int,
    world: int | None = None,
    *,
    engine: str = "cores",
    variant: str | None = None,
    prelaunched: bool = False,
    units: int | None = None,
) -> Price:
    """A collective into which each rank puts `size` bytes: its shard for an all-gather, its whole
    input for the others. By a library's kernels on the compute units, or by copy engines."""
    _positive(size=size)
    if kind not in UNROOTED:
        raise Unsupported(
            f"there is no collective {kind!r}{nearest(kind, UNROOTED)}; "
            f"known: {', '.join(UNROOTED)}"
        )
    check_engine(engine)
    world = machine.links.world if world is None else world
    if not 2 <= world <= machine.links.world:
        raise Unsupported(
            f"{machine.name} has {machine.links.world} devices; a collective takes 2 or more of "
            f"them, not {world}"
        )
    if engine == "dma" and units is not None:
        raise Unsupported("copy engines take no compute units; leave out --units")
    if engine == "cores" and (variant is not None or prelaunched):
        raise Unsupported("only copy engines have variants; add --engine dma")
    if units is not None and not 1 <= units <= machine.compute.units:
        raise Unsupported(
            f"{machine.name} has 1 to {machine.compute.units} compute units to give, not {units}"
        )
    if variant is not None and variant not in (of := VARIANTS.get(kind, VARIANTS["all_to_all"])):
        raise Unsupported(
            f"{kind} has no variant {variant!r}{nearest(variant, of)}; known: {', '.join(of)}"
        )
    total = size * world if kind == "all_gather" else size
    pieces = parts(
        machine,
        kind,
        total,
        world,
        driver=engine,
        variant=variant,
        prelaunch=prelaunched,
        units=units,
    )
    seconds = sum(one for _, one in pieces)
    sent = total * (world - 1) / world * (2.0 if kind == "all_reduce" else 1.0)
    numbers: dict[str, Any] = {
        "collective": kind,
        "world": world,
        "engine": engine,
        "size_bytes": size,
        "total_bytes": total,
        "bus_gb_per_s": sent / seconds / 1e9,
    }
    facts = {"bus bandwidth": f"{sent / seconds / 1e9:.1f} GB/s"}
    if engine == "cores":
        enough = machine.cores.all_to_all_units
        if kind != "all_to_all":
            enough = machine.cores.all_gather_units
        held = enough if units is None else min(units, enough)
        facts["compute units"] = str(held)
        numbers["units"] = held
        if held < enough:
            whole = collective(machine, kind, total, world)
            facts["against enough units"] = f"{seconds / whole:.2f}x"
            numbers["times_enough_units"] = seconds / whole
        near = nearest_collective(machine, kind, total, world)
    else:
        facts["compute units"] = "0" if kind in VARIANTS else "-"  # those of the adding kernel
        near = nearest_variant(machine, kind, total, variant, prelaunched)
    what = f"{kind}, {ranks_label(world)}, {size} bytes from each"
    head = f"{machine.name}\n{engine}"
    return Price(machine, head, what, seconds, pieces, facts, numbers, near)


def price_copy(
    machine: Machine,
    size: int,
    *,
    engine: str = "dma",
    rows: int = 1,
    prelaunched: bool = False,
    local: bool = False,
) -> Price:
    """A copy of bytes that lie in `rows` equal runs, to one peer or inside the device."""
    _positive(size=size, rows=rows)
    check_engine(engine)
    if prelaunched and engine != "dma":
        raise Unsupported("only copy engines can be prelaunched; leave out --prelaunched")
    cost = copy(machine, size, rows=rows, engine=engine, prelaunched=prelaunched, remote=not local)
    pieces = (
        ("command, until bytes flow", cost.command),
        ("bytes", cost.bytes / cost.rate),
        ("until the waiter knows", cost.completion),
    )
    facts = {
        "rate while bytes flow": f"{cost.rate / 1e9:.1f} GB/s",
        "rate in all": f"{size / cost.seconds / 1e9:.1f} GB/s",
        "compute units": str(cost.units),
    }
    numbers = {
        "size_bytes": size,
        "rows": rows,
        "engine": engine,
        "local": local,
        "prelaunched": prelaunched,
        "gb_per_s": size / cost.seconds / 1e9,
        "flowing_gb_per_s": cost.rate / 1e9,
        "units": cost.units,
    }
    near = nearest_copy(machine, size) if engine == "dma" and not local else None
    where = "inside the device" if local else "to one peer"
    what = f"copy of {size} bytes {where}" + (f" in {rows} rows" if rows > 1 else "")
    head = f"{machine.name}\n{engine}"
    return Price(machine, head, what, cost.seconds, pieces, facts, numbers, near)


def check_engine(engine: str) -> None:
    """Raises unless it is known who moves the bytes."""
    if engine not in ENGINES:
        raise Unsupported(
            f"bytes are moved by cores or dma, not {engine!r}{nearest(engine, ENGINES)}"
        )


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if not 1 <= size <= MOST:
            raise Unsupported(f"{name} must be from 1 to 2^48, not {size}")
