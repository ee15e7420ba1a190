"""Code written for PyTorch's fused operators and for FSDP2, on tensors of a device."""

from __future__ import annotations

# -- inside the ranks ------------------------------------------------------------------------------


def numbers(seed, *shape):
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float()


def fused_operators():
    """PyTorch's names on loom, with gradients, and float8; then PyTorch's own again."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory

    import weft

    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    fused, good = torch.ops.symm_mem, {}
    x, w = numbers(1, 6 * world, 16), numbers(2, 16, 16)
    shard = x.tensor_split(world)[rank].to("loom").requires_grad_()
    weight = w.to("loom").requires_grad_()
    with weft.symm_mem_compat(devices=["loom"]):
        gathered, (y,) = fused.fused_all_gather_matmul(shard, [weight], 0, group)
        good["gathered"] = torch.equal(gathered.detach().cpu(), x)
        good["product"] = torch.equal(y.detach().cpu(), x @ w)
        y.sum().backward()
        good["dw"] = torch.equal(weight.grad.cpu(), x.sum(0)[:, None].expand(16, 16))
        good["dx"] = torch.equal(shard.grad.cpu(), (w.sum(1) * world).expand(6, 16))
        z = fused.fused_matmul_reduce_scatter(x.to("loom"), w.to("loom"), "sum", 0, group)
        good["sum"] = torch.equal(z.cpu(), (world * (x @ w)).tensor_split(world)[rank])
        eight, one = torch.float8_e4m3fn, torch.tensor(1.0, device="loom")
        rows = 2.0 ** (torch.arange(6.0 * world) % 5)[:, None]
        _, (s,) = fused.fused_all_gather_scaled_matmul(
            x.tensor_split(world)[rank].to(eight).to("loom"),
            [w.to(eight).to("loom")],
            rows.tensor_split(world)[rank].to("loom"),
            [one],
            0,
            group,
            [None],
            [None],
            [torch.float32],
            [False],
        )
        good["scaled"] = torch.equal(s.cpu(), (x @ w) * rows)
        t = fused.fused_scaled_matmul_reduce_scatter(
            x.to(eight).to("loom"),
            w.to(eight).to("loom"),
            rows.to("loom"),
            one,
            "sum",
            0,
            0,
            group,
            [6 * world, 16],
            None,
            None,
            torch.float32,
        )
        good["scaled sum"] = torch.equal(
            t.cpu(), (world * (x @ w) * rows).tensor_split(world)[rank]
        )
    try:
        fused.fused_matmul_reduce_scatter(x.to("loom"), w.to("loom"), "sum", 0, group)
    except NotImplementedError:
        good["back"] = True
    dist.barrier()
    return good


def test_pytorchs_fused_operators(loom_pools):
    for good in loom_pools(2).run(fused_operators):
        assert len(good) == 8
        assert all(good.values()), good


def weights_and_gradients(kind):
    """What FSDP2 asks of its custom communication, on one kind of device."""
    import torch
    import torch.distributed as dist

    from weft.errors import Unsupported
    from weft.nn import AllGather, ReduceScatter

    rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device(kind)
    gather, reduce = AllGather(), ReduceScatter()
    good = []
    for n in (5, 20000):  # below and above what symmetric memory is used for
        full = gather.allocate([n * world], dtype=torch.float32, device=device)
        mine = numbers(rank, n).to(device)
        for later in (False, True):
            full.zero_()
            work = gather(full, mine, dist.group.WORLD, async_op=later)
            if later:
                work.wait()
            good.append(torch.equal(full.cpu(), torch.cat([numbers(r, n) for r in range(world)])))
        grads = reduce.allocate([n * world], dtype=torch.float32, device=device)
        grads.copy_(numbers(10 + rank, n * world))
        out = torch.empty(n, device=device)
        total = torch.stack([numbers(10 + r, n * world) for r in range(world)]).sum(0)
        for op, share in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, world)):
            for later in (False, True):
                work = reduce(out, grads, dist.group.WORLD, op, async_op=later)
                if later:
                    work.wait()
                good.append(torch.equal(out.cpu(), total.view(world, n)[rank] / share))
    try:
        reduce(out, grads, dist.group.WORLD, dist.ReduceOp.MAX)
    except Unsupported:
        good.append(True)
    dist.barrier()
    return good


def trains_with_fsdp2():
    """Two steps of SGD under `fully_shard` on loom, beside the same model in one process. Small
    whole numbers make sums exact in any order."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from weft.nn import gather_by_weft

    def model():
        layers = torch.nn.Sequential(
            torch.nn.Linear(12, 10), torch.nn.ReLU(), torch.nn.Linear(10, 6)
        )
        for number, parameter in enumerate(layers.parameters()):
            parameter.data = numbers(number, *parameter.shape)
        return layers

    rank, world = dist.get_rank(), dist.get_world_size()
    alone, sharded = model(), model().to("loom")
    mesh = init_device_mesh("loom", (world,))
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)
    assert gather_by_weft(sharded, gradients=True) == 3
    steps = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (alone, sharded)]
    good = []
    for turn in range(2):
        xs = [numbers(20 + 10 * turn + r, 4, 12) for r in range(world)]
        wanted = [alone(x) for x in xs]
        (sum(y.sum() for y in wanted) / world).backward()
        y = sharded(xs[rank].to("loom"))
        y.sum().backward()
        good.append(torch.equal(y.detach().cpu(), wanted[rank].detach()))
        for step in steps:
            step.step()
            step.zero_grad()
        for one, other in zip(alone.parameters(), sharded.parameters(), strict=True):
            part = one.detach().tensor_split(world)[rank]
            good.append(torch.equal(other.to_local().detach().cpu(), part))
    return good


def test_fsdp2_trains_on_a_device(loom_pools):
    for good in loom_pools(2).run(trains_with_fsdp2):
        assert good == [True] * (2 + 2 * 4)


def test_fsdp2s_communication(loom_pools):
    for kind in ("loom", "cpu"):
        for good in loom_pools(2).run(weights_and_gradients, kind):
            assert len(good) == 13
            assert all(good), kind
