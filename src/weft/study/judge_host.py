"""Judges `auto` on this machine by measurement: its final choice against every candidate.

One group of ranks runs all scenarios. In each scenario, `auto` first makes the calls that its guard
watches. Then all candidates take turns, so that a slow moment affects them equally. The best of
twenty noisy medians would be a lucky one. So a few rounds only select the candidates that can be
the best, and the figures come from further rounds of these.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from math import ceil
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import Unsupported
from weft.fabric import Link, of
from weft.measure.launch import Report, launch
from weft.measure.measurement import interleaved
from weft.measure.stopping import stop_asked
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.tasks import Copy
from weft.run import session as sessions
from weft.run.explain import explain_plan
from weft.schedule import Schedule
from weft.select import auto
from weft.select.guard import MOST_CALLS
from weft.select.heuristic import candidates
from weft.study.judgement import IN_SET, Drawn, Judgement, Verdict, chosen, size

ROWS = (1, 4096)
COLUMNS = (32, 1024)
INNER = (64, 1024)
LINKS = ("memory", "0.1GB/s", "0.5GB/s", "2GB/s")
FINDING = 2
"""The rounds of all candidates that select those which can be the best."""
NEAR = 1.3
"""A candidate can be the best if it takes at most this many times the best time of its set."""
REPEAT = 31
"""The rounds of the selected candidates, which give the figures."""
AT_LEAST, MOST_IN_A_ROW = 5e-3, 32
"""The shortest sample in seconds, and the most calls in a sample. Ranks do not start at exactly the
same moment, which would distort short samples."""
TOLERANCE = 0.05
"""A choice counts as slower than serial beyond this share. Smaller differences are noise."""

Calls = Mapping[Schedule, Callable[[], Any]]


def draw(seed: int, number: int, world: int) -> Drawn:
    """The measured scenario with that number."""
    random = Random(f"weft judge host {seed} {number}")
    m, n, k = size(random, ROWS, 1), size(random, COLUMNS, 1), size(random, INNER, 1)
    operation = AllGatherMatmul.of(m, n, k, world, "float32")
    return Drawn(operation, 1.0, random.choice(LINKS))


def judge_host(
    count: int, seed: int, report: Report | None = None, stop: str | None = None
) -> Judgement:
    """Judges `auto` by measurement, on two ranks, or one per core up to four. stop: the path of a
    file that ends it after a scenario, from `stopping.stop_file`."""
    if count < 1:
        raise Unsupported(f"there must be at least 1 scenario, not {count}")
    world = max(2, min(4, len(os.sched_getaffinity(0))))
    drawn = [draw(seed, number, world) for number in range(count)]
    verdicts = launch(world, _on_rank, drawn, stop, report=report)[0]
    return Judgement("cpu", seed, TOLERANCE, tuple(verdicts))


def _on_rank(report: Report, scenarios: list[Drawn], stop: str | None) -> list[Verdict]:
    verdicts = []
    for number, drawn in enumerate(scenarios):
        if number and stop_asked(stop):
            break
        text = f"{number + 1} of {len(scenarios)}: {drawn.operation.label}"
        report(number / len(scenarios), text)
        verdicts.append(_verdict(drawn))
    return verdicts


def _verdict(drawn: Drawn) -> Verdict:
    operation, rank = drawn.operation, dist.get_rank()
    fabric = of(None)
    fabric.set_link(Link.parse(drawn.link))
    x = torch.randn(operation.rows[rank], operation.k)
    weights = [torch.randn(operation.k, n) for n in operation.columns[rank]]

    def call(schedule: str | Schedule) -> Callable[[], Any]:
        return lambda: all_gather_matmul(x, weights, schedule=schedule, shard_rows=operation.rows)

    memory = auto.of(sessions.of(fabric))
    memory.mode = "heuristic"  # not what was tuned: that would be looking up the answer
    for _ in range(MOST_CALLS + 1):
        call("auto")()
    explained = explain_plan()
    assert explained is not None
    explanation = explained[1]
    among = candidates(operation.world)
    settled = Schedule.parse(explanation.schedule)
    choices = {**chosen(memory.machine, operation, among), "heuristic": settled}
    twin = _twins(operation, [*among, settled], fabric.link.paced)
    choices = {kind: twin[schedule] for kind, schedule in choices.items()}
    calls = {schedule: call(schedule) for schedule in dict.fromkeys(twin.values())}
    found = _measured(calls, 1, FINDING)
    near = _contenders(found, choices)
    quickest = min(found.values())
    in_a_row = max(1, min(MOST_IN_A_ROW, ceil(AT_LEAST / quickest)))
    counted = _measured({schedule: calls[schedule] for schedule in near}, in_a_row, REPEAT)
    # Candidates that were not selected are far behind, so their few rounds are enough.
    return Verdict(drawn, choices, {**found, **counted})


def _twins(
    operation: AllGatherMatmul, schedules: Sequence[Schedule], paced: bool
) -> dict[Schedule, Schedule]:
    """Maps every schedule to the first one that does the same here; only that one is measured.
    Measuring the same thing twice would give noise two chances to win.

    On two ranks a step has one chunk, fused or not. At memory speed, an engine and a core copy in
    the same way. In place, nothing arrives to which adaptive could adapt.
    """
    first: dict[object, Schedule] = {}
    twin = {}
    for schedule in sorted(schedules, key=lambda s: s.fusion == "adaptive"):
        adapts = schedule.fusion == "adaptive" and schedule.engine != "direct"
        done: list[object] = [adapts]
        for task in operation.lower(schedule).tasks:
            engine = task.engine if isinstance(task, Copy) and paced else ""
            done.append((task.rank, task.lane, task.reads(), task.writes(), task.after, engine))
        twin[schedule] = first.setdefault(tuple(done), schedule)
    return twin


def _contenders(
    found: Mapping[Schedule, float], choices: Mapping[str, Schedule]
) -> Collection[Schedule]:
    """The candidates that can be the best of a set, the chosen ones, and serial, in order."""
    near = {*choices.values(), *(schedule for schedule in found if schedule.serial)}
    for within in IN_SET.values():
        some = {schedule: seconds for schedule, seconds in found.items() if within(schedule)}
        most = NEAR * min(some.values())
        near.update(schedule for schedule, seconds in some.items() if seconds <= most)
    selected: list[Any] = [sorted(near, key=str)]
    dist.broadcast_object_list(selected, src=0)  # all ranks must measure the same candidates
    return list(selected[0])


def _measured(calls: Calls, in_a_row: int, repeat: int) -> dict[Schedule, float]:
    """The median seconds per call of each schedule, of the slowest rank. Collective."""

    def several(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(in_a_row):
                call()

        return run

    arms = {str(schedule): several(call) for schedule, call in calls.items()}
    samples = interleaved(arms, repeat, lambda share, text: None)
    return {schedule: statistics.median(samples[str(schedule)]) / in_a_row for schedule in calls}
