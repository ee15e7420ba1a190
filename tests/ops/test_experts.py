"""Several experts per rank: dispatch and combine equal plain torch, and so do their gradients."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from ranks import integers

import weft

SCHEDULES = ["auto", "serial@dma", "shard-p2p@cores", "hetero-unfused-1d@dma", "adaptive@dma"]
SCHEDULES += ["hetero-unfused-1d@direct", "adaptive:3@cores", "adaptive@direct"]
FORMS = (
    lambda splits, world: torch.tensor(splits).view(world, -1),
    lambda splits, world: torch.tensor(splits, dtype=torch.int32),
    lambda splits, world: torch.tensor(splits).view(world, -1).tolist(),
    lambda splits, world: splits,
    lambda splits, world: list(torch.tensor(splits).view(world, -1)),
)


def everything(experts: int, seed: int, dtype=torch.float32, most: int = 7):
    """The tokens, splits and weights of all ranks: what one process has."""
    world, draw = dist.get_world_size(), random.Random(seed)
    splits = [
        [draw.choice((0, 0, 1, 3, most)) for _ in range(world * experts)] for _ in range(world)
    ]
    k, n = draw.choice((1, 4, 9)), draw.choice((1, 6))
    xs = [integers((sum(splits[r]), k), dtype, seed + r) for r in range(world)]
    gate, up = (
        [integers((experts, k, n), dtype, seed + 100 * i + r) for r in range(world)] for i in (1, 2)
    )
    down = [integers((experts, n, k), dtype, seed + 300 + r) for r in range(world)]
    return splits, xs, gate, up, down


def in_one_place(splits, xs, gate, up, down, experts):
    """(rows at each rank's experts, results at each rank's tokens) by plain products."""
    world = len(xs)
    parts = [x.split(s) for x, s in zip(xs, splits, strict=True)]
    received, results = [], [[None] * len(s) for s in splits]
    for target in range(world):
        rows = []
        for e in range(experts):
            at = target * experts + e
            for source in range(world):
                x = parts[source][at]
                rows.append(x)
                h = (x @ gate[target][e]) * (x @ up[target][e])
                results[source][at] = h @ down[target][e]
        received.append(torch.cat(rows))
    return received, [torch.cat(some) for some in results]


def both_ways(experts: int, seeds) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in seeds:
        splits, xs, gate, up, down = everything(experts, seed)
        received, results = in_one_place(splits, xs, gate, up, down, experts)
        sent = splits[rank]
        came = [splits[s][rank * experts + e] for s in range(world) for e in range(experts)]
        form = FORMS[seed % len(FORMS)]
        given = form(sent, world), form(came, world)
        for schedule in SCHEDULES:
            weights = [gate[rank], up[rank]]
            (a, b), rows = weft.all_to_all_matmul(
                xs[rank], weights, *given, schedule=schedule, return_gathered=True
            )
            assert torch.equal(rows, received[rank]), (schedule, seed)
            y = weft.matmul_all_to_all(a * b, down[rank], *given[::-1], schedule=schedule)
            assert torch.equal(y, results[rank]), (schedule, seed)
            out = torch.full_like(a, torch.nan)
            one = weft.all_to_all_matmul(xs[rank], gate[rank], *given, schedule=schedule, out=out)
            assert one is out
            assert torch.equal(out, a)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_schedule_equals_plain_products(ranks, world):
    for experts in (1, 2, 5):
        ranks(world).run(both_ways, experts, range(4))


def test_four_ranks(ranks):
    ranks(4).run(both_ways, 2, range(3))


def gradients(experts: int, seed: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    splits, *tensors = everything(experts, seed, torch.float64)
    leaves = [[t.requires_grad_() for t in some] for some in tensors]
    _, results = in_one_place(splits, *leaves, experts)
    sum((y.sin() * y).sum() for y in results).backward()
    came = [splits[s][rank * experts + e] for s in range(world) for e in range(experts)]
    for schedule in ("auto", "serial@dma", "adaptive@dma"):
        x, gate, up, down = own = [some[rank].detach().clone().requires_grad_() for some in leaves]
        a, b = weft.all_to_all_matmul(x, [gate, up], splits[rank], came, schedule=schedule)
        y = weft.matmul_all_to_all(a * b, down, came, splits[rank], schedule=schedule)
        (y.sin() * y).sum().backward()
        for mine, some in zip(own, leaves, strict=True):
            torch.testing.assert_close(mine.grad, some[rank].grad, rtol=1e-12, atol=1e-12)
    x = leaves[0][rank].detach().clone().requires_grad_()  # no weight needs a gradient
    y, rows = weft.all_to_all_matmul(x, gate.detach(), splits[rank], came, return_gathered=True)
    (y.sum() + (rows * 2).sum()).backward()
    wanted = [gate_of.detach() for gate_of in leaves[1]]
    for part, g, at in zip(
        x.grad.split(splits[rank]),
        [w for some in wanted for w in some],
        range(world * experts),
        strict=True,
    ):
        torch.testing.assert_close(part, (g.sum(1) + 2).expand_as(part), msg=str(at))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients(ranks, world):
    for experts, seed in ((1, 1), (3, 2), (2, 5)):
        ranks(world).run(gradients, experts, seed)


def tokens_for_nobody() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        w, none = torch.ones(2, 4, 3, dtype=dtype), torch.zeros(2, 2, dtype=torch.int64)
        x = torch.empty(0, 4, dtype=dtype)
        ys = weft.all_to_all_matmul(x, [w, w], none, none)
        assert [y.shape for y in ys] == [(0, 3), (0, 3)]
        assert weft.matmul_all_to_all(x, w, none, none).shape == (0, 3)


def plain_weights() -> None:
    """Splits as tensors, and several weights, also without experts."""
    rank, x, w = dist.get_rank(), integers((6, 4), torch.float32, 1), torch.ones(4, 3)
    splits = torch.tensor([[4, 2], [1, 5]])
    want, rows = weft.all_to_all_matmul(
        x, w, splits[rank].tolist(), splits[:, rank].tolist(), return_gathered=True
    )
    assert torch.equal(weft.all_to_all_matmul(x, w, splits[rank], splits[:, rank]), want)
    back = weft.matmul_all_to_all(rows, w, splits[:, rank], splits[rank])
    assert torch.equal(back, x @ w)
    first, second = weft.all_to_all_matmul(x, [w, 2 * w], splits[rank], splits[:, rank])
    assert torch.equal(first, want)
    assert torch.equal(second, 2 * want)


def test_nothing_and_plain_weights(ranks):
    ranks(2).run(tokens_for_nobody)
    ranks(2).run(plain_weights)


def refused() -> list[str]:
    rank = dist.get_rank()
    x, w, even = torch.ones(4, 3), torch.ones(2, 3, 5), [[1, 1], [1, 1]]
    said = []
    for call in (
        lambda: weft.all_to_all_matmul(x, w, [2, 2], even),
        lambda: weft.all_to_all_matmul(x, w, [[1, 1], [1, 2]], even),
        lambda: weft.all_to_all_matmul(x, w, [[1, 1], [3, -1]], even),
        lambda: weft.all_to_all_matmul(x, w, torch.ones(4), even),
        lambda: weft.all_to_all_matmul(x, [w, w[:1]], even, even),
        lambda: weft.all_to_all_matmul(x, w[:, :2], even, even),
        lambda: weft.all_to_all_matmul(x, w.half(), even, even),
        lambda: weft.all_to_all_matmul(x, [], even, even),
        lambda: weft.all_to_all_matmul(x, [w, w], even, even, out=torch.empty(4, 5)),
        lambda: weft.all_to_all_matmul(x, w, even, even, schedule="hetero-fused-1d"),
        lambda: weft.matmul_all_to_all(x, w, even, even, schedule="in-kernel"),
        lambda: weft.matmul_all_to_all(x, [w], even, even),
        lambda: weft.all_to_all_matmul(x, w, even, [[1, 1], [rank, 1]]),
        lambda: weft.all_to_all_matmul(x, w[: 2 - rank], even if rank == 0 else [2, 2], even),
    ):
        with pytest.raises(weft.Error) as error:
            call()
        said.append(f"{type(error.value).__name__}: {error.value}")
        weft.all_to_all_matmul(x, w, even, even)  # the group goes on
    return said


def test_wrong_arguments_are_refused_and_the_group_goes_on(ranks):
    said = ranks(2).run(refused)[0]
    for text, part in zip(
        said,
        (
            "2 sizes, but 2 ranks with 2 experts each need 4",
            "in_splits adds up to 5, but there are 4 rows",
            "below zero",
            "one size per rank and expert",
            "w[0] has 2 experts and w[1] has 1",
            "columns; both are K",
            "cast one",
            "w is empty",
            "out= takes one w",
            "no GEMM can cover a step",
            "the kernel that stores into peers has one weight",
            "w must be",
            "rank 1 sends 1 rows of expert 0 to rank 0, which expects 0",
            "",
        ),
        strict=True,
    ):
        assert part in text, text


def many_routings() -> None:
    """Other splits in every call, as a router gives them."""
    rank, world, experts = dist.get_rank(), dist.get_world_size(), 4
    w = [integers((experts, 8, 3), torch.float32, r) for r in range(world)]
    for seed in range(12):
        splits, draw = [], random.Random(seed)
        for _ in range(world):
            splits.append([draw.randint(0, 9) for _ in range(world * experts)])
        x = integers((sum(splits[rank]), 8), torch.float32, seed)
        came = [splits[s][rank * experts + e] for s in range(world) for e in range(experts)]
        rows = weft.all_to_all_matmul(x, w[rank], splits[rank], came)
        back = weft.matmul_all_to_all(
            torch.ones(rows.shape[0], 3), w[rank].transpose(1, 2), came, splits[rank]
        )
        want = [
            w[t][e].sum(1).expand(n, 8)
            for (t, e), n in zip(
                [(t, e) for t in range(world) for e in range(experts)], splits[rank], strict=True
            )
        ]
        assert torch.equal(back, torch.cat(want))


def test_routing_changes_with_every_call(ranks):
    ranks(2).run(many_routings)
