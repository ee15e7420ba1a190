"""What is told of collectives: recordings with spans of every rank, and explanations in words."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import weft


def recorded():
    """Collectives of all ways, one in the background among them, and an operator between."""
    rank, world = dist.get_rank(), dist.get_world_size()
    symmetric = weft.symmetric_empty((70_000,), dtype=torch.float32).fill_(rank)
    with weft.record() as recording:
        weft.all_reduce(torch.ones(5), out=torch.empty(5))
        handle = weft.all_gather(torch.ones(300_000), async_op=True)
        weft.all_gather_matmul(torch.ones(4, 3), torch.ones(3, 2))
        gathered = weft.all_gather(symmetric)
        weft.all_reduce(torch.ones(200_001))
        assert float(handle.wait().sum()) == 300_000 * world
    assert float(gathered[-1]) == world - 1
    weft.all_reduce(torch.ones(5))  # not recorded
    return recording.gather()


def test_collectives_are_recorded_in_the_order_of_calls(ranks):
    small, background, operator, in_place, summed = ranks(3).run(recorded)[0]
    assert small.title == "all_reduce of 20 bytes over 3 ranks"
    for timeline in (small, background, operator, in_place, summed):
        assert timeline.ranks == [0, 1, 2]
    assert {span.kind for span in small.spans} == {"wait", "reduce"}
    for timeline, bytes_each in ((background, 1_200_000), (in_place, 280_000)):
        for rank in range(3):
            for peer in {0, 1, 2} - {rank}:
                came = [s for s in timeline.of(rank).spans if s.lane == f"engine {peer}"]
                assert {s.kind for s in came} == {"copy"}
                assert sum(s.num_bytes for s in came) == bytes_each
            assert timeline.communication_seconds(rank) > 0
    assert any(s.task == "stage" for s in background.spans)
    assert all(s.task != "stage" for s in in_place.spans)  # read where it lies
    added = sum(s.num_bytes for s in summed.spans if s.kind == "reduce" and s.rank == 0)
    assert added == pytest.approx(200_001 * 4, abs=3 * 64)  # a third of it, of three ranks
    for timeline in (small, background, in_place, summed):
        assert all(span.end >= span.start for span in timeline.spans)


def explained():
    rank = dist.get_rank()
    told = []
    symmetric = weft.symmetric_empty((70_000,), dtype=torch.float32).fill_(rank)
    for call in (
        lambda: weft.all_gather(torch.ones(256), out=torch.empty(512)),
        lambda: weft.all_reduce(torch.ones(200_000, dtype=torch.float64), "max"),
        lambda: weft.all_gather(symmetric, engine="cores"),
        lambda: weft.all_to_all(torch.ones(300_000), async_op=True).wait(),
        lambda: weft.all_gather_matmul(torch.ones(4, 3), torch.ones(3, 2)),
        lambda: weft.broadcast(torch.ones(3)),
    ):
        call()
        told.append(weft.explain())
    return told


def test_explain_says_how_a_collective_came(ranks):
    gather, maximum, in_place, exchange, operator, broadcast = ranks(2).run(explained)[1]
    assert gather.operation == "all_gather of 256 float32 into 512 over 2 ranks"
    assert (gather.schedule, gather.bytes_by_engine) == ("announcement", {"dma": 1024})
    assert 0 < gather.seconds < 1
    assert maximum.operation == "all_reduce (max) of 200000 float64 over 2 ranks"
    assert maximum.bytes_by_way == {"ring": 1_600_000}
    assert in_place.schedule == "in place"
    assert in_place.bytes_by_engine == {"cores": 280_000}
    assert exchange.num_tasks == 4  # 600,000 bytes in quarters, in whole lines
    assert "ring (in chunks of 146.5 KiB" in str(exchange)
    assert operator.operation.startswith("all_gather_matmul")
    assert "announcement" in str(broadcast)
    for told in (gather, maximum, in_place, exchange, broadcast):
        assert len(str(told).splitlines()) == 4
        assert max(map(len, str(told).splitlines())) <= 100


def background_after():
    """One that is waited for after the recording has ended."""
    with weft.record() as recording:
        handle = weft.all_gather(torch.ones(400_000), async_op=True)
    handle.wait()
    return recording.gather()


def test_a_recording_waits_for_nobody_and_loses_nothing(ranks):
    (timeline,) = ranks(2).run(background_after)[0]
    assert timeline.ranks == [0, 1]


def never_called():
    return str(weft.explain())


def test_nothing_to_explain(fresh_ranks):
    assert fresh_ranks(1).run(never_called) == ["None"]
