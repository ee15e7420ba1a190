"""PyTorch's fused operators on CPU tensors, by weft, and only while that is asked for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory
import torch.distributed.nn.functional

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


def eight(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float().to(torch.float8_e4m3fn)


def scaled_routed():
    rank, world = dist.get_rank(), dist.get_world_size()
    group, fused = dist.group.WORLD.group_name, torch.ops.symm_mem
    x, w = eight(1, 4 * world, 16), eight(2, 16, 16)
    scales = 2.0 ** torch.arange(4.0 * world)[:, None]
    one, kind = torch.tensor(1.0), torch.float32
    product = x.float() @ w.float()
    with weft.symm_mem_compat():
        gathered, (y,) = fused.fused_all_gather_scaled_matmul(
            x.tensor_split(world)[rank],
            [w],
            scales.tensor_split(world)[rank],
            [one],
            0,
            group,
            [None],
            [None],
            [kind],
            [False],
        )
        assert torch.equal(gathered.float(), x.float())
        assert torch.equal(y, product * scales)
        # A graph flattens [2, 2 * world, K] to two dimensions and says what it was.
        shape = [2, 2 * world, 16]
        z = fused.fused_scaled_matmul_reduce_scatter(
            x, w, scales, one, "sum", 1, 0, group, shape, None, None, kind
        )
        whole = (product * scales * world).view(shape)
        assert torch.equal(z, whole.tensor_split(world, 1)[rank])


def test_the_scaled_operators(ranks):
    ranks(2).run(scaled_routed)


def replaced():
    """The kernels of the key CUDA, called with CPU tensors, since there is no GPU here."""
    cuda, group = torch._C.DispatchKey.CUDA, dist.group.WORLD.group_name
    call = torch.ops.symm_mem.fused_matmul_reduce_scatter.default._op_dk
    x = torch.ones(4, 3)
    expected = torch.full((2, 3), 6.0)

    def own():
        try:
            call(cuda, x, x.t() @ x, "sum", 0, group)
        except Exception as error:
            return type(error).__name__
        return "ran"

    before = own()
    first = weft.symm_mem_compat(["cuda"])
    with weft.symm_mem_compat(devices=["cuda", "loom"]):
        inside = call(cuda, x, torch.ones(3, 3), "sum", 0, group)
    still = call(cuda, x, torch.ones(3, 3), "sum", 0, group)
    first.undo()
    first.undo()
    return before, own(), torch.equal(inside, expected), torch.equal(still, expected)


def test_kernels_of_a_device_are_replaced_and_come_back(ranks):
    for before, after, inside, still in ranks(2).run(replaced):
        assert before == after != "ran"
        assert inside
        assert still


def test_an_unknown_device_is_refused():
    with pytest.raises(weft.Unsupported, match="did you mean cuda"):
        weft.symm_mem_compat(["cud"])
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(
        "symm_mem::fused_matmul_reduce_scatter", "CPU"
    )
