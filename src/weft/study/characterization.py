"""The losses of overlapping a GEMM with communication, over a grid of shapes:

    decomposition   the parts of a GEMM, one after the other, against the whole GEMM: cut into 8 and
                    64 parts along M (rows) and along K (columns; partial sums are accumulated)
    contention      the GEMM during copies from all peers, against the GEMM alone: copies by copy
                    engines (dma) and by compute units (cores)

Both are shares: 0.25 means 25 % longer. They decide between schedules, and a choice that is made
before anything runs must estimate them from sizes. This file simulates a machine;
`weft.study.characterize_host` measures this host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import Any

from weft.dtype import ITEM_BYTES, NARROW, accumulator
from weft.errors import keeping
from weft.machine import Machine
from weft.measure.launch import Report
from weft.operation import split
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.builder import Builder
from weft.plan.tasks import Plan, Region
from weft.schedule import Schedule
from weft.simulate import run
from weft.study.scenarios import Shape

CUTS = (("m", 8), ("m", 64), ("k", 8), ("k", 64))
"""The axis along which a GEMM is cut, and the number of parts."""
DRIVERS = ("dma", "cores")
GRID = ((64, 512, 4096, 32768), (1024, 8192), (1024, 8192, 65536))
"""M, N and K on one device: from memory-bound GEMMs to the largest of the FiCCO evaluation."""
CHUNK = 16 << 20
"""The bytes of one copy during a GEMM."""
LONGER = 3.0
"""Communication takes this many times as long as the GEMM alone, so that it never ends first."""


@dataclass(frozen=True)
class Character:
    """The losses of one GEMM. shape: the GEMM of one device. seconds: its time alone."""

    shape: Shape
    seconds: float
    decomposition: Mapping[tuple[str, int], float]
    contention: Mapping[str, float]

    @property
    def num_bytes(self) -> int:
        """The memory traffic if everything is read and written once."""
        m, n, k = self.shape.m, self.shape.n, self.shape.k
        return (m * k + k * n + m * n) * ITEM_BYTES[self.shape.dtype]

    @property
    def op_to_byte(self) -> float:
        """Floating point operations per byte of memory traffic."""
        return 2.0 * self.shape.m * self.shape.n * self.shape.k / self.num_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            **{axis: getattr(self.shape, axis) for axis in ("m", "n", "k", "dtype")},
            "op_to_byte": self.op_to_byte,
            "memory_bytes": self.num_bytes,
            "ms": 1e3 * self.seconds,
            "decomposition": {f"{axis}{n}": loss for (axis, n), loss in self.decomposition.items()},
            "contention": dict(self.contention),
        }


@dataclass(frozen=True)
class Characterization:
    """All shapes on one machine, simulated or measured."""

    machine: str
    title: str
    measured: bool
    characters: tuple[Character, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data. Losses are shares of the time of the GEMM alone."""
        return {
            "machine": self.machine,
            "measured": self.measured,
            "shapes": [character.to_json() for character in self.characters],
        }


def shapes_of(grid: Sequence[Sequence[int]], dtype: str) -> tuple[Shape, ...]:
    """The shapes of a grid of M, N and K."""
    return tuple(Shape(m, n, k, dtype=dtype) for m, n, k in product(*grid))


def characterize(
    machine: Machine, shapes: Sequence[Shape] | None = None, report: Report | None = None
) -> Characterization:
    """Simulates the losses of shapes (default: `GRID`) on a node of the machine."""
    if shapes is None:
        rates = machine.compute.rate
        shapes = shapes_of(GRID, "bfloat16" if "bfloat16" in rates else next(iter(rates)))
    characters: list[Character] = []

    def found() -> Characterization:
        return Characterization(machine.name, machine.title, False, tuple(characters))

    with keeping(lambda: found() if characters else None):
        for number, shape in enumerate(shapes):
            if report is not None:
                report(number / len(shapes), shape.label)
            characters.append(_simulated(machine, shape))
    return found()


def _simulated(machine: Machine, shape: Shape) -> Character:
    whole = run(cut_plan(shape, "m", 1), machine).seconds
    cut = {
        (axis, pieces): run(cut_plan(shape, axis, pieces), machine).seconds / whole - 1.0
        for axis, pieces in CUTS
    }
    beside = {}
    for engine in DRIVERS:
        simulation = run(_beside_plan(machine, shape, engine, whole), machine)
        (piece,) = simulation.compute_pieces(0)
        beside[engine] = (piece.end - piece.body) / piece.alone - 1.0
    return Character(shape, whole, cut, beside)


def pieces_of(size: int, parts: int) -> Iterator[tuple[int, int]]:
    """(start, length) of every part of an even cut, without empty parts."""
    start = 0
    for length in split(size, parts):
        if length:
            yield start, length
        start += length


def cut_plan(shape: Shape, axis: str, pieces: int) -> Plan:
    """One device multiplies a shape in parts, one after the other."""
    operation = AllGatherMatmul.of(shape.m, shape.n, shape.k, 1, shape.dtype)
    builder = Builder(operation, Schedule.parse("serial"))
    a = builder.add_buffer("a", 0, shape.m, shape.k, "input")
    b = builder.add_buffer("b", 0, shape.k, shape.n, "input")
    c = builder.add_buffer("c", 0, shape.m, shape.n, "output")
    if axis == "m":
        for start, rows in pieces_of(shape.m, pieces):
            builder.matmul(
                0, a.rows_of(start, rows), b.all(), c.rows_of(start, rows), label=f"row {start}"
            )
        return builder.plan()
    sums = c
    if shape.dtype in NARROW:
        sums = builder.add_buffer(
            "sums", 0, shape.m, shape.n, "workspace", accumulator(shape.dtype)
        )
    for start, columns in pieces_of(shape.k, pieces):
        block = Region(0, "a", 0, shape.m, start, columns)
        slab = b.rows_of(start, columns)
        more = start > 0
        builder.matmul(0, block, slab, sums.all(), accumulate=more, label=f"column {start}")
    if sums is not c:
        builder.permute(0, [(sums.all(), c.all())], label="round")
    return builder.plan()


def _beside_plan(machine: Machine, shape: Shape, engine: str, alone: float) -> Plan:
    """Every device multiplies a shape while it repeatedly copies from all others."""
    world = machine.links.world
    operation = AllGatherMatmul.of(shape.m, shape.n, shape.k, world, shape.dtype)
    builder = Builder(operation, Schedule.parse(f"serial@{engine}"))
    columns = max(1, CHUNK // ITEM_BYTES[shape.dtype] // 1024)
    sources = [builder.add_buffer("source", r, 1024, columns, "input") for r in range(world)]
    rate = machine.links.out_of_device(world) / max(1, world - 1)
    copies = ceil(LONGER * alone * rate / CHUNK)
    for rank in range(world):
        a = builder.add_buffer("a", rank, shape.m, shape.k, "input")
        b = builder.add_buffer("b", rank, shape.k, shape.n, "input")
        c = builder.add_buffer("c", rank, shape.m, shape.n, "output")
        builder.matmul(rank, a.all(), b.all(), c.all(), label="whole")
        for step in range(1, world):
            peer = (rank + step) % world
            name = f"from {peer}"
            target = builder.add_buffer(name, rank, 1024, columns, "workspace")
            for _ in range(copies):
                builder.copy(rank, sources[peer].all(), target.all(), peer=peer, label=name)
    return builder.plan()
