"""Links between the ranks of the host fabric: memory speed, or paced to behave like slower ones."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from weft.errors import Unsupported, nearest

Topology = Literal["mesh", "ring", "switch"]
TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)

SLOWEST = 1e3
"""The least bandwidth, in bytes per second."""
LONGEST = 1e6
"""The longest latency, in seconds: eleven days. In nanoseconds, the moment after it has 64 bits."""

_UNITS = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
_RATE = re.compile(
    r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)\s*((?:[kmg]i?)?b)/s\s*", re.IGNORECASE
)


@dataclass(frozen=True)
class Link:
    """The speed of the links between ranks.

    bandwidth: bytes per second of one link in each direction; None is memory speed. latency:
    seconds added to every transfer. topology: `mesh` has a link per pair, `ring` one to each
    neighbour, `switch` one port per rank that any peer can fill.
    """

    bandwidth: float | None = None
    latency: float = 0.0
    topology: Topology = "mesh"

    def __post_init__(self) -> None:
        if self.bandwidth is not None and not (SLOWEST <= self.bandwidth < math.inf):
            raise Unsupported(
                f"a link's bandwidth must be at least {SLOWEST / 1e3:g} kB/s, not "
                f"{self.bandwidth / 1e3:g} kB/s"
            )
        if not 0 <= self.latency <= LONGEST:
            raise Unsupported(
                f"a link's latency must be from 0 to {LONGEST:g} seconds, not {self.latency}"
            )
        if self.topology not in TOPOLOGIES:
            raise Unsupported(
                f"there is no topology {self.topology!r}{nearest(self.topology, TOPOLOGIES)}; "
                f"the topologies are {', '.join(TOPOLOGIES)}"
            )

    @property
    def paced(self) -> bool:
        return self.bandwidth is not None or self.latency > 0

    @classmethod
    def parse(cls, text: str, topology: Topology = "mesh", latency: float = 0.0) -> Link:
        """`memory`, or a rate such as `0.1GB/s`."""
        if text.strip() == "memory":
            return cls(None, latency, topology)
        match = _RATE.fullmatch(text)
        if match is None:
            raise Unsupported(f"{text!r} is not a link; write memory, or a rate such as 0.1GB/s")
        return cls(float(match[1]) * _UNITS[match[2].lower()], latency, topology)

    def __str__(self) -> str:
        if not self.paced:
            return "memory"
        rate = "memory" if self.bandwidth is None else f"{self.bandwidth / 1e9:.3g}GB/s"
        delay = f" +{self.latency * 1e6:.3g}us" if self.latency else ""
        return f"{rate}{delay} {self.topology}"
