"""The arguments of `all_gather_matmul`: out, several w, gathered, dimensions, layouts, memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import integers, product, shard_of

import weft

NAMES = ["serial@dma", "shard-p2p@cores", "uniform-fused-1d@dma", "hetero-fused-2d@dma"]
NAMES += ["hetero-unfused-1d@direct", "adaptive@dma", "adaptive@direct"]


def out() -> None:
    for name in NAMES:
        for dtype in (torch.float32, torch.bfloat16):
            x, w = integers((11, 6), dtype, 1), integers((6, 5), dtype, 2)
            y = torch.full((11, 5), torch.nan, dtype=dtype)
            assert weft.all_gather_matmul(shard_of(x), w, out=y, schedule=name) is y
            assert torch.equal(y, product(x, w)), name
            columns = torch.full((5, 11), torch.nan, dtype=dtype).t()
            weft.all_gather_matmul(shard_of(x), w, out=columns, schedule=name)
            assert torch.equal(columns, product(x, w)), name
            wide = torch.zeros(11, 9, dtype=dtype)
            weft.all_gather_matmul(shard_of(x), w, out=wide[:, 2:7], schedule=name)
            assert torch.equal(wide[:, 2:7], product(x, w)), name
            assert not wide[:, :2].any()
            assert not wide[:, 7:].any()


def test_out(ranks):
    ranks(2).run(out)


def out_of_a_size_that_changes() -> None:
    """Rank 0 has three rows in both calls; only the other rank knows that M is another now."""
    w = integers((4, 2), torch.float32, 2)
    for m in (5, 6, 5):
        x = integers((m, 4), torch.float32, m)
        y = torch.empty(m, 2)
        weft.all_gather_matmul(shard_of(x), w, out=y)
        assert torch.equal(y, product(x, w))


@pytest.mark.parametrize("world", [2, 3])
def test_out_while_the_other_shards_change(ranks, world):
    ranks(world).run(out_of_a_size_that_changes)


def shards_that_change() -> None:
    """What rank 0 expects from the last call with its own sizes is wrong each time."""
    w = integers((4, 2), torch.float32, 2)
    for name in NAMES:
        for m in (5, 6, 5, 5, 6, 6):
            x = integers((m, 4), torch.float32, m)
            y = weft.all_gather_matmul(shard_of(x), w, schedule=name)
            assert torch.equal(y, product(x, w)), (name, m)


@pytest.mark.parametrize("world", [2, 3])
def test_the_other_shards_change(ranks, world):
    ranks(world).run(shards_that_change)


def several() -> None:
    x = integers((9, 6), torch.float32, 1)
    ws = [integers((6, n), torch.float32, n) for n in (3, 0, 5, 1)]
    for name in NAMES:
        ys = weft.all_gather_matmul(shard_of(x), ws, schedule=name)
        assert isinstance(ys, list)
        assert all(torch.equal(y, product(x, w)) for y, w in zip(ys, ws, strict=True)), name
        outs = [torch.full_like(y, torch.nan) for y in ys]
        returned = weft.all_gather_matmul(shard_of(x), tuple(ws), out=outs, schedule=name)
        assert all(a is b for a, b in zip(returned, outs, strict=True))
        assert all(torch.equal(y, product(x, w)) for y, w in zip(outs, ws, strict=True)), name
        one = weft.all_gather_matmul(shard_of(x), ws[:1], schedule=name)
        assert isinstance(one, list)
        assert len(one) == 1
    assert weft.all_gather_matmul(shard_of(x), []) == []
    same = weft.all_gather_matmul(shard_of(x), [ws[0], ws[0]])
    assert torch.equal(same[0], same[1])


def test_several_w(ranks):
    ranks(3).run(several)


def gathered() -> None:
    for name in NAMES:
        for dtype in (torch.float32, torch.float16):
            x, w = integers((11, 6), dtype, 1), integers((6, 5), dtype, 2)
            y, whole = weft.all_gather_matmul(shard_of(x), w, return_gathered=True, schedule=name)
            assert torch.equal(y, product(x, w)), name
            assert torch.equal(whole, x), name
    ys, whole = weft.all_gather_matmul(shard_of(x), [], return_gathered=True)
    assert ys == []
    assert torch.equal(whole, x)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_return_gathered(ranks, world):
    ranks(world).run(gathered)


def dimensions() -> None:
    w = integers((4, 3), torch.float32, 2)
    for shape in ((5, 2, 4), (2, 7, 4), (2, 3, 5, 4), (1, 1, 4), (3, 0, 4), (0, 3, 4)):
        for dim in range(len(shape) - 1):
            for name in ("adaptive@dma", "adaptive@direct", "serial"):
                x = integers(shape, torch.float32, dim)
                cut = x.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]
                for at in (dim, dim - len(shape)):
                    y, whole = weft.all_gather_matmul(
                        cut, w, gather_dim=at, return_gathered=True, schedule=name
                    )
                    assert torch.equal(y, product(x, w)), (shape, dim, name)
                    assert torch.equal(whole, x), (shape, dim, name)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_three_and_four_dimensions(ranks, world):
    ranks(world).run(dimensions)


def layouts() -> None:
    x, w = integers((12, 6), torch.float32, 1), integers((6, 5), torch.float32, 2)
    shard = shard_of(x)
    expected = product(x, w)
    spread = torch.zeros(shard.shape[0] * 2, 12)
    spread[::2, ::2] = shard
    back = torch.zeros(10, 6)
    back[::2] = w.t()
    for name in NAMES:
        for one in (shard.t().contiguous().t(), spread[::2, ::2]):
            assert not one.is_contiguous()
            for weight in (w, w.t().contiguous().t(), back[::2].t()):
                y = weft.all_gather_matmul(one, weight, schedule=name)
                assert torch.equal(y, expected), name
    rows = torch.tensor([[1.0, 2, 3, 4, 5, 6]]).expand(shard.shape[0], 6)
    y = weft.all_gather_matmul(rows, w)
    assert torch.equal(y, product(rows[:1].expand(12, 6), w))


def test_tensors_that_are_not_contiguous(ranks):
    ranks(2).run(layouts)


def symmetric() -> None:
    """In place, without staging; and the input may be overwritten as soon as the call returns."""
    world, rank = dist.get_world_size(), dist.get_rank()
    w = integers((16, 8), torch.float32, 2)
    shard = weft.symmetric_empty(20, 16)
    assert shard.shape == (20, 16)
    for name in NAMES:
        for turn in range(20):
            x = integers((20 * world, 16), torch.float32, turn)
            shard.copy_(x[20 * rank : 20 * rank + 20])
            y = weft.all_gather_matmul(shard, w, schedule=name)
            shard.fill_(torch.nan)
            assert torch.equal(y, product(x, w)), name
            part = weft.symmetric_empty((40, 16))[10:30]
            part.copy_(x[20 * rank : 20 * rank + 20])
            assert torch.equal(weft.all_gather_matmul(part, w, schedule=name), product(x, w))


@pytest.mark.parametrize("world", [2, 3])
def test_symmetric_inputs(ranks, world):
    ranks(world).run(symmetric)


def mixed_memory() -> None:
    """One rank's input is symmetric, the other's is not; and outputs in symmetric memory."""
    rank = dist.get_rank()
    x, w = integers((20, 6), torch.float64, 1), integers((6, 5), torch.float64, 2)
    for turn in range(10):
        shard = shard_of(x)
        if (rank + turn) % 2:
            here = weft.symmetric_empty(*shard.shape, dtype=torch.float64)
            here.copy_(shard)
            shard = here
        y = weft.symmetric_empty(20, 5, dtype=torch.float64)
        weft.all_gather_matmul(shard, w, out=y, schedule=NAMES[turn % len(NAMES)])
        assert torch.equal(y, product(x, w))


def test_symmetric_on_some_ranks_only(ranks):
    ranks(2).run(mixed_memory)


def overwritten_at_once() -> None:
    """An ordinary input may change as soon as the call returns, however slow the peer is."""
    import time

    rank = dist.get_rank()
    w = integers((8, 4), torch.float32, 2)
    shard = torch.empty(10, 8)
    for turn in range(30):
        x = integers((20, 8), torch.float32, turn)
        shard.copy_(shard_of(x))
        if (turn + rank) % 3 == 0:
            time.sleep(0.003)
        y = weft.all_gather_matmul(shard, w, schedule=NAMES[turn % len(NAMES)])
        shard.fill_(torch.nan)
        assert torch.equal(y, product(x, w))


def test_ordinary_inputs_may_be_overwritten_at_once(ranks):
    ranks(2).run(overwritten_at_once)


def under_modes() -> None:
    x, w = integers((6, 4), torch.float32, 1), integers((4, 3), torch.float32, 2)
    with torch.inference_mode():
        assert torch.equal(weft.all_gather_matmul(shard_of(x), w), product(x, w))
    needs_grad = w.clone().requires_grad_()
    with torch.no_grad():
        y = weft.all_gather_matmul(shard_of(x), needs_grad)
    assert torch.equal(y, product(x, w))
    assert not y.requires_grad
    y = weft.all_gather_matmul(shard_of(x), needs_grad.detach())
    assert not y.requires_grad


def test_inference_and_no_grad(ranks):
    ranks(2).run(under_modes)
