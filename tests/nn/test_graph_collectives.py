"""Collectives of a graph that no product hides: they run as weft's own, with the results of
torch's, and torch's are kept where that is right."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import weft.nn

collectives = torch.ops._c10d_functional


def world():
    return dist.group.WORLD


def lookup(x):
    return torch.nn.functional.embedding(x.long() % 5, torch.arange(15.0).view(5, 3))


def in_place(x):
    y = x.sin()
    dist.all_reduce(y)
    return y + 1


def coalesced(x):
    sums = functional.all_reduce_coalesced([x, x + 1], "sum", world())
    parts = functional.reduce_scatter_single_coalesced(sums, "sum", [0, 0], world())
    return torch.cat(functional.all_gather_single_coalesced(parts, world()))


def background(x):
    """A collective that runs while something else is computed."""
    begun = collectives.all_reduce(x, "sum", world().group_name)
    other = x.sin()
    return collectives.wait_tensor(begun) + other


def exchanged(x):
    half = x.shape[0] // 2
    return functional.all_to_all_single(x, [half] * 2, [half] * 2, world())


# Functions of x [4, 6], which every rank has of its own, and the collectives of weft that run.
REPLACED = {
    "lookup, summed": (lambda x: functional.all_reduce(lookup(x), "sum", world()), ["all_reduce"]),
    "lookup, scattered": (
        lambda x: functional.reduce_scatter_tensor(lookup(x), "sum", 1, world()),
        ["reduce_scatter"],
    ),
    "head": (
        lambda x: functional.all_gather_tensor(x @ torch.ones(6, 5), 1, world()),
        ["all_gather"],
    ),
    "in place": (in_place, ["all_reduce"]),
    "maximum": (lambda x: functional.all_reduce(x, "max", world()), ["all_reduce"]),
    "broadcast": (lambda x: functional.broadcast(x, 1, world()), ["broadcast"]),
    "exchange": (exchanged, ["all_to_all"]),
    "coalesced": (coalesced, ["all_reduce", "reduce_scatter", "all_gather"]),
    "integers": (lambda x: functional.all_reduce(x.long(), "sum", world()), ["all_reduce"]),
    "truths": (lambda x: functional.all_reduce(x > 0, "sum", world()), ["all_reduce"]),
    "halves": (lambda x: functional.all_reduce(x.bfloat16(), "sum", world()), ["all_reduce"]),
}
KEPT = {"background": (background, "it runs in the background")}


def compiled(function, dynamic):
    """A function in graphs of the pass: its reports, and the graphs as code."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    torch.compiler.reset()
    reports, codes = [], []

    def compiler(module, inputs):
        reports.append(weft.nn.overlap_pass(module))
        codes.append(module.code)
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    made = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    return made, reports, codes


def all_cases():
    found = {}
    generator = torch.Generator().manual_seed(dist.get_rank())
    for name, (function, _) in {**REPLACED, **KEPT}.items():
        made, reports, codes = compiled(function, dynamic=True)
        for rows in (4, 8):
            x = torch.randn(rows, 6, generator=generator) * 10
            got, want = made(x), torch.as_tensor(function(x))
            assert torch.equal(got, want), name
            assert (got.dtype, got.stride()) == (want.dtype, want.stride())
        assert len(reports) == 1, (name, codes)  # one graph for all sizes
        found[name] = reports[0].near_misses, codes[0]
    return found


def test_what_is_left_runs_as_wefts_own(ranks):
    for found in ranks(2).run(all_cases, within=120):
        for name, (misses, code) in found.items():
            if name in REPLACED:
                ran = dict.fromkeys((m.node, m.operator) for m in misses)  # it may have two reasons
                assert [operator for _, operator in ran] == REPLACED[name][1], (name, misses)
                assert "_c10d_functional" not in code
            else:
                assert [m.operator for m in misses] == [""]
                assert KEPT[name][1] in str(misses[0])
                assert "torch.ops.weft" not in code


class Summed(torch.autograd.Function):
    """The lookup of a divided embedding: its gradient is the same on all ranks."""

    @staticmethod
    def forward(ctx, x):
        return functional.all_reduce(x, "sum", world())

    @staticmethod
    def backward(ctx, gradient):
        return functional.all_reduce(gradient, "sum", world())


def gradients():
    """Embedding, sum, and a loss: forward and backward graphs."""

    def loss(ids, table):
        return Summed.apply(torch.nn.functional.embedding(ids, table)).square().sum()

    ids = torch.tensor([[1, 2, dist.get_rank()]])
    outcomes = []
    made, reports, codes = compiled(loss, None)
    for function in (loss, made):
        table = torch.arange(12.0).view(4, 3).requires_grad_()
        function(ids, table).backward()
        outcomes.append(table.grad)
    assert torch.equal(*outcomes)
    assert not any("_c10d_functional" in code for code in codes)
    return [miss.operator for report in reports for miss in report.near_misses]


def test_graphs_of_gradients(ranks):
    assert ranks(2).run(gradients) == [["all_reduce"] * 2] * 2


def irreducible():
    """Numbers that weft's collectives do not add."""
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.ones(4, dtype=torch.complex64)
    graph = make_fx(lambda x: functional.all_reduce(x, "sum", world()), tracing_mode="fake")(x)
    return [str(miss) for miss in weft.nn.overlap_pass(graph).near_misses]


def test_what_weft_cannot_reduce_stays_with_torch(ranks):
    for (text,) in ranks(2).run(irreducible):
        assert text.endswith(
            "torch's is kept: weft cannot reduce them: complex64 has no reduction 'sum' here"
        )
