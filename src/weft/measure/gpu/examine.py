"""Runs all points on the ranks of a group, one device each, and puts their checks together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from weft import fabric
from weft.errors import Error, Unsupported
from weft.fabric.device.device_driver import driver_of
from weft.measure.gpu import device as point_1_to_3
from weft.measure.gpu import exactness, speed
from weft.measure.gpu.finding import Examination, Finding
from weft.measure.gpu.peers import meet, order, symmetric
from weft.measure.gpu.spinners import spinner_of, who_copies
from weft.measure.launch import Report, launch

ROUNDS = {"cuda": 1000, "loom": 12}
WORST = ("ok", "unknown", "not")


def examine(kind: str, report: Report | None = None, world: int | None = None) -> Examination:
    """Examines the devices of a kind: one rank on each, or as many ranks as are asked for."""
    if kind == "loom":
        from weft.loom.build import library, why_not

        if reason := why_not():
            raise Unsupported(reason)
        library(report or (lambda share, text: None))
        world = world or 2
    elif not torch.cuda.is_available():
        raise Unsupported(
            "there is no GPU here that torch can use; everything but the vendor's own behaviour "
            "can be tried with: weft doctor --gpu --device loom"
        )
    count = torch.cuda.device_count() if kind == "cuda" else 0
    world = world or max(2, min(count, 8))
    if kind == "cuda" and count < world:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    found: list[Examination] = launch(world, _on_rank, kind, report=report, pin=False)
    examination = found[0]
    shared = kind == "cuda" and count < world
    examination.checks += _not_checked(kind, shared)
    return examination


def _on_rank(report: Report, kind: str) -> Examination:
    rank, world = dist.get_rank(), dist.get_world_size()
    if kind == "loom":
        import weft.loom

        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        weft.loom.load()
    else:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device(kind, torch.accelerator.current_device_index())
    driver = driver_of(device)
    title = point_1_to_3.title_of(device)
    done = Examination(driver.name, title, world)
    sizes = speed.GPU if kind == "cuda" else speed.EMULATED

    def step(share: float, what: str, work: Callable[[], Iterable[Finding]], point: int) -> None:
        report(share, what)
        done.checks += _together(point, what, work)

    step(0.0, "versions", lambda: point_1_to_3.versions(driver, device), 1)
    step(0.02, "topology", lambda: point_1_to_3.topology(driver, device), 2)
    step(0.04, "environment", lambda: point_1_to_3.environment(driver), 3)
    report(0.05, "symmetric memory")
    peers = meet(device)
    step(0.1, "symmetric memory", lambda: [symmetric(peers)], 4)
    spin = lambda: who_copies(driver, spinner_of(driver, device), peers)  # noqa: E731
    step(0.15, "who copies", spin if rank == 0 else list, 5)
    step(0.3, "order", lambda: [order(driver, peers, ROUNDS[kind])], 6)
    if kind in fabric.devices():
        step(0.4, "exact results", lambda: exactness.exact(device), 7)
        step(0.7, "capture", lambda: [exactness.captured(device)], 7)
        step(0.75, "a late peer", lambda: [exactness.late(device)], 7)
    else:
        text = f"weft has no fabric for {kind} tensors yet"
        done.checks.append(Finding(7, "operators", "unknown", "not run", text))
    if kind == "cuda":
        step(0.8, "Triton kernels", lambda: exactness.kernels(device), 7)
    report(0.85, "speed")

    def timed() -> list[Finding]:
        checks, figures = speed.speed(driver, peers, sizes)
        done.figures = figures
        return checks

    step(0.85, "speed", timed, 8)
    if done.figures:
        done.machine = speed.machine_file(title, driver.name, done.figures, world)
    if kind in fabric.devices():  # last: the group that it uses is broken afterwards
        step(0.95, "a peer that never comes", lambda: [exactness.absent(device)], 7)
    done.checks.sort(key=lambda check: check.point)
    return done


def _together(point: int, what: str, work: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The checks of rank 0, each in the worst state of all ranks. What raises is a check too."""
    try:
        mine = list(work())
    except Unsupported as error:
        mine = [Finding(point, what, "unknown", "refused", str(error))]
    except Error as error:
        mine = [Finding(point, what, "not", type(error).__name__, str(error))]
    except Exception as error:  # a driver or a compiler may raise anything
        lines = str(error).strip().splitlines() or [""]
        mine = [Finding(point, what, "not", type(error).__name__, lines[0])]
    everyone: list[list[Finding]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    found = {check.what: check for check in everyone[0]}
    for checks in everyone[1:]:
        for check in checks:
            known = found.get(check.what)
            if known is None or WORST.index(check.state) > WORST.index(known.state):
                found[check.what] = check
    return list(found.values())


def _not_checked(kind: str, shared: bool) -> list[Finding]:
    checks = [
        Finding(9, "several machines", "unknown", "devices of one machine only"),
        Finding(9, "long runs", "unknown", "hours of calls, other work on the same devices"),
        Finding(9, "multicast", "unknown", "weft does not use it yet"),
    ]
    if kind == "loom":
        checks.append(Finding(9, "a GPU", "unknown", "loom proves orders, never speed"))
        checks.append(Finding(9, "Triton kernels", "unknown", "they run on GPUs only"))
    if shared:
        text = "ranks share a device: numbers and orders were checked, engines and links were not"
        checks.append(Finding(9, "two devices", "unknown", text))
    return checks
