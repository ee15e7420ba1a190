"""Float8 products with scales equal torch's own composition, whatever the schedule."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import weft

SCHEDULES = (
    "serial",
    "shard-p2p",
    "uniform-fused-1d",
    "hetero-fused-1d",
    "hetero-unfused-1d",
    "adaptive@dma",
    "adaptive@cores",
    "adaptive@direct",
    "uniform-fused-2d",
    "auto",
)

# -- inside the ranks ------------------------------------------------------------------------------


def eight(seed, *shape, dtype=torch.float8_e4m3fn):
    """Small whole numbers: products and sums of them are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float().to(dtype)


def powers(seed, *shape):
    """Scales that are powers of two, so that scaling is exact too."""
    generator = torch.Generator().manual_seed(seed)
    return 2.0 ** torch.randint(-2, 3, shape, generator=generator).float()


def gathers(kind, row_wise, shape=(6, 32, 16)):
    """Every schedule against gathering first and torch._scaled_mm."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows, k, n = shape
    x = eight(1, rows * world, k)
    w, v = eight(2 + rank, k, n), eight(20 + rank, k, 2 * n, dtype=torch.float8_e5m2)
    x_scale = powers(3, rows * world, 1) if row_wise else torch.tensor(0.5)
    w_scales = [powers(4, 1, n), powers(5, 1, 2 * n)] if row_wise else [torch.tensor(2.0)] * 2
    whole = x_scale if row_wise else torch.tensor(0.5)
    bias = torch.arange(n).to(kind)
    mine = x_scale.tensor_split(world)[rank] if row_wise else x_scale
    expected = [
        torch._scaled_mm(x, one.t().contiguous().t(), whole, scale, out_dtype=kind)
        for one, scale in zip((w, v), w_scales, strict=True)
    ]
    expected[0] = (expected[0].float() + bias.float()).to(kind)
    wrong = []
    for schedule in SCHEDULES:
        ys, gathered = weft.all_gather_scaled_matmul(
            x.tensor_split(world)[rank],
            [w, v],
            mine,
            w_scales,
            bias=[bias, None],
            out_dtype=kind,
            schedule=schedule,
            return_gathered=True,
        )
        same = torch.equal(gathered.view(torch.uint8), x.view(torch.uint8))
        if not same or not all(torch.equal(a, b) for a, b in zip(ys, expected, strict=True)):
            wrong.append(schedule)
    y = weft.all_gather_scaled_matmul(
        x.tensor_split(world)[rank], w, mine, w_scales[0], out_dtype=kind
    )
    return wrong, y.dtype == kind and y.shape == (rows * world, n)


@pytest.mark.parametrize("row_wise", [False, True], ids=["tensor", "rows"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=str)
def test_gathering_equals_torchs_composition(ranks, kind, row_wise):
    for wrong, shaped in ranks(2).run(gathers, kind, row_wise):
        assert wrong == []
        assert shaped


def test_gathering_on_three_ranks(ranks):
    for wrong, _ in ranks(3).run(gathers, torch.float16, True, (5, 16, 16)):
        assert wrong == []


def few_rows(rows):
    """Scales by row where a rank has one row, or none; [1, 1] is that of all rows of a rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, w, scale = eight(1, rows, 16), eight(2, 16, 8), 2.0 ** torch.arange(rows).view(-1, 1)
    shard, mine = x.tensor_split(world)[rank], scale.tensor_split(world)[rank]
    y = weft.all_gather_scaled_matmul(
        shard, w, mine, torch.tensor(1.0), out_dtype=torch.float32, schedule="serial"
    )
    product = x.float() @ w.float()
    by_rank = [torch.full((len(part), 1), 2.0**r) for r, part in enumerate(x.tensor_split(world))]
    z = weft.all_gather_scaled_matmul(
        shard, w, torch.full((1, 1), 2.0**rank), torch.tensor(1.0), out_dtype=torch.float32
    )
    return torch.equal(y, product * scale), torch.equal(z, product * torch.cat(by_rank))


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_scales_of_few_rows(ranks, rows):
    assert ranks(2).run(few_rows, rows) == [(True, True)] * 2


