"""The number of programs of a compiled kernel that fit on a GPU at once.

Programs that wait for one another must all be running. A grid of at most (compute units) times
(programs that fit on one) is resident. The latter follows from registers, shared memory and warps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft.errors import Unsupported


@dataclass(frozen=True)
class Unit:
    """The resources of one compute unit (CU, SM). A warp is called a wave on AMD."""

    lanes: int  # threads of a warp
    partitions: int  # each has its own registers and its own warps
    registers: int  # of a partition, in registers of one lane
    register_step: int  # per lane: registers are allocated in multiples of it
    warps: int  # of a partition, at most
    shared: int  # bytes
    shared_step: int
    shared_extra: int  # bytes that every program takes in addition
    programs: int


GFX942 = Unit(64, 4, 512 * 64, 8, 8, 64 * 1024, 512, 0, 16)
GFX950 = Unit(64, 4, 512 * 64, 8, 8, 160 * 1024, 1280, 0, 16)
SM_90 = Unit(32, 4, 512 * 32, 8, 16, 228 * 1024, 128, 1024, 32)

UNITS = {"gfx942": GFX942, "gfx950": GFX950, "sm_90": SM_90, "sm_100": SM_90}
"""Public figures: AMD's CDNA 3 and CDNA 4 ISA guides (512 vector registers per lane and 8 waves per
SIMD, 64 and 160 KiB of LDS), NVIDIA's CUDA programming guide, technical specifications of compute
capability 9.0 and 10.0 (65536 registers, 64 warps, 228 KiB, 32 programs per SM)."""


@dataclass(frozen=True)
class Resources:
    """The resources of one program of a compiled kernel. `registers` are those of a lane, `spilled`
    the registers (AMD) or bytes (NVIDIA) that were moved to memory; None if unknown."""

    registers: int | None
    spilled: int | None
    shared: int
    warps: int


def programs_per_unit(resources: Resources, unit: Unit) -> int:
    """The number of programs that fit on one compute unit, possibly 0."""
    warps = unit.warps
    if resources.registers:
        step = unit.register_step
        per_lane = -(-resources.registers // step) * step
        warps = min(warps, unit.registers // (per_lane * unit.lanes))
    by_warps = warps // max(1, -(-resources.warps // unit.partitions))
    if resources.warps < unit.partitions:  # several programs share a row of partitions
        by_warps = warps * unit.partitions // resources.warps
    shared = -(-(resources.shared + unit.shared_extra) // unit.shared_step) * unit.shared_step
    by_shared = unit.shared // shared if shared else unit.programs
    return min(by_warps, by_shared, unit.programs)


def unit_of(architecture: str) -> Unit:
    """The compute unit of an architecture, by Triton's or torch's name for it."""
    name = architecture.split(":")[0]
    found = UNITS.get(name)
    if found is None and (match := re.fullmatch(r"sm_?(\d+)a?", name)):
        found = UNITS.get(f"sm_{match[1]}")
    if found is None:
        raise Unsupported(
            f"weft does not know how many programs fit on {architecture}; "
            f"it knows {', '.join(UNITS)}; pass grid= to say it yourself"
        )
    return found
