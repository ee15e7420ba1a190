"""The numbers of a machine for the rule, computed once for a world and a dtype."""

from __future__ import annotations

from functools import lru_cache
from math import inf

from weft.dtype import ITEM_BYTES, accumulator, rated
from weft.errors import Unsupported, nearest
from weft.machine import DTYPES, HostCores, Machine
from weft.select import _rule
from weft.simulate.contention import contention
from weft.simulate.cost import bandwidth_of
from weft.simulate.cost.gemm import MOST_SPLITS, SPREAD, TIE
from weft.simulate.cost.rates import TRUST_DISTANCE, corrections

_DRIVERS = ("dma", "cores")
MOST_BUSY = 0.95
"""The largest share of a core that copies take: compute always gets some time."""


@lru_cache(maxsize=256)
def numbers(
    machine: Machine, world: int, dtype: str, result: str | None = None, sends: bool = False
) -> _rule.Machine:
    """The numbers of a machine for the rule. result: the dtype of the result, if the operation
    names one. sends: results are sent, not operands."""
    links, launch, memory = machine.links, machine.launch, machine.memory
    peers = max(1, world - 1)
    element, stored = _bytes(dtype, result)
    left = _units_left(machine, peers)
    one_peer = links.to_one_peer()
    if machine.host is None:
        by_engines, by_cores = _by_engines(machine, world), _by_cores(machine, world, left)
    else:
        by_engines, by_cores = (_on_host(machine, machine.host, world, e) for e in _DRIVERS)
        if not _linked(machine):
            one_peer = inf  # the memory of a peer is as fast as a rank's own
    return _rule.Machine(
        gemms=gemms(machine, dtype, _share_of_core(machine, world), result),
        dma=by_engines,
        cores=by_cores,
        rate=machine.compute.rate[rated(dtype)],
        kernel=launch.kernel,
        gap=launch.gap,
        latency=memory.latency,
        bandwidth=bandwidth_of(machine),
        decision=launch.decision,
        # On a host, tasks without waits are merged when the plan is prepared, not in a call.
        decision_in_place=launch.decision if machine.host is None else 0.0,
        # A host's own description has no launches: its calls are what they are.
        host=launch.host if machine.host is None else 0.0,
        reach=links.latency,
        one_peer=one_peer,
        # All ranks that read the same peer share its outgoing bandwidth.
        from_same=one_peer / (peers if links.topology == "switch" else 1),
        in_place=contention(machine, "direct", world).share,
        full=links.out_of_device(max(2, world)),
        # The bytes of an element that is moved.
        element=stored if sends and result is not None else element,
        result=stored,
        sum_bytes=ITEM_BYTES[accumulator(result or dtype)],
        left=left,
    )


def _bytes(dtype: str, result: str | None) -> tuple[int, int]:
    """Bytes of an element of the operands, and of the result."""
    element, usual = DTYPES[dtype]
    return element, usual if result is None else ITEM_BYTES[result]


