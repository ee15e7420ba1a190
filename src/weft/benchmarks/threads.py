"""Compares weft's own kernels on all threads of a rank with one thread, and with torch on all
threads: products of few rows, quantised weights, embedding lookups and their gradients, sums, and
large collectives of one rank, which are copies."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import embedding_bag

import weft
from weft.benchmarks import Check, Result, part
from weft.errors import Unsupported
from weft.fabric import of
from weft.fabric.host.probe import sum_of
from weft.measure.launch import Report, cores_of, launch
from weft.measure.measurement import interleaved

PRODUCTS = ((1, 1024, 1024), (1, 2048, 2048), (1, 4096, 4096), (8, 2048, 2048), (32, 2048, 2048))
"""(M, N, K)."""
QUANTISED = ((1, 2048, 2048), (1, 4096, 4096))
TABLE_ROWS, DIM, BATCH, POOLING = 100_000, 128, 2048, 20
TERMS, ROWS, COLUMNS = 4, 512, 2048
COPIED_MIB = (1, 4, 64)
"""MiB of the inputs of collectives."""
SAMPLE = 0.008
"""The seconds of one sample, about: as many calls as fit."""
REPEAT = 15
ONE, ALL, TORCH = "one thread", "all threads", "torch"
HEADERS = ("case", "1 thread us", "all us", "torch us", "speedup", "torch/weft", "spread")

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """The same work by weft and by torch."""

    name: str
    weft: Call
    torch: Call


@dataclass(frozen=True)
class Found:
    """Medians in seconds, and medians of the ratios of single rounds. spread: half the samples on
    all threads are within this share of their median."""

    name: str
    seconds: dict[str, float]
    speedup: float
    over_torch: float
    spread: float


def run(report: Report) -> Result:
    """One rank on all cores of this process, one thread per core, fp32 (int8 weights: bf16)."""
    threads = len(cores_of(0, 1))
    if threads < 2:
        raise Unsupported("weft bench threads needs a process that may use 2 cores or more")
    found: list[Found] = launch(1, _measure, threads, threads=threads, report=report)[0]
    rows = [_row(one) for one in found]
    checks = [Check(f"{one.name}: 1 / {threads} threads", one.speedup, ">= 1.7") for one in found]
    checks += [Check(f"{one.name}: torch / weft", one.over_torch, ">= 1.0") for one in found]
    return Result(HEADERS, rows, checks)


def _row(found: Found) -> list[str | float | int | None]:
    us = [round(found.seconds[arm] * 1e6, 1) for arm in (ONE, ALL, TORCH)]
    ratios = [f"{found.speedup:.2f}x", f"{found.over_torch:.2f}x"]
    return [found.name, *us, *ratios, f"{100 * found.spread:.0f} %"]


def _measure(report: Report, threads: int) -> list[Found]:
    found = []
    cases = list(_cases())
    for number, case in enumerate(cases):
        found.append(_compare(case, threads, part(report, number, len(cases))))
    return found


def _compare(case: Case, threads: int, report: Report) -> Found:
    report(0.0, case.name)
    arms = {ONE: (1, case.weft), ALL: (threads, case.weft), TORCH: (threads, case.torch)}

    def several(calls: int) -> dict[str, Callable[[], None]]:
        return {name: partial(_repeat, *arm, calls) for name, arm in arms.items()}

    once = min(min(taken) for taken in interleaved(several(1), 3, _silent).values())
    calls = max(1, round(SAMPLE / once))
    samples = interleaved(several(calls), REPEAT, _silent)
    return _found(case.name, {n: [v / calls for v in taken] for n, taken in samples.items()})


def _repeat(threads: int, call: Call, calls: int) -> None:
    torch.set_num_threads(threads)
    for _ in range(calls):
        call()


def _silent(share: float, text: str) -> None:
    """Rounds are too short to report."""


def _found(name: str, samples: dict[str, list[float]]) -> Found:
    def ratio(above: str, below: str) -> float:
        pairs = zip(samples[above], samples[below], strict=True)
        return statistics.median(a / b for a, b in pairs)

    seconds = {arm: statistics.median(taken) for arm, taken in samples.items()}
    low, _, high = statistics.quantiles(samples[ALL], n=4)
    spread = (high - low) / 2 / seconds[ALL]
    return Found(name, seconds, ratio(ONE, ALL), ratio(TORCH, ALL), spread)


def _cases() -> Iterator[Case]:
    make = torch.Generator().manual_seed(0)
    for m, n, k in PRODUCTS:
        x, w = torch.randn(m, k, generator=make), torch.randn(n, k, generator=make)
        for layout, weight in (("w", w.t().contiguous()), ("w.t()", w.t())):
            yield _product(f"{m}x{n}x{k} {layout}", x, weight)
    for m, n, k in QUANTISED:
        yield _quantised(f"{m}x{n}x{k} int8", torch.randn(m, k, generator=make).bfloat16(), n)
    yield from _lookups(make)
    yield _sum(make)
    for mib in COPIED_MIB:
        x, y = torch.randn(mib << 18, generator=make), torch.empty(mib << 18)
        ours = partial(weft.all_gather, x, out=y)
        yield Case(f"all_gather of {mib} MiB", ours, partial(y.copy_, x))


def _product(name: str, x: torch.Tensor, w: torch.Tensor) -> Case:
    ours = partial(weft.matmul_all_reduce, x, w, schedule="in-kernel")
    return Case(name, ours, partial(torch.mm, x, w))


def _quantised(name: str, x: torch.Tensor, n: int) -> Case:
    """Against torch's own product with int8 weights."""
    k = x.shape[1]
    w = torch.arange(n * k).remainder(255).sub(127).to(torch.int8).view(n, k)
    scale = torch.full((n,), 0.01)
    ours = partial(weft.matmul_all_reduce, x, w.t(), scale=scale, schedule="in-kernel")
    return Case(name, ours, partial(torch._weight_int8pack_mm, x, w, scale.bfloat16()))


def _lookups(make: torch.Generator) -> Iterator[Case]:
    count = BATCH * POOLING
    table = torch.randn(TABLE_ROWS, DIM, generator=make)
    index = torch.randint(TABLE_ROWS, (count,), generator=make)
    offset = torch.arange(0, count, POOLING)

    def ours(table: torch.Tensor) -> torch.Tensor:
        return weft.embedding_all_to_all([table], [index], [offset], schedule="in-kernel")

    def theirs(table: torch.Tensor) -> torch.Tensor:
        return embedding_bag(index, table, offset, mode="sum")

    yield Case("lookups", partial(ours, table), partial(theirs, table))
    wanted = table.clone().requires_grad_()
    dy = torch.randn(BATCH, DIM, generator=make)

    def gradient(y: torch.Tensor) -> Call:
        return lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True)

    yield Case("lookups, gradient", gradient(ours(wanted)), gradient(theirs(wanted)))


def _sum(make: torch.Generator) -> Case:
    terms = torch.randn(TERMS, ROWS, COLUMNS, generator=make)
    y, out = torch.empty(ROWS, COLUMNS), torch.empty(ROWS, COLUMNS)
    ours = sum_of(of(None), terms, y)
    return Case(f"sum of {TERMS}, {ROWS}x{COLUMNS}", ours, partial(torch.sum, terms, 0, out=out))
