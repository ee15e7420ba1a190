"""The five operators on the group fabric: the same plans over point-to-point transfers."""

from __future__ import annotations

import lookups
import pytest
import torch
import torch.distributed as dist
from family import DTYPES, NAMES, Case, forward, gradients, same, space

import weft
from weft.fabric.group import eager, transfers

FEW = ("serial@dma", "hetero-unfused-1d@cores", "adaptive:4@dma", "auto")


def _space(world):
    return [name for name in space(world) if not name.endswith("direct")]


@pytest.fixture(scope="module")
def flat(pools):
    """`flat(3)`: three ranks that reach each other by messages alone."""
    made = {}

    def get(world):
        if world not in made:
            made[world] = pools.fresh(world, {"WEFT_FABRIC": "flat"})
        return made[world]

    yield get
    pools.close_fresh()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", [2, 3])
def test_every_schedule_equals_plain_torch(flat, name, world):
    flat(world).run(forward, name, _space(world), range(2))


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype(flat, name):
    flat(3).run(forward, name, FEW, (7, 8), DTYPES)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(flat, name):
    flat(2).run(gradients, name, "auto", 3)


def test_lookups(flat):
    schedules = ("auto", "serial@dma", "hetero-unfused-1d:3")
    flat(3).run(lookups.forward, schedules, range(3), (torch.float32, torch.bfloat16))


def _sliced():
    """A slice of the batch is sent as soon as it is looked up, before the next one."""
    lookups.same(lookups.Case(1, batch=67, max_tables=3))
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


# -- few bytes travel with headers -----------------------------------------------------------------


class _Counted:
    """How many calls found their bytes with the headers, while a `with` block lasts."""

    def __enter__(self):
        self.count, self._plain = 0, transfers.NetworkFlight._unpack

        def unpack(flight, came):
            self.count += 1
            self._plain(flight, came)

        transfers.NetworkFlight._unpack = unpack
        return self

    def __exit__(self, *exception):
        transfers.NetworkFlight._unpack = self._plain


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
    flat(2).run(_eager, ("all_gather_matmul", "all_to_all_matmul"))
    for world in (2, 3):
        assert len(set(flat(world).run(_changing))) == 1, "all ranks come to the same answer"
    flat(2).run(_large)


# -- two machines of two ranks ---------------------------------------------------------------------


def _named(rank_hosts, function, *arguments):
    """Calls a function on ranks that take themselves for being on these hosts."""
    import os

    import torch.distributed as dist

    os.environ["WEFT_HOST"] = rank_hosts[dist.get_rank()]
    return function(*arguments)


@pytest.fixture(scope="module")
def nested(pools):
    """`nested("aabb")`: one rank per letter, on the host of that name."""
    made = {}

    def get(hosts):
        if hosts not in made:
            made[hosts] = pools.fresh(len(hosts), {})
        pool = made[hosts]
        return lambda function, *arguments: pool.run(_named, hosts, function, *arguments)

    yield get
    pools.close_fresh()


@pytest.mark.parametrize("name", NAMES)
def test_two_levels_equal_plain_torch(nested, name):
    nested("aabb")(forward, name, _space(4), (1,))


def test_two_levels_with_few_bytes(nested):
    nested("aabb")(_eager, ("all_gather_matmul", "all_to_all_matmul"))
    nested("aabb")(lookups.forward, ("auto",), range(2), (torch.float32,))


@pytest.mark.parametrize("hosts", ["aab", "ababc"])
@pytest.mark.parametrize("name", NAMES)
def test_two_levels_of_odd_shapes(nested, name, hosts):
    nested(hosts)(forward, name, FEW, (3,), DTYPES)
