"""Compute lanes that run natively: the same policy, the same bits and the same errors as task by
task."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import integers as whole_numbers

import weft
from weft.errors import Unsupported
from weft.fabric import _native, of, processes
from weft.fabric.host.lane_program import LaneProgram
from weft.plan.adaptive import next_run
from weft.plan.tasks import Matmul, Reduce, Region
from weft.run import session as sessions

sys.path.insert(0, str(Path(__file__).parent.parent / "ops"))
from conformance import Case, tensors


def integers(shape, seed):
    return whole_numbers(shape, torch.float32, seed)


# -- the policy ------------------------------------------------------------------------------------


def _area(region):
    return (region.rank, 0 if region.buffer == "x" else 1, *region[2:], region.columns)


def _random_tasks(draw: random.Random) -> list[Matmul | Reduce]:
    """Chunks of rows in a random order of rows, buffers and merges, and some sums."""
    tasks: list[Matmul | Reduce] = []
    rows = {("x", 0): 0, ("y", 0): 0, ("x", 1): 0}
    top = 0
    for number in range(draw.randint(1, 12)):
        height = draw.randint(1, 3)
        if draw.random() < 0.2:
            region = Region(0, "s", number, 1, 0, 4)
            tasks.append(Reduce(number, 0, (), "sum", (region,), (region,), early=True))
            continue
        buffer, rank = draw.choice(list(rows))
        at = rows[buffer, rank] + draw.choice([0, 0, 1])
        a, b = Region(rank, buffer, at, height, 0, 4), Region(0, "w", 0, 4, 0, 4)
        c = Region(0, "c", top, height, 0, 4)
        tasks.append(Matmul(number, 0, (), "chunk", a, b, c, merge=draw.choice([0, 0, 1])))
        rows[buffer, rank], top = at + height, top + height + draw.choice([0, 0, 1])
    draw.shuffle(tasks)
    return tasks


@pytest.mark.parametrize("seed", range(200))
def test_the_native_policy_is_that_of_the_plan(seed):
    draw = random.Random(seed)
    tasks = _random_tasks(draw)
    lane = _native.Lane(1, 4, False)
    for task in tasks:
        product = isinstance(task, Matmul)
        a, c = ([task.a], [task.c]) if product else (task.sources, task.targets)
        lane.add(task.id, 0 if product else 1, list(map(_area, a)), [], list(map(_area, c)), False,
                 False, [], False, -1, [], task.merge if product else -1, [])  # fmt: skip
    ready = list(range(len(tasks)))
    while ready:
        chosen = next_run([tasks[place] for place in ready])
        assert [tasks[place].id for place in lane.next_run(ready)] == [task.id for task in chosen]
        ready = [place for place in ready if tasks[place] not in chosen]


# -- the same bits ---------------------------------------------------------------------------------


def _forget() -> None:
    session = sessions.of(of(None))
    session.runners.clear()
    session.known.clear()


def same_bits_as_task_by_task(name: str, schedules, dtype) -> None:
    """Random floats, so that another order of sums or another GEMM would show."""
    torch.manual_seed(dist.get_rank())
    for schedule in schedules:
        case = Case(name, 3, dtype, example="plain")
        case.example = case.example.map(
            lambda t: torch.randn_like(t) if t.is_floating_point() else t
        )
        made = [case.weft(schedule) for _ in range(3)]  # new, then twice a known call
        programs = {type(r.program) for r in sessions.of(of(None)).runners.values()}
        assert LaneProgram in programs, programs
        _forget()
        native, processes.runs_natively = processes.runs_natively, lambda plan, rank: False
        try:
            slow = case.weft(schedule)
            programs = {type(r.program) for r in sessions.of(of(None)).runners.values()}
            assert LaneProgram not in programs, programs
        finally:
            processes.runs_natively = native
            _forget()
        for one in made:
            pairs = zip(tensors(one), tensors(slow), strict=True)
            assert all(torch.equal(got, want) for got, want in pairs), schedule


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_all_reduce", "matmul_all_to_all"])
def test_every_bit_is_that_of_task_by_task(ranks, name, dtype):
    schedules = ["adaptive@direct", "adaptive@dma", "hetero-unfused-1d@dma", "shard-p2p@direct"]
    ranks(3).run(same_bits_as_task_by_task, name, schedules, dtype)


# -- unusual operands ------------------------------------------------------------------------------


def strange_views() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    z = torch.complex(torch.zeros(6, 10), integers((6, 10), rank)).conj()
    negated, w = z.imag, integers((10, 4), rank)
    assert negated.is_neg()
    for schedule in ("adaptive@direct", "adaptive@dma", "in-kernel", "serial", "auto"):
        for _ in range(2):
            want = negated @ w
            dist.all_reduce(want)
            assert torch.equal(weft.matmul_all_reduce(negated, w, schedule=schedule), want)
            want = w.t() @ negated.t()
            dist.all_reduce(want)
            got = weft.matmul_all_reduce(w.t(), negated.t(), schedule=schedule)
            assert torch.equal(got, want)
    # A result with gaps between its elements, and a weight with gaps between its columns.
    out = torch.zeros(4, 6 * world).t()[:, ::2]
    x, wide = integers((6, 10), 7), integers((10, 4), rank)
    for _ in range(3):
        weft.all_gather_matmul(x, wide[:, ::2], schedule="adaptive@dma", out=out)
        assert torch.equal(out, torch.cat([x] * world) @ wide[:, ::2])
    with pytest.raises(Unsupported, match=r"out is a negated view; pass out.resolve_neg\(\)"):
        weft.all_gather_matmul(x, w, out=torch.zeros(6 * world, 4, dtype=z.dtype).conj().imag)
    weft.all_gather_matmul(x, w)


def test_strided_and_negated_operands(renewed_ranks):
    renewed_ranks(2).run(strange_views)


def parameters_and_modes() -> None:
    w, x = torch.nn.Parameter(integers((8, 4), 1)), integers((6, 8), dist.get_rank())
    want = torch.cat([integers((6, 8), r) for r in range(dist.get_world_size())]) @ w.detach()
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(weft.all_gather_matmul(x, w, schedule="adaptive@direct"), want)
        with torch.inference_mode():
            assert torch.equal(weft.all_gather_matmul(x, w, schedule="adaptive@direct"), want)
        y = weft.all_gather_matmul(x, w.detach(), schedule="adaptive@direct")
        y += 1  # it is no tensor of the inference mode
        assert torch.equal(y, want + 1)


def test_parameters_and_inference_mode(renewed_ranks):
    renewed_ranks(2).run(parameters_and_modes)


# -- errors ----------------------------------------------------------------------------------------


def no_memory_in_a_known_call() -> None:
    x, w = integers((8, 8), 1), integers((8, 8), 2)
    want = weft.all_gather_matmul(x, w, schedule="adaptive@dma")
    weft.all_gather_matmul(x, w, schedule="adaptive@dma")
    memory = of(None).memory
    if dist.get_rank() == 1:

        def share(tensor, turn):
            raise Unsupported("the symmetric heap cannot hold more")

        memory.share = share
    with pytest.raises(weft.Error, match="cannot hold more"):
        weft.all_gather_matmul(x, w, schedule="adaptive@dma")
    memory.__dict__.pop("share", None)
    assert torch.equal(weft.all_gather_matmul(x, w, schedule="adaptive@dma"), want)


def test_a_known_call_without_memory_is_refused_on_every_rank(renewed_ranks):
    renewed_ranks(2).run(no_memory_in_a_known_call)


def another_size_on_one_rank() -> None:
    """Rank 1's rows change: rank 0 has entered a known call when it sees that."""
    rank, w = dist.get_rank(), integers((8, 5), 3)
    for rows in (3, 3, 3, 4, 3, 4, 4, 3):
        sizes = [3, rows]
        x = integers((sizes[rank], 8), rank)
        every = torch.cat([integers((n, 8), r) for r, n in enumerate(sizes)])
        for schedule in ("adaptive@direct", "adaptive@dma"):
            y = weft.all_gather_matmul(x, w, schedule=schedule, shard_rows=[-1, -1])
            assert torch.equal(y, every @ w)


def test_a_known_call_is_planned_again_when_a_peer_differs(renewed_ranks):
    renewed_ranks(2).run(another_size_on_one_rank)


# -- what is shown ---------------------------------------------------------------------------------


def recorded() -> None:
    x, w = integers((64, 16), 1), integers((16, 8), 2)
    for schedule in ("adaptive@dma", "hetero-fused-1d@dma"):
        with weft.record() as recording:
            weft.all_gather_matmul(x, w, schedule=schedule)
        (timeline,) = recording.timelines
        spans = [span for span in timeline.spans if span.kind == "matmul"]
        assert sum(span.num_flops for span in spans) == 2 * 64 * dist.get_world_size() * 16 * 8
        assert all(0 < span.start <= span.end for span in timeline.spans)
        assert any(span.kind == "copy" for span in timeline.spans)


def test_a_recording_has_every_task(renewed_ranks):
    renewed_ranks(2).run(recorded)
