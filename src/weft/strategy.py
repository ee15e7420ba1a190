"""Strategies for concurrent compute and communication (C3), where neither needs the other.

    name                          who moves the collective   how
    serial                        cores                      it ends before the GEMM starts
    concurrent                    cores                      it is launched after the GEMM
    prioritized                   cores                      it is launched before the GEMM
    partitioned:K                 cores                      it has K compute units of its own
    prioritized+partitioned:K     cores                      both
    dma                           copy engines               it uses no compute unit
    dma+trimmed:K                 copy engines               the GEMM leaves K units unused

A strategy is for independent work what a schedule is for dependent work. It is frozen, printed as
a name, and parsed from it (`partitioned(32)` works, too). On a host, a compute unit is a core.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from weft.errors import Unsupported, nearest

Driver = Literal["cores", "dma"]

NAMES = (
    "serial",
    "concurrent",
    "prioritized",
    "partitioned",
    "prioritized+partitioned",
    "dma",
    "dma+trimmed",
)
"""The names without units, from no overlap to most overlap."""

_COUNTED = ("partitioned", "prioritized+partitioned", "dma+trimmed")
_GRAMMAR = re.compile(r"(?P<base>[a-z+]+)(?:[:(](?P<units>\d{1,6})\)?)?")


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy. `reserved` units belong to the collective; `trimmed` units stay unused."""

    engine: Driver = "cores"
    serial: bool = False
    prioritized: bool = False
    reserved: int = 0
    trimmed: int = 0

    def __post_init__(self) -> None:
        if self.reserved < 0 or self.trimmed < 0:
            raise Unsupported("a strategy cannot set fewer than 0 compute units aside")
        if self.engine == "dma" and (self.serial or self.prioritized or self.reserved):
            raise Unsupported("copy engines take no compute unit: there is none to give them")
        if self.engine == "cores" and self.trimmed:
            raise Unsupported("units are trimmed beside copy engines; beside cores, reserve them")
        if self.serial and (self.prioritized or self.reserved):
            raise Unsupported("serial runs nothing side by side: there is nothing to set aside")

    @property
    def base(self) -> str:
        """The name without units."""
        if self.serial:
            return "serial"
        if self.engine == "dma":
            return "dma+trimmed" if self.trimmed else "dma"
        if self.reserved:
            return "prioritized+partitioned" if self.prioritized else "partitioned"
        return "prioritized" if self.prioritized else "concurrent"

    @property
    def units(self) -> int:
        """The number of compute units in the name; 0 if it has none."""
        return self.reserved or self.trimmed

    @property
    def name(self) -> str:
        """The full name, from which `Strategy.parse` returns the same strategy."""
        return f"{self.base}:{self.units}" if self.units else self.base

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, name: str) -> Strategy:
        """The strategy with a name such as `prioritized`, `partitioned:32`, `dma+trimmed:8`."""
        match = _GRAMMAR.fullmatch(name.strip())
        if match is None:
            raise Unsupported(
                f"{name!r} is no strategy name; write NAME or NAME:UNITS, e.g. partitioned:32"
            )
        base, units = match.group("base", "units")
        if base not in NAMES:
            raise Unsupported(
                f"there is no strategy {base!r}{nearest(base, NAMES)}; known: {', '.join(NAMES)}"
            )
        return cls.of(base, None if units is None else int(units))

    @classmethod
    def of(cls, base: str, units: int | None = None) -> Strategy:
        """The strategy with a name from `NAMES`, and its compute units if the name needs them."""
        if (units is not None) != (base in _COUNTED):
            raise Unsupported(
                f"give the number of compute units that {base} sets aside, e.g. {base}:8"
                if units is None
                else f"{base} sets no compute units aside; leave out ':{units}'"
            )
        if units == 0:
            raise Unsupported(f"{base} must set at least 1 compute unit aside, not 0")
        if base == "dma+trimmed":
            return cls("dma", trimmed=units or 0)
        return cls(
            "dma" if base == "dma" else "cores",
            serial=base == "serial",
            prioritized="prioritized" in base,
            reserved=units or 0,
        )
