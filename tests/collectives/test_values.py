"""Collectives equal plain torch: every kind, odd, prime, empty and large sizes, every dtype."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import integers

import weft

SIZES = [0, 1, 7, 1013, 20_011, 150_001]
"""Rows of three: in an announcement, in one chunk, in many chunks."""
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WHOLE = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


def inputs(rows, dtype, world):
    """What each rank has: small whole numbers."""
    if dtype is torch.uint8:
        return [integers((rows, 3), torch.int8, r).abs().to(dtype) for r in range(world)]
    return [integers((rows, 3), dtype, r) for r in range(world)]


def check_everything(rows, dtype):
    rank, world = dist.get_rank(), dist.get_world_size()
    xs = inputs(rows, dtype, world)
    x, total = xs[rank], sum(t.to(torch.int64) for t in xs).to(dtype)
    for handle in (False, True):

        def call(function, *arguments, **keywords):
            given = function(*arguments, async_op=handle, **keywords)  # noqa: B023
            return given.wait() if handle else given  # noqa: B023

        assert torch.equal(call(weft.all_gather, x), torch.cat(xs))
        assert torch.equal(call(weft.all_reduce, x), total)
        assert torch.equal(call(weft.reduce_scatter, x), total.tensor_split(world)[rank])
        assert torch.equal(call(weft.broadcast, x, world - 1), xs[world - 1])
        gathered = call(weft.gather, x, world - 1)
        assert gathered is None if rank != world - 1 else torch.equal(gathered, torch.cat(xs))
        assert torch.equal(call(weft.scatter, x), xs[0].tensor_split(world)[rank])
        even = rows // world * world
        wanted = [t[:even].reshape(world, -1, 3)[rank] if even else t[:0] for t in xs]
        assert torch.equal(call(weft.all_to_all, x[:even]), torch.cat(wanted))


def check_in_place(rows):
    rank, world = dist.get_rank(), dist.get_world_size()
    xs = inputs(rows, torch.float32, world)
    total = sum(xs)
    for empty in (torch.empty, weft.symmetric_empty):
        y = empty(rows * world, 3)
        y[rank * rows : (rank + 1) * rows] = xs[rank]
        weft.all_gather(y[rank * rows : (rank + 1) * rows], out=y)
        assert torch.equal(y, torch.cat(xs))
        y = empty(rows, 3)
        assert weft.all_reduce(y.copy_(xs[rank]), out=y) is y
        assert torch.equal(y, total)
        weft.broadcast(y.copy_(xs[rank]), 0, out=y)
        assert torch.equal(y, xs[0])
        even = rows // world * world
        part = slice(rank * even // world, (rank + 1) * even // world)
        y.copy_(xs[rank])
        weft.reduce_scatter(y[:even], out=y[part])
        assert torch.equal(y[part], total[part] if even == rows else sum(x[part] for x in xs))
        y.copy_(xs[rank])
        weft.all_to_all(y[:even], out=y[:even])
        assert torch.equal(y[:even], torch.cat([x[part] for x in xs]))


def check_uneven(seed):
    """Splits that differ by rank; one rank's are small enough for its announcement, or none."""
    rank, world = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(seed)
    scale = [1, 30, 4000][seed % 3]
    splits = torch.randint(0, 5, (world, world), generator=random) * scale
    splits[seed % world] = torch.randint(0, 3, (world,), generator=random)
    xs = [integers((int(splits[r].sum()), 5), torch.float32, r) for r in range(world)]
    sent, got = splits[rank].tolist(), splits[:, rank].tolist()
    wanted = torch.cat([x.split(splits[s].tolist())[rank] for s, x in enumerate(xs)])
    assert torch.equal(weft.all_to_all(xs[rank], sent, got), wanted)
    handle = weft.all_to_all(xs[rank], sent, got, async_op=True)
    sizes = splits.diagonal().tolist()
    parts = [integers((size, 2), torch.int32, r) for r, size in enumerate(sizes)]
    assert torch.equal(weft.all_gather(parts[rank], sizes=sizes), torch.cat(parts))
    gathered = weft.gather(parts[rank], 0, sizes=sizes)
    assert gathered is None or torch.equal(gathered, torch.cat(parts))
    whole = torch.cat(parts)
    assert torch.equal(weft.reduce_scatter(whole, sizes=sizes), parts[rank] * world)
    into = torch.empty_like(parts[rank])
    weft.scatter(whole if rank == 0 else None, 0, sizes=sizes, out=into)
    assert torch.equal(into, parts[rank])
    assert torch.equal(handle.wait(), wanted)


def check_reductions():
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in (*FLOATS, *WHOLE):
        xs = [x + 3 for x in inputs(37, dtype, world)]
        stacked = torch.stack(xs)
        wide = stacked.to(torch.float64 if dtype.is_floating_point else dtype)
        wanted = {
            "product": wide.prod(0).to(dtype),
            "min": stacked.amin(0),
            "max": stacked.amax(0),
        }
        if dtype.is_floating_point:
            wanted["avg"] = wide.mean(0).to(dtype)
        else:
            bits = [x.clone() for x in xs]
            wanted["band"], wanted["bor"], wanted["bxor"] = (
                bits[0],
                bits[0].clone(),
                bits[0].clone(),
            )
            for x in bits[1:]:
                wanted["band"] = wanted["band"] & x
                wanted["bor"] = wanted["bor"] | x
                wanted["bxor"] = wanted["bxor"] ^ x
        for op, value in wanted.items():
            assert torch.equal(weft.all_reduce(xs[rank], op), value), (dtype, op)
    flags = torch.tensor([rank == 0, True, False])
    assert weft.all_reduce(flags, "max").tolist() == [True, True, False]
    assert weft.all_reduce(flags, "min").tolist() == [world == 1, True, False]


