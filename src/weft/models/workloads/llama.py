"""Transformer blocks: tensor parallel inside a node, data or sequence parallel between nodes.

    forward   gather -> QKV -> attention -> projection -> scatter
              gather -> gate, up -> down -> scatter
    backward  the same in reverse, with a product for the weights next to each for the inputs

The plain step waits for every gather and scatter inside the node, and overlaps all-reduces of
gradients between nodes with the backward pass, as frameworks do. In the fused step, each gather and
scatter is cut into chunks together with its GEMM, and the chunks overlap. With sequence
parallelism, keys and values are gathered between nodes; the fused step starts attention with those
that have arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from weft.errors import Unsupported
from weft.machine import Cluster
from weft.machine.description import DTYPES, Count, Positive, Share
from weft.models.workloads.step import StepBuilder


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and assumptions of a model. llama.toml explains each of them."""

    title: str
    between: Literal["data", "sequence"]
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    ffn: Count
    sequence: Count
    sequences_per_node: Count
    sequences: Count
    dtype: str
    gradient_bytes: Positive
    attention_share: Share
    chunks: tuple[Count, ...]


CONFIG = LlamaConfig


def check(config: LlamaConfig, where: str) -> None:
    """Raises unless the numbers fit each other."""
    if not config.chunks:
        raise Unsupported(f"{where}: chunks needs at least one number to try")
    if config.hidden % config.heads or config.heads % config.kv_heads:
        raise Unsupported(f"{where}: heads must divide hidden, and kv_heads must divide heads")


def tries(config: LlamaConfig) -> tuple[int, ...]:
    """The numbers of chunks into which a GEMM and its collective may be cut."""
    return config.chunks


def size_of(config: LlamaConfig, cluster: Cluster, scaling: str) -> float:
    """The number of tokens per node."""
    if scaling == "weak":
        return config.sequences_per_node * config.sequence
    if config.between == "data" and config.sequences < cluster.nodes:
        raise Unsupported(f"{config.sequences} sequences do not go round {cluster.nodes} nodes")
    return config.sequences * config.sequence / cluster.nodes


def describe(config: LlamaConfig, cluster: Cluster, size: float) -> str:
    return f"{size:,.0f} tokens per node, {config.between} parallel between nodes"


def step(config: LlamaConfig, cluster: Cluster, size: float, chunks: int | None) -> StepBuilder:
    """Forward and backward of `layers` blocks for `size` tokens per node."""
    build = StepBuilder(cluster)
    block = _Block(build, config, size, chunks)
    last: tuple[int, ...] = ()
    for layer in range(config.layers):
        last = block.forward(layer, last)
    for layer in reversed(range(config.layers)):
        last = block.backward(layer, last)
    return build


Product = Callable[[str, float, tuple[int, ...]], int]
"""Adds a GEMM: its name, its rows, and the tasks that it waits for."""


