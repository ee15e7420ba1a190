"""The time of one GEMM, C[m, n] = A[m, k] B[k, n], on some of a machine's compute units.

The model assumes a library that chooses the tile and K-split for a shape that are fastest on the
whole machine. The library does not know that units were taken away, so the same choice is then
timed on the units that are left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import NamedTuple

from weft.dtype import rated
from weft.errors import Unsupported, nearest
from weft.machine import DTYPES, Machine
from weft.simulate.cost.memory import bandwidth_of, checked_units
from weft.simulate.cost.rates import rate_of

MOST_SPLITS = 64

TIE = 0.02
"""A smaller tile must be faster by more than this share. Of equally fast tiles, libraries take the
largest, which has the least cache traffic."""

SPREAD = 0.5
"""The share of a last wave's time that is saved because tiles do not end all at once: half of the
way from a whole wave to an even share of its tiles for every unit."""


@dataclass(frozen=True)
class GemmCost:
    """`seconds` = `launch` + max(`compute_seconds`, `memory_seconds`).

    `launch`: the fixed part on the device (kernel start and end, and the second pass of a K-split),
    without the host's launch cost. The body takes `compute_seconds` on `busy_units`, and at the
    same time moves `bytes` through memory.
    """

    seconds: float
    launch: float
    compute_seconds: float
    memory_seconds: float
    bytes: float
    tile: tuple[int, int]
    split_k: int
    waves: int
    busy_units: int


NOTHING = GemmCost(0.0, 0.0, 0.0, 0.0, 0.0, (0, 0), 1, 0, 0)


def gemm(
    machine: Machine,
    m: int,
    n: int,
    k: int,
    dtype: str = "bfloat16",
    *,
    units: int | None = None,
    bandwidth: float = 1.0,
    batch: int = 1,
    part_of: float = 0.0,
) -> GemmCost:
    """The cost of `batch` equal GEMMs in one kernel. `bandwidth`: a share of memory bandwidth.

    `part_of`: the seconds of the computation of which this GEMM is a piece, without pauses. The
    clock settles over all of it, so pieces that are timed as if each ran alone would be too fast.
    """
    return _gemm(machine, m, n, k, rated(dtype), units, bandwidth, batch, part_of)


@lru_cache(maxsize=1 << 16)
def _gemm(
    machine: Machine,
    m: int,
    n: int,
    k: int,
    dtype: str,
    units: int | None,
    bandwidth: float,
    batch: int,
    part_of: float,
) -> GemmCost:
    if min(m, n, k, batch) < 0:
        raise Unsupported(f"A GEMM cannot have the sizes {m} x {n} x {k}, batch {batch}.")
    if dtype not in machine.compute.rate:
        known = machine.compute.rate
        raise Unsupported(
            f"{machine.name} has no GEMM rate for {dtype}{nearest(dtype, known)};"
            f" it has {', '.join(known)}."
        )
    if not part_of >= 0.0:
        raise Unsupported(f"A GEMM cannot be part of {part_of} seconds of work.")
    if not 0.0 < bandwidth <= 1.0:
        raise Unsupported(f"The share of memory bandwidth must be in (0, 1], not {bandwidth}.")
    units = checked_units(machine, units)
    if min(m, n, k, batch) == 0:
        return NOTHING
    share = bandwidth_of(machine, units) * bandwidth
    if machine.compute.tiling is None:
        return _by_rate(machine, m, n, k, dtype, units, share, batch)
    shape = (m, n, k, batch)
    kernels = _kernels(machine, dtype, batch > 1)
    index, split = _choice(machine, kernels, shape, machine.compute.units, bandwidth_of(machine))
    kernel = kernels[index]
    blocks = kernel.blocks(m, n, batch) * split
    working, waves = kernel.working(blocks, -(-kernel.steps(k) // split), units, part_of)
    traffic = kernel.traffic(shape)
    moving = machine.memory.latency + traffic / share
    fixed = machine.launch.kernel
    if split > 1:
        fixed += kernel.second_pass(m * n * batch * split, share)
    tile = (kernel.rows, kernel.columns)
    return GemmCost(
        fixed + max(working, moving),
        fixed,
        working,
        moving,
        traffic,
        tile,
        split,
        waves,
        min(units, blocks),
    )


def _by_rate(
    machine: Machine, m: int, n: int, k: int, dtype: str, units: int, share: float, batch: int
) -> GemmCost:
    """The cost on a machine without tiles: work divided by the measured rate, over the units."""
    whole = batch * 2.0 * m * n * k / rate_of(machine, m, n, k, dtype)
    compute = whole * machine.compute.units / units
    element, result = DTYPES[dtype]
    traffic = batch * float((m + n) * k * element + m * n * result)
    moving = machine.memory.latency + traffic / share
    fixed = machine.launch.kernel
    return GemmCost(
        fixed + max(compute, moving), fixed, compute, moving, traffic, (m, n), 1, 1, units
    )


class _Kernel(NamedTuple):
    """One tile of a machine for one dtype, with everything that does not depend on the shape."""

    rows: int
    columns: int
    resident: int
    step: int  # elements of K
    step_seconds: float  # one step of one tile: its arithmetic, or its reads from the caches
    step_latency: float
    tile_seconds: float
    store_seconds: float
    settled: float
    settles_after: float
    units: int  # of the whole machine
    cache: float
    element: int
    result: int
    split_seconds: float
    split_bytes: float  # the traffic of one element of one partial result

    def blocks(self, m: int, n: int, batch: int) -> int:
        return batch * -(-m // self.rows) * -(-n // self.columns)

    def steps(self, k: int) -> int:
        return -(-k // self.step)

    def working(
        self, blocks: int, steps: int, units: int, part_of: float = 0.0
    ) -> tuple[float, int]:
        """The seconds and waves of this many tiles, of this many steps each, on this many units.

        Every unit holds `resident` tiles at once. They share its arithmetic and hide each other's
        latency. The last wave takes as long as its fullest unit, minus the share `SPREAD`.
        """
        room = units * self.resident
        waves, rest = divmod(blocks, room)
        seconds = whole = 0.0
        if waves:
            whole = self._wave(self.resident, steps)
            seconds = waves * whole
        if rest:
            last = self._wave(-(-rest // units), steps)
            if waves:
                last -= SPREAD * max(0.0, last - whole * rest / room)
            seconds += last
            waves += 1
        # Under load the clock falls from boost to the clock that the power limit allows.
        load = max(seconds, part_of) / self.settles_after
        clock = self.settled + (1.0 - self.settled) / (1.0 + load)
        return seconds / clock, waves

    def _wave(self, held: int, steps: int) -> float:
        """The seconds of this many tiles on each unit."""
        inner = max(held * self.step_seconds, self.step_latency)
        return self.tile_seconds + held * self.store_seconds + steps * inner

    def splits(self, blocks: int, steps: int, units: int) -> Iterable[int]:
        """The K-splits to try. Few tiles are split until there is one for each unit, as many as the
        units hold, or a few rounds of that. Many tiles are split to fill the last round."""
        most, room = min(steps, MOST_SPLITS), units * self.resident
        if blocks > room:
            return range(2, most + 1)
        wanted = (min(most, tiles // blocks) for tiles in (units, room, 2 * room, 4 * room))
        return (split for split in dict.fromkeys(wanted) if split > 1)

    def second_pass(self, elements: int, bandwidth: float) -> float:
        """The seconds of adding partial results of this many elements after a K-split."""
        return self.split_seconds + elements * self.split_bytes / bandwidth

    def traffic(self, shape: tuple[int, int, int, int]) -> float:
        """The bytes through memory: C once, A and B once, or again if the cache cannot hold them.

        A wave is a rectangle of tiles, as square in elements as possible. The order goes down the
        rows with a panel of B in the cache, and reads A again for every further panel unless all of
        A fits. It goes along the columns, with A and B exchanged, if that moves less.
        """
        m, n, k, batch = shape
        line = k * self.element
        bytes_a, bytes_b, cache = float(m * line), float(n * line), self.cache
        once = bytes_a + bytes_b + m * n * self.result
        if bytes_a <= cache or bytes_b <= cache:
            return batch * once
        rows, columns = -(-m // self.rows), -(-n // self.columns)
        wave = min(rows * columns, self.units * self.resident)
        tall = max(1.0, min(rows, sqrt(wave * self.columns / self.rows)))
        wide = max(1.0, min(columns, wave / tall))
        tall = max(1.0, min(rows, wave / wide))
        more_a = bytes_a * (columns / wide - 1.0)
        more_b = bytes_b * (rows / tall - 1.0)
        down = more_a * _missed(bytes_a, cache)
        down += more_b * _missed(min(bytes_b, wide * self.columns * line), cache)
        along = more_b * _missed(bytes_b, cache)
        along += more_a * _missed(min(bytes_a, tall * self.rows * line), cache)
        return batch * (once + min(down, along))


def _missed(size: float, cache: float) -> float:
    """The share of this many bytes that the cache has lost when they are read again."""
    return 0.0 if size <= cache else 1.0 - cache / size


@lru_cache
def _kernels(machine: Machine, dtype: str, batched: bool) -> tuple[_Kernel, ...]:
    compute, memory, tiling = machine.compute, machine.memory, machine.compute.tiling
    assert tiling is not None, "machines without tiles are timed by their measured rates"
    element, result = DTYPES[dtype]
    rate = compute.rate[dtype] * (tiling.batched_share if batched else 1.0) / compute.units
    feed = memory.cache_bandwidth / compute.units
    return tuple(
        _Kernel(
            rows=tile.rows,
            columns=tile.columns,
            resident=tile.resident,
            step=tiling.step,
            step_seconds=tiling.step
            * max(
                2.0 * tile.rows * tile.columns / rate, (tile.rows + tile.columns) * element / feed
            ),
            step_latency=tiling.step_latency,
            tile_seconds=tiling.tile_seconds,
            store_seconds=tile.rows * tile.columns / tiling.store_rate,
            settled=compute.sustained_share,
            settles_after=compute.sustained_after,
            units=compute.units,
            cache=memory.cache_bytes,
            element=element,
            result=result,
            split_seconds=tiling.split_seconds,
            # Partial sums are written and read back as float32; many of them stay in the cache.
            split_bytes=8.0 * tiling.split_traffic,
        )
        for tile in tiling.tiles
    )


def _choice(
    machine: Machine,
    kernels: tuple[_Kernel, ...],
    shape: tuple[int, int, int, int],
    units: int,
    bandwidth: float,
) -> tuple[int, int]:
    """The index of the tile, and the K-split, that are fastest on the whole machine."""
    m, n, k, batch = shape
    latency = machine.memory.latency
    best, found = float("inf"), (0, 1)
    for index in reversed(range(len(kernels))):  # from the largest
        kernel, wanted = kernels[index], best * (1.0 - TIE)
        blocks, steps = kernel.blocks(m, n, batch), kernel.steps(k)
        even = blocks * steps * kernel.step_seconds / units
        if even >= wanted:
            continue  # its steps alone, evenly distributed, take longer
        moving = latency + kernel.traffic(shape) / bandwidth
        if moving >= wanted:
            continue
        working = kernel.working(blocks, steps, units)[0]
        seconds, taken = max(working, moving), 1
        # A split is worth its second pass only if it fills units that would be idle.
        if steps > 1 and working > moving + kernel.split_seconds:
            for split in kernel.splits(blocks, steps, units):
                again = kernel.second_pass(m * n * batch * split, bandwidth)
                if again + max(moving, even) >= seconds:
                    break
                working = kernel.working(blocks * split, -(-steps // split), units)[0]
                if again + max(working, moving) < seconds:
                    seconds, taken = again + max(working, moving), split
        if seconds < wanted:
            best, found = seconds, (index, taken)
    return found
