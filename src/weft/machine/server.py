"""Describes a CPU server by what its data sheet says: sockets, cores, memory channels, flops per
cycle and the links between sockets. The numbers of a machine follow from these.

A rank is a socket, or a part of one (a NUMA node), and computes on all of its cores. A file with a
`[server]` table may state other numbers of the machine too; they replace those that follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from weft.machine.description import Bounds, Count, Positive, Share

BYTES_PER_TRANSFER = 8
"""A DDR5 channel moves 64 bits per transfer, without the bits for error correction."""


@dataclass(frozen=True)
class Server:
    """What is known of a server. Numbers without "server" are of one socket."""

    sockets: Count  # of the server
    cores: Count  # physical ones
    ranks_per_socket: Count  # 1: a rank is a socket; more: a rank is a NUMA node of a socket
    clock: Positive  # Hz of all cores under a long matrix load
    flops_per_cycle: dict[str, Positive]  # of one core
    gemm_share: Share  # of the peak that large GEMMs reach
    channels: Count  # memory channels
    transfers: Positive  # per second and channel
    memory_share: Share  # of the peak that streaming reaches
    capacity: Positive  # bytes of memory
    cache: Positive  # bytes of last-level cache
    socket_link: Positive  # bytes per second between two sockets, one direction, all links
    link_share: Share  # of the peak that copies by many cores reach
    link_latency: Annotated[float, Bounds(most=1e-3)]  # seconds of one access to another socket
    copy_bandwidth: Positive  # bytes per second that one thread copies from another rank

    @property
    def ranks(self) -> int:
        return self.sockets * self.ranks_per_socket

    @property
    def threads(self) -> int:
        """Compute threads of a rank."""
        return max(1, self.cores // self.ranks_per_socket)


def machine_table(server: Server) -> dict[str, Any]:
    """The tables of the machine, as in a machine file. What a data sheet does not say is as on
    other hosts: the costs of calls, signals and wake-ups."""
    threads, parts = server.threads, server.ranks_per_socket
    peak = {d: f * threads * server.clock for d, f in server.flops_per_cycle.items()}
    memory = server.channels * server.transfers * BYTES_PER_TRANSFER / parts
    streamed = memory * server.memory_share
    pairs = parts if server.sockets > 1 else 1  # nodes of a socket share its links
    link = server.socket_link / pairs
    reached = link * server.link_share
    return {
        "compute": {
            "units": 1,
            "clock": server.clock,
            "loaded_clock": server.clock,
            "peak": peak,
            "rate": {dtype: rate * server.gemm_share for dtype, rate in peak.items()},
            "sustained_share": 1.0,
            "sustained_after": 1.0,
            # A thread needs some columns of its own, and a register tile some rows.
            "saturation": {"m": 16, "n": 4 * threads, "k": 64},
        },
        "memory": {
            "capacity": server.capacity / parts,
            "peak_bandwidth": memory,
            "bandwidth": streamed,
            "latency": 0.0,
            "unit_bandwidth": streamed,
            "cache_bytes": server.cache / parts,
            "cache_bandwidth": 4.0 * streamed,
            "crowding": 0.0,
            "crowding_units": 1,
        },
        "links": {
            "topology": "mesh",
            "world": server.ranks,
            "peak_bandwidth": link,
            "bandwidth": reached,
            "total_bandwidth": reached * max(1, server.ranks - 1),
            "latency": server.link_latency,
        },
        "engines": {
            "count": max(1, server.ranks - 1),  # a thread for every peer
            "bandwidth": server.copy_bandwidth,
            "local_bandwidth": server.copy_bandwidth,
            "command": 0.0,
            "schedule": 3e-5,
            "packet": 0.0,
            "next_packet": 1e-6,
            "row": 2e-8,
            "release": 3e-5,
            "completion": 3e-5,
            "collective": 0.0,
            "collective_completion": 3e-5,
            "broadcast_share": 0.5,
            "swap_share": 0.5,
            "memory_bytes_per_byte": 1.0,
        },
        "launch": {
            "host": 5e-5,
            "kernel": 1e-5,
            "gap": 0.0,
            "signal": 2e-6,
            "poll": 0.0,
            "decision": 1e-5,
        },
        "cores": {
            "all_gather_units": 1,
            "all_to_all_units": 1,
            "copy_units": 1,
            "memory_bytes_per_byte": 1.0,
            "all_reduce_latency": 2.0,
            "local_share": 1.0,
            "protocols": [
                {
                    "name": "copy",
                    "latency": 5e-5,
                    "peer_latency": 0.0,
                    "bandwidth": server.copy_bandwidth,
                }
            ],
        },
        "host": {
            "cores": server.ranks * threads,
            "threads": threads,
            "region": 5e-6,
            "turn": 2e-3,
            "turn_bytes": 16384,
            "nap": 2e-5,
            "slice": 3e-3,
            "grace": 3e-3,
        },
    }


def with_server(table: Mapping[str, Any], server: Server) -> dict[str, Any]:
    """The table of a file with its `[server]` replaced by what follows from it. What the file
    states itself is kept."""
    own = {key: value for key, value in table.items() if key != "server"}
    return merged(machine_table(server), own)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of `base` with those keys replaced that `changes` has; lists as a whole."""
    found = dict(base)
    for key, value in changes.items():
        old = found.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merged(old, value)
        found[key] = value
    return found
