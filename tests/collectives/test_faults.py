"""Bad input is heard on every rank, a lost peer fails the handle, and nothing hangs or leaks."""

from __future__ import annotations

import math
import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import weft


def refused(function):
    """What every rank hears."""
    try:
        function()
    except weft.Error as error:
        heard = f"{type(error).__name__}: {error}"
    else:
        heard = "nothing"
    # The group lives on.
    assert torch.equal(
        weft.all_reduce(torch.ones(3)), torch.full((3,), float(dist.get_world_size()))
    )
    return heard


def bad(case):
    rank = dist.get_rank()
    one = rank == 1
    cases = {
        "shape": lambda: weft.all_gather(torch.ones(4 if one else 3)),
        "dtype": lambda: weft.all_reduce(torch.ones(3, dtype=torch.float64 if one else None)),
        "kind": lambda: weft.all_reduce(torch.ones(3)) if one else weft.all_gather(torch.ones(3)),
        "root": lambda: weft.broadcast(torch.ones(3), 1 if one else 0),
        "no tensor": lambda: weft.all_gather(None if one else torch.ones(3)),
        "reduction": lambda: weft.all_reduce(torch.ones(3), "bor" if one else "sum"),
        "word": lambda: weft.all_reduce(torch.ones(3), "summ" if one else "sum"),
        "splits": lambda: weft.all_to_all(torch.ones(4), [3, 1] if one else [2, 2], [2, 2]),
        "sum of splits": lambda: weft.all_to_all(torch.ones(4), [2, 1 if one else 2], [2, 2]),
        "one list": lambda: weft.all_to_all(torch.ones(4), [2, 2], None if one else [2, 2]),
        "out": lambda: weft.all_gather(torch.ones(3), out=torch.ones(5 if one else 6)),
        "shared memory": lambda: _overlapping(one),
        "engine": lambda: weft.all_gather(torch.ones(3), engine="dna" if one else "dma"),
        "sparse": lambda: weft.all_reduce(torch.ones(3).to_sparse() if one else torch.ones(3)),
        "large": lambda: weft.all_reduce(torch.ones(100_001 if one else 100_000)),
        "fake": lambda: weft.all_reduce(_without_values("fake") if one else torch.ones(3)),
        "fake out": lambda: weft.all_reduce(
            torch.ones(3), out=_without_values("fake") if one else torch.ones(3)
        ),
        "freed": lambda: weft.all_reduce(_without_values("freed") if one else torch.ones(3)),
        "view of freed": lambda: weft.broadcast(_without_values("view") if one else torch.ones(3)),
        "freed out": lambda: weft.all_gather(
            torch.ones(3), out=_without_values("freed", 6) if one else torch.ones(6)
        ),
        "wrapper": lambda: weft.all_reduce(_without_values("wrapper") if one else torch.ones(3)),
        "nested": lambda: weft.all_reduce(
            torch.nested.nested_tensor([torch.ones(3)] * 2) if one else torch.ones(3)
        ),
        "endless sizes": lambda: weft.all_gather(
            torch.ones(3), sizes=[math.inf, 3] if one else [3, 3]
        ),
        "endless splits": lambda: weft.all_to_all(
            torch.ones(4), [math.inf, 2] if one else [2, 2], [2, 2]
        ),
        "huge splits": lambda: weft.all_to_all(
            torch.ones(4), [2, 2], [2, 2**62] if one else [2, 2]
        ),
        "large splits": lambda: weft.all_to_all(
            torch.ones(4), [2, 2], [2, 2**45] if one else [2, 2]
        ),
        "huge sizes": lambda: weft.gather(torch.ones(4), sizes=[2**70, 4] if one else None),
        "no answer": lambda: weft.all_reduce(
            torch.ones(3), async_op=torch.ones(2) if one else False
        ),
        "no words": lambda: weft.all_reduce(torch.ones(3), _NoWords() if one else "sum"),
        "async": lambda: weft.all_reduce(torch.ones(4 if one else 3), async_op=True).wait(),
    }
    return refused(cases[case])


def _overlapping(one):
    memory = torch.ones(9)
    return weft.all_reduce(memory[:6], out=memory[3:] if one else torch.ones(6))


