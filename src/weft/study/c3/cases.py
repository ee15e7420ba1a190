"""The scenarios of C3: a GEMM and an independent collective, and which of them is longer."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weft.plan.concurrent import COLLECTIVES, Collective, Concurrent

Kind = Literal["G-long", "C-long", "GC-equal"]
KINDS: tuple[Kind, ...] = ("G-long", "GC-equal", "C-long")

LONGER = 1.15
"""The GEMM or the collective is the longer one if it takes this many times as long as the other."""

_DATA = Path(__file__).parent.parent / "scenarios" / "c3.csv"


@dataclass(frozen=True)
class C3Case:
    """A GEMM of M, N, K on every rank, concurrent with a collective of `num_bytes`."""

    id: str
    m: int
    n: int
    k: int
    collective: Collective
    num_bytes: int
    note: str = ""

    @property
    def label(self) -> str:
        return f"{self.id} {'ag' if self.collective == 'all_gather' else 'a2a'}"

    def operation(self, world: int, dtype: str) -> Concurrent:
        shape = (self.m, self.n, self.k)
        return Concurrent.of(shape, self.collective, self.num_bytes, world, dtype)


def kind_of(compute: float, communication: float) -> Kind:
    """Which of the two is longer, from their times alone."""
    if compute > LONGER * communication:
        return "G-long"
    return "C-long" if communication > LONGER * compute else "GC-equal"


def llama() -> tuple[C3Case, ...]:
    """The 30 scenarios of Llama-3 70B and 405B. Their file explains how they were chosen."""
    lines = [line for line in _DATA.read_text("utf-8").splitlines() if not line.startswith("#")]
    return tuple(
        C3Case(
            row["id"],
            int(row["m"]),
            int(row["n"]),
            int(row["k"]),
            collective,
            int(row["mebibytes"]) << 20,
            row["note"],
        )
        for collective in COLLECTIVES
        for row in csv.DictReader(lines)
    )
