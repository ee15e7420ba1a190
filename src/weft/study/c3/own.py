"""A user's own GEMM beside their own collective: every strategy simulated, and which one to use.

Here serial is the GEMM and then the collective, carried out in whichever way is quickest alone; so
a strategy is credited for overlap, never for a better way to move bytes. Ideal is the longer of the
two. (The scenarios of `simulated` keep to the definition of the study that they repeat.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.dtype import ITEM_BYTES
from weft.errors import Unsupported, nearest
from weft.machine import DTYPES, Machine
from weft.plan.concurrent import COLLECTIVES, SUMMING, Collective, Concurrent
from weft.simulate import run
from weft.simulate.cost import collective
from weft.strategy import Strategy
from weft.study.c3 import rules
from weft.study.c3.findings import C3Outcome
from weft.study.c3.simulated import TRIMS, WORLD, AloneTimes, outcome_of

KINDS: tuple[Collective, ...] = (*COLLECTIVES, *SUMMING)
NEAR = 1.01
"""A simpler strategy is preferred to one that is quicker by less than this factor."""
WORTH = 1.01
"""A speedup below this is not worth running things side by side."""
SIMPLEST = (
    "serial",
    "dma",
    "prioritized",
    "concurrent",
    "dma+trimmed",
    "partitioned",
    "prioritized+partitioned",
)
"""Names without units, those that are easiest to use first."""


@dataclass(frozen=True)
class CaseQuestion:
    """A GEMM of M, N, K on every rank, beside a collective into which each rank puts `size` bytes:
    its shard for an all-gather, its whole input for the others."""

    m: int
    n: int
    k: int
    collective: Collective
    size: int
    dtype: str = "bfloat16"
    world: int = WORLD

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "size"):
            value = getattr(self, name)
            if not 1 <= value <= 1 << 48:
                raise Unsupported(f"{name} must be from 1 to 2^48, not {value}")
        if self.collective not in KINDS:
            raise Unsupported(
                f"there is no collective {self.collective!r}{nearest(self.collective, KINDS)}; "
                f"known: {', '.join(KINDS)}"
            )
        if self.dtype not in ITEM_BYTES or self.dtype not in DTYPES:
            raise Unsupported(
                f"there is no dtype {self.dtype!r}{nearest(self.dtype, ITEM_BYTES)}; "
                f"known: {', '.join(ITEM_BYTES)}"
            )
        if self.world < 2:
            raise Unsupported(f"a collective takes 2 ranks or more, not {self.world}")

    @property
    def total(self) -> int:
        """Bytes of the collective as libraries count them: an all-gather's result, the input of
        the others."""
        return self.size * self.world if self.collective == "all_gather" else self.size

    def operation(self, machine: Machine) -> Concurrent:
        shape = (self.m, self.n, self.k)
        moved = _moved(machine, self.total, self.world) if self.collective == "all_reduce" else None
        return Concurrent.of(shape, self.collective, self.total, self.world, self.dtype, moved)


@dataclass(frozen=True)
class CaseAnswer:
    """What a machine makes of a question. `ways` is the collective alone by who moves it, `refused`
    the strategies that cannot be had, with the reason."""

    question: CaseQuestion
    machine: Machine
    gemm: float
    memory_bound: bool
    ways: dict[str, float]
    tried: tuple[C3Outcome, ...]
    refused: dict[str, str]

    @property
    def way(self) -> str:
        """Who moves the collective quickest when it is alone."""
        return min(self.ways, key=lambda name: self.ways[name])

    @property
    def serial(self) -> float:
        return self.gemm + self.ways[self.way]

    @property
    def ideal(self) -> float:
        return max(self.gemm, self.ways[self.way])

    @property
    def use(self) -> C3Outcome:
        """The simplest of the strategies that are as good as the quickest."""
        best = min(self.tried, key=lambda one: one.seconds)
        if best.speedup < WORTH:
            return self.tried[0]
        near = [one for one in self.tried if one.seconds <= NEAR * best.seconds]
        return min(near, key=lambda one: SIMPLEST.index(one.strategy.base))

    def verdict(self) -> str:
        """Which strategy to use, in a sentence or two."""
        use, name = self.use, self.machine.name
        possible = f"{self.serial / self.ideal:.2f}x is possible at most"
        if use.strategy.serial:
            best = max(self.tried[1:], key=lambda one: one.speedup)
            return (
                f"On {name}, run the collective ({self.way}) and the GEMM one after the other: "
                f"the best strategy beside that, {best.strategy}, gives {best.speedup:.2f}x "
                f"({possible})."
            )
        return (
            f"On {name}, use {use.strategy}: {1e3 * use.seconds:.3f} ms instead of "
            f"{1e3 * self.serial:.3f} ms one after the other, {use.speedup:.2f}x "
            f"({possible}). The GEMM then takes {use.gemm_slowdown:.2f}x as long as alone."
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data, times in milliseconds."""
        asked = self.question
        return {
            "machine": self.machine.name,
            "title": self.machine.title,
            "world": asked.world,
            "dtype": asked.dtype,
            "gemm": {"m": asked.m, "n": asked.n, "k": asked.k},
            "gemm_bound": "memory" if self.memory_bound else "compute",
            "collective": asked.collective,
            "size_bytes": asked.size,
            "total_bytes": asked.total,
            "gemm_ms": 1e3 * self.gemm,
            "collective_ms": {name: 1e3 * seconds for name, seconds in self.ways.items()},
            "serial_ms": 1e3 * self.serial,
            "ideal_ms": 1e3 * self.ideal,
            "strategies": [_named(one) for one in self.tried],
            "refused": self.refused,
            "use": self.use.strategy.name,
            "verdict": self.verdict(),
        }


