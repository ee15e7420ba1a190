"""Builds one step of a workload on a cluster: the kernels and collectives of a device, in order."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from weft.errors import Unsupported
from weft.machine import Cluster
from weft.simulate.cluster import Axes, ClusterKernel, ClusterTask, Ran, Wiring, lower, run
from weft.simulate.cost import gemm, memory_bound
from weft.timeline import COMPUTE


class StepBuilder:
    """Collects the tasks of a step. Every method adds tasks and returns the index of the last."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.machine = cluster.device
        self.wiring = Wiring(cluster)
        self.tasks: list[ClusterTask] = []

    @property
    def network(self) -> Axes:
        """The axes between nodes."""
        return tuple(range(1, len(self.wiring.shape)))

    def gemm(
        self,
        name: str,
        m: float,
        n: float,
        k: float,
        dtype: str,
        after: tuple[int, ...],
        *,
        batch: int = 1,
    ) -> int:
        """`batch` GEMMs of C[m, n] = A[m, k] B[k, n] in one kernel."""
        machine = self.machine
        sizes = (_whole(m), _whole(n), _whole(k))
        cost = gemm(machine, *sizes, dtype, batch=batch)

        def body(units: int) -> float:
            found = gemm(machine, *sizes, dtype, batch=batch, units=units)
            return max(found.compute_seconds, found.memory_seconds)

        kernel = ClusterKernel(cost.launch + machine.launch.gap, body, cost.bytes)
        flops = 2 * batch * sizes[0] * sizes[1] * sizes[2]
        return self._add(ClusterTask(name, COMPUTE, "matmul", after, kernel, num_flops=flops))

    def moving(
        self,
        name: str,
        kind: str,
        read: float,
        written: float,
        after: tuple[int, ...],
        *,
        share: float = 1.0,
        part: float = 1.0,
        launched: bool = True,
    ) -> int:
        """A kernel that reads and writes memory at `share` of its bandwidth.

        part: the share of the kernel, if it is added in parts. launched: whether this part starts
        the kernel; true for the first part only.
        """
        machine = self.machine
        whole = memory_bound(machine, read / share, written / share)

        def body(units: int) -> float:
            found = memory_bound(machine, read / share, written / share, units=units)
            return part * found.memory_seconds

        launch = whole.launch + machine.launch.gap if launched else 0.0
        kernel = ClusterKernel(launch, body, part * (read + written) / share)
        return self._add(ClusterTask(name, COMPUTE, kind, after, kernel))

    def flops(self, name: str, amount: float, rate: float, after: tuple[int, ...]) -> int:
        """A kernel that computes at a given rate, with little memory traffic."""
        machine = self.machine
        units = machine.compute.units
        kernel = ClusterKernel(
            machine.launch.kernel + machine.launch.gap,
            lambda left: amount / rate * units / left,
        )
        return self._add(
            ClusterTask(name, COMPUTE, "matmul", after, kernel, num_flops=round(amount))
        )

    def collective(
        self,
        name: str,
        kind: str,
        total: float,
        after: tuple[int, ...],
        *,
        axes: Axes | None = None,
        library: bool = True,
        stream: str = "",
    ) -> int:
        """A collective with the fastest algorithm. library: whether a library runs it, which needs
        time to start and compute units; otherwise kernels or copy engines send it themselves."""
        everyone = tuple(range(len(self.wiring.shape)))
        axes = everyone if axes is None else axes
        start = self.cluster.start if library else 0.0
        algorithm, chunks = quickest(self.cluster, kind, total, axes, start)
        tasks = lower(
            self.wiring,
            kind,
            total,
            algorithm,
            axes=axes,
            chunks=chunks,
            name=name,
            after=after,
            first=len(self.tasks),
            start=start,
            units=self._units(kind, axes) if library else 0,
            lanes=stream,
        )
        self.tasks += tasks
        return len(self.tasks) - 1

    def run(self) -> Ran:
        return run(self.wiring, self.tasks)

    def _units(self, kind: str, axes: Axes) -> int:
        """The compute units that a library's collective uses: enough for the links inside the node,
        or for the network card of a device, which is as fast as one link."""
        cores = self.machine.cores
        if any(self.wiring.shape[axis] > 1 for axis in axes if axis):
            return cores.copy_units
        return cores.all_to_all_units if kind == "all_to_all" else cores.all_gather_units

    def _add(self, task: ClusterTask) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1


@lru_cache(maxsize=4096)
def quickest(
    cluster: Cluster, kind: str, total: float, axes: Axes, start: float
) -> tuple[str, int]:
    """The algorithm and the number of chunks that are fastest without other work."""
    wiring = Wiring(cluster)
    wide = sum(wiring.shape[axis] > 1 for axis in axes)
    tries: list[tuple[str, int]] = [("direct", 1)]
    if kind != "all_to_all" or wide < 2:
        tries.append(("ring", 1))
    if wide > 1:
        tries += [("hierarchical", 1), ("hierarchical", 4), ("hierarchical", 16)]
    found: dict[tuple[str, int], float] = {}
    for algorithm, chunks in tries:
        tasks = lower(wiring, kind, total, algorithm, axes=axes, chunks=chunks, start=start)
        found[algorithm, chunks] = run(wiring, tasks).seconds
    return min(found, key=lambda one: found[one])


def part_of(cluster: Cluster, devices: int) -> Cluster:
    """The part of a cluster that holds a group of `devices`, if the cluster has more."""
    if devices >= cluster.world:
        return cluster
    if devices % cluster.devices:
        raise Unsupported(f"a group of {devices} devices does not fill nodes of {cluster.devices}")
    found = replace(cluster, nodes=devices // cluster.devices)
    return found.with_nodes(found.nodes)


def _whole(size: float) -> int:
    return max(1, round(size))
