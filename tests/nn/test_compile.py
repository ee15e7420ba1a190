"""The compile pass: it finds pairs behind views, transposes and casts, keeps results as they were,
and says why it leaves what it leaves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import weft
import weft.nn
from weft.models.small_llama import Llama, LlamaShape, parallelize


def integers(*shape, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(-2, 3, shape, generator=generator).float()


def gather(x, dim=0):
    return functional.all_gather_tensor(x, dim, dist.group.WORLD)


def scatter(x, dim=0):
    return functional.reduce_scatter_tensor(x, "sum", dim, dist.group.WORLD)


def reduce(x):
    return functional.all_reduce(x, "sum", dist.group.WORLD)


def exchange(x, out_splits, in_splits):
    return functional.all_to_all_single(x, out_splits, in_splits, dist.group.WORLD)


# Each function takes x [4, 6] or [2, 4, 6] of every rank, w [6, 8], v [8, 6] and a bias [8].

FOUND = {
    "gather": (lambda x, w, v, b: gather(x) @ w, (4, 6), ["all_gather_matmul"]),
    "gather, with bias": (
        lambda x, w, v, b: torch.addmm(b, gather(x), w),
        (4, 6),
        ["all_gather_matmul"],
    ),
    "gather, linear": (
        lambda x, w, v, b: torch.nn.functional.linear(gather(x, 1), w.t(), b),
        (2, 4, 6),
        ["all_gather_matmul"],
    ),
    "gather, two products": (
        lambda x, w, v, b: (gathered := gather(x)) @ w + gathered @ (w * 2),
        (4, 6),
        ["all_gather_matmul"],
    ),
    "gather, second dimension": (
        lambda x, w, v, b: gather(x, 1) @ w,
        (2, 4, 6),
        ["all_gather_matmul"],
    ),
    "gather, transposed": (
        lambda x, w, v, b: (w.t() @ gather(x).t()).relu(),
        (4, 6),
        ["all_gather_matmul"],
    ),
    "gather, cast": (
        lambda x, w, v, b: gather(x).double() @ w.double(),
        (4, 6),
        ["all_gather_matmul"],
    ),
    "gather, used elsewhere": (
        lambda x, w, v, b: ((gathered := gather(x, 1)) @ w).sum() + gathered.relu().sum(),
        (2, 4, 6),
        ["all_gather_matmul"],
    ),
    "scatter": (lambda x, w, v, b: scatter(x @ w), (4, 6), ["matmul_reduce_scatter"]),
    "scatter, second dimension": (
        lambda x, w, v, b: scatter(x @ w, 1),
        (2, 4, 6),
        ["matmul_reduce_scatter"],
    ),
    "scatter, a sum of products": (
        lambda x, w, v, b: scatter(x @ w + (2 * x) @ (3 * w), 1),
        (2, 4, 6),
        ["matmul_reduce_scatter"],
    ),
    "scatter, narrowed": (
        lambda x, w, v, b: scatter((x @ w).bfloat16()),
        (4, 6),
        ["matmul_reduce_scatter"],
    ),
    "reduce": (lambda x, w, v, b: reduce(x @ w), (2, 4, 6), ["matmul_all_reduce"]),
    "reduce, transposed": (lambda x, w, v, b: reduce((x @ w).t()), (4, 6), ["matmul_all_reduce"]),
    "a whole layer": (
        lambda x, w, v, b: scatter(torch.relu(gather(x, 1) @ w) @ v, 1),
        (2, 4, 6),
        ["matmul_reduce_scatter", "all_gather_matmul"],
    ),
    "dispatch": (
        lambda x, w, v, b: exchange(x, [2, 2], [2, 2]) @ w,
        (4, 6),
        ["all_to_all_matmul"],
    ),
    "combine": (
        lambda x, w, v, b: exchange(x @ w, [2, 2], [2, 2]),
        (4, 6),
        ["matmul_all_to_all"],
    ),
}

LEFT = {
    "nothing beside it": (lambda x, w, v, b: gather(x).relu(), (4, 6), "no product uses"),
    "sums over the gathered": (
        lambda x, w, v, b: gather(x).t() @ torch.ones(8, 3),
        (4, 6),
        "sums over the dimension that is gathered",
    ),
    "gathered columns": (
        lambda x, w, v, b: gather(x, 1) @ torch.cat([w, w]),
        (4, 6),
        "sums over the dimension that is gathered",
    ),
    "scattered columns": (lambda x, w, v, b: scatter(x @ w, 1), (4, 6), "columns of the product"),
    "a product used twice": (
        lambda x, w, v, b: scatter(y := x @ w).sum() + y.relu().sum(),
        (4, 6),
        "also used by",
    ),
    "a bias before the sum": (
        lambda x, w, v, b: scatter(torch.addmm(b, x, w)),
        (4, 6),
        "adds a bias",
    ),
    "not a product": (lambda x, w, v, b: reduce(x.relu()), (4, 6), "is made by relu"),
    "widened": (
        lambda x, w, v, b: reduce((x.bfloat16() @ w.bfloat16()).float()),
        (4, 6),
        "widened",
    ),
}


def compiled(name):
    """The function of a case, compiled and not, on the same input: reports, as text."""
    torch.compiler.reset()
    function, shape, _ = {**FOUND, **LEFT}[name]
    x, w, v, b = integers(*shape), integers(6, 8, seed=1), integers(8, 6, seed=2), integers(8)
    reports = []
    got = weft.compile(function, reports=reports, fullgraph=True)(x, w, v, b)
    want = function(x, w, v, b)
    assert got.dtype == want.dtype
    assert torch.equal(got, torch.as_tensor(want)), name
    matches = [match.operator for report in reports for match in report.matches]
    return matches, "\n".join(str(report) for report in reports)


@pytest.mark.parametrize("name", FOUND)
def test_pairs_are_found(ranks, name):
    for matches, text in ranks(2).run(compiled, name):
        assert matches == FOUND[name][2], text
        assert ("return_A" in text) == ("used elsewhere" in name)


@pytest.mark.parametrize("name", LEFT)
def test_near_misses_say_why(ranks, name):
    for matches, text in ranks(2).run(compiled, name):
        assert matches == []
        assert LEFT[name][2] in text
        assert " -> weft." in text


def in_place(x, w, v, b):
    """What torch's and Hugging Face's row-wise layers do without gradients."""
    y = x @ w
    dist.all_reduce(y)
    return y + 1


def dynamic():
    """All cases in graphs whose sizes are symbols: what they match, and results for other sizes."""
    found = {}
    for name, (function, shape, _) in {**FOUND, "in place": (in_place, (2, 4, 6), [])}.items():
        torch.compiler.reset()
        reports = []
        splits = "exchange" in function.__code__.co_names
        quick = weft.compile(function, reports=reports, fullgraph=True, dynamic=not splits)
        w, v, b = integers(6, 8, seed=1), integers(8, 6, seed=2), integers(8)
        for number in (1, 2, 3):
            sizes = shape if splits else (*shape[:-2], shape[-2] * number, shape[-1])
            x = integers(*sizes, seed=number)
            assert torch.equal(quick(x, w, v, b), torch.as_tensor(function(x, w, v, b))), name
        found[name] = [[match.operator for match in r.matches] for r in reports], str(reports)
    return found


def test_dynamic_sizes_match_the_same_pairs(ranks):
    for found in ranks(2).run(dynamic, within=180):
        for name, (matches, text) in found.items():
            want = ["matmul_all_reduce"] if name == "in place" else FOUND[name][2]
            assert matches == [want], (name, text)  # one graph for all sizes


def transformer(num_layers):
    """A transformer under torch's styles, compiled, forward and backward."""
    torch.compiler.reset()
    weft.configure(deadline=20)  # the ranks meet here, so that the pass need not wait for them
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shape = LlamaShape(size=16, hidden=24, num_layers=num_layers, vocabulary=32)
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(1))
    reports, outcomes = [], []
    for wrap in (lambda m: m, lambda m: weft.compile(m, reports=reports)):
        model = parallelize(Llama(shape), mesh, "torch")
        loss = torch.nn.functional.cross_entropy(
            wrap(model)(tokens).flatten(0, 1), tokens.flatten()
        )
        loss.backward()
        gradients = [p.grad.full_tensor() for p in model.parameters()]
        outcomes.append([loss.detach(), *gradients])
    for got, want in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, want)
    assert not [miss for report in reports for miss in report.near_misses if miss.kept]
    names = [[match.operator for match in report.matches] for report in reports]
    return names, sum(report.seconds for report in reports)


