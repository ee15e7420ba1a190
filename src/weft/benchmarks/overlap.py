"""How much of the ideal the schedules reach, on paced links and at memory speed."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from weft.benchmarks import Check, Result, part
from weft.errors import keeping
from weft.measure.launch import Report, all_gather_flat, launch
from weft.measure.link_spec import LinkSpec
from weft.measure.measurement import Measurement, interleaved, measure
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.schedule import Schedule

SHAPES = ((2048, 1024, 2048), (2048, 512, 4096))
BALANCED = "balanced"
UNBALANCED = ("0.5x", "2x")
FIXED = ("uniform-fused-1d", "hetero-fused-1d", "hetero-unfused-1d", "uniform-fused-2d")
CLEARLY = 0.95
"""A `@dma` schedule is clearly faster than the same one `@cores` if it takes at most this share."""
REPEAT = 15
QUICK_SHAPE, QUICK_REPEAT = (1024, 512, 1024), 5

HEADERS = ("case", "schedule", "ms", "speedup", "of ideal %", "GEMM slowdown")


def run(report: Report) -> Result:
    """2 ranks on balanced, faster and slower links; 4 ranks on the same cores; memory speed."""
    rows: list[list[str | float]] = []
    checks: list[Check] = []
    with keeping(lambda: Result(HEADERS, rows, checks) if rows else None):
        _measure(report, rows, checks)
    return Result(HEADERS, rows, checks)


def quick(report: Report) -> Result:
    """One small shape on a balanced link, with few schedules and rounds."""
    m, n, k = QUICK_SHAPE
    result = measure(
        AllGatherMatmul.of(m, n, k, 2),
        LinkSpec.parse(BALANCED),
        _few(),
        repeat=QUICK_REPEAT,
        report=report,
    )
    reached = result.arm("adaptive@dma").percent_of_ideal
    check = Check(f"{m}x{n}x{k} balanced: adaptive@dma % of ideal", reached, ">= 90")
    return Result(HEADERS, _rows(f"{m}x{n}x{k} balanced", result), [check])


def _measure(report: Report, rows: list[list[str | float]], checks: list[Check]) -> None:
    parts = len(SHAPES) * (1 + len(UNBALANCED)) + 2
    number = 0
    for m, n, k in SHAPES:
        shape = f"{m}x{n}x{k}"
        operation = AllGatherMatmul.of(m, n, k, 2)
        for link in (BALANCED, *UNBALANCED):
            schedules = _all(operation) if link == BALANCED else _few()
            progress = part(report, number, parts)
            result = measure(
                operation, LinkSpec.parse(link), schedules, repeat=REPEAT, report=progress
            )
            number += 1
            rows += _rows(f"{shape} {link}", result)
            reached = result.arm("adaptive@dma").percent_of_ideal
            bar = ">= 90" if link == BALANCED else ">= 80"
            checks.append(Check(f"{shape} {link}: adaptive@dma % of ideal", reached, bar))
            if link == BALANCED:
                checks += _balanced_checks(shape, result)
    m, n, k = SHAPES[0]
    four = AllGatherMatmul.of(m, n, k, 4)
    result = measure(
        four,
        LinkSpec.parse(BALANCED),
        _all(four),
        repeat=REPEAT,
        report=part(report, number, parts),
    )
    rows += _rows(f"{m}x{n}x{k} balanced, 4 ranks", result)
    adaptive = result.arm("adaptive@dma").seconds
    checks.append(Check("4 ranks: adaptive@dma / best", adaptive / result.best.seconds, "<= 1.05"))
    checks.append(Check("4 ranks: adaptive@dma / serial", adaptive / result.serial, "<= 1.0"))
    memory = launch(2, _memory_speed, m, n, k, report=part(report, number + 1, parts))[0]
    for name, seconds in memory.items():
        rows.append([f"{m}x{n}x{k} memory", name, round(seconds * 1e3, 2), "", "", ""])
    direct = memory["adaptive@direct"]
    checks.append(Check("memory speed: adaptive@direct / GEMM", direct / memory["GEMM"], "<= 1.05"))
    checks.append(
        Check(
            "memory speed: adaptive@direct / gloo + GEMM", direct / memory["gloo + GEMM"], "<= 0.8"
        )
    )


def _all(operation: AllGatherMatmul) -> list[Schedule]:
    return [s for s in Schedule.space(operation) if s.engine != "direct"]


def _few() -> list[Schedule]:
    return [
        Schedule.parse(name) for name in ("shard-p2p@dma", "hetero-unfused-1d@dma", "adaptive@dma")
    ]


def _rows(case: str, result: Measurement) -> list[list[str | float]]:
    return [
        [
            case,
            arm.name,
            round(arm.seconds * 1e3, 2),
            f"{arm.speedup:.2f}x",
            round(arm.percent_of_ideal),
            f"{arm.gemm_slowdown:.2f}x",
        ]
        for arm in result.arms
    ]


def _balanced_checks(shape: str, result: Measurement) -> list[Check]:
    fixed = min(result.arm(f"{name}@dma").seconds for name in FIXED)
    shard = result.arm("shard-p2p@dma").seconds
    ratios = {
        arm.name: arm.seconds / result.arm(arm.name.replace("@dma", "@cores")).seconds
        for arm in result.arms
        if arm.name.endswith("@dma") and not arm.name.startswith("serial")
    }
    # With whole shards on two ranks, compute waits for copy engines as long as spinning cores delay
    # it, so both are equally fast on a balanced link. This pair is reported separately.
    whole_shards = ratios.pop("shard-p2p@dma")
    return [
        Check(f"{shape} balanced: best fixed chunked / shard-p2p", fixed / shard, "<= 1.0"),
        Check(
            f"{shape} balanced: worst chunked @dma / @cores", max(ratios.values()), f"<= {CLEARLY}"
        ),
        Check(f"{shape} balanced: shard-p2p @dma / @cores", whole_shards, f"<= {CLEARLY}"),
    ]


def _memory_speed(report: Report, m: int, n: int, k: int) -> dict[str, float]:
    import weft

    rank, world = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(rank)
    shard, w = torch.randn(m // world, k, generator=random), torch.randn(k, n, generator=random)
    whole, out = torch.randn(m, k, generator=random), torch.empty(m, n)
    gathered = torch.empty(m, k)

    def gloo() -> None:
        all_gather_flat(gathered, shard)
        torch.mm(gathered, w, out=out)

    def overlapped() -> None:
        weft.all_gather_matmul(shard, w, schedule="adaptive@direct", out=out)

    def alone() -> None:
        torch.mm(whole, w, out=out)

    arms = {"GEMM": alone, "adaptive@direct": overlapped, "gloo + GEMM": gloo}
    samples = interleaved(arms, REPEAT, report)
    return {name: statistics.median(values) for name, values in samples.items()}
