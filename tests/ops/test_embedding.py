"""`embedding_all_to_all` against plain torch: every schedule and dtype, gradients, bad input."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from conformance import Case, same
from ranks import integers

import weft
from weft import Mismatch, Unsupported
from weft.fabric import _native
from weft.fabric.host.bags import bags_of

NAME = "embedding_all_to_all"


def lookups(seed, dtype=torch.float32, *, grad=False, **particular):
    return Case(NAME, seed, dtype, grad=grad, particular=particular)


def close(case):
    """Means are not whole numbers: near to what plain torch gives."""
    got, want = case.weft(), case.plain()
    tolerance = {4: 1e-6, 2: 1e-2}[got.element_size()]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def options_of_a_call():
    for seed in range(3):
        close(lookups(seed, mode="mean"))
        close(lookups(seed, torch.bfloat16, mode="mean"))
        same(lookups(seed, weighted=True))
        same(lookups(seed, torch.float16, weighted=True, long=False))
        same(lookups(seed, long=False), "in-kernel:2")
        case = lookups(seed, batch=9)
        want = case.plain()
        for out in (torch.full(want.shape, 7.0), weft.symmetric_empty(*want.shape)):
            if want.numel():
                with torch.no_grad():
                    assert case.weft(out=out) is out
                assert torch.equal(out.double(), want)


def test_options(ranks):
    ranks(2).run(options_of_a_call)
    ranks(3).run(options_of_a_call)


def results_stay():
    """A result is the caller's: later calls do not touch it, and its memory is used again after."""
    case = lookups(3, batch=40)
    kept = [case.weft().detach() for _ in range(6)]
    copies = [y.clone() for y in kept]
    for seed in range(4, 12):
        same(lookups(seed))
    assert all(torch.equal(y, copy) for y, copy in zip(kept, copies, strict=True))
    del kept
    fabric = weft.fabric.of(None)
    before = fabric.memory.allocated
    for _ in range(50):
        case.weft()
    assert fabric.memory.allocated <= before + 4 * 2**16


def test_results_stay(ranks):
    ranks(2).run(results_stay)


def on_a_paced_link():
    weft.configure(link="0.02GB/s")
    try:
        for schedule in ("auto", "serial@dma", "hetero-unfused-1d"):
            same(lookups(5), schedule)
        case = lookups(5, batch=67)
        with weft.record() as recording:
            case.weft()
        kinds = {span.kind for span in recording.timelines[0].spans}
        assert kinds <= {"lookup", "await"}
        assert weft.explain().schedule == "in-kernel@direct"
    finally:
        weft.configure(link="memory")


def test_a_paced_link(ranks):
    ranks(2).run(on_a_paced_link)
    ranks(3).run(on_a_paced_link)


def a_late_rank():
    for seed in range(6):
        if dist.get_rank() == seed % dist.get_world_size():
            time.sleep(0.02)
        same(lookups(seed))


def test_a_late_rank(ranks):
    ranks(3).run(a_late_rank)


def gradients(seed, weighted, mode, sparse):
    case = lookups(seed, mode=mode, weighted=weighted, grad=True, batch=13)
    y = case.weft(sparse=sparse)
    if y.shape[1] == 0:
        return  # no rank has a table
    plain = case.example.double()
    z = plain.call(case.operator.reference, peers=case.peers)
    c = integers(y.shape, torch.float32, seed + dist.get_rank())
    (y * c).sum().backward()
    (z * c.double()).sum().backward()
    for got, want in zip(case.example.leaves, plain.leaves, strict=True):
        grad = got.grad.to_dense() if sparse and got.dim() == 2 else got.grad
        assert sparse == got.grad.is_sparse or got.dim() == 1
        torch.testing.assert_close(grad.double(), want.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("weighted", "mode"), [(False, "sum"), (True, "sum"), (False, "mean")])
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients(ranks, weighted, mode, sparse):
    for seed in (1, 2, 3):
        ranks(3).run(gradients, seed, weighted, mode, sparse)


def graph():
    table = torch.randn(9, 4, requires_grad=True)
    index, offset = torch.tensor([1, 2, 8]), torch.arange(0, 8).clamp(max=3)
    group = dist.group.WORLD.group_name
    arguments = ([table], [index], [offset], "sum", [], group)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.weft.embedding_all_to_all, arguments, test_utils=tests)
    torch.library.opcheck(
        torch.ops.weft.embedding_gradient, (torch.ones(4, 8), 4, group), test_utils=tests
    )


def test_operators(ranks):
    ranks(2).run(graph)


