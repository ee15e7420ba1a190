"""How independent work runs side by side: a strategy for concurrent compute and communication, C3.

    name                          the collective is moved by   and
    serial                        cores                        ends before the GEMM starts
    concurrent                    cores                        is launched behind the GEMM
    prioritized                   cores                        is launched ahead of the GEMM
    partitioned:K                 cores                        has K compute units to itself
    prioritized+partitioned:K     cores                        both
    dma                           copy engines                 takes no compute unit
    dma+trimmed:K                 copy engines                 the GEMM goes without K units

A strategy is to C3 what a schedule is to dependent work: frozen, printed as a name, parsed back
from it (`partitioned(32)` is read too). On a host a compute unit is a core.
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
"""The names without units, from no overlap to the most."""

_COUNTED = ("partitioned", "prioritized+partitioned", "dma+trimmed")
_GRAMMAR = re.compile(r"(?P<base>[a-z+]+)(?:[:(](?P<units>\d{1,6})\)?)?")


@dataclass(frozen=True, slots=True)
class Strategy:
    """A point of the space above. `reserved` units are the collective's, `trimmed` ones nobody's;
    0 of either is none."""

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
        """The compute units that the name counts; 0 where it counts none."""
        return self.reserved or self.trimmed

    @property
    def name(self) -> str:
        """The full name; `Strategy.parse` gives the same strategy back."""
        return f"{self.base}:{self.units}" if self.units else self.base

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, name: str) -> Strategy:
        """The strategy of a name such as `prioritized`, `partitioned:32`, `dma+trimmed:8`."""
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
        """The strategy of a name from `NAMES`, with its compute units where it counts some."""
        if (units is not None) != (base in _COUNTED):
            raise Unsupported(
                f"say how many compute units {base} sets aside, e.g. {base}:8"
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
