"""Inputs with more dimensions, uneven rows, averages, and gathered results with gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist

import weft
from weft.operation import split


def _integers(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).double()


def _summed():
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = split(7, world)
    own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    x = _integers((2, 7, 3), rank).requires_grad_()
    w = _integers((3, 4), 10 + rank).requires_grad_()
    total = (x @ w).detach()
    dist.all_reduce(total)
    y = weft.matmul_reduce_scatter(x, w, scatter_dim=1)
    assert torch.equal(y, total[:, own])
    c = _integers((2, 7, 4), 5)
    (y * c[:, own]).sum().backward()
    assert torch.equal(x.grad, c @ w.detach().t())
    assert torch.equal(w.grad, x.detach().flatten(0, 1).t() @ c.flatten(0, 1))
    with torch.no_grad():
        assert torch.equal(weft.matmul_all_reduce(x, w), total)
        average = weft.matmul_all_reduce(x, w, reduce_op="avg")
        assert torch.allclose(average, total / world)
        kept = [7] + [0] * (world - 1)
        y = weft.matmul_reduce_scatter(x, w, scatter_dim=1, own_rows=kept[rank])
        assert torch.equal(y, total[:, : kept[rank]])
    x.grad = None
    y = weft.matmul_reduce_scatter(x, w, scatter_dim=1, own_rows=kept[rank])
    (y * c[:, : kept[rank]]).sum().backward()
    assert torch.equal(x.grad, c @ w.detach().t())


def test_sums_of_three_dimensions(ranks):
    for world in (1, 2, 3):
        ranks(world).run(_summed)


def _gathered():
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = split(7, world)
    own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    whole = _integers((7, 3), 1)
    x = whole[own].clone().requires_grad_()
    weights = [_integers((3, n), 10 * n + rank).requires_grad_() for n in (2, 4)]
    ys, gathered = weft.all_gather_matmul(x, weights, return_gathered=True)
    assert torch.equal(gathered, whole)
    cs = [_integers(y.shape, 3 + rank) for y in (*ys, gathered)]
    sum((y * c).sum() for y, c in zip((*ys, gathered), cs, strict=True)).backward()
    dx = sum(c @ w.detach().t() for c, w in zip(cs, weights, strict=False)) + cs[-1]
    dist.all_reduce(dx)
    assert torch.equal(x.grad, dx[own])
    for w, c in zip(weights, cs, strict=False):
        assert torch.equal(w.grad, whole.t() @ c)


def test_gradients_of_several_w_and_of_the_gathered_x(ranks):
    for world in (1, 2, 3):
        ranks(world).run(_gathered)


def test_there_and_back(ranks):
    """Rows that are sent and come back, with in_splits that are their own transpose."""
    ranks(2).run(_there_and_back)


def _there_and_back():
    splits = [[1, 3], [3, 1]][dist.get_rank()]
    x = _integers((4, 2, 3), dist.get_rank()).requires_grad_()
    w = _integers((3, 5), 7).requires_grad_()
    y, received = weft.all_to_all_matmul(x, w, splits, splits, return_gathered=True)
    assert (y.shape, received.shape) == ((4, 2, 5), (4, 2, 3))
    back = weft.matmul_all_to_all(received, w, splits, splits)
    assert torch.equal(back, x @ w)
    (back.sum() + y.sum()).backward()
    assert torch.equal(x.grad, 2 * torch.ones(4, 2, 5).double() @ w.detach().t())
