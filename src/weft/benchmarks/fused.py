"""Compares kernels that communicate by themselves with the same work in separate steps: embedding
lookups + all-to-all, GEMV + all-reduce, GEMM + all-to-all. Measured here, simulated on MI300X."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag

import weft
from weft.benchmarks import Check, Result, part
from weft.fabric import Link, of
from weft.fabric.host.probe import multiply
from weft.machine import load
from weft.measure.arms import arms_of
from weft.measure.launch import Report, launch
from weft.measure.link_spec import LinkSpec
from weft.measure.measurement import interleaved, measure
from weft.operation import find
from weft.schedule import Schedule
from weft.study.in_kernel_savings import savings

WORLD = 2
NUM_TABLES, TABLE_ROWS, DIM, BATCH, POOLING = 26, 100_000, 64, 2048, 20
GEMV = ((2048, 2048), (4096, 4096))
SMALL = (1024, 1024)
BATCHES = (1, 8)
SHARE = 0.3
"""The time of the all-reduce on the paced link, as a share of the GEMV."""
CALLS = {1024: 40, 2048: 40, 4096: 10}
"""The number of GEMV calls per sample, by K. It is large enough that neither the common start nor
the cache contents of the previous arm matter."""
REPEAT = 15
M, N, K = 2048, 1024, 2048
HEADERS = ("case", "arm", "ms", "of the first arm")
Rows = list[list[str | float]]
Medians = dict[str, float]


def run(report: Report) -> Result:
    """2 ranks, fp32, interleaved arms, medians of the slower rank; then the simulations."""
    rows: Rows = []
    checks: list[Check] = []
    _embedding(rows, checks, part(report, 0, 6))
    for number, (k, n) in enumerate((*GEMV, SMALL)):
        _gemv(rows, checks, k, n, part(report, 1 + number, 6))
    _gemm(rows, checks, part(report, 4, 6))
    _simulated(rows, checks)
    return Result(HEADERS, rows, checks)


def _add(rows: Rows, case: str, medians: Medians) -> None:
    first = next(iter(medians.values()))
    for arm, seconds in medians.items():
        rows.append([case, arm, round(seconds * 1e3, 3), f"{seconds / first:.2f}x"])


# -- embedding lookups -----------------------------------------------------------------------------


def _embedding(rows: Rows, checks: list[Check], report: Report) -> None:
    found = launch(WORLD, _measure_embedding, report=report)[0]
    case = f"embedding, {NUM_TABLES} tables"
    _add(rows, case, found)
    fused, local = found["in-kernel"], found["lookups alone"]
    checks.append(Check(f"{case}: in-kernel / lookups alone", fused / local, "<= 1.15"))
    checks.append(
        Check(f"{case}: steps with gloo / in-kernel", found["steps, gloo"] / fused, ">= 2.0")
    )
    checks.append(
        Check(f"{case}: steps with weft / in-kernel", found["steps, weft"] / fused, ">= 1.5")
    )


def _measure_embedding(report: Report) -> Medians:
    count = NUM_TABLES // WORLD
    random = torch.Generator().manual_seed(dist.get_rank())
    tables = [torch.randn(TABLE_ROWS, DIM, generator=random) for _ in range(count)]
    wanted = BATCH * POOLING
    indices = [torch.randint(TABLE_ROWS, (wanted,), generator=random) for _ in range(count)]
    offsets = [torch.arange(0, wanted, POOLING) for _ in range(count)]

    def lookups() -> list[torch.Tensor]:
        inputs = zip(indices, tables, offsets, strict=True)
        return [embedding_bag(i, t, o, mode="sum") for i, t, o in inputs]

    def steps(exchange: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        packed = torch.cat(lookups(), 1)
        parts = exchange(packed).view(WORLD, BATCH // WORLD, count * DIM)
        return torch.cat(list(parts), 1)

    def gloo(packed: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(packed)
        dist.all_to_all_single(received, packed)
        return received

    arms: dict[str, Callable[[], Any]] = {
        "lookups alone": lookups,
        "in-kernel": lambda: weft.embedding_all_to_all(tables, indices, offsets),
        "steps, gloo": lambda: steps(gloo),
        "steps, weft": lambda: steps(weft.all_to_all),
    }
    with torch.no_grad():
        assert torch.allclose(arms["in-kernel"](), arms["steps, gloo"](), atol=1e-4)
        return _medians(interleaved(arms, REPEAT, report))


# -- GEMV ------------------------------------------------------------------------------------------


def _gemv(rows: Rows, checks: list[Check], k: int, n: int, report: Report) -> None:
    for number, m in enumerate(BATCHES):
        found = launch(WORLD, _measure_gemv, m, n, k, report=part(report, number, 2))[0]
        case = f"GEMV {m}x{n}x{k}"
        _add(rows, case, found)
        ours, alone, fused = found["GEMV of weft"], found["GEMV of torch"], found["in-kernel"]
        checks.append(Check(f"{case}: weft's / torch's GEMV", ours / alone, "<= 1.0"))
        if (k, n) == SMALL:
            checks.append(
                Check(f"{case}: mv + gloo / in-kernel", found["mv + gloo"] / fused, ">= 3.0")
            )
            continue
        checks.append(Check(f"{case}: in-kernel / GEMV", fused / alone, "<= 1.10"))
        paced = found["mv + weft, paced"] / found["in-kernel, paced"]
        checks.append(Check(f"{case}: mv + weft / in-kernel, paced", paced, ">= 1.2"))


def _measure_gemv(report: Report, m: int, n: int, k: int) -> Medians:
    random = torch.Generator().manual_seed(dist.get_rank())
    x, w = torch.randn(m, k, generator=random), torch.randn(k, n, generator=random)
    out, y = torch.empty(m, n), torch.empty(m, n)
    multiply(x, w, y)  # packed from the second call on, as in the operator
    fabric, calls = of(None), CALLS[k]

    def alone() -> None:
        torch.mm(x, w, out=out)

    def ours() -> None:
        multiply(x, w, y)

    def gloo() -> None:
        alone()
        dist.all_reduce(out)

    def all_reduce() -> None:
        weft.all_reduce(out, out=out)

    def steps() -> None:
        alone()
        all_reduce()

    def fused() -> None:
        weft.matmul_all_reduce(x, w)

    with torch.no_grad():
        arms = {"GEMV of torch": alone, "GEMV of weft": ours, "in-kernel": fused, "mv + gloo": gloo}
        arms |= {"mv + weft": steps, "all-reduce of weft": all_reduce}
        repeated = {name: _repeated(arm, calls) for name, arm in arms.items()}
        found = _medians(interleaved(repeated, REPEAT, report))
        found = {name: seconds / calls for name, seconds in found.items()}
        if (k, n) == SMALL:
            return found
        # An all-reduce of two ranks sends the bytes of y over each link, in one exchange or in two.
        # Its other costs, such as starting and waking up, are the same on any link.
        share = SHARE * found["GEMV of torch"]

        def pace(besides: float) -> float:
            on_link = max(share - besides, 0.1 * share)
            fabric.set_link(Link(m * n * 4 / on_link))
            return on_link

        on_link = pace(found["all-reduce of weft"])
        tried = interleaved({"all-reduce": _repeated(all_reduce, calls)}, 3, report)
        pace(_medians(tried)["all-reduce"] / calls - on_link)
        paced = {"mv + weft": steps, "in-kernel": fused, "all-reduce of weft": all_reduce}
        slow = {f"{name}, paced": _repeated(arm, calls) for name, arm in paced.items()}
        slow_found = _medians(interleaved(slow, REPEAT, report))
        fabric.set_link(Link())
    return found | {name: seconds / calls for name, seconds in slow_found.items()}


def _repeated(action: Callable[[], Any], calls: int) -> Callable[[], None]:
    def several() -> None:
        for _ in range(calls):
            action()

    return several


def _medians(samples: dict[str, list[float]]) -> Medians:
    return {name: statistics.median(values) for name, values in samples.items()}


# -- GEMM ------------------------------------------------------------------------------------------


def _gemm(rows: Rows, checks: list[Check], report: Report) -> None:
    case = f"GEMM {M}x{N}x{K} + all-to-all"
    found = launch(WORLD, _measure_gemm, report=part(report, 0, 2))[0]
    _add(rows, case, found)
    ratio = found["in-kernel"] / found["GEMM"]
    checks.append(Check(f"{case}: in-kernel / GEMM, memory speed", ratio, "<= 1.05"))
    operation = find("matmul_all_to_all").of(M, N, K, WORLD)
    schedules = [Schedule.parse(name) for name in ("in-kernel:4", "in-kernel:8")]
    balanced = LinkSpec.parse("balanced")
    result = measure(operation, balanced, schedules, repeat=REPEAT, report=part(report, 1, 2))
    arms = {arm.name: arm.seconds for arm in result.arms}
    _add(rows, f"{case}, balanced", {"ideal": result.ideal, **arms})
    best = max(arm.percent_of_ideal for arm in result.arms if arm.name.startswith("in-kernel"))
    checks.append(Check(f"{case}: % of ideal, balanced link", best, ">= 85"))


def _measure_gemm(report: Report) -> Medians:
    made = arms_of(find("matmul_all_to_all").of(M, N, K, WORLD), of(None))
    arms = {"GEMM": made.compute, "in-kernel": made.call(Schedule.parse("in-kernel:1"))}
    arms["mm + gloo"] = made.plain
    return _medians(interleaved(arms, REPEAT, report))


# -- simulated -------------------------------------------------------------------------------------


def _simulated(rows: Rows, checks: list[Check]) -> None:
    """The kernels against serial (the faster of copy engines and cores) on 8 MI300X, simulated."""
    least: dict[str, float] = {}
    for saving in savings(load("mi300x")):
        size, serial, fused = saving.size, saving.scenario.serial, saving.fused
        rows.append([size.what, "serial, simulated", round(serial * 1e3, 3), "1.00x"])
        arm = f"in-kernel: {saving.percent:.0f} % less (paper: {size.paper})"
        rows.append(["", arm, round(fused * 1e3, 3), f"{fused / serial:.2f}x"])
        name = size.operation
        least[name] = min(saving.percent, least.get(name, saving.percent))
    for name, percent in least.items():
        checks.append(Check(f"mi300x, {name}: least time saved, %", percent, ">= 10"))
