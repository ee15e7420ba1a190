"""PyTorch's fused operators on CPU tensors, by weft, and only while that is asked for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory

import weft


def values(*shape, seed=0):
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randint(-2, 3, shape, generator=generator).double().requires_grad_()


def routed():
    group = dist.group.WORLD.group_name
    x, w, v = values(3, 5), values(5, 4, seed=1), values(5, 2, seed=2)
    whole = torch.cat(torch.distributed.nn.functional.all_gather(x))
    fused = torch.ops.symm_mem
    with weft.symm_mem_compat():
        gathered, (y, z) = fused.fused_all_gather_matmul(x, [w, v], 0, group)
        assert torch.equal(gathered, whole)
        assert torch.equal(y, whole @ w)
        assert torch.equal(z, whole @ v)
        nothing, _ = fused.fused_all_gather_matmul(x, [w], 0, group, return_A=False)
        assert nothing is None
        a = values(4, 3, seed=3)
        b = values(3, 5, seed=4)
        scattered = fused.fused_matmul_reduce_scatter(a, b, "sum", 0, group)
        total = (a @ b).detach().clone()
        dist.all_reduce(total)
        assert torch.equal(scattered, total.chunk(2)[dist.get_rank()])
        (y.sum() + scattered.sum()).backward()
        assert torch.equal(w.grad, whole.detach().sum(0)[:, None].expand(5, 4))
        assert torch.equal(b.grad, a.detach().sum(0)[:, None].expand(3, 5))


def test_the_fused_operators_equal_plain_torch(ranks):
    ranks(2).run(routed)


def test_undone():
    x = torch.ones(2, 2)
    compat = weft.symm_mem_compat()
    with weft.symm_mem_compat():
        pass
    with pytest.raises((RuntimeError, weft.Error)) as routed:  # weft, which finds no group
        torch.ops.symm_mem.fused_matmul_reduce_scatter(x, x, "sum", 0, "none")
    assert "symm_mem::fused_matmul_reduce_scatter" not in str(routed.value)
    compat.undo()
    compat.undo()
    with pytest.raises(NotImplementedError, match="symm_mem::fused_matmul_reduce_scatter"):
        torch.ops.symm_mem.fused_matmul_reduce_scatter(x, x, "sum", 0, "none")
