"""`torch.ops.weft.all_gather_matmul`: opcheck, fake kernel, compiled graphs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import integers, product, shard_of

import weft


def checked() -> None:
    name = dist.group.WORLD.group_name
    world = dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16):
        x = integers((4, 6), dtype, 1)
        w = [integers((6, n), dtype, n) for n in (3, 5)]
        operator = torch.ops.weft.all_gather_matmul.default
        torch.library.opcheck(operator, (x, w, 0, name))
        torch.library.opcheck(
            operator, (x, w[:1], 0, name), {"return_A": True, "schedule": "serial@dma"}
        )
        cube = integers((2, 4, 6), dtype, 1)
        torch.library.opcheck(operator, (cube, w, 1, name), {"return_A": True})
        torch.library.opcheck(operator, (x, w, 0, name), {"shard_rows": [4] * world})


@pytest.mark.parametrize("world", [1, 2])
def test_opcheck(ranks, world):
    ranks(world).run(checked)


def block(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y = weft.all_gather_matmul(x.relu() + 1, w)
    q, k = weft.all_gather_matmul(x, [w, v], schedule="adaptive:2@dma")
    z, whole = weft.all_gather_matmul(x, v, return_gathered=True)
    return torch.cat([y * 2, q, k + z, whole], dim=1)


def block_of_cubes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return weft.all_gather_matmul(x, w, gather_dim=1).transpose(0, 1).reshape(-1, w.shape[1])


def compiled() -> None:
    x = shard_of(integers((8, 4), torch.float32, 1))
    w, v = integers((4, 3), torch.float32, 2), integers((4, 3), torch.float32, 3)
    with torch.no_grad():
        quick = torch.compile(block, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            assert torch.equal(quick(x, w, v), block(x, w, v))
        cube = integers((3, 2, 4), torch.float32, 4 + dist.get_rank())
        quick = torch.compile(block_of_cubes, fullgraph=True, backend="aot_eager")
        assert torch.equal(quick(cube, w), block_of_cubes(cube, w))


def test_compiled_equals_eager(ranks):
    ranks(2).run(compiled)


def uneven_graph() -> None:
    x, w = integers((7, 4), torch.float32, 1), integers((4, 3), torch.float32, 2)

    def function(shard: torch.Tensor) -> torch.Tensor:
        return weft.all_gather_matmul(shard, w, shard_rows=[4, 3]) + 1

    with torch.no_grad():
        quick = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert torch.equal(quick(shard_of(x)), product(x, w) + 1)


def test_compiled_with_uneven_shards(ranks):
    ranks(2).run(uneven_graph)


def fakes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    name = dist.group.WORLD.group_name
    with FakeTensorMode():
        x, w = torch.empty(5, 2, 6, dtype=torch.bfloat16), torch.empty(6, 3, dtype=torch.bfloat16)
        whole, (y,) = torch.ops.weft.all_gather_matmul(x, [w], 0, name, return_A=True)
        assert (whole.shape, y.shape, y.dtype) == ((10, 2, 6), (10, 2, 3), torch.bfloat16)
        none, (y,) = torch.ops.weft.all_gather_matmul(x, [w], 1, name, shard_rows=[2, 7])
        assert none is None
        assert y.shape == (5, 9, 3)


def test_the_fake_kernel_gives_the_shapes(ranks):
    ranks(2).run(fakes)


def test_the_schema_is_in_the_order_of_symm_mem():
    import torch.distributed._symmetric_memory  # registers symm_mem

    ours = torch.ops.weft.all_gather_matmul.default._schema
    theirs = torch.ops.symm_mem.fused_all_gather_matmul.default._schema
    assert [a.name for a in ours.arguments[1:4]] == [a.name for a in theirs.arguments[1:4]]
    assert [str(a.type) for a in ours.arguments[:4]] == [str(a.type) for a in theirs.arguments[:4]]
    assert ours.arguments[4].name == theirs.arguments[4].name == "return_A"
