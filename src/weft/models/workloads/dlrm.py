"""A training step of a recommendation model (DLRM). Tables are distributed over all devices, and
every device has the MLPs.

    forward    lookup -> all-to-all ─┐
               bottom MLP ───────────┴-> interaction -> top MLP
    backward   top MLP -> interaction ┬-> all-to-all -> update of the rows
                                      └-> bottom MLP
    gradients  of the MLPs are all-reduced in buckets; then the optimizer

The plain step overlaps what frameworks overlap already: both all-to-alls with the bottom MLP, and
the all-reduces of gradients with the rest of the backward pass. In the fused step, pooled rows are
sent slice by slice while others are still looked up, and rows are updated slice by slice as
gradients arrive.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from weft.errors import Unsupported
from weft.machine import Cluster
from weft.machine.description import DTYPES, Count, Positive, Share
from weft.models.workloads.step import StepBuilder


@dataclass(frozen=True)
class DlrmConfig:
    """Sizes and assumptions of a model. dlrm.toml explains each of them."""

    title: str
    tables: Count
    dimension: Positive
    pooling: Positive
    dense_features: Count
    bottom: tuple[Count, ...]
    top: tuple[Count, ...]
    batch_per_device: Count
    batch: Count
    table_bytes: Positive
    sent_bytes: Positive
    dtype: str
    gradient_bytes: Positive
    bucket: Positive
    lookup_share: Share
    update_passes: Positive
    optimizer_passes: Positive
    slices: tuple[Count, ...]
    cross_layers: int = 0
    cross_rank: int = 0


CONFIG = DlrmConfig


def check(config: DlrmConfig, where: str) -> None:
    """Raises unless the numbers fit each other."""
    if not config.bottom or not config.top:
        raise Unsupported(f"{where}: bottom and top need at least one layer")
    if not config.slices:
        raise Unsupported(f"{where}: slices needs at least one number to try")
    if bool(config.cross_layers) != bool(config.cross_rank):
        raise Unsupported(f"{where}: cross_layers and cross_rank go together")


def size_of(config: DlrmConfig, cluster: Cluster, scaling: str) -> float:
    """The number of samples per device."""
    if scaling == "weak":
        return config.batch_per_device
    if config.batch < cluster.world:
        raise Unsupported(f"{config.batch} samples do not go round {cluster.world} devices")
    return config.batch / cluster.world


def tries(config: DlrmConfig) -> tuple[int, ...]:
    """The numbers of slices that a fused step may use."""
    return config.slices


def describe(config: DlrmConfig, cluster: Cluster, size: float) -> str:
    return f"{size:g} samples per device, {size * cluster.world:,.0f} in all"


def step(config: DlrmConfig, cluster: Cluster, size: float, slices: int | None) -> StepBuilder:
    """One step of `size` samples per device: plain, or fused with a number of slices."""
    build = StepBuilder(cluster)
    here = config.tables / cluster.world  # tables per device
    rows = size * cluster.world * here  # pooled rows that a device computes
    gathered = rows * config.pooling * (config.dimension * config.table_bytes + 8)  # and indices
    sent = rows * config.dimension * config.sent_bytes
    features = config.tables * config.dimension + config.bottom[-1]
    fused, slices = slices is not None, slices or 1

    def move(name: str, after: tuple[int, ...]) -> int:
        return build.collective(name, "all_to_all", sent / slices, after, library=not fused)

    def lookup(part: int, after: tuple[int, ...]) -> int:
        return build.moving(
            "lookup" + _of(part, slices),
            "lookup",
            gathered,
            sent,
            after,
            share=config.lookup_share,
            part=1.0 / slices,
            launched=part == 0,
        )

    arrived = tuple(
        move("all-to-all forward" + _of(part, slices), (lookup(part, ()),))
        for part in range(slices)
    )
    last = _forward(build, config, "bottom", (config.dense_features, *config.bottom), size, ())
    item = DTYPES[config.dtype][0]
    traffic = size * features * item  # the interaction reads all features and writes as much
    last = build.moving("interaction", "permute", traffic, traffic, (last, *arrived))
    last = _cross(build, config, "cross", size, features, last, 1)
    widths = (features if config.cross_layers else config.top[0], *config.top)
    last = _forward(build, config, "top", widths, size, (last,))
    grads = _Gradients(build, config)
    last = _backward(build, config, grads, "top", widths, size, last)
    last = _cross(build, config, "cross backward", size, features, last, 2)
    # Gradients of the pooled rows are sent as soon as they are computed.
    updates = []
    for part in range(slices):
        last = build.moving(
            "interaction backward" + _of(part, slices),
            "permute",
            2.0 * traffic,
            traffic,
            (last,),
            part=1.0 / slices,
            launched=part == 0,
        )
        updates.append(move("all-to-all backward" + _of(part, slices), (last,)))
    bottom = (config.dense_features, *config.bottom)
    last = _backward(build, config, grads, "bottom", bottom, size, last)
    for part, arrival in enumerate(updates):
        build.moving(
            "update" + _of(part, slices),
            "lookup",
            gathered + sent,
            (config.update_passes - 1) * gathered,
            (arrival,),
            share=config.lookup_share,
            part=1.0 / slices,
            launched=part == 0,
        )
    grads.finish()
    return build


def _of(part: int, slices: int) -> str:
    return f" {part + 1}/{slices}" if slices > 1 else ""


def _forward(
    build: StepBuilder,
    config: DlrmConfig,
    name: str,
    widths: tuple[float, ...],
    size: float,
    after: tuple[int, ...],
) -> int:
    last = -1
    for number, (k, n) in enumerate(pairwise(widths)):
        last = build.gemm(f"{name} {number}", size, n, k, config.dtype, after)
        after = (last,)
    return last


class _Gradients:
    """Dense gradients in buckets. A bucket is all-reduced as soon as it is full."""

    def __init__(self, build: StepBuilder, config: DlrmConfig) -> None:
        self._build, self._config = build, config
        self._parameters = self._pending = 0.0
        self._sums: list[int] = []

    def add(self, parameters: float, after: int) -> None:
        self._parameters += parameters
        self._pending += parameters * self._config.gradient_bytes
        if self._pending >= self._config.bucket:
            self._send(after)

    def finish(self) -> None:
        """Runs the optimizer after all all-reduces."""
        if self._pending:
            self._send(len(self._build.tasks) - 1)
        traffic = self._parameters * 4.0 * self._config.optimizer_passes
        self._build.moving("optimizer", "reduce", traffic, 0.0, tuple(self._sums))

    def _send(self, after: int) -> None:
        total, self._pending = self._pending, 0.0
        name = f"gradients {len(self._sums)}"
        self._sums.append(
            self._build.collective(name, "all_reduce", total, (after,), stream="gradients ")
        )


def _backward(
    build: StepBuilder,
    config: DlrmConfig,
    grads: _Gradients,
    name: str,
    widths: tuple[float, ...],
    size: float,
    after: int,
) -> int:
    for number, (k, n) in reversed(list(enumerate(pairwise(widths)))):
        weight = build.gemm(f"{name} {number} weights", k, n, size, config.dtype, (after,))
        grads.add(k * n, weight)
        if number or name != "bottom":  # the gradient of the model's input is not needed
            after = build.gemm(f"{name} {number} inputs", size, k, n, config.dtype, (after,))
    return after


def _cross(
    build: StepBuilder,
    config: DlrmConfig,
    name: str,
    size: float,
    features: float,
    last: int,
    passes: int,
) -> int:
    """A cross network multiplies all features with low-rank weights in every layer. The backward
    has twice as many products."""
    rank = config.cross_rank
    for layer in range(config.cross_layers):
        for _ in range(passes):
            last = build.gemm(f"{name} {layer}", size, rank, features, config.dtype, (last,))
            last = build.gemm(f"{name} {layer}", size, features, rank, config.dtype, (last,))
    return last
