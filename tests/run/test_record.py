"""Recording and explaining: every task one span, every byte counted, and nothing when it is off."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from ranks import check_call, integers, product, shard_of

import weft
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.run import record


def every_task_has_one_span() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    operation = AllGatherMatmul.of(24, 5, 8, world)
    for schedule in weft.Schedule.space(operation):
        plan = operation.lower(schedule)
        with weft.record() as recording:
            check_call(24, 5, 8, schedule=schedule)
        [timeline] = recording.timelines
        tasks = [task for task in plan.tasks if task.rank == rank]
        copies = [task for task in tasks if task.kind == "copy"]
        spans = [s for s in timeline.spans if s.kind == "copy"]
        assert Counter(s.task for s in spans) == Counter(t.label for t in copies), schedule
        assert {s.lane for s in spans} == {t.lane for t in copies}
        assert sum(s.num_bytes for s in spans) == sum(plan.num_bytes(t.source) for t in copies)
        others = [s for s in timeline.spans if s.kind != "copy"]
        if schedule.fusion == "adaptive":
            pieces = sum(1 + int(s.task.partition(" +")[2] or 0) for s in others)
            assert pieces == len(tasks) - len(copies), "a merged span says how many tasks it is"
        else:
            wanted = Counter(t.label for t in tasks if t.kind != "copy")
            assert Counter(s.task for s in others) == wanted, schedule
        assert sum(s.num_flops for s in others) == operation.num_flops(rank)
        assert all(s.rank == rank and s.end >= s.start for s in timeline.spans)
        assert timeline.title == schedule.name


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_task_becomes_one_span(ranks, world):
    ranks(world).run(every_task_has_one_span)


def gathered_timelines() -> None:
    with weft.record() as recording:
        for seed in range(3):
            check_call(8, 3, 4, seed=seed, schedule="adaptive@dma")
    check_call(8, 3, 4, schedule="adaptive@dma")
    assert len(recording.timelines) == 3
    merged = recording.gather()
    assert [t.ranks for t in merged] == [list(range(dist.get_world_size()))] * 3
    with weft.record() as outer:
        with weft.record() as inner:
            check_call(8, 3, 4)
        check_call(8, 3, 4)
    assert (len(outer.timelines), len(inner.timelines)) == (1, 1)


def test_recordings_are_gathered_and_nest(ranks):
    ranks(2).run(gathered_timelines)


def recordings_that_overlap() -> None:
    one, other = weft.record(), weft.record()
    first, second = one.__enter__(), other.__enter__()
    check_call(8, 3, 4)
    one.__exit__(None, None, None)
    weft.all_reduce(torch.ones(3))
    other.__exit__(None, None, None)
    weft.all_reduce(torch.ones(3))
    assert (len(first.calls), len(second.calls)) == (0, 2)
    assert record.active is None
    assert record.last is second


def test_recordings_end_in_any_order(ranks):
    """As those of several threads do."""
    ranks(2).run(recordings_that_overlap)


def test_threads_add_to_one_recording():
    recording = weft.Recording()
    called = record.Called("a", "a", "", False, 0, "dma", "", "", None, 0, weft.Link())

    def add(thread: int) -> None:
        for number in range(500):
            filled = weft.Timeline((), f"{thread} {number}")
            recording.add(called, weft.Timeline(()), lambda filled=filled: filled)
            recording.settle()

    threads = [threading.Thread(target=add, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    titles = [timeline.title for timeline in recording.timelines]
    assert sorted(titles) == sorted(f"{t} {n}" for t in range(4) for n in range(500))
    assert len(recording.calls) == 2000


def failed_calls_are_not_recorded() -> None:
    with weft.record() as recording:
        k = 3 + dist.get_rank()
        with pytest.raises(weft.Mismatch):
            weft.all_gather_matmul(torch.ones(2, k), torch.ones(k, 2))
        check_call(8, 3, 4)
    assert len(recording.timelines) == 1


def test_failed_calls_are_not_recorded(ranks):
    ranks(2).run(failed_calls_are_not_recorded)


def explained() -> None:
    rank = dist.get_rank()
    world = dist.get_world_size()
    shard_bytes = 4 * 8 * 4
    for name, engine in [("adaptive@dma", "dma"), ("serial@cores", "cores")]:
        check_call(4 * world, 5, 8, schedule=name)
        said = weft.explain()
        assert said.schedule == name
        assert said.why == "asked for"
        assert said.bytes_by_engine == {engine: shard_bytes * (world - 1)}
        assert said.percent_of_ideal is None
        assert "all_gather_matmul" in said.operation
        assert name in str(said)
    check_call(4 * world, 5, 8, schedule="adaptive@direct")
    assert weft.explain().bytes_by_engine == {"direct": shard_bytes * (world - 1)}
    check_call(4 * world, 5, 8)
    assert weft.explain().why.startswith("by the rule for")
    with weft.record():
        check_call(4 * world, 5, 8, schedule=weft.Schedule.parse("hetero-fused-1d"))
    said = weft.explain()
    assert 0 < said.percent_of_ideal <= 100
    operation = AllGatherMatmul.of(4 * world, 5, 8, world)
    plan = operation.lower(weft.Schedule.parse("hetero-fused-1d"))
    assert said.num_tasks == sum(task.rank == rank for task in plan.tasks)
    assert said.workspace_bytes == plan.workspace[rank]


def test_explain(ranks):
    ranks(2).run(explained)


def by_environment(schedule: str) -> tuple[str, str]:
    check_call(8, 3, 4, schedule=schedule)
    return weft.explain().schedule, weft.explain().why


def test_the_environment_overrides_auto_and_no_name_that_was_given(fresh_ranks):
    pool = fresh_ranks(2, WEFT_SCHEDULE="serial@cores", WEFT_LINK="1GB/s")
    assert pool.run(by_environment, "auto") == [("serial@cores", "WEFT_SCHEDULE is set")] * 2
    assert pool.run(by_environment, "adaptive@dma") == [("adaptive@dma", "asked for")] * 2


def recorded_results_are_the_same() -> None:
    x, w = integers((31, 7), torch.float32, 1), integers((7, 3), torch.float32, 2)
    with weft.record():
        for name in ("adaptive@dma", "hetero-fused-2d@cores", "adaptive@direct"):
            y = weft.all_gather_matmul(shard_of(x), w, schedule=name)
            assert torch.equal(y, product(x, w))


def test_recording_changes_no_result(ranks):
    ranks(2).run(recorded_results_are_the_same)
