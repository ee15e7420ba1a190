"""The overhead of a call beyond its work: tiny products with cached plans, in times of the bare
product."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from weft.benchmarks import Check, Result
from weft.measure.launch import Report, all_gather_flat, launch
from weft.measure.measurement import interleaved
from weft.ops.operands import group_name

SIZE = 64
WORLD = 2
CALLS = 20
"""The number of calls per sample, so that the common start does not matter."""
REPEAT = 60
TARGETS = {"adaptive@direct": 6, "adaptive@dma": 10}
"""The most that a call of a schedule may take, in times of the bare product."""
FIRST = "all_gather_matmul"
"""The operator whose other ways are measured too."""
MORE = 3
"""The most that `torch.ops.weft` and autograd may add, in times of the bare product."""

Calls = dict[str, Callable[[], object]]


def run(report: Report) -> Result:
    """Calls with M = N = K = 64. Each is compared with the bare product of the same round."""
    samples = launch(WORLD, _measure, report=report)[0]
    bare = samples["mm alone"]
    ratios = {
        name: [value / one for value, one in zip(values, bare, strict=True)]
        for name, values in samples.items()
    }
    times = {name: statistics.median(values) for name, values in ratios.items()}
    rows: list[list[str | float]] = []
    for name, values in ratios.items():
        low, _, high = statistics.quantiles(values, n=4)
        spread = f"{low:.1f}-{high:.1f}"
        microseconds = statistics.median(samples[name]) / CALLS * 1e6
        rows.append([name, round(times[name], 1), spread, round(microseconds, 1)])
    case = f"{SIZE}^3, {WORLD} ranks"
    checks = [
        Check(f"{name}, {case}: times the bare mm", times[name], f"<= {target}")
        for schedule, target in TARGETS.items()
        for name in times
        if name.endswith(f" {schedule}")
    ]
    for name in ("torch.ops.weft", "autograd"):
        more = times[name] - times[f"{FIRST} adaptive@direct"]
        checks.append(Check(f"{name}, {case}: mm more than the call itself", more, f"<= {MORE}"))
    return Result(("arm", "times mm", "middle half", "us a call"), rows, checks)


def _measure(report: Report) -> dict[str, list[float]]:
    import weft

    random = torch.Generator().manual_seed(dist.get_rank())
    shard = torch.randn(SIZE // WORLD, SIZE, generator=random)
    w = torch.randn(SIZE, SIZE, generator=random)
    trained = w.clone().requires_grad_()
    gathered = torch.empty(SIZE, SIZE)
    group = group_name(None)

    def gloo() -> None:
        all_gather_flat(gathered, shard)
        torch.mm(gathered, w)

    calls: Calls = {"mm alone": lambda: torch.mm(gathered, w), "gloo + mm": gloo}
    for schedule in (*TARGETS, "serial@dma"):
        for name, call in _operators(shard, gathered, w, schedule).items():
            if schedule in TARGETS or name == FIRST:
                calls[f"{name} {schedule}"] = call
    direct = "adaptive@direct"
    calls["torch.ops.weft"] = lambda: torch.ops.weft.all_gather_matmul(
        shard, [w], 0, group, schedule=direct
    )
    calls["autograd"] = lambda: weft.all_gather_matmul(shard, trained, schedule=direct)

    def repeated(call: Callable[[], object]) -> Callable[[], None]:
        def sample() -> None:
            for _ in range(CALLS):
                call()

        return sample

    return interleaved({name: repeated(call) for name, call in calls.items()}, REPEAT, report)


def _operators(shard: torch.Tensor, x: torch.Tensor, w: torch.Tensor, schedule: str) -> Calls:
    """One call of every operator that multiplies, in which a rank computes one product of 64^3."""
    import weft

    even = [SIZE // WORLD] * WORLD
    return {
        FIRST: lambda: weft.all_gather_matmul(shard, w, schedule=schedule),
        "matmul_reduce_scatter": lambda: weft.matmul_reduce_scatter(x, w, schedule=schedule),
        "matmul_all_reduce": lambda: weft.matmul_all_reduce(x, w, schedule=schedule),
        "all_to_all_matmul": lambda: weft.all_to_all_matmul(x, w, even, even, schedule=schedule),
        "matmul_all_to_all": lambda: weft.matmul_all_to_all(x, w, even, even, schedule=schedule),
    }
