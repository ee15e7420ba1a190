"""The operators of weft, each beside what it equals in plain torch: one entry each, as data.

    operator = OPERATORS["matmul_all_reduce"]
    example = operator.examples["plain"](Draw(seed=3))       # this rank's random, exact inputs
    y = example.call(operator.function, schedule="serial")
    z = example.call(operator.reference, peers=Peers())      # torch and torch.distributed alone

References compute in float64 and can be differentiated, so gradients are compared as well.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from operator_entry import Draw, Example, Operator, exchanged
from torch.nn.functional import embedding_bag

from weft.operation import split

DIMS = (1, 3, 4, 8, 16, 24, 37, 64, 100)
"""Columns of embedding tables."""


# -- all_gather_matmul -----------------------------------------------------------------------------


def _gathers(d: Draw) -> Example:
    return Example((d.values(split(d.m, d.world)[d.rank], d.k), d.values(d.k, d.n)))


def _gathers_for_several(d: Draw) -> Example:
    x, w = _gathers(d).arguments
    return Example((x, [w, *(d.values(d.k, n) for n in (0, 5, 1))]), {"return_gathered": True})


def _gathers_cubes(d: Draw) -> Example:
    shape = (2, split(d.m, d.world)[d.rank], d.k)
    return Example(
        (d.values(*shape), d.values(d.k, d.n)), {"gather_dim": 1, "return_gathered": True}
    )


def _gathers_stated(d: Draw) -> Example:
    rows = d.splits[0]
    return Example((d.values(rows[d.rank], d.k), d.values(d.k, d.n)), {"shard_rows": rows})


def _gathers_for_own_columns(d: Draw) -> Example:
    x, _ = _gathers(d).arguments
    return Example((x, d.values(d.k, split(d.n, d.world)[d.rank])))


def _all_gather_matmul(x, w, *, peers, gather_dim=0, return_gathered=False, shard_rows=None):
    whole = torch.cat(peers.gather(x), gather_dim)
    ys = [whole @ one for one in w] if isinstance(w, list) else whole @ w
    return (ys, whole) if return_gathered else ys


def _graph_of_gather(example, group):
    x, w = example.arguments
    weights = w if isinstance(w, list) else [w]
    options = {"shard_rows": example.options.get("shard_rows")}
    if example.options.get("return_gathered"):
        options["return_A"] = True
    return (x, weights, example.options.get("gather_dim", 0), group), options


# -- matmul_reduce_scatter, matmul_all_reduce ------------------------------------------------------


def _sums(d: Draw) -> Example:
    return Example((d.values(d.m, d.k), d.values(d.k, d.n)))


def _sums_of_cubes(d: Draw) -> Example:
    return Example((d.values(2, d.m, d.k), d.values(d.k, d.n)))


def _sums_of_own_k(d: Draw) -> Example:
    """Ranks differ in K, and one may have none."""
    k = d.splits[0][d.rank]
    return Example((d.values(d.m, k), d.values(k, d.n)))


def _averages(d: Draw) -> Example:
    x, w = _sums(d).arguments  # multiples of the world, so that the average is exact
    return Example(((x.detach() * d.world).requires_grad_(d.grad), w), {"reduce_op": "avg"})


def _scatters_cubes(d: Draw) -> Example:
    return replace(_sums_of_cubes(d), options={"scatter_dim": 1})


def _scatters_stated(d: Draw) -> Example:
    rows = d.splits[0]
    own = {"own_rows": rows[d.rank]}
    return Example((d.values(sum(rows), d.k), d.values(d.k, d.n)), own)


def _matmul_reduce_scatter(x, w, *, peers, scatter_dim=0, reduce_op="sum", own_rows=None):
    total = sum(peers.gather(x @ w))
    if reduce_op == "avg":
        total = total / peers.world
    if own_rows is None:
        return total.tensor_split(peers.world, scatter_dim)[peers.rank]
    return total.split(exchanged(peers, own_rows), scatter_dim)[peers.rank]


def _matmul_all_reduce(x, w, *, peers, reduce_op="sum"):
    total = sum(peers.gather(x @ w, sums=False))
    return total / peers.world if reduce_op == "avg" else total


def _graph_of_scatter(example, group):
    options = dict(example.options)
    first = (options.pop("reduce_op", "sum"), options.pop("scatter_dim", 0), group)
    return (*example.arguments, *first), options


def _graph_of_all_reduce(example, group):
    return (*example.arguments, example.options.get("reduce_op", "sum"), group), {}


# -- all_to_all_matmul, matmul_all_to_all ----------------------------------------------------------


def _exchanges(d: Draw) -> Example:
    return Example((d.values(sum(d.sent), d.k), d.values(d.k, d.n), d.sent, d.taken))


def _exchanges_cubes(d: Draw) -> Example:
    return Example((d.values(sum(d.sent), 2, d.k), d.values(d.k, d.n), d.sent, d.taken))


def _exchanges_and_gives_both(d: Draw) -> Example:
    return replace(_exchanges(d), options={"return_gathered": True})


def _exchanges_of_own_k(d: Draw) -> Example:
    k = d.splits[0][d.rank]
    return Example((d.values(sum(d.sent), k), d.values(k, d.n), d.sent, d.taken))


def _exchange(x, sent, peers):
    """The rows of every rank's x that are for this one."""
    parts = zip(peers.gather(x), exchanged(peers, sent), strict=True)
    return torch.cat([part.split(sizes)[peers.rank] for part, sizes in parts])


def _all_to_all_matmul(x, w, in_splits, out_splits, *, peers, return_gathered=False):
    received = _exchange(x, in_splits, peers)
    return (received @ w, received) if return_gathered else received @ w


