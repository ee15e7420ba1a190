"""The times of whole collectives in closed form, driven by compute units or by copy engines.

Sizes are totals: of the gathered result of an all-gather, of the input of a reduce-scatter or
all-to-all, of the vector of an all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from weft.errors import Unsupported
from weft.machine import Machine
from weft.machine.description import Protocol
from weft.plan.collective import UNROOTED, find_kind
from weft.plan.command_variants import COMMANDS
from weft.simulate.cost.memory import memory_bound

VARIANTS: dict[str, tuple[str, ...]] = {
    kind: COMMANDS[kind] for kind in UNROOTED if not find_kind(kind).sums
}
"""The command variants of copy engines, by kind of collective."""

Parts = tuple[tuple[str, float], ...]
"""The parts of a collective's time, with their seconds."""


def collective(
    machine: Machine,
    kind: str,
    total_bytes: float,
    world: int,
    *,
    driver: str = "cores",
    variant: str | None = None,
    prelaunch: bool = False,
    units: int | None = None,
) -> float:
    """The seconds of one collective over `world` devices of a node.

    `units`: a limit for the compute units of a core-driven one. `variant`: for `driver="dma"`; None
    is the fastest. Engines cannot add, so their reduce-scatter is an all-to-all and a kernel that
    adds, and their all-reduce is that and an all-gather.
    """
    asked = (machine, kind, total_bytes, world)
    found = parts(*asked, driver=driver, variant=variant, prelaunch=prelaunch, units=units)
    return _seconds(found)


def parts(
    machine: Machine,
    kind: str,
    total_bytes: float,
    world: int,
    *,
    driver: str = "cores",
    variant: str | None = None,
    prelaunch: bool = False,
    units: int | None = None,
) -> Parts:
    """The parts of the seconds of `collective`, by name, in their order."""
    _check(machine, kind, total_bytes, world)
    if driver not in ("cores", "dma"):
        raise Unsupported(f"A collective is driven by cores or dma, not {driver}.")
    if total_bytes == 0 or world == 1:
        return ()
    if driver == "cores":
        return _by_cores(machine, kind, total_bytes, world, units)
    if not find_kind(kind).sums:
        return _by_engines(machine, kind, total_bytes, world, variant, prelaunch)
    found = _by_engines(machine, "all_to_all", total_bytes, world, variant, prelaunch)
    summing = memory_bound(machine, total_bytes, total_bytes / world).seconds
    found = (*found, ("kernel that adds", summing))
    if find_kind(kind).phases == 2:
        found += _by_engines(machine, "all_gather", total_bytes, world, None, prelaunch)
    return found


def dma_variants(
    machine: Machine, kind: str, total_bytes: float, world: int
) -> dict[tuple[str, bool], float]:
    """The seconds of every engine variant, by (variant, prelaunched)."""
    _check(machine, kind, total_bytes, world)
    if find_kind(kind).sums:
        able = [name for name in UNROOTED if not find_kind(name).sums]
        raise Unsupported(f"Only {' and '.join(able)} have copy engine variants, not {kind}.")
    return {
        (variant, prelaunch): _seconds(_variant(machine, variant, total_bytes, world, prelaunch))
        for variant in COMMANDS[kind]
        for prelaunch in (False, True)
    }


def _check(machine: Machine, kind: str, total_bytes: float, world: int) -> None:
    if find_kind(kind).name not in UNROOTED:
        raise Unsupported(f"There is no closed form of {kind}; there is of {', '.join(UNROOTED)}.")
    if total_bytes < 0:
        raise Unsupported(f"A collective cannot move {total_bytes} bytes.")
    if not 1 <= world <= machine.links.world:
        raise Unsupported(f"{machine.name} has {machine.links.world} devices, not {world}.")


def _seconds(found: Parts) -> float:
    return sum(seconds for _, seconds in found)


