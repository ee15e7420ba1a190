"""The quick way of plain calls gives what the long way gives, and leaves the rest to it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import integers

import weft
from weft.collectives import group_channel as channels
from weft.collectives.kinds import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
)


def both_ways(dtype, rows):
    rank, world = dist.get_rank(), dist.get_world_size()
    channel = channels.of()
    xs = [integers((rows * world, 3), torch.float32, r).abs().to(dtype) for r in range(world)]
    x = xs[rank]
    wide = torch.stack(xs).to(torch.float64)
    total = (wide.amax(0) if dtype is torch.bool else wide.sum(0)).to(dtype)
    whole, like, part = (
        torch.zeros(n, 3, dtype=dtype) for n in (rows * world**2, rows * world, rows)
    )
    assert channel.quick(ALL_GATHER, x, whole)
    assert torch.equal(whole, torch.cat(xs))
    assert channel.quick(ALL_TO_ALL, x, like)
    assert torch.equal(like, torch.cat([other.chunk(world)[rank] for other in xs]))
    assert channel.quick(BROADCAST, x, like, root=world - 1)
    assert torch.equal(like, xs[-1])
    assert channel.quick(ALL_REDUCE, x, like)
    assert torch.equal(like, total)
    assert channel.quick(REDUCE_SCATTER, x, part)
    assert torch.equal(part, total.chunk(world)[rank])
    whole.view(world, -1, 3)[rank].copy_(x)
    assert channel.quick(ALL_GATHER, whole.view(world, -1, 3)[rank], whole)  # in place
    assert torch.equal(whole, torch.cat(xs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_calls_of_every_dtype(ranks, dtype):
    pool = ranks(3)
    for rows in (1, 7, 5003):
        pool.run(both_ways, dtype, rows)


def left_alone():
    """Calls that the quick way must not begin: nothing of them has happened."""
    channel = channels.of()
    x, y = torch.ones(8), torch.zeros(8)
    whole = torch.zeros(16)
    cases = {
        "strided input": (ALL_REDUCE, torch.ones(16)[::2], y),
        "strided result": (ALL_REDUCE, x, torch.zeros(16)[::2]),
        "another dtype": (ALL_REDUCE, x, torch.zeros(8, dtype=torch.float64)),
        "another shape": (ALL_REDUCE, x, torch.zeros(2, 4)),
        "too small": (ALL_GATHER, x, torch.zeros(15)),
        "other rows": (ALL_GATHER, torch.ones(4, 2), torch.zeros(16, 1)),
        "shared memory": (ALL_TO_ALL, y, y),
        "overlap": (ALL_REDUCE, whole[:8], whole[4:12]),
        "not its own rows": (ALL_GATHER, whole[4:12], whole),
        "odd rows": (ALL_TO_ALL, torch.ones(7), torch.zeros(7)),
        "no rows": (ALL_GATHER, torch.tensor(1.0), torch.zeros(2)),
        "empty": (ALL_REDUCE, torch.ones(0), torch.zeros(0)),
        "complex": (ALL_REDUCE, torch.ones(8, dtype=torch.complex64), y),
        "unsigned": (ALL_GATHER, x.to(torch.uint16), whole.to(torch.uint16)),
        "negative view": (ALL_REDUCE, torch.tensor([1 + 2j]).conj().imag, torch.zeros(1)),
        "parameter": (ALL_REDUCE, torch.nn.Parameter(x), y),
        "meta": (ALL_REDUCE, torch.ones(8, device="meta"), y),
        "sparse": (ALL_REDUCE, x.to_sparse(), y),
        "no tensor": (ALL_REDUCE, [1.0], y),
        "nothing": (ALL_REDUCE, None, y),
    }
    begun = [name for name, case in cases.items() if channel.quick(*case)]
    assert float(y.sum()) == float(whole.sum()) == 0
    assert float(weft.all_reduce(torch.ones(1))) == dist.get_world_size()  # all still count alike
    return begun


def test_what_is_not_plain_is_left_to_the_long_way(ranks):
    assert ranks(2).run(left_alone) == [[], []]


def views():
    """Conjugates and negatives are sent as what they mean."""
    world = dist.get_world_size()
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert weft.all_gather(z.conj()).tolist() == [1 - 2j, 3 + 1j] * world
    assert weft.all_reduce(z[:1].conj().imag).tolist() == [-2.0 * world]
    y = torch.zeros(1)
    weft.all_reduce(z[:1].conj().imag, out=y)
    assert y.tolist() == [-2.0 * world]
    weft.all_reduce(torch.nn.Parameter(torch.ones(1)), out=y)
    assert y.tolist() == [float(world)]
    weft.all_reduce(torch.ones(1, requires_grad=True), out=y)
    assert y.tolist() == [float(world)]


def test_conjugate_and_negative_views(ranks):
    ranks(2).run(views)


def threads():
    """Plain calls from two threads on two groups, while others are under way in the background."""
    import threading

    world = dist.get_world_size()
    groups = [dist.new_group() for _ in range(2)]
    wrong = []

    def work(group):
        for step in range(200):
            x = torch.full((3,), float(step))
            handle = weft.all_reduce(x, group=group, async_op=True)
            y = weft.all_reduce(x + 1, out=torch.empty(3), group=group)
            if float(y[0]) != (step + 1) * world or float(handle.wait()[0]) != step * world:
                wrong.append(step)

    workers = [threading.Thread(target=work, args=(group,)) for group in groups]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return wrong


def test_threads_and_background(ranks):
    assert ranks(2).run(threads) == [[], []]
