"""The weft backend of torch.distributed: every operation of c10d on CPU, and training like gloo."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import integers, on_weft, tell

import weft
from weft.collectives import backend_call

NAMES = {op: getattr(dist.ReduceOp, op) for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")}


def every_operation(rows, dtype, background):
    rank, world = dist.get_rank(), dist.get_world_size()
    assert dist.get_backend() == "weft"
    xs = [integers((rows, 2), dtype, r) for r in range(world)]
    x, total = xs[rank], sum(xs)

    def done(work):
        if background:
            work.wait()
            assert work.is_completed()
            assert work.is_success()

    y = x.clone()
    done(dist.all_reduce(y, async_op=background))
    assert torch.equal(y, total)
    y = x.clone()
    done(dist.broadcast(y, world - 1, async_op=background))
    assert torch.equal(y, xs[-1])
    y = x.clone()
    done(dist.reduce(y, 0, async_op=background))
    assert torch.equal(y, total if rank == 0 else x)
    parts = [torch.empty_like(x) for _ in range(world)]
    done(dist.all_gather(parts, x, async_op=background))
    assert all(map(torch.equal, parts, xs))
    flat = torch.empty(rows * world, 2, dtype=dtype)
    done(dist.all_gather_single(flat, x, async_op=background))
    assert torch.equal(flat, torch.cat(xs))
    y = torch.empty_like(x)
    done(dist.reduce_scatter(y, [t.clone() for t in [x] * world], async_op=background))
    assert torch.equal(y, total)
    done(dist.reduce_scatter_single(y, torch.cat([x] * world), async_op=background))
    assert torch.equal(y, total)
    parts = [torch.empty_like(x) for _ in range(world)] if rank == 0 else None
    done(dist.gather(x, parts, async_op=background))
    assert rank or all(map(torch.equal, parts, xs))
    done(dist.scatter(y, xs if rank == 0 else None, async_op=background))
    assert torch.equal(y, x)
    outs = [torch.empty(s + 1, dtype=dtype) for s in range(world)]
    ins = [torch.full((rank + 1,), r, dtype=dtype) for r in range(world)]
    done(dist.all_to_all(outs, ins, async_op=background))
    assert [o.tolist() for o in outs] == [[rank] * (s + 1) for s in range(world)]
    into = torch.empty(sum(range(1, world + 1)), dtype=dtype)
    splits = list(range(1, world + 1))
    done(dist.all_to_all_single(into, torch.cat(ins), splits, [rank + 1] * world,
                                async_op=background))  # fmt: skip
    assert into.tolist() == [rank] * into.numel()
    strided = torch.zeros(rows, 4, dtype=dtype)[:, ::2]
    strided.copy_(x)
    done(dist.all_reduce(strided, async_op=background))
    assert torch.equal(strided, total)
    done(dist.barrier(async_op=background))


def other_operations():
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, op in NAMES.items():
        y = torch.full((5,), float(rank + 1))
        dist.all_reduce(y, op)
        values = torch.arange(1.0, world + 1)
        wanted = {"SUM": values.sum(), "AVG": values.mean(), "PRODUCT": values.prod(),
                  "MIN": values.min(), "MAX": values.max()}[name]  # fmt: skip
        assert torch.equal(y, wanted.expand(5)), name
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert bits.item() == 2**world - 1
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(world)]
    said = [f"from {rank}"]
    dist.broadcast_object_list(said, 1)
    assert said == ["from 1"]
    z = torch.ones(3, dtype=torch.complex64)
    dist.all_reduce(z)
    assert z.real.tolist() == [world] * 3
    future = dist.all_reduce(torch.ones(4), async_op=True).get_future()
    assert future.wait()[0].tolist() == [world] * 4
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        many = [torch.full((7,), float(rank)) for _ in range(4)]
        for one in many:
            dist.all_reduce(one)
    manager.wait()
    assert all(one.tolist() == [sum(range(world))] * 7 for one in many)
    dist.group.WORLD.monitored_barrier(timedelta(seconds=10))


def messages():
    rank, world = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % world, (rank - 1) % world
    for size in (1, 1000, 500_000):
        sent, got = torch.full((size,), float(rank)), torch.empty(size)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, got, before)]
        )
        for work in works:
            work.wait()
        assert torch.equal(got, torch.full((size,), float(before)))
    # Tags out of order, and one that is larger than the ring before it.
    if rank == 0:
        dist.isend(torch.ones(400_000), 1, tag=7)
        dist.send(torch.full((3,), 5.0), 1, tag=8)
    if rank == 1:
        late, early = torch.empty(400_000), torch.empty(3)
        dist.recv(early, 0, tag=8)
        dist.recv(late, 0, tag=7)
        assert early.tolist() == [5.0] * 3
        assert float(late.sum()) == 400_000
    got = torch.empty(2)
    if rank == 0:
        seen = set()
        for _ in range(world - 1):
            source = dist.recv(got)
            assert got.tolist() == [source] * 2
            seen.add(source)
        assert seen == set(range(1, world))
    else:
        dist.send(torch.full((2,), float(rank)), 0)
    dist.barrier()


def forgotten_messages():
    """Nobody keeps the work of a message, nor the tensor that was sent: it arrives all the same."""
    rank, size = dist.get_rank(), 400_000  # larger than the ring
    if rank == 0:
        dist.isend(torch.ones(size), 1)
        for _ in range(3):  # takes the memory that nobody else holds
            torch.zeros(size)
    dist.barrier()
    if rank == 1:
        got = torch.empty(size)
        dist.recv(got, 0)
        assert got.sum() == size
    dist.barrier()


def subgroups():
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([a, (a + 1) % world]) for a in range(world)]
    for a, group in enumerate(pairs):
        if rank in (a, (a + 1) % world):
            y = torch.full((50_000,), float(rank))
            work = dist.all_reduce(y, group=group, async_op=True)
            work.wait()
            assert float(y[-1]) == a + (a + 1) % world
            assert torch.equal(
                weft.all_gather_matmul(torch.ones(2, 3), torch.ones(3, 2), group=group),
                torch.full((4, 2), 3.0),
            )


def mismatch():
    try:
        dist.all_reduce(torch.ones(3 + dist.get_rank()))
    except weft.Mismatch as error:
        return str(error)
    return "nothing"


def train(kind):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 33), torch.nn.ReLU(), torch.nn.Linear(33, 16), torch.nn.Linear(16, 1)
    )
    if kind == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model[0], mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
        if kind == "hook":
            assert weft.nn.gather_by_weft(wrapped, mesh.get_group()) == 2
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    random = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(6):
        x = torch.randn(8, 16, generator=random)
        loss = (wrapped(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


@pytest.fixture
def pool(ranks):
    """`pool(2)`: ranks that change from backend to backend."""
    return lambda world: ranks(world, WEFT_TESTS="backend")


@pytest.mark.parametrize("background", [False, True])
def test_every_operation(pool, background):
    three = pool(3)
    for rows, dtype in ((1, torch.float32), (513, torch.int64), (30_011, torch.float32)):
        three.run(on_weft, every_operation, rows, dtype, background)


def test_other_operations_messages_and_subgroups(pool):
    three = pool(3)
    three.run(on_weft, other_operations)
    three.run(on_weft, messages)
    three.run(on_weft, forgotten_messages)
    three.run(on_weft, subgroups)
    heard = three.run(on_weft, mismatch)
    assert heard[0] == heard[1] == heard[2]
    assert "rank 0 calls all_reduce (sum of 3 float32)" in heard[0]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_gives_the_losses_of_gloo(pool, kind):
    plain, woven = pool(2).run(train, kind), pool(2).run(on_weft, train, kind)
    for ours, theirs in zip(woven, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_weights_gathered_by_the_hook(pool):
    assert pool(2).run(train, "hook") == pool(2).run(train, "fsdp")


def saved_in_the_background(path):
    """A checkpoint that is written while the ranks compute, as `async_save` does."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(24.0).view(4, 6)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "step": torch.tensor(7)}
    future = dcp.async_save(state, checkpoint_id=path)
    state["w"].to_local().mul_(2)  # the checkpoint has a copy of its own
    future.result()
    found = {"w": distribute_tensor(whole * 0, mesh, [Shard(0)]), "step": torch.tensor(0)}
    dcp.load(found, checkpoint_id=path)
    assert torch.equal(found["w"].full_tensor(), whole)
    assert int(found["step"]) == 7


