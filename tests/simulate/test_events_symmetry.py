"""One rank that stands for all gives what simulating all of them gives."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from weft.machine import load
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.tasks import Copy, Matmul
from weft.schedule import Schedule
from weft.simulate import run
from weft.timeline import Timeline

SMALL = AllGatherMatmul.of(4096, 512, 1024, 4, "bfloat16")


def _same(one: Timeline, other: Timeline) -> None:
    def key(timeline: Timeline) -> list[tuple[object, ...]]:
        return [(s.rank, s.lane, s.task, s.kind, s.num_bytes, s.num_flops) for s in timeline.spans]

    assert key(one) == key(other)
    for here, there in zip(one.spans, other.spans, strict=True):
        assert here.start == pytest.approx(there.start, rel=1e-9, abs=1e-15)
        assert here.end == pytest.approx(there.end, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("topology", ["mesh", "switch", "ring"])
@pytest.mark.parametrize("schedule", Schedule.space(SMALL), ids=str)
def test_folded_equals_full(schedule: Schedule, topology: str) -> None:
    node = load("mi300x")
    # Scarce everywhere, so that every kind of resource is shared by someone.
    node = replace(
        node,
        links=replace(node.links, topology=topology, total_bandwidth=1.0e11),
        memory=replace(node.memory, bandwidth=4e11),
        engines=replace(node.engines, count=3),
    )
    plan = SMALL.lower(schedule)
    folded, full = run(plan, node), run(plan, node, fold=False)
    assert not full.folded
    assert folded.seconds == pytest.approx(full.seconds, rel=1e-9)
    _same(folded.timeline(), full.timeline())


def test_most_schedules_fold() -> None:
    node = load("mi300x")
    folded = {s.name for s in Schedule.space(SMALL) if run(SMALL.lower(s), node).folded}
    # Adaptive merges across shards and a local shard in the middle splits a block, which ranks see
    # differently.
    assert {s.name for s in Schedule.space(SMALL)} - folded == {
        f"{name}@{engine}"
        for name, engines in (
            ("hetero-fused-2d", ("dma", "cores")),
            ("adaptive", ("dma", "cores", "direct")),
        )
        for engine in engines
    }


def test_uneven_shards_do_not_fold() -> None:
    operation = AllGatherMatmul.of(4097, 512, 1024, 4, "bfloat16")
    plan = operation.lower(Schedule.parse("hetero-fused-1d"))
    simulation = run(plan, load("mi300x"))
    assert not simulation.folded
    assert simulation.timeline().ranks == [0, 1, 2, 3]


@pytest.mark.parametrize("schedule", Schedule.space(SMALL), ids=str)
def test_a_timeline_has_every_task_and_no_lane_does_two_things(schedule: Schedule) -> None:
    plan = SMALL.lower(schedule)
    timeline = run(plan, load("mi300x")).timeline()
    moved = sum(plan.num_bytes(t.source) for t in plan.tasks if isinstance(t, Copy))
    worked = sum(2 * t.c.num_elements * t.a.columns for t in plan.tasks if isinstance(t, Matmul))
    assert sum(s.num_bytes for s in timeline.spans if s.kind == "copy") == moved
    assert sum(s.num_flops for s in timeline.spans) == worked
    if schedule.fusion != "adaptive":
        labels = sorted((t.rank, t.lane, t.label) for t in plan.tasks)
        assert sorted((s.rank, s.lane, s.task) for s in timeline.spans) == labels
    for rank, lane in timeline.lanes():
        spans = [s for s in timeline.spans if (s.rank, s.lane) == (rank, lane)]
        for before, after in pairwise(spans):
            assert before.end <= after.start + 1e-12
