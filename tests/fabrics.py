"""The fabrics that operators are tested on: one entry each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from loom_fabric import LoomPools, LoomRanks
from rank_pools import Environment, Pool, Pools

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
    """Whether compute can read and write the memory of peers."""
    in_kernel: bool = True
    """Whether a kernel can communicate by itself."""

    def pool(self, pools: Pools, world: int) -> Pool:
        return pools.get(world, self.environment.get(world))

    def able(self, schedules: Sequence[str]) -> list[str]:
        """Those of the schedules that this fabric can carry out."""
        return [name for name in schedules if self._is_able(name)]

    def some(self, seeds: Sequence[int]) -> Sequence[int]:
        """Those of the seeds that `make test` has time for."""
        return seeds

    def _is_able(self, name: str) -> bool:
        if name == "auto":
            return True
        schedule = weft.Schedule.parse(name)
        if schedule.fusion == "kernel":
            return self.in_kernel
        return self.in_place or schedule.engine != "direct"


@dataclass(frozen=True)
class OnLoom(Fabric):
    """The emulated device. Its operations run as late as the program allows, after random delays,
    or in one hardware queue."""

    settings: Mapping[int, Mapping[str, object]] = field(default_factory=dict)

    def pool(self, pools: Pools, world: int) -> LoomRanks:  # type: ignore[override]
        from weft.loom import build

        reason = build.why_not()
        if reason:
            pytest.skip(reason)
        build.library()  # here, where no deadline runs
        own = pools.others.setdefault("loom", LoomPools(pools))
        return own.get(world, **(MODE or self.settings.get(world, {})))

    def some(self, seeds: Sequence[int]) -> Sequence[int]:
        return seeds if ALL_ON_LOOM else seeds[-1:]


ALL_ON_LOOM = os.environ.get("WEFT_TEST_LOOM", "") == "all"
"""Whether the emulated device runs all cases, which takes long."""

MODE: dict[str, object] = {}
"""How the emulated device behaves in all worlds, if WEFT_TEST_LOOM_MODE says: a mode, or
queues=1."""
if os.environ.get("WEFT_TEST_LOOM_MODE"):
    _asked = os.environ["WEFT_TEST_LOOM_MODE"]
    MODE = {"queues": int(_asked[7:])} if _asked.startswith("queues=") else {"mode": _asked}

FLAT: Environment = {"WEFT_FABRIC": "flat"}

FABRICS = {
    fabric.name: fabric
    for fabric in (
        Fabric("host", (1, 2, 3, 4, 5, 6, 7, 8)),
        # Ranks that reach each other by messages alone.
        Fabric("flat", (2, 3, 4), dict.fromkeys((2, 3, 4), FLAT), in_place=False, in_kernel=False),
        # Several machines with several ranks each: one letter per rank says on which it is.
        Fabric(
            "two_level",
            (3, 4, 5),
            {len(hosts): {"WEFT_HOST": tuple(hosts)} for hosts in ("aab", "aabb", "ababc")},
            in_place=False,
            in_kernel=False,
        ),
        OnLoom(
            "loom",
            (1, 2, 3, 4),
            in_kernel=False,
            settings={
                1: {"mode": "eager"},
                2: {"mode": "late"},
                3: {"mode": "random"},
                4: {"mode": "late", "queues": 1},
            },
        ),
    )
}