def test_every_pair_of_a_transformer(ranks):
    """Each block: two gathers and two scatters forward, and as many backward; the head one of
    each."""
    for names, seconds in ranks(2).run(transformer, 1):
        forward, backward = names
        assert sorted(forward) == ["all_gather_matmul"] * 3 + ["matmul_reduce_scatter"] * 2
        assert sorted(backward) == ["all_gather_matmul"] * 2 + ["matmul_reduce_scatter"] * 3
        assert seconds < 2


def own_backend():
    """The pass by itself, in a backend that somebody else wrote."""
    from torch._dynamo.backends.common import aot_autograd

    torch.compiler.reset()
    reports = []

    def compiler(module, inputs):
        reports.append(weft.nn.overlap_pass(module, schedule="serial@dma"))
        return module.forward

    x, w = integers(4, 6), integers(6, 8, seed=1)
    function = torch.compile(lambda x, w: gather(x) @ w, backend=aot_autograd(fw_compiler=compiler))
    assert torch.equal(function(x, w), gather(x) @ w)
    assert weft.explain().schedule == "serial@dma"
    return str(reports[0])


def test_the_pass_in_ones_own_backend(ranks):
    for text in ranks(2).run(own_backend):
        assert text.startswith("replaced 1 in")
        assert "-> all_gather_matmul (gather_dim=0)" in text


