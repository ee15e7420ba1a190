"""A result that shares memory with an input is refused on every rank, for its first rows would be
written while the input is still read. It is so in the first call and in known ones, which are
recognised by their layouts."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist

import weft
from weft import Mismatch, Unsupported
from weft.ops.aliasing import aliased, any_aliased
from weft.ops.concurrent import matmul_beside

ROWS, K, N = 6, 4, 8


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape).float()


def bags(table: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    starts = torch.arange(0, 2 * ROWS, 2)
    indices = torch.arange(2 * ROWS) % table.shape[0]
    return weft.embedding_all_to_all([table], [indices], [starts], out=out)


def product_beside(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None):
    return matmul_beside(a, b, torch.ones(3, 2), out=out)[0]


EVEN = {"in_splits": [ROWS // 2] * 2, "out_splits": [ROWS // 2] * 2}
CALLS = {
    "all_gather_matmul": (weft.all_gather_matmul, {}, [(ROWS, K), (K, N)]),
    "matmul_reduce_scatter": (weft.matmul_reduce_scatter, {}, [(ROWS, K), (K, N)]),
    "matmul_all_reduce": (weft.matmul_all_reduce, {}, [(ROWS, K), (K, N)]),
    "all_to_all_matmul": (weft.all_to_all_matmul, EVEN, [(ROWS, K), (K, N)]),
    "matmul_all_to_all": (weft.matmul_all_to_all, EVEN, [(ROWS, K), (K, N)]),
    "embedding_all_to_all": (bags, {}, [(5, N)]),
    "matmul_beside": (product_beside, {}, [(ROWS, K), (K, N)]),
}


def refused_where_aliased(name: str) -> None:
    function, options, shapes = CALLS[name]
    inputs = [integers(*shape) for shape in shapes]
    wanted = function(*inputs, **options)
    for place, known in itertools.product(range(len(inputs)), (False, True)):
        out = torch.empty_like(wanted)
        for _ in range(3 if known else 0):
            assert function(*inputs, **options, out=out) is out
        if dist.get_rank() == 0:
            memory = torch.empty(max(wanted.numel(), inputs[place].numel()) + 1)
            given = list(inputs)
            given[place] = memory[1 : 1 + inputs[place].numel()].view(inputs[place].shape)
            given[place].copy_(inputs[place])
            out = memory[: wanted.numel()].view(wanted.shape)
            with pytest.raises(Unsupported, match=r"out and .* share memory"):
                function(*given, **options, out=out)
            assert torch.equal(given[place], inputs[place])
        else:
            with pytest.raises(Mismatch, match="share memory"):
                function(*inputs, **options, out=out)
        out = torch.empty_like(wanted)
        function(*inputs, **options, out=out)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("name", CALLS)
def test_a_result_in_an_input_is_refused(ranks, name):
    ranks(2).run(refused_where_aliased, name)


def columns_of_one_buffer() -> None:
    """x, w and the result may be columns of one matrix each, as in a fused buffer."""
    for schedule in ("adaptive@dma", "serial", "auto", "adaptive@direct"):
        memory = torch.zeros(2 * ROWS, K + N)
        memory[:ROWS, :K] = integers(ROWS, K)
        x, out, w = memory[:ROWS, :K], memory[:, K:], integers(K, N)
        wanted = weft.all_gather_matmul(x, w, schedule=schedule)
        for _ in range(3):
            made = weft.all_gather_matmul(x, w, schedule=schedule, out=out)
            assert made is out
            assert torch.equal(out, wanted)


def test_columns_of_one_buffer_are_apart(ranks):
    ranks(2).run(columns_of_one_buffer)


def several_results() -> None:
    x, weights = integers(ROWS, K), [integers(K, N), integers(K, N)]
    outs = [torch.empty(2 * ROWS, N) for _ in weights]
    wanted = weft.all_gather_matmul(x, weights)
    for _ in range(3):
        weft.all_gather_matmul(x, weights, out=outs)
        assert all(map(torch.equal, outs, wanted))
    with pytest.raises(Unsupported, match=r"out\[1\] and out\[0\] share memory"):
        weft.all_gather_matmul(x, weights, out=[outs[0], outs[0]])
    assert all(map(torch.equal, weft.all_gather_matmul(x, weights, out=outs), wanted))


def test_results_in_each_other_are_refused(ranks):
    ranks(2).run(several_results)


def addresses(tensor: torch.Tensor) -> set[int]:
    """The addresses of all bytes of a tensor's elements."""
    size = tensor.element_size()
    steps = [[i * step * size for i in range(n)] for n, step in _dims(tensor)]
    starts = (tensor.data_ptr() + sum(one) for one in itertools.product(*steps))
    return {start + byte for start in starts for byte in range(size)}


def _dims(tensor: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip(tensor.shape, tensor.stride(), strict=True))


def random_view(memory: torch.Tensor, choose: random.Random) -> torch.Tensor:
    if choose.random() < 0.3:
        memory = memory.half() if choose.random() < 0.5 else memory.view(torch.int16)
    matrix = memory[: memory.numel() // 12 * 12].view(-1, 12)
    rows = sorted(choose.choices(range(matrix.shape[0] + 1), k=2))
    columns = sorted(choose.choices(range(13), k=2))
    view = matrix[slice(*rows), slice(*columns)]
    step = choose.choice((1, 1, 1, 2))
    view = view[:: choose.choice((1, 1, 2)), ::step]
    return view.t() if choose.random() < 0.3 else view


def test_shared_elements_are_never_missed():
    choose, memory, found = random.Random(11), torch.zeros(120), [0, 0, 0]
    for _ in range(3000):
        a, b = random_view(memory, choose), random_view(memory, choose)
        share, said = bool(addresses(a) & addresses(b)), aliased(a, b)
        assert said or not share, (a.shape, a.stride(), b.shape, b.stride())
        assert said == aliased(b, a)
        found[share + said] += 1
    assert min(found) > 50, found  # apart, close by in an odd layout, shared


def test_what_lies_apart():
    memory = torch.zeros(8, 12)
    assert not aliased(memory[:4], memory[4:])
    assert not aliased(memory[:, :5], memory[:, 5:])
    assert not aliased(memory.t()[:5], memory.t()[5:])
    assert not aliased(memory[2:, 7:9], memory[:6, 3:7])
    assert not aliased(memory[:0], memory)
    assert not aliased(memory[3], memory[4])
    assert aliased(memory[:, :5], memory[:, 4:])
    assert aliased(memory[:, :5], memory)
    assert aliased(memory, memory.view(torch.int32))
    assert not any_aliased(memory[:4], [memory[4:], None, 3])
    assert any_aliased([memory[:4], memory[3:]], [])
