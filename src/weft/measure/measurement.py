"""Measures the schedules of an operation on this machine: interleaved arms, medians, and ratios
within one run.

Every round runs each arm once (compute alone, communication alone, and every schedule). The order
rotates by one from round to round, so that a slow moment of the machine affects all arms equally.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from weft.fabric import Link, of
from weft.measure import busyness
from weft.measure.arms import arms_of
from weft.measure.busyness import Company
from weft.measure.launch import Report, launch
from weft.measure.link_spec import LinkSpec, paced
from weft.measure.stopping import stop_asked
from weft.operation import Operation
from weft.plan.tasks import Plannable
from weft.run.explain import explain_plan
from weft.run.record import record
from weft.schedule import Schedule
from weft.select.decision import AUTO
from weft.select.guard import MOST_CALLS
from weft.timeline import Timeline, percent_of_ideal

WARM_UP = 2
SERIAL = "serial@dma"
YARDSTICK = "yardstick"
YARDSTICK_CALLS = 16
"""The yardstick runs this many times in a row, so that its operands are in the cache."""
RECORDED = 3
"""The number of rounds that record spans, after the measured rounds."""


@dataclass(frozen=True)
class Arm:
    """The figures of one schedule: medians over rounds, of the slowest rank.

    `speedup` and `percent_of_ideal` are medians of ratios within a round. The arms of a round run
    close to each other, so that a change in the speed of the machine does not distort the ratios.
    """

    name: str
    seconds: float
    speedup: float
    percent_of_ideal: float
    gemm_slowdown: float
    bytes_by_engine: dict[str, int]
    timeline: Timeline = field(repr=False, default_factory=lambda: Timeline(()))
    """One recorded call. Its time need not be the median."""
    samples: tuple[float, ...] = field(repr=False, default=())
    chose: str = ""
    """What `auto` has chosen; empty for other arms."""
    why: str = ""

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of the rounds lie between them."""
        if len(self.samples) < 2:
            return self.seconds, self.seconds
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high

    @property
    def spread_percent(self) -> float:
        """Half the distance of the quartiles, in percent of the median."""
        low, high = self.quartiles
        return 50.0 * (high - low) / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        chosen = {"chose": self.chose, "why": self.why} if self.chose else {}
        return {
            "name": self.name,
            **chosen,
            "median_ms": self.seconds * 1e3,
            "quartiles_ms": [1e3 * seconds for seconds in self.quartiles],
            "speedup": self.speedup,
            "percent_of_ideal": self.percent_of_ideal,
            "gemm_slowdown": self.gemm_slowdown,
            "bytes": self.bytes_by_engine,
        }


@dataclass(frozen=True)
class Measurement:
    """All arms of one operation on one link."""

    operation: Operation
    link: Link
    compute: float
    communication: float
    serial: float
    arms: tuple[Arm, ...]
    yardstick: float = 0.0
    """Seconds of the yardstick GEMM; 0 if none was requested."""
    auto: Arm | None = None
    """Calls with `schedule="auto"`, after it has settled; None if it was not asked for."""
    company: Company | None = None
    """What other programs used meanwhile; None if that is unknown."""
    threads: int = 1

    @property
    def ideal(self) -> float:
        return max(self.compute, self.communication)

    @property
    def busy(self) -> bool:
        """Whether other programs took part of the cores that the ranks wanted."""
        wanted = self.operation.world * self.threads
        return self.company is not None and self.company.disturbs(wanted)

    @property
    def every(self) -> tuple[Arm, ...]:
        """All arms, `auto` last."""
        return self.arms if self.auto is None else (*self.arms, self.auto)

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def best(self) -> Arm:
        return min(self.arms, key=lambda arm: arm.seconds)

    def to_json(self) -> dict[str, Any]:
        return {
            "operation": self.operation.label,
            "link": str(self.link),
            "compute_ms": self.compute * 1e3,
            "communication_ms": self.communication * 1e3,
            "serial_ms": self.serial * 1e3,
            "ideal_ms": self.ideal * 1e3,
            "schedules": [arm.to_json() for arm in self.arms],
            "auto": None if self.auto is None else self.auto.to_json(),
            "busy": self.busy,
            "cores_used_by_others": None if self.company is None else self.company.others,
        }


def measure(
    operation: Plannable,
    link: LinkSpec,
    schedules: Sequence[Schedule],
    *,
    repeat: int = 15,
    threads: int = 1,
    yardstick: tuple[int, int, int] | None = None,
    device: str = "cpu",
    auto: bool = False,
    report: Report | None = None,
    stop: str | None = None,
) -> Measurement:
    """Starts the ranks and measures. `serial@dma` is always among the arms.

    stop: the path of a file that ends the measurement after a round, from `stopping.stop_file`.

    auto: whether also calls with `schedule="auto"`, which has settled on a schedule before.

    yardstick: M, N, K of a float32 GEMM that runs as one of the arms and shows how fast the machine
    is at that time. device: where the tensors are; rank r uses the r-th of that kind.
    """
    serial = Schedule.parse("serial")
    arms = list(dict.fromkeys([serial, *schedules]))
    for schedule in arms:
        operation.lower(schedule)
    before = busyness.now()
    results = launch(
        operation.world,
        _measure_rank,
        operation,
        link,
        arms,
        repeat,
        yardstick,
        device,
        auto,
        stop,
        threads=threads,
        report=report,
    )
    result: Measurement = results[0]
    company = busyness.between(before, busyness.now())
    return replace(result, company=company, threads=threads)