def _by_cores(
    machine: Machine, kind: str, total_bytes: float, world: int, units: int | None
) -> Parts:
    """The time with the fastest protocol that the library has for the size."""
    cores, links = machine.cores, machine.links
    peers = world - 1
    # With fewer devices, some links of a mesh are unused. With fewer units, no link is full, and
    # peers take turns, each of which costs as much as a launch of the collective.
    reach, turns = links.out_of_device(world) / links.out_of_device(links.world), 1
    if units is not None:
        enough = _enough(machine, kind)
        reach *= min(1.0, units / enough)
        turns = -(-enough // units)
    two_phases = find_kind(kind).phases == 2
    fixed = cores.all_reduce_latency if two_phases else 1.0
    ways: list[Parts] = []
    for protocol in _protocols(machine, kind, total_bytes / world):
        local = cores.local_share if protocol.local_share is None else protocol.local_share
        sent = 2.0 * peers if two_phases else peers + local
        wire = total_bytes * sent / world / reach / protocol.bandwidth
        ways.append(
            (
                (f"start, {protocol.name} protocol", fixed * protocol.latency),
                ("start, for each peer", fixed * turns * peers * protocol.peer_latency),
                ("bytes on the links", wire),
            )
        )
    if kind == "all_reduce" and cores.in_switch is not None:
        summed = total_bytes / (cores.in_switch.bandwidth * reach)
        start = ("start, sums in the switch", cores.in_switch.latency)
        ways.append((start, ("bytes on the links", summed)))
    return min(ways, key=_seconds)


def bandwidth_by_cores(machine: Machine, kind: str, world: int, units: int | None = None) -> float:
    """The bytes per second that leave a device in a large core-driven collective."""
    cores, links, peers = machine.cores, machine.links, world - 1
    reach = links.out_of_device(world) / links.out_of_device(links.world)
    if units is not None:
        reach *= min(1.0, units / _enough(machine, kind))
    rates = []
    for protocol in _protocols(machine, kind, inf):
        local = cores.local_share if protocol.local_share is None else protocol.local_share
        rates.append(protocol.bandwidth * peers / (peers + local))
    return max(rates) * reach


def _enough(machine: Machine, kind: str) -> int:
    """The compute units with which a collective saturates its links."""
    cores = machine.cores
    return cores.all_to_all_units if kind == "all_to_all" else cores.all_gather_units


def _protocols(machine: Machine, kind: str, each: float) -> list[Protocol]:
    """The protocols that a library uses for a collective with this many bytes per rank."""
    for_it = [p for p in machine.cores.protocols if not p.collectives or kind in p.collectives]
    within = [p for p in for_it if each <= p.most_bytes]
    return within or for_it or list(machine.cores.protocols)


def _by_engines(
    machine: Machine,
    kind: str,
    total_bytes: float,
    world: int,
    variant: str | None,
    prelaunch: bool,
) -> Parts:
    if variant is None:
        found = (_variant(machine, name, total_bytes, world, prelaunch) for name in COMMANDS[kind])
        return min(found, key=_seconds)
    if variant not in COMMANDS[kind]:
        raise Unsupported(
            f"{kind} has no variant {variant!r} (it has {', '.join(COMMANDS[kind])})."
        )
    return _variant(machine, variant, total_bytes, world, prelaunch)


@dataclass(frozen=True)
class _EngineUse:
    """The use of the engines of one device by a variant."""

    engines: float
    packets: int  # of each engine
    rate_share: float  # relative to a plain copy, in each packet


def _work(machine: Machine, variant: str, world: int) -> _EngineUse:
    peers = world - 1
    if variant == "b2b":
        return _EngineUse(1, peers, 1.0)
    if variant == "bcst":
        return _EngineUse(-(-peers // 2), 1, machine.engines.broadcast_share)
    if variant == "swap":
        # Two devices share one swap, so each device commands half of its pairs.
        return _EngineUse(peers / 2, 1, machine.engines.swap_share)
    return _EngineUse(peers, 1, 1.0)


def _variant(
    machine: Machine, variant: str, total_bytes: float, world: int, prelaunch: bool
) -> Parts:
    if total_bytes == 0 or world == 1:
        return ()
    engines, links = machine.engines, machine.links
    work = _work(machine, variant, world)
    rate = min(engines.bandwidth, links.to_one_peer())
    together = min(work.engines, engines.count) * rate
    # Engines share the bandwidth out of the device. More copies than engines take turns.
    rate *= min(1.0, links.out_of_device(world) / together)
    turns = max(1.0, work.engines / engines.count)
    piece = total_bytes / world
    moving = work.packets * piece / (rate * work.rate_share) * turns
    # One host thread commands the engines one after another, and then waits for each in turn.
    # Prelaunched engines already wait, so one write starts them all.
    if prelaunch:
        commanding = engines.release + work.engines * engines.collective_completion
    else:
        commanding = work.engines * (engines.command + engines.schedule + engines.completion)
    packets = engines.packet + (work.packets - 1) * engines.next_packet
    return (
        ("start and end", engines.collective),
        ("commands and completions", commanding),
        (f"packets of {variant}", packets),
        ("bytes on the links", moving),
    )