def scatters(kind, row_wise, op="sum", shape=(13, 16, 32)):
    """Every schedule against torch._scaled_mm on each rank and a sum; scales differ by rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows, k, n = shape
    products = []
    for one in range(world):
        x, w = eight(one, rows, k), eight(10 + one, k, n)
        x_scale = powers(20 + one, rows, 1) if row_wise else torch.tensor(2.0**one)
        w_scale = powers(30 + one, 1, n) if row_wise else torch.tensor(0.5)
        products.append(
            torch._scaled_mm(x, w.t().contiguous().t(), x_scale, w_scale, out_dtype=kind)
        )
        if one == rank:
            mine = (x, w, x_scale, w_scale)
    total = torch.stack([p.float() for p in products]).sum(0)
    expected = (total / world if op == "avg" else total).to(kind).tensor_split(world)[rank]
    wrong = []
    for schedule in SCHEDULES:
        y = weft.scaled_matmul_reduce_scatter(
            *mine, reduce_op=op, out_dtype=kind, schedule=schedule
        )
        if not torch.equal(y, expected):
            wrong.append(schedule)
    return wrong


@pytest.mark.parametrize("row_wise", [False, True], ids=["tensor", "rows"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=str)
def test_scattering_equals_torchs_composition(ranks, kind, row_wise):
    assert ranks(2).run(scatters, kind, row_wise) == [[], []]


def test_scattering_on_three_ranks(ranks):
    assert ranks(3).run(scatters, torch.float32, True, "avg", (12, 16, 16)) == [[]] * 3


def shapes_and_refusals():
    """Three dimensions, then one refusal after another; the group stays usable."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, w = eight(1, 2, 4 * world, 16), eight(2, 16, 16)
    scale = powers(3, 2, 4 * world, 1)
    shard, part = x.tensor_split(world, 1)[rank], scale.tensor_split(world, 1)[rank]
    one = torch.tensor(1.0)
    y = weft.all_gather_scaled_matmul(shard, w, part, one, gather_dim=1, out_dtype=torch.float32)
    product = (x.float() @ w.float()) * scale
    good = [torch.equal(y, product)]
    z = weft.scaled_matmul_reduce_scatter(
        x, w, scale, one, scatter_dim=1, out_dtype=torch.float32, bias=torch.ones(16)
    )
    good.append(torch.equal(z, ((product + 1) * world).tensor_split(world, 1)[rank]))
    said = []
    gather, scatter = weft.all_gather_scaled_matmul, weft.scaled_matmul_reduce_scatter
    flat = x[0].contiguous()
    for call in (
        lambda: gather(shard.float(), w, one, one, gather_dim=1),
        lambda: gather(shard, w[:8], one, one, gather_dim=1),
        lambda: gather(shard, w, torch.ones(3), one, gather_dim=1),
        lambda: gather(shard, w, one, torch.ones(1, 3), gather_dim=1),
        lambda: gather(shard, w, one.double(), one, gather_dim=1),
        lambda: gather(shard, w, one, one, gather_dim=1, out_dtype=torch.float64),
        lambda: gather(shard, w, one, one, gather_dim=1, bias=torch.ones(3)),
        lambda: scatter(flat, w, one, one, reduce_op="max"),
        lambda: torch.ops.weft.scaled_matmul_reduce_scatter(
            flat, w, one, one, "sum", 0, dist.group.WORLD.group_name, None, one
        ),
        lambda: gather(shard, w, part if rank else one, one, gather_dim=1),
    ):
        try:
            call()
            said.append("")
        except weft.Error as error:
            said.append(str(error))
    good.append(
        torch.equal(gather(shard, w, part, one, gather_dim=1).float(), product.bfloat16().float())
    )
    return good, said


def test_shapes_and_refusals(ranks):
    answers = ranks(2).run(shapes_and_refusals)
    for good, said in answers:
        assert all(good)
        for words, heard in zip(
            (
                "scaled products take torch.float8_e4m3fn",
                "w has 8 rows, but x_shard has 16 columns",
                "x_scale must have one number, or one for each row of x",
                "w_scale must have one number, or one for each column of w: the shape [1, 16]",
                "x_scale must be a tensor of torch.float32",
                "out_dtype must be one of torch.float32",
                "bias must have the shape [16], not [3]",
                "reduce_op must be 'sum' or 'avg'",
                "result_scale is for float8 results",
                "scales of rows is False on rank 0 and True on rank 1",
            ),
            said,
            strict=True,
        ):
            assert words in heard
    assert answers[0][1] == answers[1][1]


def compiled():
    rank, world = dist.get_rank(), dist.get_world_size()
    x, w, one = eight(1, 4 * world, 16), eight(2, 16, 16), torch.tensor(1.0)
    shard = x.tensor_split(world)[rank]

    def both(shard, w, one):
        y = weft.all_gather_scaled_matmul(shard, w, one, one, out_dtype=torch.float32)
        z = weft.scaled_matmul_reduce_scatter(
            y.to(torch.float8_e4m3fn), w, one, one, out_dtype=torch.float32
        )
        return y, z

    run = torch.compile(both, backend="aot_eager", fullgraph=True)
    return all(
        torch.equal(a, b) for a, b in zip(run(shard, w, one), both(shard, w, one), strict=True)
    )


def test_in_a_compiled_graph(ranks):
    assert ranks(2).run(compiled) == [True, True]
