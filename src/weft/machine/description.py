"""The description of a machine for the simulator: frozen numbers in SI units (seconds, bytes, flops
per second).

A description states properties of the hardware, never what a schedule should do. The same types
describe a GPU node (compute units that work on tiles) and a host (threads whose GEMM rate was
measured), so fields that only one kind has are optional.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Literal, NamedTuple

from weft import dtype as dtypes
from weft.dtype import ITEM_BYTES

DTYPES = {
    dtype.name: (dtype.bytes, ITEM_BYTES[dtype.result])
    for dtype in dtypes.DTYPES.values()
    if dtype.rated is not None
}
"""(bytes of an operand element, bytes of a result element) of what can be multiplied, by name."""


Collective = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]


class Bounds(NamedTuple):
    """The bounds that the loader checks. Numbers without bounds may be zero but not negative."""

    above: float = 0.0
    most: float = inf


Positive = Annotated[float, Bounds()]
Count = Annotated[int, Bounds()]
Share = Annotated[float, Bounds(most=1.0)]


@dataclass(frozen=True)
class Tile:
    """A tile of the output, which one compute unit computes at a time."""

    rows: Count
    columns: Count
    resident: Count  # the number of tiles that one compute unit holds at once


@dataclass(frozen=True)
class Tiling:
    """How a compute unit processes a tile."""

    tiles: tuple[Tile, ...]
    step: Count  # elements of K in one step of the inner loop
    step_latency: Positive  # the least time of a step, however small the tile
    tile_seconds: float  # filling the pipeline before the first step
    store_rate: Positive  # output elements per second that one unit writes at the end
    split_seconds: float  # the second pass over the partial results of split K
    split_traffic: float  # share of the partial results' traffic that reaches memory
    batched_share: Share  # rate of batched GEMM kernels against plain ones


@dataclass(frozen=True)
class Saturation:
    """The sizes at which a GEMM reaches half of its rate, for machines without tiles."""

    m: float
    n: float
    k: float


@dataclass(frozen=True)
class Measured:
    """One measured GEMM rate, in flops per second, which corrects the saturation curve near it."""

    dtype: str
    m: Count
    n: Count
    k: Count
    rate: Positive


@dataclass(frozen=True)
class Compute:
    """Compute units and the rates of GEMMs. Either `tiling` or `saturation` is given."""

    units: Count  # compute units of a device: SMs, CUs
    clock: Positive  # boost clock in Hz
    loaded_clock: Positive  # clock under a long matrix load
    peak: dict[str, Positive]  # data sheet, dense
    rate: dict[str, Positive]  # the rate that the inner loops of GEMM kernels reach
    sustained_share: Share  # share of `rate` that is left under sustained load
    sustained_after: Positive  # seconds of load after which half of the drop has happened
    tiling: Tiling | None = None
    saturation: Saturation | None = None
    measured: tuple[Measured, ...] = ()


@dataclass(frozen=True)
class DeviceMemory:
    """Device memory and the last-level cache in front of it."""

    capacity: Positive  # bytes
    peak_bandwidth: Positive  # data sheet
    bandwidth: Positive  # the bandwidth that streaming kernels reach on all units
    latency: float  # until the first bytes of a kernel arrive
    unit_bandwidth: Positive  # the bandwidth of one compute unit
    cache_bytes: Positive  # of the last-level cache, as far as GEMM operands have it
    cache_bandwidth: Positive  # all units together, from the caches into tiles
    crowding: float  # share of bandwidth gained when a few units are taken away
    crowding_units: Count  # the number of units to take away for the whole gain


@dataclass(frozen=True)
class Links:
    """Links between the devices of one node."""

    topology: Literal["mesh", "switch", "ring"]  # every pair, all through a switch, or neighbours
    world: Count  # devices in the node
    peak_bandwidth: Positive  # one link, one direction, data sheet
    bandwidth: Positive  # one link, one direction, as measured
    total_bandwidth: Positive  # out of a device over all its links, as measured
    latency: float  # one small remote write or read
    interference: float = 0.0  # kernels and full links slow each other by this share

    def to_one_peer(self) -> float:
        """The bandwidth from a device to one other: one link of a mesh, or all of a switch."""
        return self.total_bandwidth if self.topology == "switch" else self.bandwidth

    def out_of_device(self, world: int) -> float:
        """The bandwidth out of a device that sends to all `world - 1` others at once."""
        if self.topology == "switch":
            return self.total_bandwidth
        neighbours = world - 1 if self.topology == "mesh" else min(2, world - 1)
        return min(self.total_bandwidth, neighbours * self.bandwidth)


@dataclass(frozen=True)
class CopyEngines:
    """Copy engines (SDMA, CE, or copy threads) and the costs of their commands."""

    count: Count  # engines of a device that copy to peers at the same time
    bandwidth: Positive  # one engine over a link
    local_bandwidth: Positive  # one engine inside the device's own memory
    command: float  # host: build a command and write the doorbell, per engine
    schedule: float  # engine: see the doorbell and fetch the command
    packet: float  # engine: start of a copy packet until its bytes flow
    next_packet: float  # engine: a further packet queued right behind another
    row: float  # engine: each further row of a strided copy
    release: float  # prelaunched: the write that releases a polling engine, until it runs
    completion: float  # signal that a copy is done, until the waiter sees it
    collective: float  # starting and ending a collective, beyond its copies
    collective_completion: float  # per engine of a prelaunched collective: waiting for its signal
    broadcast_share: Share  # rate to each destination of a two-destination copy
    swap_share: Share  # rate of each direction of an in-place exchange
    memory_bytes_per_byte: Positive  # memory traffic at each end for a byte moved


@dataclass(frozen=True)
class Launch:
    """The costs of starting work and of seeing that it has ended."""

    host: float  # host call to start a kernel, until the device sees it
    kernel: float  # device: first and last instructions of any kernel; part of every task
    gap: float  # device: between two kernels that depend on each other
    signal: float  # write a counter in a peer's memory
    poll: float  # see that a counter has changed
    decision: float  # adaptive: read counters and choose the next GEMM
    captured_gap: float | None = None  # `gap` between kernels of a captured graph; None: as `gap`


@dataclass(frozen=True)
class Protocol:
    """A protocol of core-driven collectives: low latency, or high bandwidth."""

    name: str
    latency: Positive  # from the call until bytes flow, and at the end
    peer_latency: float  # in addition, for every peer
    bandwidth: Positive  # out of a device, all links
    collectives: tuple[Collective, ...] = ()  # which the library uses it for; none named: for all
    most_bytes: Positive = inf  # of a rank; beyond, the library takes another, quicker or not
    local_share: float | None = None  # where it is not `cores.local_share`


@dataclass(frozen=True)
class InSwitch:
    """An all-reduce whose sums the switch computes. Its time does not depend on the world."""

    latency: Positive  # from the call to the end, but for the bytes
    bandwidth: Positive  # bytes of the result per second


@dataclass(frozen=True)
class Cores:
    """Communication driven by compute units (NCCL, RCCL)."""

    protocols: tuple[Protocol, ...]
    all_gather_units: Count  # compute units that saturate the links
    all_to_all_units: Count  # the same for an all-to-all
    copy_units: Count  # compute units that saturate one link
    all_reduce_latency: Positive  # latency of the two phases of an all-reduce, against one phase
    local_share: float  # cost of copying a device's own part, relative to sending a part
    memory_bytes_per_byte: Positive  # memory traffic at each end for a byte moved
    in_switch: InSwitch | None = None


@dataclass(frozen=True)
class HostCores:
    """A host whose ranks are processes. Its copy engines are threads, which take core time.

    If this section is given, a rank is a device with one compute unit, `launch.host` is the cost of
    a call beyond its tasks, and engine threads share the rank's cores with its compute thread.
    """

    cores: Count  # cores that the ranks share
    region: float  # per region of a permute, in addition to its bytes
    turn: Positive  # the longest single sleep of a transfer on a paced link
    turn_bytes: Count  # the fewest bytes of such a sleep
    nap: float  # core time of one sleep and wake-up
    slice: float  # how long a thread keeps its core while others wait for it
    grace: float  # an engine that is later than this has left its link idle
    threads: Count = 1  # compute threads of a rank, each on a core of its own if there are enough


@dataclass(frozen=True)
class Machine:
    """A node of equal devices, or a host."""

    name: str
    title: str
    compute: Compute
    memory: DeviceMemory
    links: Links
    engines: CopyEngines
    launch: Launch
    cores: Cores
    host: HostCores | None = None

    @property
    def limited_by_memory(self) -> bool:
        """Whether a GEMM also takes the time of its operands in memory. Rates that were measured
        on a host include it."""
        return self.host is None or (self.host.threads > 1 and not self.compute.measured)

    def without_contention(self) -> Machine:
        """The machine if kernels and bytes did not slow each other beyond sharing compute units and
        memory bandwidth: what it makes of a plan is an upper bound."""
        title = f"{self.title}, without contention (upper bound)"
        return replace(self, title=title, links=replace(self.links, interference=0.0))

    def captured(self) -> Machine:
        """The machine for plans that are captured in a graph once and launched as a whole: no host
        call for each kernel, and shorter gaps between them."""
        launch = self.launch
        gap = launch.gap if launch.captured_gap is None else launch.captured_gap
        compute = self.compute
        if compute.tiling is not None:  # the second pass over a K-split is a kernel of the graph
            tiling = compute.tiling
            second = max(0.0, tiling.split_seconds - (launch.gap - gap))
            compute = replace(compute, tiling=replace(tiling, split_seconds=second))
        launch = replace(launch, host=0.0, gap=gap)
        return replace(
            self, title=f"{self.title}, captured in a graph", compute=compute, launch=launch
        )

    def __hash__(self) -> int:
        # Costs are cached by machine. The name and a few numbers are enough for a hash; equality
        # compares every number.
        return hash((self.name, self.compute.units, self.memory.bandwidth, self.links.bandwidth))
