"""The demands of a plan's tasks on a node: a fixed part that uses no shared resource, and a body
that flows through shared ones.

The costs come from `weft.simulate.cost`. Here they get the form that resource sharing needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt

from weft.dtype import rated
from weft.machine import DTYPES, Machine
from weft.plan.tasks import (
    AnyTask,
    Await,
    Copy,
    KernelTiles,
    Lookup,
    Matmul,
    Permute,
    Plan,
    Reduce,
    Region,
)
from weft.simulate.cost import bandwidth_of, copy, gemm, memory_bound
from weft.simulate.node import Draws, Node
from weft.simulate.sharing import Resource


@dataclass(frozen=True, slots=True)
class TransferDemand:
    """A copy of `size` bytes at a rate of at most `rate`.

    Before bytes flow, `first` seconds pass if the lane was idle, and `next` if the copy was queued
    directly behind another. After `completion` more seconds, a waiting task knows the end. `units`:
    the compute units that it holds from its launch on. `ends`: the ranks whose links carry it, both
    ends of every stream of bytes.
    """

    size: float
    rate: float
    draws: tuple[tuple[Resource, float], ...]
    first: float
    next: float
    completion: float
    units: int
    ends: tuple[int, ...] = ()


class KernelDemand:
    """A task on the compute units: `launch` seconds, then a body with `size` bytes of traffic.

    `reach`: the time of its `remote` bytes over idle links.
    """

    __slots__ = ("_bodies", "_body", "draws", "launch", "reach", "remote", "size")

    def __init__(
        self,
        launch: float,
        size: float,
        draws: tuple[tuple[Resource, float], ...],
        body: Callable[[int], float],
        reach: float = 0.0,
        remote: float = 0.0,
    ) -> None:
        self.launch = launch
        self.size = size
        self.draws = draws
        self.reach = reach
        self.remote = remote
        self._body = body
        self._bodies: dict[int, float] = {}

    def body(self, units: int) -> float:
        """The seconds of the body alone on this many units, if all operands are in local memory."""
        found = self._bodies.get(units)
        if found is None:
            found = self._bodies[units] = self._body(units)
        return found


_NOTHING = KernelDemand(0.0, 0.0, (), lambda units: 0.0)
"""A task that only waits."""


class Demands:
    """The costs of a plan's tasks on a node. Equal tasks are computed once."""

    def __init__(self, plan: Plan, node: Node) -> None:
        self.plan = plan
        self.node = node
        self.machine = node.machine
        self._transfers: dict[tuple[object, ...], TransferDemand] = {}
        self._kernels: dict[tuple[object, ...], KernelDemand] = {}
        self._loads: dict[tuple[int, str], float] = {}
        self._turns: dict[tuple[int, str], int] = {}
        self._whole: dict[int, tuple[KernelDemand, int]] = {}

    def transfer(self, task: Copy) -> TransferDemand:
        here, there = task.source, task.target
        ranks = (task.rank, here.rank, there.rank, task.peer)
        more = (task.swaps, task.prelaunched, *(region.rank for region in task.also))
        key = (here.rows, here.columns, here.buffer, there.buffer, task.engine, *ranks, *more)
        found = self._transfers.get(key)
        if found is None:
            found = self._transfers[key] = self._copy(task)
        return found

    def kernel(
        self, task: Matmul | Permute | Reduce | KernelTiles | Lookup | Await
    ) -> KernelDemand:
        if isinstance(task, KernelTiles):
            return self._tiles(task)
        if isinstance(task, Await):
            return _NOTHING
        if not isinstance(task, Matmul):
            sizes = [(r.rank, self.plan.num_bytes(r)) for r in (*task.sources, *task.targets)]
            key: tuple[object, ...] = (task.rank, task.kind, self._pipelined(task), *sizes)
            if isinstance(task, Lookup):
                key = (*key, task.pooling)
        else:
            a, b, c = task.a, task.b, task.c
            shape = (a.rows, b.columns, a.columns, task.transposed, task.accumulate)
            key = (task.rank, a.rank, b.rank, c.rank, *shape, a.buffer, c.buffer)
        found = self._kernels.get(key)
        if found is None:
            found = self._matmul(task) if isinstance(task, Matmul) else self._move(task)
            self._kernels[key] = found
        return found

    def _copy(self, task: Copy) -> TransferDemand:
        machine, node = self.machine, self.node
        size, runs = self.plan.num_bytes(task.source), runs_of(self.plan, task)
        source, target = task.source.rank, task.target.rank
        remote = source != target
        ahead = task.prelaunched
        cost = copy(machine, size, rows=runs, engine=task.engine, prelaunched=ahead, remote=remote)
        if task.also or task.swaps:  # a command with several targets gives each of them a share
            engines = machine.engines
            share = engines.swap_share if task.swaps else engines.broadcast_share
            cost = replace(cost, rate=cost.rate * share)
        traffic = cost.traffic / size
        wanted: Draws = []
        for start, end in zip(task.reads(), task.writes(), strict=True):
            wanted += node.route(start.rank, end.rank, 1.0) if start.rank != end.rank else []
            wanted += [(("memory", start.rank, 0), traffic), (("memory", end.rank, 0), traffic)]
        if not ahead:  # one thread of the host commands the engines one after another
            engines = machine.engines
            turn = self._turns.setdefault((task.rank, task.lane), len(self._lanes(task.rank)))
            later = turn * (engines.command + engines.schedule)
            cost = replace(cost, command=cost.command + later)
        following = cost.command
        if task.engine == "dma":
            following = machine.engines.next_packet
            if machine.engines.count < node.world:
                wanted += node.engine(task.rank, task.peer, 1.0 / cost.rate)
        elif remote:
            wanted.append((("driven", source, 0), 1.0))
        pairs = zip(task.reads(), task.writes(), strict=True)
        streams = [(start.rank, end.rank) for start, end in pairs if start.rank != end.rank]
        ends = tuple(0 if node.folded else rank for stream in streams for rank in stream)
        return TransferDemand(
            size,
            cost.rate,
            node.draws(wanted),
            cost.command,
            following,
            cost.completion,
            cost.units,
            ends,
        )

    def _lanes(self, rank: int) -> list[str]:
        """The engine lanes of a rank that have had a command from the host so far."""
        return [lane for owner, lane in self._turns if owner == rank]

    def _move(self, task: Permute | Reduce | Lookup) -> KernelDemand:
        """A permute, a sum or lookups. Only the bytes that are read and written count."""
        machine = self.machine
        read = sum(map(self.plan.num_bytes, task.sources))
        if isinstance(task, Lookup):
            read *= task.pooling
        written = sum(map(self.plan.num_bytes, task.targets))
        within = machine.memory.latency if self._pipelined(task) else 0.0

        def body(units: int) -> float:
            return memory_bound(machine, read, written, units=units).memory_seconds - within

        total = float(read + written)
        regions = (*task.sources, *task.targets)
        wanted, here, reach = self._remote(task.rank, regions, total, len(task.sources))
        wanted.append((("memory", task.rank, 0), here / total))
        launch = memory_bound(machine, read, written).launch
        launch += machine.links.latency if reach else 0.0
        return KernelDemand(launch, total, self.node.draws(wanted), body, reach, total - here)

    def _matmul(self, task: Matmul) -> KernelDemand:
        machine = self.machine
        m, n, k = task.c.rows, task.c.columns, task.inner
        dtype = self.plan.buffer[task.a.key].dtype
        whole = gemm(machine, m, n, k, dtype)
        load = self._load(task.rank, dtype)
        # The cost assumes that C is written once, in the result's dtype. Sums may be wider, and are
        # read again.
        bytes_c = self.plan.num_bytes(task.c)
        traffic = whole.bytes + bytes_c * (2 if task.accumulate else 1) - m * n * DTYPES[dtype][1]
        traffic = max(traffic, float(bytes_c))

        def body(units: int) -> float:
            cost = gemm(machine, m, n, k, dtype, units=units)
            moving = machine.memory.latency + traffic / bandwidth_of(machine, units)
            return max(_under_load(machine, cost.compute_seconds, load), moving)

        # Remote operands are read once: tiles that need the same rows run together and share them.
        wanted, here, reach = self._remote(task.rank, (task.a, task.b, task.c), traffic, 2)
        wanted.append((("memory", task.rank, 0), max(here, 0.0) / traffic))
        launch = whole.launch + (machine.links.latency if reach else 0.0)
        return KernelDemand(launch, traffic, self.node.draws(wanted), body, reach, traffic - here)

    def _tiles(self, task: KernelTiles) -> KernelDemand:
        """Products that are part of one kernel: their share of the time of the whole kernel."""
        found = self._whole.get(task.rank)
        if found is None:
            tiles = [
                t for t in self.plan.tasks if t.rank == task.rank and isinstance(t, KernelTiles)
            ]
            found = self._whole[task.rank] = (
                self._matmul(_as_one(tiles)),
                sum(t.num_flops for t in tiles),
            )
        whole, flops = found
        share = task.num_flops / flops if flops else 1.0 / max(1, len(self.plan.tasks))
        traffic = max(whole.size * share, 1.0)
        wanted, here, reach = self._remote(task.rank, task.writes(), traffic, 0)
        wanted.append((("memory", task.rank, 0), max(here, 0.0) / traffic))
        draws = self.node.draws(wanted)
        launch = whole.launch + (self.machine.links.latency if reach else 0.0)
        remote = traffic - here
        return KernelDemand(
            launch, traffic, draws, lambda units: share * whole.body(units), reach, remote
        )

    def _pipelined(self, task: AnyTask) -> bool:
        """Whether other work of the same kernel hides the memory latency. Its workers do not wait
        for each other, so the latency shows only in its first task and its last sum."""
        if not self.plan.one_launch:
            return False
        lane = self.plan.lanes[(task.rank, task.lane)]
        last = next((t for t in reversed(lane) if isinstance(t, Reduce)), None)
        return task is not lane[0] and task is not last

    def _remote(
        self, rank: int, regions: tuple[Region, ...], traffic: float, num_read: int
    ) -> tuple[Draws, float, float]:
        """The draws of a kernel for regions of peers (the first ones read, the others written), the
        traffic that is left in local memory, and the time of the regions over idle links."""
        wanted: Draws = []
        here, reach = traffic, 0.0
        for number, region in enumerate(regions):
            if region.rank == rank:
                continue
            size = self.plan.num_bytes(region)
            ends = (rank, region.rank) if number >= num_read else (region.rank, rank)
            wanted += self.node.route(*ends, size / traffic)
            wanted.append((("memory", region.rank, 0), size / traffic))
            here -= size
            reach = max(reach, size / self.machine.links.to_one_peer())
        return wanted, here, reach

    def _load(self, rank: int, dtype: str) -> float:
        """The seconds of the rank's matmuls on its units, at the rate of their inner loops."""
        found = self._loads.get((rank, dtype))
        if found is None:
            flops = sum(num_flops(t) for t in self.plan.tasks if t.rank == rank)
            found = self._loads[(rank, dtype)] = flops / self.machine.compute.rate[rated(dtype)]
        return found


