"""Small correct stream programs, each of whose waits can be left out. They are run by rank
processes that have loom loaded (`loom_ranks.py`).

A program is a function of a `Run`. `run.sync(name, action)` is a wait, a join or a record_stream
that the program needs: the mutation of that name leaves it out. A program raises if a result is
wrong, unless a wait was left out. The file is long because it has one function per program.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm

from weft.fabric.device.device_driver import EQUAL
from weft.loom.driver import LoomDriver

PROGRAMS = {}


def program(world):
    def add(function):
        PROGRAMS[function.__name__] = (world, function)
        return function

    return add


class Run:
    """One run of a program on one rank."""

    def __init__(self, drop=None):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.driver, self.drop, self.names = LoomDriver(), drop, []
        self.blocks = []

    def sync(self, name, action):
        if name not in self.names:
            self.names.append(name)
        if name != self.drop:
            action()

    def symmetric(self, *shape, fill=0.0, dtype=torch.float32):
        """Memory of all ranks, filled and met: (own tensor, views of all ranks' tensors)."""
        mine = symm.empty(*shape, dtype=dtype, device="loom")
        mine.fill_(fill)
        handle = symm.rendezvous(mine, dist.group.WORLD)
        torch.accelerator.synchronize()
        dist.barrier()
        self.blocks.append(mine)
        return mine, [handle.get_buffer(r, shape, dtype) for r in range(self.world)], handle

    def flags(self, count=16):
        """Words of all ranks, zero: addresses by rank and index."""
        _, views, _ = self.symmetric(count, fill=0, dtype=torch.int32)
        return [[view.data_ptr() + 4 * i for i in range(count)] for view in views]

    def expect(self, tensor, value):
        found = tensor.cpu()
        if self.drop is None:
            assert bool((found == value).all()), (found.flatten()[:4], value)


def here():
    return torch.accelerator.current_stream()


def stream(priority=0):
    return torch.Stream("loom", priority=priority)


@program(world=2)
def ping_pong(run):
    """A buffer goes to and fro, with a word that counts."""
    mine, views, _ = run.symmetric(256)
    words = run.flags()
    peer = 1 - run.rank
    s = stream()
    with s:
        for turn in range(4):
            if turn % 2 == run.rank:
                if turn:
                    run.sync(
                        f"turn {turn}", lambda t=turn: run.driver.wait(words[run.rank][0], t, s)
                    )
                mine.copy_(views[peer])
                mine.add_(1)
                run.driver.post(words[peer][0], turn + 1, s)
        if run.rank == 0:
            run.sync("last turn", lambda: run.driver.wait(words[0][0], 4, s))
            got = views[1] + 0
            s.synchronize()
            run.expect(got, 4)
    s.synchronize()


@program(world=3)
def ring(run):
    """An all-gather around a ring: every rank passes on what it got in the step before."""
    n = 64
    _, parts, _ = run.symmetric(run.world, n, fill=-1)
    words = run.flags()
    mine, left = parts[run.rank], parts[run.rank - 1]
    s = stream()
    with s:
        mine[run.rank].fill_(run.rank)
        right = (run.rank + 1) % run.world
        run.driver.post(words[right][0], 1, s)
        for step in range(1, run.world):
            shard = (run.rank - step) % run.world
            run.sync(f"step {step}", lambda k=step: run.driver.wait(words[run.rank][0], k, s))
            run.driver.copy(mine[shard], left[shard], s)
            if step + 1 < run.world:
                run.driver.post(words[right][0], step + 1, s)
    s.synchronize()
    for rank in range(run.world):
        run.expect(mine[rank], rank)


@program(world=1)
def double_buffer(run):
    """A copy stream is one buffer ahead of the compute stream."""
    copies, compute = stream(), stream()
    source = torch.arange(6.0, device="loom").repeat_interleave(128).reshape(6, 128)
    buffers = torch.empty(2, 128, device="loom")
    total = torch.zeros(128, device="loom")
    run.sync("copies begin", lambda: copies.wait_stream(here()))
    free = [None, None]
    for i in range(6):
        if free[i % 2] is not None:
            run.sync(f"free {i}", lambda i=i: copies.wait_event(free[i % 2]))
        with copies:
            buffers[i % 2].copy_(source[i])
            filled = copies.record_event()
        run.sync(f"filled {i}", lambda f=filled: compute.wait_event(f))
        with compute:
            total.add_(buffers[i % 2])
            free[i % 2] = compute.record_event()
    run.sync("end", lambda: here().wait_stream(compute))
    result = total + 0
    run.expect(result, 15)


@program(world=2)
def chunked_gather(run):
    """Chunks of the peer's shard are pulled to their place; each is multiplied as it arrives."""
    rows, k, n, chunks = 8, 16, 4, 4
    _, shards, handle = run.symmetric(rows, k, fill=run.rank + 1)
    w = torch.ones(k, n, device="loom")
    peer = 1 - run.rank
    whole = torch.empty(rows, k, device="loom")
    y = torch.empty(rows, n, device="loom")
    shards[run.rank].mul_(2)
    run.sync("shards are there", lambda: handle.barrier(channel=0))
    copies = stream()
    run.sync("copies begin", lambda: copies.wait_stream(here()))
    part = rows // chunks
    for c in range(chunks):
        rows_c = slice(c * part, (c + 1) * part)
        with copies:
            run.driver.copy(whole[rows_c], shards[peer][rows_c], copies)
            arrived = copies.record_event()
        run.sync(f"chunk {c}", lambda e=arrived: here().wait_event(e))
        torch.mm(whole[rows_c], w, out=y[rows_c])
    run.sync("nobody reads any more", lambda: handle.barrier(channel=1))
    shards[run.rank].fill_(0)
    run.expect(y, k * 2 * (peer + 1))


@program(world=2)
def produce_and_scatter(run):
    """Partial products go to their owners, who add them up in the order of ranks."""
    rows, k, n = 4, 8, 8
    _, partials, _ = run.symmetric(2, rows, n, fill=-1)
    words = run.flags()
    x = torch.full((2 * rows, k), run.rank + 1.0, device="loom")
    w = torch.ones(k, n, device="loom")
    inbox = torch.full((2, rows, n), -1.0, device="loom")
    compute, copies, adds = stream(), stream(), stream(-1)
    run.sync("compute begins", lambda: compute.wait_stream(here()))
    run.sync("copies begin", lambda: copies.wait_stream(here()))
    with compute:
        for owner in range(2):
            torch.mm(x[owner * rows : (owner + 1) * rows], w, out=partials[run.rank][owner])
            run.driver.post(words[owner][run.rank], 1, compute)
    for source in range(2):
        mine = words[run.rank][source]
        run.sync(f"produced by {source}", lambda a=mine: run.driver.wait(a, 1, copies))
        with copies:
            run.driver.copy(inbox[source], partials[source][run.rank], copies)
    run.sync("all arrived", lambda: adds.wait_stream(copies))
    with adds:
        total = inbox[0] + inbox[1]
    run.sync("end", lambda: here().wait_stream(adds))
    result = total + 0
    run.sync("total is used by two streams", lambda t=total: t.record_stream(here()))
    del total
    with adds:
        again = torch.zeros(rows, n, device="loom")
    here().wait_stream(adds)
    run.expect(result, 3 * k)
    assert again is not None
    torch.accelerator.synchronize()


@program(world=1)
def capture_and_replay(run):
    """A captured fork and join, replayed on inputs that change."""
    x = torch.zeros(64, device="loom")
    y, z = torch.zeros(64, device="loom"), torch.zeros(64, device="loom")
    main, side, feed = stream(), stream(), stream()
    torch.accelerator.synchronize()
    graph = torch.accelerator.Graph()
    with main, graph:
        x.mul_(2)
        side.wait_stream(main)
        with side:
            torch.add(x, 1, out=y)
        torch.add(x, 2, out=z)
        run.sync("join in the graph", lambda: main.wait_stream(side))
        z.add_(y)
    for i in range(3):
        with feed:
            x.fill_(i)
        run.sync(f"input {i}", lambda: main.wait_stream(feed))
        with main:
            graph.replay()
        run.sync(f"output {i}", lambda: feed.wait_stream(main))
        with feed:
            result = z + 0
        feed.synchronize()
        run.expect(result, 4 * i + 3)


@program(world=1)
def recorded_use(run):
    """A temporary of one stream is read by another, and its memory is used again at once."""
    side = stream()
    for i in range(3):
        temporary = torch.full((512,), float(i), device="loom")
        side.wait_stream(here())
        with side:
            result = temporary + 1
        run.sync(f"use {i}", lambda t=temporary: t.record_stream(side))
        del temporary
        other = torch.full((512,), -5.0, device="loom")
        run.sync(f"result {i}", lambda: here().wait_stream(side))
        run.expect(result + 0, i + 1)
        result.record_stream(here())
        assert other is not None


@program(world=1)
def fork_and_join(run):
    """Three streams multiply parts; one adds them up."""
    a = torch.ones(3, 8, 8, device="loom")
    parts = torch.empty(3, 8, 8, device="loom")
    a.mul_(2)
    streams = [stream() for _ in range(3)]
    for i, s in enumerate(streams):
        run.sync(f"fork {i}", lambda s=s: s.wait_stream(here()))
        with s:
            torch.mm(a[i], a[i], out=parts[i])
    for i, s in enumerate(streams):
        run.sync(f"join {i}", lambda s=s: here().wait_stream(s))
    total = parts[0] + parts[1]
    total.add_(parts[2])
    run.expect(total, 3 * 32)


@program(world=2)
def signals(run):
    """put_signal and wait_signal hand a buffer over, and back."""
    _, views, handle = run.symmetric(128, fill=run.rank)
    s = stream()
    with s:
        if run.rank == 0:
            views[0].fill_(7)
            handle.put_signal(1, channel=0)
            run.sync("taken", lambda: handle.wait_signal(1, channel=1))
            views[0].fill_(9)
            handle.put_signal(1, channel=2)
        else:
            run.sync("given", lambda: handle.wait_signal(0, channel=0))
            first = views[0] + 0
            handle.put_signal(0, channel=1)
            run.sync("given again", lambda: handle.wait_signal(0, channel=2))
            second = views[0] + 0
    s.synchronize()
    if run.rank == 1:
        run.expect(first, 7)
        run.expect(second, 9)


@program(world=3)
def phases(run):
    """Barriers of all ranks between writing and reading."""
    _, views, handle = run.symmetric(96)
    for phase in range(2):
        views[run.rank].fill_(10 * phase + run.rank)
        run.sync(f"written {phase}", lambda p=phase: handle.barrier(channel=2 * p))
        total = views[0] + views[1]
        total.add_(views[2])
        run.expect(total, 30 * phase + 3)
        run.sync(f"read {phase}", lambda p=phase: handle.barrier(channel=2 * p + 1))
    views[run.rank].fill_(-1)


@program(world=1)
def through_the_host(run):
    """A result goes to pinned memory of the host by one stream, and back by another."""
    out, back = stream(), stream()
    x = torch.full((256,), 3.0, device="loom")
    pinned = torch.empty(256, pin_memory=True)
    run.sync("x is there", lambda: out.wait_stream(here()))
    with out:
        pinned.copy_(x, non_blocking=True)
        landed = out.record_event()
    run.sync("landed", landed.synchronize)
    with back:
        y = torch.empty(256, device="loom")
        y.copy_(pinned, non_blocking=True)
    run.sync("back", lambda: here().wait_stream(back))
    result = y + 0
    y.record_stream(here())
    run.expect(result, 3)


@program(world=2)
def column_blocks(run):
    """Blocks of columns are pulled by pitched copies, and their products added up."""
    rows, k, n, steps = 6, 12, 5, 3
    _, shards, _ = run.symmetric(rows, k, fill=-1)
    words = run.flags()
    peer = 1 - run.rank
    w = torch.ones(k, n, device="loom")
    y = torch.zeros(rows, n, device="loom")
    block = k // steps
    stage = torch.empty(2, rows, block, device="loom")
    copies, compute = stream(), stream()
    run.sync("copies begin", lambda: copies.wait_stream(here()))
    produce = stream()
    with produce:
        for s in range(steps):
            shards[run.rank][:, s * block : (s + 1) * block].fill_(s + 1)
            run.driver.post(words[peer][s], 1, produce)
    used = [None, None]
    for s in range(steps):
        columns = slice(s * block, (s + 1) * block)
        run.sync(f"block {s}", lambda s=s: run.driver.wait(words[run.rank][s], 1, copies))
        if used[s % 2] is not None:
            run.sync(f"stage {s}", lambda s=s: copies.wait_event(used[s % 2]))
        with copies:
            run.driver.copy(stage[s % 2], shards[peer][:, columns], copies)
            arrived = copies.record_event()
        run.sync(f"arrived {s}", lambda e=arrived: compute.wait_event(e))
        with compute:
            y.addmm_(stage[s % 2], w[columns])
            used[s % 2] = compute.record_event()
    compute.synchronize()
    run.expect(y, block * 6)
    torch.accelerator.synchronize()


@program(world=2)
def words_that_reset(run):
    """Words that alternate and are cleared by who waited, as a replayed graph needs them."""
    _, views, _ = run.symmetric(2, 64)
    words = run.flags()
    peer = 1 - run.rank
    s = stream()
    out = torch.zeros(64, device="loom")
    run.sync("out is there", lambda: s.wait_stream(here()))
    with s:
        for call in range(4):
            ready = call % 2
            views[run.rank][ready].fill_(call + run.rank)
            run.driver.post(words[peer][ready], 1, s)
            mine = words[run.rank][ready]
            run.sync(f"ready {call}", lambda a=mine: run.driver.wait(a, 1, s, EQUAL))
            run.driver.post(mine, 0, s)
            out.add_(views[peer][ready])
    s.synchronize()
    run.expect(out, 6 + 4 * peer)


@program(world=1)
def backward_on_a_stream(run):
    """Forward and backward on a stream of its own; the optimiser's stream waits for it."""
    w = torch.ones(8, 8, device="loom", requires_grad=True)
    x = torch.ones(4, 8, device="loom")
    s, update = stream(), stream()
    run.sync("inputs are there", lambda: s.wait_stream(here()))
    with s:
        (x @ w).sum().backward()
    run.sync("gradient is there", lambda: update.wait_stream(s))
    with update, torch.no_grad():
        w.sub_(w.grad)
    run.sync("weights are there", lambda: here().wait_stream(update))
    run.expect(w.detach() + 0, -3)
    torch.accelerator.synchronize()


@program(world=3)
def pushes(run):
    """A root pushes to all, data first and then the word, by copies of an engine (NCCL's way)."""
    mine, views, _ = run.symmetric(128, fill=-1)
    flags, theirs, _ = run.symmetric(4, fill=0, dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int32, device="loom")
    s = stream()
    run.sync("one is there", lambda: s.wait_stream(here()))
    with s:
        if run.rank == 0:
            mine.fill_(5)
            for peer in (1, 2):
                run.driver.copy(views[peer], mine, s)
                run.driver.copy(theirs[peer][:1], one, s)
        else:
            run.sync("pushed", lambda: run.driver.wait(flags.data_ptr(), 1, s))
            mine.add_(1)
    s.synchronize()
    run.expect(mine, 5 if run.rank == 0 else 6)