def _matmul_all_to_all(x, w, in_splits, out_splits, *, peers):
    return _exchange(x @ w, in_splits, peers)


def _graph_of_exchange(example, group):
    options = {"return_A": True} if example.options.get("return_gathered") else {}
    return (*example.arguments, group), options


# -- embedding_all_to_all --------------------------------------------------------------------------


def lookups(d: Draw, *, mode="sum", weighted=False, max_tables=3, batch=None, long=True) -> Example:
    """Bags of rows of this rank's tables, of which it may have none."""
    common = random.Random(d.seed)
    batch = common.choice((0, 1, 2, 5, 13, 40, 67)) if batch is None else batch
    count = [common.randint(0, max_tables) for _ in range(d.world)][d.rank]
    choose = random.Random(1000 * d.seed + d.rank)
    values = torch.Generator().manual_seed(1000 * d.seed + d.rank)
    integer = torch.int64 if long else torch.int32
    tables, indices, offsets, weights = [], [], [], []
    for _ in range(count):
        rows = choose.choice((1, 2, 7, 50))
        lengths = [choose.choice((0, 1, 2, 5)) for _ in range(batch)]
        total, shape = sum(lengths), (rows, choose.choice(DIMS))
        starts = torch.tensor([sum(lengths[:i]) for i in range(batch)], dtype=integer)
        tables.append(torch.randint(-2, 3, shape, generator=values).to(d.dtype))
        indices.append(torch.randint(0, rows, (total,), generator=values).to(integer))
        offsets.append(starts)
        weights.append(torch.randint(-1, 3, (total,), generator=values).to(d.dtype))
    for tensor in (*tables, *(weights if weighted else ())):
        tensor.requires_grad_(d.grad)
    options = {"mode": mode, **({"per_sample_weights": weights} if weighted else {})}
    return Example((tables, indices, offsets), options)


def _embedding_all_to_all(tables, indices, offsets, *, peers, mode="sum", per_sample_weights=None):
    weights = per_sample_weights or [None] * len(tables)
    batch = max(exchanged(peers, offsets[0].numel() if offsets else 0))
    # The first column stands for a rank without tables: it takes part in backward as others do.
    pooled = [torch.zeros(batch, 0, dtype=torch.float64, requires_grad=True)]
    for table, index, offset, weight in zip(tables, indices, offsets, weights, strict=True):
        if batch:
            bags = {"mode": mode, "per_sample_weights": weight}
            pooled.append(embedding_bag(index.long(), table, offset.long(), **bags))
        else:
            pooled.append(table[:0])
    return torch.cat(peers.gather(torch.cat(pooled, 1)), 1).tensor_split(peers.world)[peers.rank]


def _schedules_of_lookups(world: int) -> Sequence[str]:
    return ("auto", "in-kernel:3", "serial@dma", "hetero-fused-1d", "hetero-unfused-1d@cores")


# -- the table -------------------------------------------------------------------------------------

OPERATORS = {
    operator.name: operator
    for operator in (
        Operator(
            "all_gather_matmul",
            {
                "plain": _gathers,
                "several w": _gathers_for_several,
                "three dimensions": _gathers_cubes,
                "stated rows": _gathers_stated,
                "own columns": _gathers_for_own_columns,
            },
            _all_gather_matmul,
            _graph_of_gather,
            more=(
                "adaptive:1@dma",
                "adaptive:5@cores",
                "adaptive:3@direct",
                "uniform-unfused-1d@dma",
                "uniform-adaptive-1d:2@dma",
                "hetero-fused-1d-p2p:3@cores",
                "uniform-fused-2d-p2p:4@dma",
                "hetero-unfused-1d:64@dma",
            ),
            shapes=(
                (0, 3, 4),
                (1, 1, 1),
                (2, 5, 0),
                (7, 0, 3),
                (3, 2, 5),  # fewer rows than chunks
                (13, 7, 11),
                (16, 8, 16),
                (31, 3, 17),  # uneven shards, uneven chunks
            ),
        ),
        Operator(
            "matmul_reduce_scatter",
            {
                "plain": _sums,
                "three dimensions": _scatters_cubes,
                "own K": _sums_of_own_k,
                "stated rows": _scatters_stated,
                "averages": _averages,
            },
            _matmul_reduce_scatter,
            _graph_of_scatter,
        ),
        Operator(
            "matmul_all_reduce",
            {
                "plain": _sums,
                "three dimensions": _sums_of_cubes,
                "own K": _sums_of_own_k,
                "averages": _averages,
            },
            _matmul_all_reduce,
            _graph_of_all_reduce,
            replicated=True,
        ),
        Operator(
            "all_to_all_matmul",
            {
                "plain": _exchanges,
                "three dimensions": _exchanges_cubes,
                "gathered": _exchanges_and_gives_both,
            },
            _all_to_all_matmul,
            _graph_of_exchange,
        ),
        Operator(
            "matmul_all_to_all",
            {
                "plain": _exchanges,
                "three dimensions": _exchanges_cubes,
                "own K": _exchanges_of_own_k,
            },
            _matmul_all_to_all,
            _graph_of_exchange,
        ),
        Operator(
            "embedding_all_to_all",
            {
                "plain": lookups,
                "weighted": lambda d: lookups(d, weighted=True),
                "short indices": lambda d: lookups(d, long=False),
            },
            _embedding_all_to_all,
            None,
            dtypes=(torch.float32, torch.bfloat16, torch.float16),
            schedules=_schedules_of_lookups,
            few=("auto", "in-kernel:3", "serial@dma", "hetero-unfused-1d:3"),
        ),
    )
}
