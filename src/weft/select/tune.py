"""`weft.tune(fn)`: measures every candidate in the calls that `fn` makes, and keeps the fastest.

Rank 0 chooses the candidate, as it makes every choice. `fn` is not changed, and is called on all
ranks the same number of times. Candidates take turns in rounds, so that a slow moment of the
machine does not affect only one of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from weft.errors import Error, Unsupported
from weft.fabric import VERSION, Fabric
from weft.fabric import of as fabric_of
from weft.run import session as sessions
from weft.schedule import Schedule
from weft.select import auto, store
from weft.select.heuristic import Choice, candidates

Samples = dict[Any, dict[Schedule, list[float]]]
Report = Callable[[float, str], None]


def tune(
    fn: Callable[[], Any],
    *,
    group: dist.ProcessGroup | None = None,
    repeat: int = 5,
    report: Report | None = None,
    stop: Callable[[], bool] | None = None,
) -> dict[str, str]:
    """Finds the fastest schedule for every `schedule="auto"` call that fn makes on a group.

    All ranks of the group call it, with an fn that makes the same calls. The results are kept, and
    `schedule="auto"` uses them from then on, in this and in later processes on this machine.

    Args:
        fn: makes weft calls, e.g. one forward pass; called many times.
        repeat: measured calls of every candidate.
        report: called with the share that is done, and the candidate that is measured.
        stop: called after every round, in which each candidate is measured once; whether to end
            with it. The answer must be the same on every rank.

    Returns:
        The schedule found for every operation, by its label; the same on every rank.
    """
    if repeat < 1:
        raise Unsupported(f"tuning needs at least 1 repeat, not {repeat}")
    fabric = fabric_of(group)
    if fabric.world == 1:
        return {}
    if fabric.can.two_level:
        raise Unsupported(
            'schedules are tuned on one machine; between machines "auto" is adaptive@dma, and a '
            "call can name another"
        )
    memory = auto.of(sessions.of(fabric))
    samples: Samples = {}
    space = candidates(fabric.world)
    try:
        for number in range(repeat):
            for index, schedule in enumerate(space):
                if report is not None:
                    report((number + index / len(space)) / repeat, str(schedule))
                # The first call of a turn makes plans, and meets peers that expect another one.
                for counts in (False, True):
                    memory.forced = Choice(schedule, "being tuned")
                    memory.observer = _observer(samples, schedule) if counts else _ignore
                    fn()
            if stop is not None and stop():
                break
    finally:
        memory.forced = memory.observer = None
    return _keep(fabric, memory, samples)


def _observer(samples: Samples, schedule: Schedule) -> Callable[[Any, float], None]:
    def observe(operation: Any, seconds: float) -> None:
        samples.setdefault(operation, {}).setdefault(schedule, []).append(seconds)

    return observe


def _ignore(operation: Any, seconds: float) -> None:
    """A call that does not count."""


def _keep(fabric: Fabric, memory: auto.Auto, samples: Samples) -> dict[str, str]:
    """Stores the results on rank 0, and sends them to all ranks."""
    found: dict[str, str] = {}
    failure = ""
    if fabric.rank == 0:
        try:
            for operation, measured in samples.items():
                answer = answer_of(measured)
                asked = store.question(operation, str(fabric.link), VERSION)
                store.keep(asked, answer)
                found[operation.label] = answer.schedule.name
        except Error as error:
            failure = str(error)
    memory.forget()
    shared: list[Any] = [found, failure]
    first = dist.get_global_rank(fabric.group, 0)
    dist.broadcast_object_list(shared, src=first, group=fabric.group)
    if shared[1]:
        raise Unsupported(shared[1])
    if not shared[0]:
        raise Unsupported('nothing was tuned: fn makes no weft call with schedule="auto"')
    tuned: dict[str, str] = shared[0]
    return tuned


def answer_of(measured: dict[Schedule, list[float]]) -> store.Answer:
    """The schedule with the least median; serial if nothing is measurably faster."""
    median = {schedule: statistics.median(values) for schedule, values in measured.items()}
    serial = min((s for s in median if s.serial), key=median.__getitem__)
    best = min(median, key=median.__getitem__)
    if median[best] > median[serial] * 0.99:
        best = serial
    return store.Answer(best, median[best], median[serial])
