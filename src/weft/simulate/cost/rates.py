"""The GEMM rate of a machine that is described by measurements, not by tiles, e.g. a CPU."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import product
from math import exp, log, log2

from weft.machine import Machine, Saturation

TRUST_DISTANCE = 3.0
"""Farther than this many doublings from all measured points, the curve is used alone."""

Axis = tuple[float, ...]
Place = tuple[float, float, float]


def rate_of(machine: Machine, m: int, n: int, k: int, dtype: str) -> float:
    """Flops per second: a curve that saturates in m, n and k, corrected by measurements.

    Between measured points the correction is interpolated, in doublings of the sizes. Outside it is
    that of the nearest point, and fades with the distance.
    """
    curve = machine.compute.saturation
    assert curve is not None, "a description has tiles or saturation; the loader sees to it"
    smooth = machine.compute.rate[dtype] * _reached(curve, m, n, k)
    axes, found = corrections(machine, dtype)
    if not found:
        return smooth
    around = [_around(axis, log2(size)) for axis, size in zip(axes, (m, n, k), strict=True)]
    pull = weights = 0.0
    for corner in product(*(sides for sides, _ in around)):
        known = found.get((corner[0][0], corner[1][0], corner[2][0]))
        if known is not None:
            weight = corner[0][1] * corner[1][1] * corner[2][1]
            pull += weight * known
            weights += weight
    if weights == 0.0:  # the grid has a hole here: none of the surrounding points was measured
        return smooth
    away = sum(beyond**2 for _, beyond in around)
    return smooth * exp(pull / weights / (1.0 + (away / TRUST_DISTANCE**2) ** 2))


@lru_cache(maxsize=64)
def corrections(machine: Machine, dtype: str) -> tuple[tuple[Axis, ...], dict[Place, float]]:
    """The measured sizes of each axis in doublings, and for every point the logarithm of the factor
    on the curve."""
    curve, peak = machine.compute.saturation, machine.compute.rate[dtype]
    assert curve is not None
    found = {
        (log2(p.m), log2(p.n), log2(p.k)): log(p.rate / (peak * _reached(curve, p.m, p.n, p.k)))
        for p in machine.compute.measured
        if p.dtype == dtype
    }
    return tuple(tuple(sorted({place[i] for place in found})) for i in range(3)), found


def _around(axis: Axis, at: float) -> tuple[tuple[tuple[float, float], ...], float]:
    """The measured sizes on both sides with their weights, and the distance outside of all."""
    if at <= axis[0]:
        return ((axis[0], 1.0),), axis[0] - at
    if at >= axis[-1]:
        return ((axis[-1], 1.0),), at - axis[-1]
    above = bisect_right(axis, at)
    low, high = axis[above - 1], axis[above]
    share = (at - low) / (high - low)
    return ((low, 1.0 - share), (high, share)) if share > 0.0 else ((low, 1.0),), 0.0


def _reached(curve: Saturation, m: int, n: int, k: int) -> float:
    return (m / (m + curve.m)) * (n / (n + curve.n)) * (k / (k + curve.k))