def _without_values(kind, size=3):
    """A tensor that says it is on the CPU, and has no values there."""
    if kind == "fake":
        with FakeTensorMode():
            return torch.ones(size)
    if kind == "wrapper":
        return DTensor.from_local(torch.ones(size), init_device_mesh("cpu", (2,)))
    whole = torch.ones(size + 1)
    tensor = whole[1:] if kind == "view" else whole[:size]
    whole.untyped_storage().resize_(0)
    return tensor


class _NoWords:
    def __repr__(self):
        raise ZeroDivisionError("no words")


NO_VALUES = "no values in memory"
SAYS = {
    "fake": f"x has {NO_VALUES}",
    "fake out": f"out has {NO_VALUES}",
    "freed": f"x has {NO_VALUES}",
    "view of freed": f"x has {NO_VALUES}",
    "freed out": f"out has {NO_VALUES}",
    "wrapper": f"x has {NO_VALUES}",
    "nested": "take dense tensors",
    "endless sizes": "sizes must be a list with one size per rank",
    "endless splits": "in_splits must be a list with one size per rank",
    "huge splits": "more than any memory",
    "large splits": "no memory for a result of shape (35184372088834,)",
    "huge sizes": "more than any memory",
    "no answer": "ambiguous",
    "no words": "no words",
    "shape": "rank 0 calls all_gather (3 float32), rank 1 calls all_gather (4 float32)",
    "dtype": "(sum of 3 float32), rank 1 calls all_reduce (sum of 3 float64)",
    "kind": "rank 0 calls all_gather (3 float32), rank 1 calls all_reduce",
    "root": "root 0), rank 1 calls broadcast (3 float32, root 1)",
    "no tensor": "x must be a tensor, not NoneType",
    "reduction": "float32 has no reduction 'bor'",
    "word": "did you mean sum",
    "splits": "rank 1 sends 3 elements to rank 0, which expects 2",
    "sum of splits": "adds up to 3, but there are 4 rows",
    "one list": "give both in_splits and out_splits",
    "out": "out has shape (5,), but the result has (6,)",
    "shared memory": "share memory",
    "engine": "moved by dma or cores",
    "sparse": "dense tensors",
    "large": "all_reduce (sum of 100001 float32)",
    "async": "all_reduce (sum of 4 float32)",
}


@pytest.mark.parametrize("case", SAYS)
def test_every_rank_hears_what_was_wrong(ranks, case):
    heard = ranks(2).run(bad, case)
    assert all(SAYS[case] in said for said in heard), heard
    assert all(said.count("\n") == 0 for said in heard)


def die(rank, kind, waits):
    """A rank dies once the others are in a collective that needs it. waits: how they wait for it;
    backwards, the first error is that of a handle whose collective never began."""
    me = dist.get_rank()
    weft.all_reduce(torch.ones(2))
    if me == rank:
        time.sleep(0.2)
        os._exit(1)
    started = time.monotonic()
    size = 3 if kind == "small" else 2_000_000
    errors = []
    handles = []
    if waits != "in place":
        handles = [weft.all_reduce(torch.ones(size), async_op=True) for _ in range(3)]
        calls = [handle.wait for handle in handles]
        if waits == "backwards":
            calls.reverse()
    else:
        calls = [lambda: weft.all_reduce(torch.ones(size))]
    calls.append(lambda: weft.all_gather(torch.ones(size)))
    for call in calls:
        try:
            call()
        except weft.PeerLost as error:
            errors.append((str(error), error.rank))
    assert all(handle.done() for handle in handles)
    assert len(errors) == len(calls)
    return errors, time.monotonic() - started


@pytest.mark.parametrize("waits", ["in place", "in order", "backwards"])
@pytest.mark.parametrize("kind", ["small", "large"])
def test_a_lost_peer_fails_the_call_and_every_handle(fresh_ranks, kind, waits):
    outcomes = fresh_ranks(3).outcomes(die, 1, kind, waits)
    assert outcomes[1].died
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome.trace
        errors, seconds = outcome.value
        assert errors[0][1] == 1
        assert any("rank 1 died" in said for said, _ in errors) or "gave up" in errors[0][0]
        assert seconds < 5
    assert any("rank 1 died" in said for r in (0, 2) for said, _ in outcomes[r].value[0])


