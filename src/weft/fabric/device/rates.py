"""Measures how fast a device multiplies and copies, for plans that are decided ahead."""

from __future__ import annotations

import time

import torch

from weft.plan.planned import Rates

_SIDE = 768
_BYTES = 1 << 22
_ROUNDS = 3


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
    return Rates(_BYTES / copy, 2 * _SIDE**3 / multiply, 2 * _BYTES / copy, launch, launch)


def _best(work: object, device: torch.device) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        torch.accelerator.synchronize(device)
        begin = time.perf_counter()
        work()  # type: ignore[operator]
        torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best
