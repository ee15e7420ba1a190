"""Simulates what communication from inside a kernel saves over serial, for sizes of real models."""

from __future__ import annotations

from typing import NamedTuple

from weft.machine import Machine
from weft.study.exploration import Scenario, ScheduleOutcome, explore
from weft.study.scenarios import Shape

WORLD, DTYPE = 8, "bfloat16"


class Size(NamedTuple):
    """A size, and the saving that arXiv 2305.06942 (Fused Computation-Collective Operations)
    reports for the operator at other sizes."""

    what: str
    operation: str
    m: int
    n: int
    k: int
    paper: str


SIZES = (
    Size("DLRM lookups: 16384 bags, pooling 32, 1664 columns a GPU", "embedding_all_to_all",
         16384, 1664, 32, "20 %"),
    Size("DLRM lookups: 8192 bags, pooling 64, 3328 columns a GPU", "embedding_all_to_all",
         8192, 3328, 64, "20 %"),
    Size("Llama-3 70B decode, 8 rows, MLP down: 8192 x 3584 a GPU", "matmul_all_reduce",
         8, 8192, 3584, "up to 22 %"),
    Size("Llama-3 405B decode, 8 rows, MLP down: 16384 x 6656 a GPU", "matmul_all_reduce",
         8, 16384, 6656, "up to 22 %"),
    Size("Mixtral 8x7B combine, 8192 rows a GPU: 4096 x 14336", "matmul_all_to_all",
         8192, 4096, 14336, "up to 20 %"),
    Size("DeepSeek-V3 combine, 8192 rows a GPU: 7168 x 2048", "matmul_all_to_all",
         8192, 7168, 2048, "up to 20 %"),
)  # fmt: skip
"""M, N per GPU, and K."""


class Saving(NamedTuple):
    """A size, and its simulation under every schedule."""

    size: Size
    scenario: Scenario

    @property
    def fused(self) -> float:
        return self.scenario.outcome("in-kernel").seconds

    @property
    def chunked(self) -> ScheduleOutcome:
        """The best schedule with several launches, other than serial."""
        others = [o for o in self.scenario.outcomes if not o.schedule.serial]
        return min((o for o in others if o.schedule.fusion != "kernel"), key=lambda o: o.seconds)

    @property
    def percent(self) -> float:
        """The saving over serial (the faster one of copy engines and cores), in percent."""
        return 100 * (1 - self.fused / self.scenario.serial)


def savings(machine: Machine) -> list[Saving]:
    """Simulates every size on 8 devices of a machine."""
    return [Saving(size, _simulated(machine, size)) for size in SIZES]


def _simulated(machine: Machine, size: Size) -> Scenario:
    shape = Shape(size.m, size.n * WORLD, size.k, dtype=DTYPE)
    return explore(machine, size.operation, [shape], WORLD).scenarios[0]
