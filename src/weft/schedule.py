"""Schedules: how communication is cut into chunks and overlapped with compute.

    axis      values                                  meaning
    depth     0 serial, 1 shard, d chunks per shard   how fine communication is cut
    pattern   peer, all                               one peer at a time, or all links at once
    cut       rows (1d), columns (2d)                 what a chunk is
    start     uniform, local (hetero)                 whether local data waits for step 0
    fusion    fused, unfused, adaptive                GEMM per step, per chunk, or over what arrived
              kernel                                  one launch whose workers send their results
    engine    dma, cores, direct                      who moves the bytes

A schedule is printed as a name and parsed from it: `NAME[:DEPTH][@ENGINE]`, with NAME one of
`serial`, `shard-p2p`, `adaptive`, `in-kernel` (communication inside the kernel; the old name
`fused` still parses), or `{uniform|hetero}-{fused|unfused|adaptive}-{1d|2d}[-p2p]`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Protocol

from weft.errors import Unsupported, nearest

Pattern = Literal["peer", "all"]
Cut = Literal["rows", "columns"]
Start = Literal["uniform", "local"]
Fusion = Literal["fused", "unfused", "adaptive", "kernel"]
Engine = Literal["dma", "cores", "direct"]

ENGINES: tuple[Engine, ...] = ("dma", "cores", "direct")
MAX_DEPTH = 4096

_STARTS: dict[str, Start] = {"uniform": "uniform", "hetero": "local"}
_CUTS: dict[str, Cut] = {"1d": "rows", "2d": "columns"}
_FUSIONS: dict[str, Fusion] = {"fused": "fused", "unfused": "unfused", "adaptive": "adaptive"}
_PATTERNS: dict[str, Pattern] = {"": "all", "-p2p": "peer"}
_GRAMMAR = re.compile(r"(?P<name>[a-z0-9-]+)(?::(?P<depth>\d{1,9}))?(?:@(?P<engine>[a-z0-9]+))?")


class Sized(Protocol):
    """The properties of an operation that a schedule needs."""

    @property
    def world(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """A point of the design space. If `depth` is None, the operation's lowering chooses it."""

    depth: int | None = None
    pattern: Pattern = "all"
    cut: Cut = "rows"
    start: Start = "local"
    fusion: Fusion = "fused"
    engine: Engine = "dma"

    @property
    def serial(self) -> bool:
        """Whether nothing is overlapped: all communication comes before compute."""
        return self.depth == 0

    @property
    def base(self) -> str:
        """The name without depth and engine."""
        own = _REGISTERED.get(self.with_engine("dma")) if _REGISTERED else None
        return own or _BASE_OF.get(self._key(), self._long_name())

    @property
    def name(self) -> str:
        """The full name, from which `Schedule.parse` returns the same schedule."""
        return _name(self)

    def __str__(self) -> str:
        return self.name

    def with_engine(self, engine: Engine) -> Schedule:
        return replace(self, engine=engine)

    @staticmethod
    def parse(name: str) -> Schedule:
        """The schedule with that name, e.g. `adaptive`, `adaptive:16@dma`, `hetero-fused-1d`."""
        if not isinstance(name, str):
            raise Unsupported(f"a schedule is parsed from its name, not from {name!r}")
        return Schedule._parse(name)

    @staticmethod
    @lru_cache(maxsize=1024)
    def _parse(name: str) -> Schedule:
        match = _GRAMMAR.fullmatch(name.strip())
        if match is None:
            raise Unsupported(
                f"{name!r} is no schedule name; write NAME[:DEPTH][@ENGINE], e.g. adaptive:16@dma"
            )
        base, depth, engine = match.group("name", "depth", "engine")
        if base in _OLD_NAMES:
            base = _OLD_NAMES[base]
            warnings.warn(
                f"the schedule {match['name']!r} is called {base!r} now",
                FutureWarning,
                stacklevel=4,
            )
        if base not in _NAMED:
            known = list(_NAMED)
            raise Unsupported(
                f"there is no schedule {base!r}{nearest(base, known)}; "
                f"the main names are {', '.join(MAIN_NAMES)} and {IN_KERNEL}"
            )
        schedule = _NAMED[base]
        if engine is not None:
            if engine not in ENGINES:
                raise Unsupported(
                    f"there is no engine {engine!r}{nearest(engine, ENGINES)}; "
                    f"the engines are {', '.join(ENGINES)}"
                )
            schedule = replace(schedule, engine=engine)
        if depth is not None:
            if not 1 <= int(depth) <= MAX_DEPTH:
                raise Unsupported(
                    f"the depth of {name!r} must be from 1 to {MAX_DEPTH}; "
                    "to not overlap at all use serial"
                )
            if base in ("serial", "shard-p2p"):
                raise Unsupported(f"{base} has a fixed depth; leave out ':{depth}'")
            schedule = replace(schedule, depth=int(depth))
        return schedule

    @classmethod
    def space(cls, operation: Sized) -> list[Schedule]:
        """All useful schedules of the operation, baselines first.

        Two kinds are left out, because another schedule is never worse: schedules in which local
        chunks wait although each chunk has its own GEMM (uniform with unfused or adaptive), and
        those that cut finer than shards but use one peer at a time. `impossible` returns the reason
        why a schedule cannot exist, and the operation's `refuses`, if it has this method, why the
        operation cannot have it. `in-kernel` is for operations with `in_kernel`, whose kernel can
        communicate.
        """
        refuses = getattr(operation, "refuses", lambda schedule: None)
        if operation.world == 1:
            return [cls.parse("serial")]
        inside = [cls.parse(IN_KERNEL)] if getattr(operation, "in_kernel", False) else []
        return [
            schedule
            for base in MAIN_NAMES
            for engine in ENGINES
            if (schedule := cls.parse(base).with_engine(engine)).impossible() is None
            and refuses(schedule) is None
        ] + inside

    def impossible(self) -> str | None:
        """The reason why no plan can exist for this schedule, or None if one can."""
        if self.engine not in ENGINES:
            return f"there is no engine {self.engine!r}; the engines are {', '.join(ENGINES)}"
        if self.depth is not None and not 0 <= self.depth <= MAX_DEPTH:
            return f"a depth of {self.depth} is outside 0 to {MAX_DEPTH}"
        if self.engine == "direct" and self.serial:
            return "serial moves everything before it computes; direct never moves anything"
        if self.engine == "direct" and self.fusion == "fused":
            return "a fused GEMM needs its chunks side by side; direct leaves them where they are"
        if self.engine == "direct" and self.cut == "columns":
            return (
                "direct has nothing to wait for inside a shard, so cutting columns only adds sums"
            )
        if self.fusion == "kernel":
            usual = Schedule(self.depth, fusion="kernel", engine="direct")
            if self.engine != "direct":
                return f"pieces leave from inside the kernel, so no engine moves them: {usual} does"
            if self != usual or self.serial:
                return "a kernel sends to all peers, remote pieces first, as they are made"
        if self.fusion == "adaptive" and self.cut == "columns":
            return "the order of sums would depend on which columns happen to arrive first"
        return None

    def _key(self) -> tuple[object, ...]:
        depth = (
            self.depth if (self.depth in (0, 1) and self.pattern == "peer") or self.serial else None
        )
        return (depth, self.pattern, self.cut, self.start, self.fusion)

    def _long_name(self) -> str:
        start = next(k for k, v in _STARTS.items() if v == self.start)
        cut = next(k for k, v in _CUTS.items() if v == self.cut)
        pattern = next(k for k, v in _PATTERNS.items() if v == self.pattern)
        return f"{start}-{self.fusion}-{cut}{pattern}"


