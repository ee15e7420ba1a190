"""Measures how fast a device multiplies and copies, for plans that are decided ahead."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from weft.plan.planned import GPU_TILE, Rates

_SIDE = 768
_BYTES = 1 << 26
"""More than caches hold."""
_ROUNDS = 3
_CPU_TILE = 32
"""The rows and columns below which a product on a CPU, which an emulated device is, gets no
cheaper."""


@cache
def measured(device: torch.device) -> Rates:
    """The rates of a device with nothing else to do. The link is taken to be as fast as a copy on
    the device: only its ratio to the GEMM matters, and `Fabric.set_link` replaces it."""
    a = torch.ones(_SIDE, _SIDE, device=device)
    c = torch.empty_like(a)
    source = torch.ones(_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    launch = _best(lambda: torch.mm(a[:1, :1], a[:1, :1], out=c[:1, :1]), device)
    multiply = _best(lambda: torch.mm(a, a, out=c), device) - launch
    copy = _best(lambda: target.copy_(source), device) - launch
    copy, multiply = max(copy, 1e-9), max(multiply, 1e-9)
    rates = Rates(_BYTES / copy, 2 * _SIDE**3 / multiply, 2 * _BYTES / copy, launch, launch)
    units = _units(device)
    if units is None:
        return rates._replace(tile=_CPU_TILE, loads_ahead=False)
    return rates._replace(units=units, tile=GPU_TILE)


def _units(device: torch.device) -> int | None:
    """How many compute units a GPU has; None for an emulated device."""
    module = torch.get_device_module(device)
    if not hasattr(module, "get_device_properties"):
        return None
    return getattr(module.get_device_properties(device), "multi_processor_count", None)


def _best(work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        torch.accelerator.synchronize(device)
        begin = time.perf_counter()
        work()
        torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best