def bad(change):
    """A call in which the last rank's arguments are wrong; then one that is right."""
    last = dist.get_rank() == dist.get_world_size() - 1
    made = {
        "tables": [torch.ones(5, 3), torch.ones(4, 2)],
        "indices": [torch.tensor([0, 1, 4]), torch.tensor([3, 0, 0])],
        "offsets": [torch.tensor([0, 1, 1, 3]), torch.tensor([0, 0, 2, 2])],
    }
    options = {}
    if last:
        for name, value in change.items():
            if name in made:
                made[name][value[0]] = value[1]
            else:
                options[name] = value
    out = torch.full((2, 10), 7.0)
    with pytest.raises((Unsupported, Mismatch)) as refused, torch.no_grad():
        weft.embedding_all_to_all(**made, out=out, **options)
    assert torch.equal(out, torch.full((2, 10), 7.0)), "nothing is written"
    same(lookups(2))
    return str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tables": (1, torch.ones(4, 2).double())}, "tables[1] is torch.float64"),
        ({"tables": (0, torch.ones(3, 5).t())}, "not contiguous"),
        ({"offsets": (0, torch.tensor([0, 2, 1, 3]))}, "must not decrease"),
        ({"offsets": (0, torch.tensor([1, 2, 2, 3]))}, "must start at 0"),
        ({"offsets": (0, torch.tensor([0, 2, 2, 4]))}, "offsets[0][3] is 4"),
        ({"offsets": (0, torch.tensor([0, 2, 2]))}, "same batch"),
        ({"indices": (1, torch.tensor([0, 4, 1]))}, "indices[1][1] is 4, but tables[1] has 4"),
        ({"indices": (1, torch.tensor([0, -1, 1]))}, "indices[1][1] is -1"),
        ({"indices": (0, torch.tensor([0, 1, 4], device="meta"))}, "indices[0] is on meta"),
        ({"indices": (0, torch.tensor([0.0, 1.0, 2.0]))}, "use int32 or int64"),
        ({"indices": (0, "rows")}, "must be a tensor"),
        ({"mode": "min"}, "mode must be one of sum, mean, max, not 'min'"),
        ({"per_sample_weights": [torch.ones(3)]}, "2 tables, but 1 per_sample_weights"),
        ({"schedule": "adaptive@dma"}, "the schedule is"),
    ],
    ids=str,
)
def test_bad_input(ranks, change, said):
    messages = ranks(2).run(bad, change)
    assert all(said in message and "\n" not in message for message in messages), messages


def disagree():
    rank = dist.get_rank()
    bags = 4 + 2 * (rank == 2)
    arguments = [torch.ones(5, 3)], [torch.tensor([0])], [torch.zeros(bags, dtype=torch.int64)]
    said = []
    for _ in range(2):
        with pytest.raises(Mismatch) as refused:
            weft.embedding_all_to_all(*arguments)
        said.append(str(refused.value))
    same(lookups(2))
    return said


def test_a_batch_that_ranks_disagree_on(ranks):
    messages = ranks(3).run(disagree)
    assert {text for said in messages for text in said} == {
        "ranks disagree on the batch: it is 4 on rank 0 and 6 on rank 2"
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_of_all_processors_agree(dtype):
    torch.manual_seed(1)
    for dim in (1, 7, 8, 33, 64, 129):
        table, index = torch.randn(50, dim).to(dtype), torch.randint(50, (70,))
        offset = torch.arange(0, 70, 7)
        bags = bags_of([table], [index], [offset], None, ["sum"], dtype)
        want = torch.nn.functional.embedding_bag(index, table.double(), offset, mode="sum")
        for name in _native.kernel_names():
            got = torch.empty(10, dim, dtype=dtype)
            bags.native.pool(0, 10, 0, dim, got.data_ptr(), dim * dtype.itemsize, kernels=name)
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def compiled_gradient():
    """A compiled graph has the gradient of a table, too."""
    table = integers((10, 4), torch.float32, dist.get_rank()).requires_grad_()
    index, offset = torch.tensor([1, 2, 3, 1]), torch.tensor([0, 2])
    name = dist.group.WORLD.group_name

    def loss(table):
        y = torch.ops.weft.embedding_all_to_all([table], [index], [offset], "sum", [], name)
        return (y * torch.arange(y.numel()).view_as(y)).sum()

    with torch.no_grad():
        loss(table)  # the columns of peers are known from here on
    (want,) = torch.autograd.grad(loss(table), table)
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        quick = torch.compile(loss, backend="aot_eager", fullgraph=True)
        (got,) = torch.autograd.grad(quick(table), table)
    assert torch.equal(got, want)


def test_a_compiled_gradient(ranks):
    ranks(2).run(compiled_gradient)
