"""A mixture-of-experts layer, forward and backward, with experts distributed over all devices.

    forward   router -> dispatch -> gate, up -> down -> combine     (shared expert during dispatch)
    backward  reverse of combine -> down -> gate, up -> reverse of dispatch

The plain step sends all tokens, multiplies, and sends them back. The shared expert runs during the
dispatch, as in frameworks today. In the fused step, tokens are received, multiplied and sent back
chunk by chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import Unsupported
from weft.machine import Cluster
from weft.machine.description import Count, Positive
from weft.models.workloads.step import StepBuilder, part_of


@dataclass(frozen=True)
class MoeConfig:
    """Sizes and assumptions of a layer. moe.toml explains each of them."""

    title: str
    layers: Count
    hidden: Count
    expert_ffn: Count
    experts: Count
    top_k: Count
    shared_experts: int
    tokens_per_device: Count
    tokens: Count
    dtype: str
    sent_bytes: Positive
    chunks: tuple[Count, ...]


CONFIG = MoeConfig


def check(config: MoeConfig, where: str) -> None:
    """Raises unless the numbers fit each other."""
    if not config.chunks:
        raise Unsupported(f"{where}: chunks needs at least one number to try")
    if config.top_k > config.experts:
        raise Unsupported(f"{where}: a token cannot go to {config.top_k} of {config.experts}")


def tries(config: MoeConfig) -> tuple[int, ...]:
    """The numbers of chunks into which tokens may be cut."""
    return config.chunks


def size_of(config: MoeConfig, cluster: Cluster, scaling: str) -> float:
    """The number of tokens per device."""
    if scaling == "weak":
        return config.tokens_per_device
    if config.tokens < cluster.world:
        raise Unsupported(f"{config.tokens} tokens do not go round {cluster.world} devices")
    return config.tokens / cluster.world


def describe(config: MoeConfig, cluster: Cluster, size: float) -> str:
    spread = min(cluster.world, config.experts)
    return f"{size:g} tokens per device, {config.experts} experts over {spread} devices"


def step(config: MoeConfig, cluster: Cluster, size: float, chunks: int | None) -> StepBuilder:
    """Forward and backward of `layers` layers for `size` tokens per device."""
    # Groups of as many devices as there are experts are equal, so one of them is simulated.
    build = StepBuilder(part_of(cluster, config.experts))
    last: tuple[int, ...] = ()
    for name, passes in (("forward", 1), ("backward", 2)):
        for layer in range(config.layers):
            last = _layer(build, config, f"layer {layer} {name}", size, chunks, last, passes)
    return build


def _layer(
    build: StepBuilder,
    config: MoeConfig,
    name: str,
    size: float,
    chunks: int | None,
    after: tuple[int, ...],
    passes: int,
) -> tuple[int, ...]:
    """`passes` is 2 for the backward pass: products for the inputs and for the weights."""
    hidden, ffn, dtype = config.hidden, config.expert_ffn, config.dtype
    world = build.cluster.world
    here = max(1, round(config.experts / world))  # experts per device
    rows = size * config.top_k / here  # tokens per expert
    sent = size * config.top_k * hidden * config.sent_bytes
    parts = chunks or 1
    routed = build.gemm(f"{name} router", size, config.experts, hidden, dtype, after)
    arrivals = [
        build.collective(
            f"{name} dispatch{_of(part, parts)}",
            "all_to_all",
            sent / parts,
            (routed,),
            library=chunks is None,
            stream="dispatch ",
        )
        for part in range(parts)
    ]
    shared = routed
    if config.shared_experts:
        width = ffn * config.shared_experts
        for _ in range(passes):
            shared = build.gemm(f"{name} shared up", size, 2 * width, hidden, dtype, (shared,))
            shared = build.gemm(f"{name} shared down", size, hidden, width, dtype, (shared,))
    found = [shared]
    for part, arrived in enumerate(arrivals):
        tail, last = _of(part, parts), arrived
        last = build.gemm(
            f"{name} up{tail}", rows / parts, 2 * ffn, hidden, dtype, (last,), batch=here
        )
        last = build.gemm(
            f"{name} down{tail}", rows / parts, hidden, ffn, dtype, (last,), batch=here
        )
        found.append(
            build.collective(
                f"{name} combine{tail}",
                "all_to_all",
                sent / parts,
                (last,),
                library=chunks is None,
                stream="combine ",
            )
        )
        if passes == 2:  # products for the weights, which nothing in this step waits for
            build.gemm(
                f"{name} up weights{tail}",
                hidden,
                2 * ffn,
                rows / parts,
                dtype,
                (arrived,),
                batch=here,
            )
            build.gemm(
                f"{name} down weights{tail}",
                ffn,
                hidden,
                rows / parts,
                dtype,
                (arrived,),
                batch=here,
            )
    return tuple(found)


def _of(part: int, parts: int) -> str:
    return f" {part + 1}/{parts}" if parts > 1 else ""