def test_async_save(pool, tmp_path):
    pool(2).run(on_weft, saved_in_the_background, str(tmp_path))


def futures_of_inference_tensors():
    """A watcher completes a future outside of any mode, also where it copies a result."""
    with torch.inference_mode():
        x = torch.ones(4, 6).t()
        for _ in range(2):
            dist.all_reduce(x, async_op=True).get_future().wait()
        assert x.eq(dist.get_world_size() ** 2).all()


def test_futures_of_inference_tensors(ranks):
    ranks(2, WEFT_TESTS="backend").run(on_weft, futures_of_inference_tensors)


def futures_of_results_that_do_not_fit():
    """What goes wrong when a result is copied reaches the future, and every wait after it."""
    broken = backend_call._fill

    def fails(tensor, values):
        raise RuntimeError("that does not fit")

    backend_call._fill = fails
    try:
        work = dist.all_reduce(torch.ones(4, 6).t(), async_op=True)
        with pytest.raises(RuntimeError, match="that does not fit"):
            work.get_future().wait()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="that does not fit"):
                work.wait()
        assert not work.is_success()
    finally:
        backend_call._fill = broken
    x = torch.ones(3, 5).t()  # the watcher is still there
    dist.all_reduce(x, async_op=True).get_future().wait()
    assert x.eq(dist.get_world_size()).all()


def test_futures_of_results_that_do_not_fit(ranks):
    ranks(2, WEFT_TESTS="backend").run(on_weft, futures_of_results_that_do_not_fit)


def barrier_without_the_last():
    """Ranks come one after the other, and the last not at all."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 2:
        store.wait(["0", "1"])
        return ""
    if rank == 0:
        store.wait(["coming"])
    else:
        store.set("coming", "")
    try:
        with pytest.raises(weft.Timeout, match="waited 1 s for rank 2 to make it too") as late:
            dist.group.WORLD.monitored_barrier(timedelta(seconds=1))
    finally:
        store.set(str(rank), "")
        store.wait(["0", "1"])
    return str(late.value)


def test_a_monitored_barrier_names_who_did_not_come(fresh_ranks):
    fresh_ranks(3).run(on_weft, barrier_without_the_last)


def new_group_with_the_dead():
    """Rank 1 has died before the new group was made."""
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(weft.PeerLost) as lost:
        dist.all_reduce(torch.ones(4), group=dist.new_group([0, 1], timeout=timedelta(seconds=60)))
    assert lost.value.rank == 1
    assert time.monotonic() - began < 20
    tell("named")
    os._exit(0)  # there is no peer with which this rank could form the usual group again


def test_a_new_group_with_a_rank_that_died_before(fresh_ranks):
    job = fresh_ranks(2).start(on_weft, new_group_with_the_dead)
    job.hear("named")
    assert (0, "named") in job._told
    assert all(outcome.died for outcome in job.outcomes())