def _by_engines(machine: Machine, world: int) -> _rule.Moving:
    engines, peers = machine.engines, max(1, world - 1)
    alone = min(engines.bandwidth, machine.links.to_one_peer())
    lanes = -(-world // engines.count)
    rate = min(alone / lanes, _each_of_all(machine, world))
    drawn = 2.0 * peers * rate * engines.memory_bytes_per_byte
    return _rule.Moving(
        first=engines.release + engines.packet,
        following=engines.next_packet,
        completion=engines.completion,
        rate=rate,
        rate_alone=alone,
        rate_own=engines.local_bandwidth,
        row=engines.row,
        bandwidth=machine.memory.bandwidth,
        drawn=drawn,
        share=contention(machine, "dma", world).share,
    )


def _by_cores(machine: Machine, world: int, left: int) -> _rule.Moving:
    cores, links, launch = machine.cores, machine.links, machine.launch
    peers = max(1, world - 1)
    inside = bandwidth_of(machine, min(cores.copy_units, machine.compute.units)) / 2.0
    driven = max(protocol.bandwidth for protocol in cores.protocols)
    driven *= links.out_of_device(max(2, world)) / links.out_of_device(max(2, links.world))
    alone = min(links.to_one_peer(), inside, driven)
    rate = min(alone, _each_of_all(machine, world), driven / peers)
    drawn = 2.0 * peers * rate * cores.memory_bytes_per_byte
    return _rule.Moving(
        first=launch.kernel + links.latency,
        following=launch.kernel + links.latency,
        completion=launch.signal + launch.poll,
        rate=rate,
        rate_alone=alone,
        rate_own=inside,
        row=0.0,
        bandwidth=bandwidth_of(machine, left),
        drawn=drawn,
        share=contention(machine, "cores", world).share,
    )


def _on_host(machine: Machine, host: HostCores, world: int, driver: str) -> _rule.Moving:
    """On a host a copy runs on a thread of the rank, and takes time of its core."""
    engines, links, peers = machine.engines, machine.links, max(1, world - 1)
    copying = engines.bandwidth * _share_of_core(machine, world)
    alone, rate = copying, copying / peers
    waits = 0.0
    if _linked(machine):
        alone, rate = min(alone, links.to_one_peer()), min(rate, _each_of_all(machine, world))
        waits = links.latency
        if driver == "dma":
            waits += host.nap + engines.release  # the engine sleeps, and must wake up
    slowdown, late, each = 1.0, 0.0, 0.0
    if host.cores < (host.threads + 1) * world:
        # The thread of a copy takes a core from compute, and gives it back.
        each = engines.release + engines.completion
        if driver == "cores" and _linked(machine):
            slowdown = 1.0 + peers / host.threads  # each copy spins for as long as its link takes
            late = host.slice / 2.0  # and sees its end only when it has a core
        else:
            naps = peers * host.nap / host.turn if _linked(machine) else 0.0
            busy = (peers * rate / copying + naps) / host.threads
            slowdown = 1.0 / (1.0 - min(MOST_BUSY, busy))
    own = peers / copying + 1.0 / engines.local_bandwidth  # one after the other, on one core
    return _rule.Moving(
        first=engines.release + engines.packet,
        following=engines.next_packet + each,
        completion=engines.completion + waits,
        rate=rate,
        rate_alone=alone,
        rate_own=1.0 / own,
        row=engines.row,
        bandwidth=bandwidth_of(machine),
        drawn=0.0,
        share=0.0,
        slowdown=slowdown,
        late=late,
        each=each,
    )


def _share_of_core(machine: Machine, world: int) -> float:
    """The share of a core that a compute thread has: below 1 if a host has fewer cores than
    threads."""
    host = machine.host
    return 1.0 if host is None else min(1.0, host.cores / (world * host.threads))


def _linked(machine: Machine) -> bool:
    """Whether links are slower than a copying thread; otherwise they are never the limit."""
    return machine.links.to_one_peer() < machine.engines.bandwidth


def _units_left(machine: Machine, peers: int) -> int:
    held = min(peers * machine.cores.copy_units, machine.cores.all_gather_units)
    return max(1, machine.compute.units - held)


def _each_of_all(machine: Machine, world: int) -> float:
    """Bytes per second from each peer while all peers are read at once."""
    links, peers = machine.links, max(1, world - 1)
    if links.topology == "ring":
        # On the shorter path, a hop carries the traffic of up to half a ring.
        half = max(1, world // 2)
        return min(links.bandwidth / (half * (half + 1) / 2), links.total_bandwidth / peers)
    return min(links.to_one_peer(), links.out_of_device(max(2, world)) / peers)


@lru_cache(maxsize=64)
def gemms(
    machine: Machine, dtype: str, share: float = 1.0, result: str | None = None
) -> _rule.Gemms:
    """The GEMM times of a machine in a dtype; on a host, with that share of a core. result: the
    dtype of the result, if it is not the usual one."""
    element, stored = _bytes(dtype, result)
    dtype = rated(dtype)
    compute, memory, tiling = machine.compute, machine.memory, machine.compute.tiling
    if dtype not in compute.rate:
        raise Unsupported(
            f"{machine.name} has no GEMM rate for {dtype}{nearest(dtype, compute.rate)};"
            f" it has {', '.join(compute.rate)}."
        )
    if tiling is None:
        half = compute.saturation
        assert half is not None, "the loader checks that a description has tiles or saturation"
        if not machine.limited_by_memory:
            element = stored = 0  # the measured rates include memory
        axes, found = corrections(machine, dtype)
        return _rule.Rated(
            compute.rate[dtype] * share,
            (half.m, half.n, half.k),
            (TRUST_DISTANCE, element, stored),
            (machine.launch.kernel / share, compute.units),
            axes or [[], [], []],
            [(*place, correction) for place, correction in found.items()],
        )
    rate, feed = compute.rate[dtype] / compute.units, memory.cache_bandwidth / compute.units
    tiles = []
    for tile in tiling.tiles:
        arithmetic = 2.0 * tile.rows * tile.columns / rate
        feeding = (tile.rows + tile.columns) * element / feed
        step = tiling.step * max(arithmetic, feeding)
        store = tile.rows * tile.columns / tiling.store_rate
        tiles.append((tile.rows, tile.columns, tile.resident, step, store))
    return _rule.Tiled(
        tiles,
        (tiling.step, compute.units, MOST_SPLITS),
        [
            tiling.step_latency,
            tiling.tile_seconds,
            compute.sustained_share,
            compute.sustained_after,
            memory.cache_bytes,
            element,
            stored,
            tiling.split_seconds,
            8.0 * tiling.split_traffic,
            machine.launch.kernel,
            memory.latency,
            bandwidth_of(machine),
            SPREAD,
            TIE,
        ],
    )
