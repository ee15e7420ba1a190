"""The copy streams of weft's Triton kernels on loom, where the kernels themselves cannot run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="weft.triton needs Triton")

# -- inside the ranks ------------------------------------------------------------------------------


def gather(calls):
    """Calls of the engines with other numbers each time: the gathered rows and the counters."""
    import torch
    import torch.distributed as dist

    from weft.triton import symmetric_memory
    from weft.triton.engines import CopyStreams, engines_of

    rank, world = dist.get_rank(), dist.get_world_size()
    space = symmetric_memory(1 << 16)
    engines = engines_of(space)
    assert isinstance(engines, CopyStreams)
    rows, inner = 5, 4
    size = engines.symmetric_bytes(rows, inner, torch.float32)
    region, _ = space.allocate("gather", size, (), ())
    gathered = torch.zeros(rows * world, inner, device="loom")
    firsts = [rows * r for r in range(world + 1)]
    chunks = [
        (rows * r + b, n, r, 2 * r + i) for r in range(world) for i, b, n in ((0, 0, 2), (1, 2, 3))
    ]
    engines.prepare(region, gathered, rows, firsts, chunks)
    seen = []
    for number in range(1, calls + 1):
        shard = torch.full((rows, inner), float(10 * number + rank), device="loom")
        epoch = engines.start(None, shard, number)
        engines.end(True)
        gathered[firsts[rank] : firsts[rank + 1]].copy_(shard)
        counters = engines.counters.cpu().view(world, 2).tolist()
        seen.append((epoch, gathered.cpu()[::rows, 0].tolist(), counters))
        assert all(
            len(gathered.cpu()[r * rows : (r + 1) * rows].unique()) == 1 for r in range(world)
        )
    dist.barrier()
    return seen


def test_engines_gather_in_order(loom_pools):
    for rank, seen in enumerate(loom_pools(3).run(gather, 3)):
        for number, (epoch, values, counters) in enumerate(seen, 1):
            assert epoch == number
            assert values == [10.0 * number + r for r in range(3)]
            assert counters == [[0 if r == rank else number] * 2 for r in range(3)]


def capture_a_kernel():
    import torch
    import torch.distributed as dist

    import weft
    from weft.triton import AllGatherGemm, symmetric_memory

    op = AllGatherGemm(symmetric_memory(1 << 16), 8, 4, torch.float32)
    x, w = torch.ones(4, 4, device="loom"), torch.ones(4, 4, device="loom")
    torch.accelerator.synchronize()
    graph, said = torch.accelerator.Graph(), ""
    with torch.Stream("loom"):
        graph.capture_begin()
        try:
            op(x, w)
        except weft.Unsupported as error:
            said = str(error)
        graph.capture_end()
    torch.accelerator.synchronize()
    dist.barrier()
    return said


def test_a_kernel_cannot_be_captured(loom_pools):
    for said in loom_pools(2).run(capture_a_kernel):
        assert "cannot be captured into a graph" in said


def test_memory_that_begins_inside_of_an_allocation():
    from weft.triton import SymmetricMemory

    whole = torch.zeros(4096, dtype=torch.uint8)
    start = -whole.data_ptr() % 256  # the base of the allocation
    base, offset = whole.data_ptr() + start, 512
    memory = whole[start + offset : start + offset + 1024]

    def get_buffer(rank, shape, dtype, storage_offset):
        assert rank == 0
        first = start + storage_offset * dtype.itemsize
        return whole[first : first + shape[0] * dtype.itemsize].view(dtype)

    handle = SimpleNamespace(buffer_ptrs=[base], offset=offset, get_buffer=get_buffer)
    space = SymmetricMemory(memory, handle, 0, lambda text: [text], 60.0)
    region, _ = space.allocate("test", 512, (), ())
    assert region.bases.tolist() == [memory.data_ptr()]
    region.carve((3,), torch.int64)
    part = region.carve((5,), torch.int64)
    assert space.peer_tensor(part, 0).data_ptr() == part.data_ptr()
