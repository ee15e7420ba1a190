"""Figures of a made-up host, as the probes of a calibration would find them."""

from __future__ import annotations

from weft.measure.calibration import QUICK
from weft.measure.describe import Figures
from weft.measure.probes import CallTimes, Paced


def figures(rate: float = 5e10, threads: int = 1) -> Figures:
    """A machine whose GEMMs are all equally fast."""
    return Figures(
        gemms={g: 2.0 * g.m * g.n * g.k / rate for g in QUICK.points},
        remote_copy=1e-4,
        local_copy=1.1e-4,
        strided_copy=3e-4,
        queued=1e-6,
        permute=5e-5,
        small_permute=2e-6,
        signal=1e-6,
        decision=3e-6,
        calls=CallTimes(1e-4, 5e-6, 2e-5),
        paced=Paced(2e-5, 4e-3),
        num_cores=2 * threads,
        threads=threads,
    )
