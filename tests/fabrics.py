"""The fabrics that operators are tested on: one entry each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ranks import Environment, Pool, Pools

import weft


@dataclass(frozen=True)
class Fabric:
    """How ranks come to use a fabric, and what it can do."""

    name: str
    worlds: Sequence[int]
    """How many ranks it is tested with."""
    environment: Mapping[int, Environment] = field(default_factory=dict)
    """What its ranks have in their environment, by the size of the world; nothing if not named."""
    in_place: bool = True
    """Whether a kernel can read and write the memory of peers."""

    def pool(self, pools: Pools, world: int) -> Pool:
        return pools.get(world, self.environment.get(world))

    def able(self, schedules: Sequence[str]) -> list[str]:
        """Those of the schedules that this fabric can carry out."""
        return [name for name in schedules if self.in_place or not _in_place(name)]


def _in_place(name: str) -> bool:
    return name != "auto" and weft.Schedule.parse(name).engine == "direct"


FLAT: Environment = {"WEFT_FABRIC": "flat"}

FABRICS = {
    fabric.name: fabric
    for fabric in (
        Fabric("host", (1, 2, 3, 4, 5, 6, 7, 8)),
        # Ranks that reach each other by messages alone.
        Fabric("flat", (2, 3, 4), dict.fromkeys((2, 3, 4), FLAT), in_place=False),
        # Several machines with several ranks each: one letter per rank says on which it is.
        Fabric(
            "two_level",
            (3, 4, 5),
            {len(hosts): {"WEFT_HOST": tuple(hosts)} for hosts in ("aab", "aabb", "ababc")},
            in_place=False,
        ),
    )
}