def _measure_rank(
    report: Report,
    operation: Plannable,
    spec: LinkSpec,
    schedules: list[Schedule],
    repeat: int,
    yardstick: tuple[int, int, int] | None,
    device: str,
    auto: bool,
    stop: str | None,
) -> Measurement | None:
    finish = prepare_device(device)
    fabric = of(None, device)
    made = arms_of(operation, fabric)
    report(0.0, "warming up")
    alone = statistics.median(timed(finished(made.compute, finish)) for _ in range(5))
    link = spec.link or paced(operation, spec, _slowest(alone))
    fabric.set_link(link)
    arms: dict[str, Callable[[], None]] = {
        "compute": made.compute,
        "communication": made.communicate,
    }
    if yardstick is not None:
        arms[YARDSTICK] = _multiplications(*yardstick)
    arms.update({str(schedule): made.call(schedule) for schedule in schedules})
    if auto:
        arms[AUTO] = made.call(AUTO)
    arms = {name: finished(arm, finish) for name, arm in arms.items()}
    chosen = _settled(arms[AUTO], report) if auto else None
    samples = interleaved(arms, repeat, report, stop=stop)
    timelines: dict[str, list[Timeline]] = {}
    for name in [*map(str, schedules), *([AUTO] if auto else [])]:
        report(1.0, f"recording {name}")
        timelines[name] = _recorded(arms[name])
    if fabric.rank != 0:
        return None
    return _summarise(operation, link, schedules, samples, timelines, chosen)


def _settled(call: Callable[[], None], report: Report) -> tuple[str, str]:
    """Calls `auto` until it has compared its choice with serial; the schedule on which it has
    settled, and the reason. Collective: every rank makes as many calls."""
    for number in range(MOST_CALLS + 1):
        report(0.0, f"auto tries its choice, call {number + 1}")
        call()
    found = explain_plan()
    assert found is not None
    return found[1].schedule, found[1].why


def prepare_device(device: str) -> Callable[[], object] | None:
    """Makes this rank use its device. Returns the function that waits for it; None for the CPU,
    which does its work at once."""
    if device == "cpu":
        return None
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    if device == "loom":
        from weft import loom

        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        loom.load()
    else:
        torch.accelerator.set_device_index(dist.get_rank())
    return torch.accelerator.synchronize


def finished(arm: Callable[[], None], finish: Callable[[], object] | None) -> Callable[[], None]:
    """An arm that ends when the device has done its work."""
    if finish is None:
        return arm

    def run() -> None:
        arm()
        finish()

    return run


def interleaved(
    arms: dict[str, Callable[[], None]],
    repeat: int,
    report: Report,
    before: Callable[[], None] | None = None,
    stop: str | None = None,
) -> dict[str, list[float]]:
    """The seconds of every arm in every round, of the slowest rank. Collective.

    before: called before every arm, outside its time, so that no arm inherits another's caches.
    """
    names = list(arms)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-WARM_UP, repeat):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            if before is not None:
                before()
            seconds = timed(arms[name])
            if number >= 0:
                samples[name].append(seconds)
        report((number + WARM_UP + 1) / (repeat + WARM_UP), f"round {max(number, 0) + 1}")
        if number >= 0 and stop_asked(stop):
            break
    own = torch.tensor([samples[name] for name in names], dtype=torch.float64)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return {name: row.tolist() for name, row in zip(names, own, strict=True)}


def _multiplications(m: int, n: int, k: int) -> Callable[[], None]:
    a, b, c = torch.ones(m, k), torch.ones(k, n), torch.empty(m, n)

    def multiply() -> None:
        for _ in range(YARDSTICK_CALLS):
            torch.mm(a, b, out=c)

    return multiply


def timed(function: Callable[[], object]) -> float:
    """The seconds of one call that all ranks start together."""
    dist.barrier()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _slowest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def _recorded(function: Callable[[], None]) -> list[Timeline]:
    with record() as recording:
        for _ in range(RECORDED):
            dist.barrier()
            function()
    return recording.gather()


def _summarise(
    operation: Plannable,
    link: Link,
    schedules: list[Schedule],
    samples: dict[str, list[float]],
    timelines: dict[str, list[Timeline]],
    chosen: tuple[str, str] | None,
) -> Measurement:
    median = {name: statistics.median(values) for name, values in samples.items()}
    compute, communication = median["compute"], median["communication"]
    serial = median[SERIAL]

    def arm(name: str, schedule: Schedule, chose: str = "", why: str = "") -> Arm:
        recorded = sorted(timelines[name], key=lambda t: t.seconds)[RECORDED // 2]
        matmul = max(recorded.matmul_seconds(rank) for rank in range(operation.world))
        return Arm(
            name=name,
            seconds=median[name],
            speedup=statistics.median(
                one / other for one, other in zip(samples[SERIAL], samples[name], strict=True)
            ),
            percent_of_ideal=percent_over_rounds(samples, name, SERIAL),
            gemm_slowdown=matmul / compute if compute > 0 else 1.0,
            bytes_by_engine=operation.lower(schedule).bytes_by_engine(0),
            timeline=recorded,
            samples=tuple(samples[name]),
            chose=chose,
            why=why,
        )

    arms = tuple(arm(str(schedule), schedule) for schedule in schedules)
    auto = None if chosen is None else arm(AUTO, Schedule.parse(chosen[0]), *chosen)
    known = median.get(YARDSTICK, 0.0) / YARDSTICK_CALLS
    return Measurement(operation, link, compute, communication, serial, arms, known, auto)


def percent_over_rounds(samples: Mapping[str, Sequence[float]], arm: str, serial: str) -> float:
    """The percent of ideal of an arm over `serial`: the median over rounds. `samples` also has the
    arms `compute` and `communication`."""
    names = (serial, arm, "compute", "communication")
    rounds = zip(*(samples[name] for name in names), strict=True)
    return statistics.median(percent_of_ideal(*times) for times in rounds)
