"""Point 8: how fast copies and products are alone and beside each other, and a machine file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

import weft
from weft.errors import Unsupported
from weft.fabric.device.device_driver import Driver
from weft.machine import Machine, calibrated, load, names
from weft.measure.gpu.finding import Finding
from weft.measure.gpu.peers import Peers


@dataclass(frozen=True)
class SpeedSizes:
    """What is measured: bytes of a copy, M = N = K of a product, its dtype, and repetitions."""

    copy: int
    product: int
    dtype: torch.dtype
    times: int


SECTIONS = ("compute", "memory", "links", "engines", "launch", "cores", "host")
"""Of a machine file."""
GPU = SpeedSizes(8 << 20, 8192, torch.bfloat16, 20)
EMULATED = SpeedSizes(1 << 20, 192, torch.float32, 3)


def seconds(work: Callable[[], None], times: int) -> float:
    """The least time of `work`, from issue to end, over several runs."""
    best = float("inf")
    for _ in range(times):
        torch.accelerator.synchronize()
        begin = time.perf_counter()
        work()
        torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def speed(
    driver: Driver, peers: Peers, sizes: SpeedSizes
) -> tuple[list[Finding], dict[str, float]]:
    """Copies and products alone and together, then one operator against the ideal."""
    n, stream = sizes.product, torch.Stream(peers.device)
    x = torch.ones(n, n, dtype=sizes.dtype, device=peers.device)
    y = torch.empty_like(x)
    target = torch.empty(sizes.copy, dtype=torch.uint8, device=peers.device)
    many = 8

    def copies() -> None:
        for _ in range(many):
            driver.copy(target, peers.theirs[: sizes.copy], stream)

    def product() -> None:
        torch.mm(x, x, out=y)

    def both() -> None:
        copies()
        product()

    for work in (copies, product, both):
        work()
    copy, gemm, together = (seconds(work, sizes.times) for work in (copies, product, both))
    figures = {
        "copy, bytes per second": many * sizes.copy / copy,
        f"product of {n}, flops per second": 2.0 * n**3 / gemm,
        "copies alone, seconds": copy,
        "product alone, seconds": gemm,
        "both at once, seconds": together,
    }
    longer = together / max(copy, gemm)
    checks = [
        Finding(8, "copy from a peer", "ok", f"{many * sizes.copy / copy / 1e9:.1f} GB/s"),
        Finding(8, f"{n} x {n} x {n} product", "ok", f"{2.0 * n**3 / gemm / 1e12:.2f} TFLOP/s"),
        Finding(8, "both at once", "ok", f"{longer:.2f} x the longer of the two"),
    ]
    try:
        overlap = _overlap(peers.device, sizes, figures)
        checks.append(Finding(8, "overlap of all_gather_matmul", "ok", overlap))
    except Unsupported as error:
        checks.append(Finding(8, "overlap of all_gather_matmul", "unknown", "not run", str(error)))
    return checks, figures


def _overlap(device: torch.device, sizes: SpeedSizes, figures: dict[str, float]) -> str:
    """An operator against the sum of its parts and against the longer part."""
    world, n = dist.get_world_size(), sizes.product
    shard = torch.ones(n // world, n, dtype=sizes.dtype, device=device)
    w = torch.ones(n, n, dtype=sizes.dtype, device=device)

    def run(schedule: str) -> Callable[[], None]:
        def work() -> None:
            weft.all_gather_matmul(shard, w, schedule=schedule)

        return work

    taken = {}
    for schedule in ("serial", "adaptive"):
        run(schedule)()
        dist.barrier()
        taken[schedule] = seconds(run(schedule), sizes.times)
        figures[f"all_gather_matmul {schedule}, seconds"] = taken[schedule]
    return f"{taken['serial'] / taken['adaptive']:.2f} x serial"


def machine_file(title: str, device: str, figures: dict[str, float], world: int) -> str:
    """A machine file for `weft explore`: the nearest machine that weft knows, with the figures that
    were measured here in place of its own."""
    base = load(_nearest(title, device))
    copy = figures["copy, bytes per second"]
    rate = next(value for name, value in figures.items() if name.startswith("product of"))
    compute = replace(
        base.compute,
        rate={
            name: one * rate / base.compute.rate["bfloat16"]
            for name, one in base.compute.rate.items()
        },
    )
    peak = {name: max(one, compute.rate[name]) for name, one in base.compute.peak.items()}
    made: Machine = replace(
        base,
        name="here",
        title=f"{title}, as weft doctor --gpu found it",
        compute=replace(compute, peak=peak, measured=()),
        engines=replace(base.engines, bandwidth=copy),
        links=replace(
            base.links,
            world=max(world, 2),
            bandwidth=copy,
            peak_bandwidth=max(copy, base.links.peak_bandwidth),
            total_bandwidth=max(copy, base.links.total_bandwidth),
        ),
    )
    measured = "measured by weft doctor --gpu"
    sources = {
        **dict.fromkeys(SECTIONS, f"as {base.name}"),
        "compute.rate": f"{measured} in one dtype; others in {base.name}'s proportion",
        "compute.peak": f"as {base.name}, or the measured rate if that is higher",
        "links.bandwidth": measured,
        "links.world": "ranks of the run",
        "engines.bandwidth": measured,
    }
    heading = (
        f"{title}, begun from {base.name}: what was measured is marked, the rest as there.\n"
        "Use it by its path: weft explore --machine FILE"
    )
    return calibrated.to_toml(made, heading, sources)


def _nearest(title: str, device: str) -> str:
    """The machine whose name is in the title of a device."""
    plain = title.lower().replace(" ", "")
    found = [name for name in names() if name in plain]
    return max(found, key=len) if found else "mi300x" if device == "hip" else "h100"
