"""The parallel styles give what torch's give: results, gradients, layouts."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as plain

import weft
import weft.nn


class Gated(nn.Module):
    """A gated MLP: two layers with one input, and one behind them."""

    def __init__(self, size, hidden, bias):
        super().__init__()
        self.w1 = nn.Linear(size, hidden, bias=bias)
        self.w3 = nn.Linear(size, hidden, bias=bias)
        self.w2 = nn.Linear(hidden, size, bias=bias)

    def forward(self, x):
        return self.w2(self.w1(x) * self.w3(x))


def exact(module, seed):
    """Parameters that are small integers: sums over ranks are the same in any order."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def outcome(module, x, factor):
    """The result, the gradient of the input, and those of the parameters, whole."""
    x = x.clone().requires_grad_()
    y = module(x)
    (y * factor).sum().backward()
    gradients = {name: whole(p.grad) for name, p in module.named_parameters()}
    return [y.detach(), x.grad, *gradients.values()]


def equal(ours, theirs):
    for got, want in zip(ours, theirs, strict=True):
        assert got.shape == want.shape
        assert got.is_contiguous()
        assert torch.equal(got, want), (got, want)


def shard_of(shape, dim, seed=5):
    """This rank's shard of a random input, along a dimension; None: all of it."""
    x = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()
    return x if dim is None else x.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def gated(shape, dim, bias, together, schedule):
    """A whole MLP: sharded or replicated in and out, against torch's styles on the same."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layout = Replicate() if dim is None else Shard(dim)
    theirs = Gated(shape[-1], 12, bias)
    exact(theirs, 3)
    ours = copy.deepcopy(theirs)
    plan = {
        "w1": plain.ColwiseParallel(input_layouts=layout),
        "w3": plain.ColwiseParallel(input_layouts=layout),
        "w2": plain.RowwiseParallel(output_layouts=layout),
    }
    plain.parallelize_module(theirs, mesh, plan)
    options = {"schedule": schedule}
    plan = {
        "w1": weft.nn.ColwiseParallel(input_layouts=layout, **options),
        "w3": weft.nn.ColwiseParallel(input_layouts=layout, **options),
        "w2": weft.nn.RowwiseParallel(output_layouts=layout, **options),
    }
    if together:
        style = weft.nn.ColwiseTogether("w1", "w3", input_layouts=layout, **options)
        plain.parallelize_module(ours, mesh, style)
        plan = {"w2": plan["w2"]}
    plain.parallelize_module(ours, mesh, plan)
    for other in (ours, copy.deepcopy(ours)):
        x = shard_of(shape, dim)
        # Where the result is whole on all ranks, so is its gradient.
        factor = shard_of(shape, dim, 6)
        equal(outcome(other, x, factor), outcome(theirs, x, factor))
        theirs.zero_grad()
    with weft.record() as recording:
        ours(shard_of(shape, dim))
    return len(recording.timelines)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("shape", "dim"), [((8, 6), 0), ((2, 8, 6), 1), ((8, 3, 6), 0), ((2, 4, 6), None)]
)
def test_gated_mlp_equals_torch(ranks, shape, dim, bias):
    calls = ranks(2).run(gated, shape, dim, bias, False, "auto")
    assert calls == [1 if dim is None else 3] * 2


def test_layers_together_gather_once(ranks):
    assert ranks(2).run(gated, (2, 8, 6), 1, True, True, "adaptive@dma") == [2, 2]
    assert ranks(2).run(gated, (2, 4, 6), None, True, True, "serial@dma") == [1, 1]


def test_four_ranks(ranks):
    ranks(4).run(gated, (2, 8, 6), 1, True, True, "auto")


def sequence():
    """A norm under SequenceParallel gives DTensors; they go in and out of weft's layers."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    made = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    results = []
    for styles in (plain, weft.nn):
        module = copy.deepcopy(made)
        plan = {
            "0": styles.SequenceParallel(),
            "1": styles.ColwiseParallel(input_layouts=Shard(1)),
            "3": styles.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        plain.parallelize_module(module, mesh, plan)
        x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
        y = module(x.requires_grad_())
        assert isinstance(y, DTensor)
        assert y.placements == (Shard(1),)
        y.to_local().square().sum().backward()
        results.append([y.to_local(), x.grad, *(whole(p.grad) for p in module.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_sequence_parallel_norm(ranks):
    ranks(2).run(sequence)


def others():
    """Layouts that are not overlapped, and embeddings, go torch's way and give torch's results."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    for made, x, column, row in [
        (nn.Linear(6, 8), torch.randn(2, 4, 6), {"output_layouts": Replicate()}, {}),
        (nn.Linear(6, 8), torch.randn(2, 4, 6), {}, {"input_layouts": Replicate()}),
        (nn.Linear(6, 8), torch.randn(2, 4, 6), {}, {"output_layouts": Shard(-1)}),
        (nn.Embedding(6, 8), torch.randint(6, (2, 4)), {}, {"input_layouts": Replicate()}),
    ]:
        for name, options in (("ColwiseParallel", column), ("RowwiseParallel", row)):
            results = []
            for styles in (plain, weft.nn):
                module = copy.deepcopy(made)
                plain.parallelize_module(module, mesh, getattr(styles, name)(**options))
                local = x
                if name == "RowwiseParallel" and not options.get("input_layouts"):
                    local = x.chunk(2, -1)[dist.get_rank()]
                y = module(local)
                y.sum().backward()
                results.append([y, *(whole(p.grad) for p in module.parameters())])
            for ours, theirs in zip(*results, strict=True):
                torch.testing.assert_close(ours, theirs)


def test_other_layouts_equal_torch(ranks):
    ranks(2).run(others)


def uneven():
    """A sequence that does not divide: each rank keeps the rows that `chunk` gives it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = nn.Linear(6, 6)
    exact(made, 4)
    module = plain.parallelize_module(
        copy.deepcopy(made), mesh, weft.nn.RowwiseParallel(output_layouts=Shard(0))
    )
    x = torch.randint(-2, 3, (5, 6), generator=torch.Generator().manual_seed(1)).float()
    y = module(x.tensor_split(3, 1)[dist.get_rank()])
    assert torch.equal(y, made(x).chunk(3)[dist.get_rank()])


def test_uneven_rows(ranks):
    ranks(3).run(uneven)


def moded(mode, layout):
    """Inference mode and autocast: what torch's styles give, also if an input is changed in
    between."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    theirs = Gated(6, 12, True)
    exact(theirs, 3)
    ours = copy.deepcopy(theirs)
    for module, styles in ((theirs, plain), (ours, weft.nn)):
        plan = {"w2": styles.RowwiseParallel(output_layouts=layout)}
        if styles is weft.nn:
            together = weft.nn.ColwiseTogether("w1", "w3", input_layouts=layout)
            plain.parallelize_module(ours, mesh, together)
        else:
            plan["w1"] = plan["w3"] = styles.ColwiseParallel(input_layouts=layout)
        plain.parallelize_module(module, mesh, plan)
    x = shard_of((2, 8, 6), None if layout == Replicate() else 1)

    def changed(module, x):
        first = module.w1(x)
        x.mul_(2)
        return first * module.w3(x)

    with mode():
        for call in (lambda m, x: m(x), changed):
            got, want = call(ours, x.clone()), call(theirs, x.clone())
            assert got.dtype == want.dtype
            # torch adds the products of ranks in bfloat16, weft in float32.
            rounding = 2**-6 * float(want.abs().max()) if mode is autocast else 0
            torch.testing.assert_close(got, want, rtol=0, atol=rounding)
    if mode is autocast:
        with mode():
            y = ours(x.clone().requires_grad_())
            assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in ours.parameters())


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("mode", [torch.inference_mode, autocast, torch.no_grad])
@pytest.mark.parametrize("layout", [Replicate(), Shard(1)])
def test_modes_equal_torch(ranks, mode, layout):
    ranks(2).run(moded, mode, layout)


def twice(layout):
    """Second derivatives: those of the module on one rank."""
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    alone = Gated(6, 12, True).double()
    ours = copy.deepcopy(alone)
    together = weft.nn.ColwiseTogether("w1", "w3", input_layouts=layout)
    plain.parallelize_module(ours, mesh, together)
    row = weft.nn.RowwiseParallel(output_layouts=layout)
    plain.parallelize_module(ours, mesh, {"w2": row})
    x = torch.randn(2, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cut = None if layout == Replicate() else 1

    def penalty(module, x, total):
        loss = (module(x) ** 2).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        total(loss, first).backward()
        return x.grad

    want = penalty(alone, x.clone().requires_grad_(), lambda loss, g: loss + g.square().sum())
    own = x if cut is None else x.chunk(2, cut)[dist.get_rank()]
    got = penalty(ours, own.clone().requires_grad_(), lambda loss, g: loss + g.square().sum())
    want = want if cut is None else want.chunk(2, cut)[dist.get_rank()]
    torch.testing.assert_close(got, want)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(whole(ours.get_parameter(name).grad), parameter.grad)


@pytest.mark.parametrize("layout", [Replicate(), Shard(1)])
def test_second_derivatives(ranks, layout):
    ranks(2).run(twice, layout)
