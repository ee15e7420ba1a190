"""What only calls over a network have: slices that leave early, and few bytes with the headers."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from conformance import Case, same
from fabrics import FABRICS
from ranks import shard_of

import weft
from weft.errors import Mismatch
from weft.fabric.group import eager
from weft.fabric.group.network_native import NetworkNative
from weft.fabric.group.transfers import NetworkFlight


@pytest.fixture
def flat(pools):
    """`flat(3)`: three ranks that reach each other by messages alone."""
    return lambda world: FABRICS["flat"].pool(pools, world)


def _sliced():
    """A slice of the batch is sent as soon as it is looked up, before the next one."""
    same(Case("embedding_all_to_all", 1, particular={"batch": 67, "max_tables": 3}))
    plan = weft.run.session.last_finished().plan
    assert weft.explain().schedule == "hetero-unfused-1d:8@dma"
    copies = [task for task in plan.tasks if task.kind == "copy" and task.source.rank == 0]
    lookups_before = [task.after for task in copies]
    assert len({tuple(after) for after in lookups_before}) == len(copies) > 2


def test_slices_of_lookups_leave_as_they_are_ready(flat):
    flat(3).run(_sliced)


def _without_gradients():
    """Other threads than the caller's touch its tensors, and they follow gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.arange(24.0).view(4, 6).requires_grad_()
    w = torch.ones(6, 2, requires_grad=True)
    for schedule in ("auto", "auto", "uniform-fused-2d", "adaptive:2"):
        with torch.no_grad():
            y = weft.all_gather_matmul(x, w, schedule=schedule)
        assert torch.equal(y, (x @ w).detach().repeat(world, 1)), (schedule, rank)


def test_tensors_that_require_gradients_under_no_grad(flat):
    flat(2).run(_without_gradients)


def _one_column():
    """A matrix of one column may have any last stride, which views of bytes do not take."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for rows in (4, 300_000):
        x = torch.full((1, rows), rank + 1.0).t()
        w = torch.full((1, 2), 3.0)
        for _ in range(3):
            y = weft.all_gather_matmul(x, w, schedule="serial")
            want = torch.cat([torch.full((rows, 2), 3.0 * (r + 1)) for r in range(world)])
            assert torch.equal(y, want)


def test_one_column(flat):
    flat(2).run(_one_column)


def _no_thread():
    """A rank that can have no thread for its transfers raises that, and its peer hears of it."""
    rank = dist.get_rank()
    x, w = torch.ones(2000, 256), torch.ones(256, 8)
    weft.all_gather_matmul(torch.ones(2, 256), w, schedule="serial")
    dist.barrier()
    if rank == 0:
        lane, asked = NetworkNative._lane, []

        def failing(native, peer, sends):
            asked.append(peer)
            if len(asked) == 2:
                raise RuntimeError("can't start new thread")
            return lane(native, peer, sends)

        NetworkNative._lane = failing
    with pytest.raises(RuntimeError if rank == 0 else weft.PeerLost, match=r"thread|gave up"):
        weft.all_gather_matmul(x, w, schedule="serial")


def test_no_thread_for_a_transfer(fresh_ranks):
    began = time.monotonic()
    fresh_ranks(2, WEFT_FABRIC="flat").run(_no_thread)
    assert time.monotonic() - began < 30


def _broken_transfer():
    """What a thread raises in a transfer is the error of its own rank."""
    rank = dist.get_rank()
    x, w = torch.ones(2000, 256), torch.ones(256, 8)
    if rank == 0:

        def failing(flight, transfer):
            raise ValueError("this rank cannot send")

        NetworkFlight._send = failing
    with pytest.raises(ValueError if rank == 0 else weft.PeerLost, match=r"cannot send|rank 0"):
        weft.all_gather_matmul(x, w, schedule="serial")


def test_a_transfer_that_raises(fresh_ranks):
    fresh_ranks(2, WEFT_FABRIC="flat").run(_broken_transfer)


# -- few bytes travel with headers -----------------------------------------------------------------


EARLY = ("all_gather_matmul", "all_to_all_matmul")
LATE = ("matmul_reduce_scatter", "matmul_all_to_all")
"""Operators whose headers wait for products."""


class _Counted:
    """How many calls found their bytes with the headers, while a `with` block lasts."""

    def __enter__(self):
        self.count, self._plain = 0, NetworkNative.came

        def came(native, call, number):
            found = self._plain(native, call, number)
            self.count += found is not None
            return found

        NetworkNative.came = came
        return self

    def __exit__(self, *exception):
        NetworkNative.came = self._plain


def _eager(names):
    """A known call of few bytes takes one message, whatever peers did in between."""
    for name in names:
        same(Case(name, 5, sizes=(5, 8, 13)))
        with _Counted() as counted:
            for _ in range(3):
                same(Case(name, 5, sizes=(5, 8, 13)))
        assert counted.count == 3, name


def _changing():
    """What a rank expects of its peers turns out wrong on some ranks, right on others."""
    world, rank = dist.get_world_size(), dist.get_rank()
    w = torch.arange(12.0).view(4, 3)
    with _Counted() as counted:
        for m in (6, 6, 6, 5, 6, 5, 5, 4, 6, 6, 7, 7):
            x = torch.arange(4.0 * m).view(m, 4)
            y = weft.all_gather_matmul(x.tensor_split(world)[rank], w)
            assert torch.equal(y, x @ w), m
    assert counted.count >= 3
    return counted.count


def _changing_products():
    """The same where the header waits for the products."""
    world, rank = dist.get_world_size(), dist.get_rank()
    w = torch.arange(12.0).view(4, 3)
    with _Counted() as counted:
        for m in (6, 6, 6, 5, 6, 5, 5, 4, 6, 6, 7, 7):
            x = torch.arange(4.0 * m).view(m, 4)
            y = weft.matmul_reduce_scatter(x, w)
            assert torch.equal(y, shard_of(x @ w * world)), (m, rank)
    assert counted.count >= 3
    return counted.count


def _late_and_different():
    """A rank whose header waits for its products hears of another call, and so do its peers."""
    rank, x, w = dist.get_rank(), torch.ones(6, 4), torch.ones(4, 3)
    for _ in range(3):
        weft.matmul_reduce_scatter(x, w)
    with pytest.raises(Mismatch) as raised:
        weft.matmul_reduce_scatter(x, w, schedule="serial" if rank else "auto")
    with _Counted() as counted:
        y = weft.matmul_reduce_scatter(x, w)
    assert torch.equal(y, torch.full(y.shape, 4.0 * dist.get_world_size()))
    return str(raised.value), counted.count


def _large():
    """One row more than goes with a header."""
    most = eager.MOST_BYTES // (4 * 64)
    for rows, expected in ((most, 2), (most + 1, 0)):
        x, w = torch.ones(rows, 64), torch.ones(64, 2)
        with _Counted() as counted:
            for _ in range(3):
                y = weft.all_gather_matmul(x, w, schedule="serial")
                assert torch.equal(y, torch.full((rows * dist.get_world_size(), 2), 64.0))
        assert counted.count == expected


def test_few_bytes_travel_with_headers(flat):
    flat(2).run(_eager, EARLY + LATE)
    for world in (2, 3):
        assert len(set(flat(world).run(_changing))) == 1, "all ranks come to the same answer"
        assert len(set(flat(world).run(_changing_products))) == 1
        assert len(set(flat(world).run(_late_and_different))) == 1
    flat(2).run(_large)


def test_two_levels_with_few_bytes(pools):
    pool = FABRICS["two_level"].pool(pools, 4)
    pool.run(_eager, EARLY + LATE)