def runs_of(plan: Plan, task: Copy) -> int:
    """The number of separate runs of bytes in a copy: one, or one per row if rows are cut."""

    def cut(region: Region) -> bool:
        return region.columns < plan.buffer[region.key].columns

    return task.source.rows if cut(task.source) or cut(task.target) else 1


def num_flops(task: object) -> int:
    """The floating point operations of a task."""
    if isinstance(task, KernelTiles):
        return task.num_flops
    if not isinstance(task, Matmul):
        return 0
    return 2 * task.a.rows * task.a.columns * task.b.columns


def _as_one(tiles: list[KernelTiles]) -> Matmul:
    """The one product that the tiles of a kernel form: all their rows, or all their columns."""
    parts = [part for task in tiles for part in task.parts]
    first = parts[0]
    by_rows = all(part.b == first.b for part in parts)
    rows = sum(p.c.rows for p in parts) if by_rows else first.c.rows
    columns = first.c.columns if by_rows else sum(p.c.columns for p in parts)
    rank, inner, c = tiles[0].rank, first.b.rows, first.c
    return Matmul(
        tiles[0].id,
        rank,
        (),
        "all tiles",
        Region(rank, first.a.buffer, 0, rows, 0, inner),
        Region(rank, first.b.buffer, 0, inner, 0, columns),
        Region(c.rank, c.buffer, 0, rows, 0, columns),
    )


def _under_load(machine: Machine, seconds: float, load: float) -> float:
    """The compute time of a GEMM that is a piece of `load` seconds of work.

    In the cost of a GEMM, the clock falls with the length of that GEMM. Pieces run back to back, so
    each of them runs at the clock that follows from all of them together.
    """
    compute = machine.compute
    if compute.tiling is None or seconds == 0.0:
        return seconds
    share, after = compute.sustained_share, compute.sustained_after
    # seconds = x (1 + x / after) / (1 + share x / after), solved for x, the time at full clock
    scaled = seconds / after
    half = (1.0 - share * scaled) / 2.0
    unloaded = after * (sqrt(half * half + scaled) - half)
    return unloaded / (share + (1.0 - share) / (1.0 + max(unloaded, load) / after))
