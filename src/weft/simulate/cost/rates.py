"""GEMM rate of a machine that is described by measurements instead of tiles, such as a host CPU."""

from __future__ import annotations

from math import exp, log, log2

from weft.machine import Machine, Saturation

# Beyond about one doubling of a size a measured point says less than the smooth curve does.
TRUST_DISTANCE = 1.0


def rate_of(machine: Machine, m: int, n: int, k: int, dtype: str) -> float:
    """Flops per second: a curve that saturates in m, n and k, corrected by the points nearby.

    Each measured point pulls the curve towards what it found there, the more the nearer it is in
    doublings of the sizes; far from all points the curve stands alone.
    """
    curve = machine.compute.saturation
    assert curve is not None, "a description has tiles or saturation; the loader sees to it"
    peak = machine.compute.rate[dtype]
    smooth = peak * _reached(curve, m, n, k)
    pull, weights = 0.0, 1.0 / TRUST_DISTANCE**2
    for point in machine.compute.measured:
        if point.dtype != dtype:
            continue
        found = point.rate / (peak * _reached(curve, point.m, point.n, point.k))
        away = log2(m / point.m) ** 2 + log2(n / point.n) ** 2 + log2(k / point.k) ** 2
        weight = 1.0 / (away**2 + 1e-3)
        pull += weight * log(found)
        weights += weight
    return smooth * exp(pull / weights)


def _reached(curve: Saturation, m: int, n: int, k: int) -> float:
    return (m / (m + curve.m)) * (n / (n + curve.n)) * (k / (k + curve.k))