def too_late():
    """Rank 1 never comes: the deadline of `wait`, and what comes after it."""
    weft.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        return None
    handle = weft.all_reduce(torch.ones(2), async_op=True)
    heard = []
    started = time.monotonic()
    for wait in (
        lambda: handle.wait(timeout=0.3),
        handle.wait,
        lambda: weft.all_reduce(torch.ones(1)),
    ):
        try:
            wait()
        except weft.Error as error:
            heard.append(f"{type(error).__name__}: {error}")
    return heard, time.monotonic() - started


def test_wait_has_a_deadline_and_raises_ever_after(renewed_ranks):
    heard, seconds = renewed_ranks(2).run(too_late)[0]
    assert len(heard) == 3
    assert re.match(r"Timeout: rank 0 waited 0.3 s for its all_reduce \(rank 1 did not", heard[0])
    assert all("over" in said for said in heard)
    assert seconds < 5  # and not the deadline of the group, which is twenty


def deadline():
    weft.all_reduce(torch.ones(2))
    weft.configure(deadline=0.4)
    if dist.get_rank() == 1:
        return ""
    try:
        weft.all_gather(torch.ones(5))
    except weft.Timeout as error:
        return str(error)
    return "nothing"


def test_a_late_rank_is_named(renewed_ranks):
    said = renewed_ranks(2).run(deadline)[0]
    assert "waited 0.4 s for rank 1 to make it too" in said


def cancelling(calls, seed):
    """Random kinds, sizes and cancellations: a cancelled one ends so on every rank."""
    fabric = weft.fabric.of(None)
    random = torch.Generator().manual_seed(seed)
    mine = torch.Generator().manual_seed(seed * 100 + dist.get_rank())
    world, open_ones, cancelled, memory = dist.get_world_size(), [], 0, []
    for step in range(calls):
        size = [1, 100, 9000][int(torch.randint(0, 3, (), generator=random))]
        x = torch.ones(size)
        function = (weft.all_reduce, weft.all_gather)[step % 2]
        open_ones.append((function(x, async_op=True), step % 2, size))
        if torch.randint(0, 4, (), generator=mine) == 0:
            open_ones[int(torch.randint(0, len(open_ones), (), generator=mine))][0].cancel()
        if len(open_ones) >= 16:
            for handle, kind, size in open_ones:
                try:
                    result = handle.wait()
                except weft.Cancelled as error:
                    cancelled += "was cancelled by rank" in str(error)
                else:
                    assert result.numel() == size * (world if kind else 1)
                    assert float(result[-1]) == (1 if kind else world)
            open_ones = []
            if step in (calls // 3, calls // 3 + 1) or step > calls - 17:
                memory.append((fabric.memory.allocated, len(os.listdir("/proc/self/fd")),
                               len(os.listdir("/proc/self/task"))))  # fmt: skip
    for handle, _, _ in open_ones:
        try:
            handle.wait()
        except weft.Cancelled:
            cancelled += 1
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * 4096
    return cancelled, memory, resident


def test_nothing_leaks_over_many_cancelled_collectives(fresh_ranks):
    pool = fresh_ranks(2)
    _, before, start = pool.run(cancelling, 1000, 1)[0]
    results = pool.run(cancelling, 10_000, 2)
    cancelled, after, end = results[0]
    assert cancelled == results[1][0]  # the same ones on every rank
    assert cancelled > 50
    assert after[-1] == before[-1]
    assert end - start < 30e6


def test_a_dropped_handle_harms_nobody(ranks):
    ranks(2).run(dropped)


def dropped():
    for _ in range(50):
        weft.all_reduce(torch.ones(200_000), async_op=True)
    assert float(weft.all_reduce(torch.ones(1))) == dist.get_world_size()


def leave_early():
    """A rank that has done its part may leave while others still read."""
    x = torch.full((300_000,), float(dist.get_rank()))
    handle = weft.all_gather(x, async_op=True)
    if dist.get_rank() == 0:
        handle.wait()
        raise SystemExit
    time.sleep(0.3)
    return float(handle.wait().sum())


def test_leaving_after_the_last_collective(fresh_ranks):
    outcomes = fresh_ranks(2).outcomes(leave_early)
    assert outcomes[1].error is None, outcomes[1].trace
    assert outcomes[1].value == 300_000.0