def undecomposed():
    """A graph made before autograd, with linear layers and products of three dimensions."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x, w, b):
        y = torch.nn.functional.linear(gather(x, 1), w, b)
        return scatter(y @ w, 1)

    x, w, b = integers(2, 4, 6), integers(8, 6, seed=1), integers(8)
    graph = make_fx(function, tracing_mode="fake", pre_dispatch=True)(x, w, b)
    assert any(node.target is torch.ops.aten.linear.default for node in graph.graph.nodes)
    report = weft.nn.overlap_pass(graph)
    assert torch.equal(graph(x, w, b), function(x, w, b))
    return [match.operator for match in report.matches]


def test_linear_layers_that_were_not_decomposed(ranks):
    for names in ranks(2).run(undecomposed):
        assert sorted(names) == ["all_gather_matmul", "matmul_reduce_scatter"]


def inductor():
    """Both ways into inductor: the pass, and styles in a model that torch compiles."""
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": weft.nn.ColwiseParallel(input_layouts=Shard(0))}
    plan["2"] = weft.nn.RowwiseParallel(output_layouts=Shard(0))
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % (number + 3))
    parallelize_module(model, mesh, plan)
    x = integers(4, 6)
    want = model(x)
    assert torch.equal(torch.compile(model, fullgraph=True)(x), want)
    reports, w = [], integers(6, 8, seed=1)
    function = weft.compile(lambda x, w: gather(x) @ w, backend="inductor", reports=reports)
    assert torch.equal(function(x, w), gather(x) @ w)
    return [match.operator for match in reports[0].matches]


@pytest.mark.slow
def test_inductor(ranks):
    assert ranks(2).run(inductor) == [["all_gather_matmul"]] * 2


def styles():
    """A model under weft's styles in one graph, forward and backward."""
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shape = LlamaShape(size=16, hidden=24, num_layers=1, vocabulary=32)
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(1))
    outcomes = []
    for compiled in (False, True):
        model = parallelize(Llama(shape), mesh, "weft")
        function = model.loss
        if compiled:
            function = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)
        loss = function(tokens)
        loss.backward()
        outcomes.append([loss.detach(), *(p.grad.full_tensor() for p in model.parameters())])
    for got, want in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, want)


def test_styles_in_one_graph(ranks):
    ranks(2).run(styles)


def test_an_unknown_backend_is_refused():
    with pytest.raises(weft.Unsupported, match="there is no backend 'xla'"):
        weft.compile(lambda x: x, backend="xla")
