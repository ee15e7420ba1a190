"""The same judgement on this machine, measured: what `auto` settles on, against every candidate.

One group of ranks goes through all scenarios. In each, `auto` makes the calls that its guard
watches; then all candidates take turns, so that a slow moment hits them alike.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import Unsupported
from weft.fabric import Link, of
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.run.explain import explain
from weft.schedule import Schedule
from weft.select import auto
from weft.select.guard import BLOCK
from weft.study.judge import Drawn, Judgement, Verdict, chosen, size
from weft.study.launch import Report, launch
from weft.study.measure import interleaved

ROWS = (1, 4096)
COLUMNS = (32, 1024)
INNER = (64, 1024)
LINKS = ("memory", "0.1GB/s", "0.5GB/s", "2GB/s")
REPEAT = 7
TOLERANCE = 0.05
"""Slower than serial by more counts: less is noise, on a machine that does other things too."""


def draw(seed: int, number: int, world: int) -> Drawn:
    """The measured scenario of that number."""
    random = Random(f"weft judge host {seed} {number}")
    m, n, k = size(random, ROWS, 1), size(random, COLUMNS, 1), size(random, INNER, 1)
    operation = AllGatherMatmul.of(m, n, k, world, "float32")
    return Drawn(operation, 1.0, random.choice(LINKS))


def judge_host(count: int, seed: int, report: Report | None = None) -> Judgement:
    """Judges `auto` by measuring; two ranks, or one for each core up to four."""
    if count < 1:
        raise Unsupported(f"there must be at least 1 scenario, not {count}")
    world = max(2, min(4, len(os.sched_getaffinity(0))))
    drawn = [draw(seed, number, world) for number in range(count)]
    verdicts = launch(world, _on_rank, drawn, report=report)[0]
    return Judgement("cpu", seed, TOLERANCE, tuple(verdicts))


def _on_rank(report: Report, scenarios: list[Drawn]) -> list[Verdict]:
    verdicts = []
    for number, drawn in enumerate(scenarios):
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

    memory = auto.of(fabric)
    memory.mode = "heuristic"  # not what was tuned: that would be looking up the answer
    for _ in range(2 * BLOCK + 1):
        call("auto")()
    said = explain()
    assert said is not None
    candidates = Schedule.space(operation)
    # Two calls in a row: in the first, the peers' last call was another one.
    arms = {str(s): call(s) for s in candidates}
    samples = interleaved(
        {name: _twice(arm) for name, arm in arms.items()}, REPEAT, lambda share, text: None
    )
    seconds = {s: statistics.median(samples[str(s)]) / 2.0 for s in candidates}
    choices = chosen(memory.machine, operation, candidates)
    return Verdict(drawn, {**choices, "heuristic": Schedule.parse(said.schedule)}, seconds)


def _twice(function: Callable[[], Any]) -> Callable[[], None]:
    def both() -> None:
        function()
        function()

    return both