def _named(outcome: C3Outcome) -> dict[str, Any]:
    """An outcome with the keys that the answer to a single question has."""
    said = outcome.to_json()
    return {"name": said.pop("strategy"), "total_ms": said.pop("ms"), **said}


def ask(machine: Machine, question: CaseQuestion) -> CaseAnswer:
    """Simulates every strategy for a question on a node of the machine."""
    if machine.host is not None or machine.compute.tiling is None:
        raise Unsupported(
            f"a case of your own is simulated on devices, and {machine.name} is a host; "
            "`weft c3 --machine cpu` measures scenarios here"
        )
    if question.world > machine.links.world:
        raise Unsupported(
            f"{machine.name} has {machine.links.world} devices; --world {question.world} is more"
        )
    operation = question.operation(machine)
    summing = question.collective in SUMMING
    gemm = run(operation.compute_only().lower(Strategy.of("concurrent")), machine).seconds
    moving = operation.communication_only()
    ways = {"cores": run(moving.lower(Strategy.of("concurrent")), machine).seconds}
    if summing:
        # Copies by engines and a kernel that adds: possible alone, but never beside a GEMM that
        # has the compute units.
        asked = (question.collective, operation.total_bytes, question.world)
        ways["dma"] = collective(machine, *asked, driver="dma", variant="pcpy")
    else:
        ways["dma"] = run(moving.lower(Strategy.of("dma")), machine).seconds
    communication = min(ways.values())
    serial = gemm + communication
    alone = AloneTimes(gemm, ways, communication, serial)

    def tried(strategy: Strategy) -> C3Outcome:
        return outcome_of(machine, operation, strategy, alone)

    refused: dict[str, str] = {}
    if summing:
        reason = f"copy engines cannot add, and {question.collective} adds"
        refused = {"dma": reason, "dma+trimmed": reason}
    first = C3Outcome(Strategy.of("serial"), serial, 1.0, 0.0, 1.0, 1.0)
    best = [
        min(map(tried, swept), key=lambda one: one.seconds) for swept in _swept(machine, summing)
    ]
    return CaseAnswer(
        question,
        machine,
        gemm,
        rules.is_memory_bound(machine, operation),
        ways,
        (first, *best),
        refused,
    )


def _swept(machine: Machine, summing: bool) -> Iterator[Sequence[Strategy]]:
    """Every strategy but serial, with the units that are tried for those that count some."""
    for base in ("concurrent", "prioritized"):
        yield (Strategy.of(base),)
    for base in ("partitioned", "prioritized+partitioned"):
        yield tuple(Strategy.of(base, units) for units in rules.partitions(machine))
    if not summing:
        yield (Strategy.of("dma"),)
        yield tuple(
            Strategy.of("dma+trimmed", units) for units in TRIMS if units < machine.compute.units
        )


def _moved(machine: Machine, total: int, world: int) -> int:
    """What an all-gather would gather to send as many bytes as an all-reduce: parts travel twice,
    or the vector once where the switch adds and is quicker."""
    around = replace(machine, cores=replace(machine.cores, in_switch=None))
    asked = ("all_reduce", total, world)
    if collective(machine, *asked) < collective(around, *asked):
        return total * world // (world - 1)
    return 2 * total