@lru_cache(maxsize=4096)
def _name(schedule: Schedule) -> str:
    base = schedule.base
    default = _NAMED[base].depth if base in _NAMED else None
    depth = "" if schedule.depth == default else f":{schedule.depth}"
    return f"{base}{depth}@{schedule.engine}"


def _long_names() -> Iterator[tuple[str, Schedule]]:
    for start_name, start in _STARTS.items():
        for fusion_name, fusion in _FUSIONS.items():
            for cut_name, cut in _CUTS.items():
                for suffix, pattern in _PATTERNS.items():
                    name = f"{start_name}-{fusion_name}-{cut_name}{suffix}"
                    yield name, Schedule(None, pattern, cut, start, fusion)


_ALIASES: dict[str, Schedule] = {
    "serial": Schedule(depth=0, start="uniform"),
    "shard-p2p": Schedule(depth=1, pattern="peer", fusion="unfused"),
    "adaptive": Schedule(fusion="adaptive"),
    "in-kernel": Schedule(fusion="kernel", engine="direct"),
}
_OLD_NAMES = {"fused": "in-kernel"}
_REGISTERED: dict[Schedule, str] = {}
"""Registered names, for any engine."""
_NAMED: dict[str, Schedule] = {**_ALIASES, **dict(_long_names())}
_BASE_OF: dict[tuple[object, ...], str] = {s._key(): name for name, s in _ALIASES.items()}


def register(name: str, schedule: Schedule) -> None:
    """Gives a point of the design space a name, by which it is then parsed and printed."""
    if re.fullmatch(r"[a-z0-9-]+", name) is None or name == "auto" or name in _OLD_NAMES:
        raise Unsupported(f"{name!r} cannot be the name of a schedule; use letters, digits and -")
    if _NAMED.get(name, schedule) != schedule:
        raise Unsupported(f"there is another schedule {name!r} already: {_NAMED[name]!r}")
    _NAMED[name] = schedule
    _REGISTERED.setdefault(schedule.with_engine("dma"), name)
    _name.cache_clear()
    Schedule._parse.cache_clear()


IN_KERNEL = "in-kernel"
"""The name of the schedule in which a kernel communicates by itself."""

MAIN_NAMES: tuple[str, ...] = (
    "serial",
    "shard-p2p",
    "uniform-fused-1d",
    "hetero-fused-1d",
    "hetero-unfused-1d",
    "uniform-fused-2d",
    "hetero-fused-2d",
    "hetero-unfused-2d",
    "adaptive",
)
"""The base names in `Schedule.space`: two baselines, six fixed schedules, and weft's adaptive."""
