"""`matmul_beside` equals plain torch, under every strategy; bad input is refused on every rank."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from ranks import integers

import weft
from weft.fabric import of
from weft.ops.concurrent import matmul_beside
from weft.plan.concurrent import COLLECTIVES
from weft.run.placement import LOWEST, Placement
from weft.strategy import Strategy

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = [  # m, n, k, rows of ranks in turn, columns
    (3, 5, 7, (4,), 3),
    (13, 7, 11, (5, 0, 3), 2),
    (0, 4, 3, (2, 1), 5),
    (2, 0, 3, (2, 2), 1),
    (5, 3, 0, (1,), 1),
    (16, 8, 16, (0,), 4),
    (31, 3, 17, (17, 2), 3),
]
NAMES = ("serial", "concurrent", "prioritized", "partitioned:1", "dma", "dma+trimmed:1")


def check(collective, name, m, n, k, rows, columns, dtype, seed=0, symmetric=False) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    xs = [integers((rows[r % len(rows)], columns), dtype, 100 * seed + r) for r in range(world)]
    a, b = integers((m, k), dtype, seed + rank), integers((k, n), dtype, seed + rank + 50)
    x = xs[rank]
    if symmetric:
        x = weft.symmetric_empty(*x.shape, dtype=dtype).copy_(x)
    y, received = matmul_beside(a, b, x, collective=collective, strategy=name)
    pieces = [
        x.tensor_split(world)[rank] if collective == "all_to_all" else x
        for peer, x in enumerate(xs)
        if peer != rank
    ]
    assert torch.equal(received, torch.cat([x[:0], *pieces]))
    wanted = (a.double() @ b.double()).to(dtype)
    assert torch.equal(y, wanted)
    assert y.dtype == received.dtype == dtype


def every_strategy(dtype: torch.dtype) -> int:
    calls = 0
    for collective in COLLECTIVES:
        for name in NAMES if dtype == torch.float32 else ("dma",):
            for seed, size in enumerate(SIZES):
                check(collective, name, *size, dtype, seed, symmetric=seed % 2 == 1)
                calls += 1
    return calls


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_strategy(ranks, world, dtype):
    assert min(ranks(world).run(every_strategy, dtype)) >= len(SIZES)


def on_paced_links() -> list[str]:
    group = dist.new_group()
    weft.configure(group=group, link="0.05GB/s")
    a, b = integers((64, 32), torch.float32, 1), integers((32, 16), torch.float32, 2)
    x = integers((64, 256), torch.float32, 3 + dist.get_rank())
    said = []
    for name in ("concurrent", "dma"):
        with weft.record() as recording:
            out = torch.empty(64, 16)
            y, _ = matmul_beside(a, b, x, strategy=name, group=group, out=out)
        assert y is out
        assert torch.equal(out, a @ b)
        (timeline,) = recording.gather(group)
        kinds = {span.kind for span in timeline.of(dist.get_rank()).spans}
        assert kinds == {"matmul", "copy"}
        said.append(weft.explain().schedule)
        assert weft.explain().bytes_by_engine == {
            "dma" if name == "dma" else "cores": x.nbytes * (dist.get_world_size() - 1)
        }
    return said


def test_the_path_that_ran_is_the_one_asked_for(ranks):
    assert ranks(2).run(on_paced_links) == [["concurrent", "dma"]] * 2


def refusals() -> list[str]:
    rank, said = dist.get_rank(), []
    a, b, x = torch.ones(4, 3), torch.ones(3, 2), torch.ones(2, 2)
    bad = torch.ones(5, 2)
    for call in (
        lambda: matmul_beside(a, b if rank == 0 else bad, x),
        lambda: matmul_beside(a, b, x, strategy="dma" if rank == 0 else "serial"),
        lambda: matmul_beside(a, b, x, strategy="dna" if rank else "dma"),
        lambda: matmul_beside(a, b, x, collective="all_reduce"),
        lambda: matmul_beside(a, b, x.double() if rank else x),
        lambda: matmul_beside(a, b, x[:, : 1 + rank]),
    ):
        with pytest.raises(weft.Error) as caught:
            call()
        said.append(str(caught.value))
    check("all_gather", "dma", 3, 5, 7, (4,), 3, torch.float32)  # the group goes on
    return said


def test_bad_input_is_one_sentence_on_every_rank(ranks):
    words = ("5 rows", "the strategy", "no strategy 'dna'", "all_reduce", "x is", "columns of x")
    for said in ranks(2).run(refusals):
        for sentence, wanted in zip(said, words, strict=True):
            assert wanted in sentence
            assert "\n" not in sentence


def placed() -> dict[str, object]:
    fabric = of(None)
    own = sorted(os.sched_getaffinity(0))
    placement = Placement(own)
    x = weft.symmetric_empty(4, 4).fill_(float(fabric.rank))
    a = b = torch.ones(4, 4)

    def work() -> tuple[int, list[int], list[list[int]]]:
        matmul_beside(a, b, x, strategy="concurrent")
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        engines = [sorted(os.sched_getaffinity(thread)) for thread in placement.engines()]
        return nice, sorted(os.sched_getaffinity(0)), engines

    work()
    found: dict[str, object] = {"own": own}
    for name in ("dma", "prioritized", "partitioned:1", "prioritized+partitioned:1", "concurrent"):
        strategy = Strategy.parse(name)
        reason = placement.impossible(strategy)
        found[name] = reason if reason is not None else placement.run(strategy, work)
    found["after"] = work()
    found["trimmed"] = placement.impossible(Strategy.of("dma+trimmed", len(own)))
    placement.close()
    return found


def test_threads_are_placed_and_put_back(ranks):
    for found in ranks(2).run(placed):
        own = found["own"]
        nice, cores, engines = found["after"]
        assert cores == own
        assert engines
        assert all(cores == own for cores in engines)
        assert found["dma"] == found["concurrent"] == found["after"]
        assert found["prioritized"] == (LOWEST, own, engines)
        if len(own) > 1:
            last = [own[-1:]] * len(engines)
            assert found["partitioned:1"] == (nice, own[:-1], last)
            assert found["prioritized+partitioned:1"] == (LOWEST, own, last)
        else:
            assert "leave none to compute" in found["partitioned:1"]
        assert "cannot go without them" in found["trimmed"]