class _Block:
    def __init__(
        self, build: StepBuilder, config: LlamaConfig, tokens: float, chunks: int | None
    ) -> None:
        self.build, self.config, self.tokens = build, config, tokens
        self.chunks = chunks
        self.devices = build.cluster.devices
        head = config.hidden // config.heads
        self.kv = 2.0 * config.kv_heads * head  # keys and values of a token
        self.item = DTYPES[config.dtype][0]
        self.bytes = tokens * config.hidden * self.item  # activations that are gathered
        context = config.sequence
        if config.between == "sequence":
            context = round(tokens * build.cluster.nodes)
        # Causal: a token attends to half of its context on average, with two products.
        self.attention = 2.0 * tokens * context * config.hidden / self.devices
        self.rate = build.machine.compute.rate[config.dtype] * config.attention_share
        hidden, ffn = config.hidden, config.ffn
        self.qkv = (hidden + self.kv) / self.devices
        self.parameters = (
            hidden * self.qkv + hidden * hidden / self.devices + 3.0 * hidden * ffn / self.devices
        )

    def forward(self, layer: int, after: tuple[int, ...]) -> tuple[int, ...]:
        config, name = self.config, f"layer {layer}"
        hidden, ffn = config.hidden, config.ffn / self.devices
        last = self._gather(f"{name} qkv", self.qkv, hidden, after)
        last = self._attend(name, last, 1.0)
        last = self._scatter(f"{name} projection", hidden, hidden / self.devices, last)
        last = self._gather(f"{name} gate up", 2 * ffn, hidden, last)
        return self._scatter(f"{name} down", hidden, ffn, last)

    def backward(self, layer: int, after: tuple[int, ...]) -> tuple[int, ...]:
        """Gathers gradients where the forward scattered results, and scatters where it gathered."""
        config, name = self.config, f"layer {layer} backward"
        hidden, ffn = config.hidden, config.ffn / self.devices
        last = self._gather(f"{name} down", ffn, hidden, after)
        self._weights(f"{name} down", hidden, ffn, last)
        self._weights(f"{name} gate up", 2 * ffn, hidden, last)
        last = self._scatter(f"{name} gate up", hidden, 2 * ffn, last)
        last = self._gather(f"{name} projection", hidden / self.devices, hidden, last)
        self._weights(f"{name} projection", hidden, hidden / self.devices, last)
        last = self._attend(name, last, 2.5)
        weights = self._weights(f"{name} qkv", self.qkv, hidden, last)
        last = self._scatter(f"{name} qkv", hidden, self.qkv, last)
        if self.build.cluster.nodes > 1:
            total = self.parameters * config.gradient_bytes
            axes = self.build.network
            self.build.collective(
                f"{name} gradients", "all_reduce", total, (weights,), axes=axes, stream="gradients "
            )
        return last

    def _gather(self, name: str, n: float, k: float, after: tuple[int, ...]) -> tuple[int, ...]:
        """An all-gather of the tokens, then a GEMM; chunk by chunk in the fused step."""
        parts = self.chunks or 1
        found = []
        for part in range(parts):
            tail = _of(part, parts)
            arrived = self._inside(f"{name} gather{tail}", "all_gather", parts, after)
            rows = self.tokens / parts
            found.append(
                self.build.gemm(f"{name}{tail}", rows, n, k, self.config.dtype, (arrived,))
            )
        return tuple(found)

    def _scatter(self, name: str, n: float, k: float, after: tuple[int, ...]) -> tuple[int, ...]:
        """A GEMM, then a reduce-scatter of its result; chunk by chunk in the fused step."""
        parts = self.chunks or 1
        found = []
        for part in range(parts):
            tail = _of(part, parts)
            rows = self.tokens / parts
            made = self.build.gemm(f"{name}{tail}", rows, n, k, self.config.dtype, after)
            found.append(self._inside(f"{name} scatter{tail}", "reduce_scatter", parts, (made,)))
        return tuple(found)

    def _inside(self, name: str, kind: str, parts: int, after: tuple[int, ...]) -> int:
        return self.build.collective(
            name, kind, self.bytes / parts, after, axes=(0,), library=self.chunks is None
        )

    def _weights(self, name: str, n: float, k: float, after: tuple[int, ...]) -> int:
        return self.build.gemm(f"{name} weights", k, n, self.tokens, self.config.dtype, after)

    def _attend(self, name: str, after: tuple[int, ...], times: float) -> tuple[int, ...]:
        build, config = self.build, self.config
        amount = times * self.attention
        if config.between != "sequence" or build.cluster.nodes == 1:
            return (build.flops(f"{name} attention", amount, self.rate, after),)
        # Keys and values of a device's heads, from all nodes. The backward sends their gradients.
        total = self.tokens * build.cluster.nodes * self.kv / self.devices * self.item
        parts = self.chunks or 1
        found = []
        for part in range(parts):
            tail = _of(part, parts)
            arrived = build.collective(
                f"{name} keys{tail}",
                "all_gather",
                total / parts * max(1.0, times / 1.25),
                after,
                axes=build.network,
                library=self.chunks is None,
            )
            found.append(
                build.flops(f"{name} attention{tail}", amount / parts, self.rate, (arrived,))
            )
        return tuple(found)


def _of(part: int, parts: int) -> str:
    return f" {part + 1}/{parts}" if parts > 1 else ""