def check_halves(dtype):
    """Halves grow in float32 in the order of ranks and are rounded once, also NaN and infinity."""
    rank, world = dist.get_rank(), dist.get_world_size()
    xs = [torch.randn(70_001, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    xs[0][:4] = torch.tensor([float("inf"), float("nan"), 6e4, 1e-7])
    xs = [(x * (1 if r % 2 else 1e-3)).to(dtype) for r, x in enumerate(xs)]
    grown = xs[0].float()
    for x in xs[1:]:
        grown = grown + x.float()
    for rows in (9, 70_001):
        y = weft.all_reduce(xs[rank][:rows])
        assert torch.equal(y.nan_to_num(-1.0), grown[:rows].to(dtype).nan_to_num(-1.0))


def check_moved_dtypes():
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16):
        xs = [integers((11,), torch.float32, r).abs().to(dtype) for r in range(world)]
        gathered = weft.all_gather(xs[rank])
        assert gathered.dtype is dtype
        assert torch.equal(gathered.view(torch.uint8), torch.cat(xs).view(torch.uint8))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_collective_equals_torch(ranks, world):
    pool = ranks(world)
    for rows in SIZES if world == 3 else SIZES[:5]:
        pool.run(check_everything, rows, torch.float32)
    for dtype in (*FLOATS[1:], *WHOLE) if world == 3 else ():
        pool.run(check_everything, 1013, dtype)
    for rows in (1, 601, 50_010):
        pool.run(check_in_place, rows)


@pytest.mark.parametrize("seed", range(6))
def test_uneven_splits(ranks, seed):
    ranks(3 if seed % 2 else 4).run(check_uneven, seed)


def test_eight_ranks(ranks):
    ranks(8).run(check_everything, 20_011, torch.bfloat16)


def test_every_reduction(ranks):
    ranks(3).run(check_reductions)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_grow_in_float32(ranks, dtype):
    ranks(3).run(check_halves, dtype)


def test_any_dtype_moves(ranks):
    ranks(2).run(check_moved_dtypes)


def check_random_sequences(seed):
    """Collectives of random kinds and sizes, some in the background, beside weft's operators."""
    random = torch.Generator().manual_seed(seed)
    rank, world = dist.get_rank(), dist.get_world_size()
    open_ones = []
    for step in range(60):
        rows = int(torch.randint(1, [8, 300, 60_000][step % 3], (), generator=random))
        xs = [integers((rows * world, 2), torch.float32, seed + step + r) for r in range(world)]
        kind = int(torch.randint(0, 5, (), generator=random))
        background = bool(torch.randint(0, 2, (), generator=random))
        x = xs[rank]
        if kind == 0:
            given, wanted = weft.all_gather(x, async_op=background), torch.cat(xs)
        elif kind == 1:
            given, wanted = weft.all_reduce(x, async_op=background), sum(xs)
        elif kind == 2:
            given = weft.reduce_scatter(x, async_op=background)
            wanted = sum(xs).chunk(world)[rank]
        elif kind == 3:
            given = weft.all_to_all(x, async_op=background)
            wanted = torch.cat([t.chunk(world)[rank] for t in xs])
        else:
            background = False
            w = torch.ones(2, 3)
            given, wanted = weft.all_gather_matmul(x, w), torch.cat(xs) @ w
        if background:
            open_ones.append((given, wanted))
        else:
            assert torch.equal(given, wanted)
        while len(open_ones) > 5:
            handle, value = open_ones.pop(int(torch.randint(0, 6, (), generator=random)))
            assert torch.equal(handle.wait(), value)
    for handle, value in open_ones:
        assert torch.equal(handle.wait(), value)


@pytest.mark.parametrize("seed", range(3))
def test_random_sequences(ranks, seed):
    ranks(2 + seed).run(check_random_sequences, seed)


def check_links(bandwidth, engine):
    import time

    rank, world = dist.get_rank(), dist.get_world_size()
    weft.configure(link=weft.Link(bandwidth, 1e-4))
    try:
        xs = [integers((40_000,), torch.float32, r) for r in range(world)]
        started = time.perf_counter()
        assert torch.equal(weft.all_gather(xs[rank], engine=engine), torch.cat(xs))
        seconds, used = time.perf_counter() - started, time.process_time()
        handle = weft.all_reduce(xs[rank], async_op=True, engine=engine)
        assert torch.equal(handle.wait(), sum(xs))
        assert torch.equal(weft.all_reduce(xs[rank][:9]), sum(xs)[:9])
        return seconds, time.process_time() - used
    finally:
        weft.configure(link="memory")


@pytest.mark.parametrize("engine", ["dma", "cores"])
def test_links_are_respected(ranks, engine):
    """40,000 floats of each of two peers, over links of their own, take what the link says."""
    bandwidth = 1e6
    for _ in range(10):  # a busy machine makes it longer, and nothing makes it shorter
        seconds, used = ranks(3).run(check_links, bandwidth, engine)[0]
        assert seconds / (160_000 / bandwidth) >= 0.8
        if seconds / (160_000 / bandwidth) <= 3.0:
            break
    else:
        pytest.fail(f"the link takes {seconds / (160_000 / bandwidth):.1f} times what it should")
    if engine == "cores":
        assert used > 0.008  # it holds its core meanwhile
