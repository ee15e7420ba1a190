"""Calls in which ranks wait for each other in every way: what tests have ranks repeat while one of
them is stopped, killed or interrupted at a point."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

import weft
from weft import Mismatch, fabric

SLOW, QUICK = "20MB/s", "memory"
_kept: dict[str, torch.Tensor] = {}


@dataclass(frozen=True)
class Scenario:
    """A call that is repeated. points: those that it comes to, of native/points.h or of the group
    fabric (network_points.py). link: of the ranks. backend: of the group. environment: of the
    ranks; where the value is a tuple, of each in turn."""

    call: Callable[[], object]
    points: tuple[str, ...]
    link: str = QUICK
    backend: str = "gloo"
    world: int = 2
    environment: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)


def _symmetric(name: str, *shape: int) -> torch.Tensor:
    if name not in _kept:
        _kept[name] = weft.symmetric_empty(*shape).fill_(1.0)
    return _kept[name]


def gathers_by_engines() -> None:
    weft.all_gather_matmul(torch.ones(64, 500), torch.ones(500, 8), schedule="adaptive:4@dma")


def gathers_by_cores() -> None:
    weft.all_gather_matmul(torch.ones(64, 500), torch.ones(500, 8), schedule="shard-p2p@cores")


def gathers_from_symmetric_memory() -> None:
    x = _symmetric("x", 64, 50)
    weft.all_gather_matmul(x, torch.ones(50, 8), schedule="hetero-unfused-1d@dma")


def gathers_little() -> None:
    weft.all_gather_matmul(torch.ones(32, 64), torch.ones(64, 64), schedule="adaptive@dma")


def scatters_by_engines() -> None:
    x, w = torch.ones(64, 8), torch.ones(8, 500)
    weft.matmul_reduce_scatter(x, w, schedule="hetero-unfused-1d@dma")


def scatters_in_place() -> None:
    x, w = torch.ones(64, 8), torch.ones(8, 500)
    weft.matmul_reduce_scatter(x, w, schedule="adaptive@direct")


def gathers_serially() -> None:
    weft.all_gather_matmul(torch.ones(64, 5000), torch.ones(5000, 8), schedule="serial")


def sums_serially() -> None:
    weft.matmul_all_reduce(torch.ones(64, 8), torch.ones(8, 5000), schedule="serial")


def few_rows() -> None:
    weft.matmul_all_reduce(torch.ones(4, 64), torch.ones(64, 600), schedule="in-kernel")


def small_sum() -> None:
    weft.all_reduce(torch.ones(100))


def large_sum() -> None:
    weft.all_reduce(torch.ones(1_000_000))


def gathers_in_place() -> None:
    weft.all_gather(_symmetric("large", 500_000))


def disagree() -> None:
    with suppress(Mismatch):
        weft.all_reduce(torch.ones(100 + dist.get_rank()))


def messages() -> None:
    peer, x = 1 - dist.get_rank(), torch.ones(400_000)
    sent = dist.isend(x, peer)
    dist.recv(torch.empty(400_000), peer)
    sent.wait()


def gathers_little_serially() -> None:
    weft.all_gather_matmul(torch.ones(32, 64), torch.ones(64, 64), schedule="serial")


def scatters_little_serially() -> None:
    weft.matmul_reduce_scatter(torch.ones(64, 8), torch.ones(8, 64), schedule="serial")


def gathers_over_narrow_wires() -> None:
    for wire in fabric.of().native.wires._sockets.values():
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    weft.all_gather_matmul(torch.ones(200, 600), torch.ones(600, 8), schedule="serial")


def gathers_much() -> None:
    weft.all_gather_matmul(torch.ones(2000, 500), torch.ones(500, 8), schedule="adaptive:4@dma")


def gathers_much_serially() -> None:
    weft.all_gather_matmul(torch.ones(2000, 500), torch.ones(500, 8), schedule="serial")


def sums_much() -> None:
    weft.matmul_all_reduce(torch.ones(600, 8), torch.ones(8, 1000), schedule="adaptive@dma")


FLAT = {"WEFT_FABRIC": "flat"}
TWO_LEVELS = {"WEFT_HOST": ("a", "a", "b")}
"""The rank that is lost, 1, shares its machine with rank 0, and reaches rank 2 over the network."""

CALL = ("enter", "agree", "done")
SCENARIOS = {
    "engines": Scenario(
        gathers_by_engines,
        (*CALL, "engine_copy", "engine_pause", "engine_signal", "wait_doorbell", "finish"),
        SLOW,
    ),
    "small copies": Scenario(gathers_little, ("small_copy", "small_signal")),
    "cores": Scenario(gathers_by_cores, ("engine_pause", "wait"), SLOW),
    "symmetric": Scenario(gathers_from_symmetric_memory, ("wait_released",)),
    "scatter": Scenario(scatters_by_engines, ("lane_signal", "engine_wait", "wait"), SLOW),
    "direct": Scenario(scatters_in_place, ("hold", "lane_signal", "wait_doorbell"), SLOW),
    "serial gather": Scenario(
        gathers_serially,
        (*CALL[::2], "announce", "serial_agree", "channel_post", "channel_take", "channel_move"),
    ),
    "serial sum": Scenario(
        sums_serially, ("enter", "serial_agree", "channel_move", "channel_finish"), "200MB/s"
    ),
    "few rows": Scenario(few_rows, (*CALL, "kernel_wait", "kernel_signal")),
    "few rows, paced": Scenario(few_rows, ("kernel_release",), "2MB/s"),
    "small sum": Scenario(small_sum, ("announce", "channel_agree", "channel_finish")),
    "small sum, paced": Scenario(small_sum, ("channel_deliver",), "1MB/s"),
    "large sum": Scenario(
        large_sum,
        ("channel_post", "channel_take", "channel_move", "channel_released", "channel_finish"),
    ),
    "gather in place": Scenario(gathers_in_place, ("channel_release", "channel_released")),
    "disagree": Scenario(disagree, ("channel_say", "channel_hear")),
    "flat, bytes with headers": Scenario(
        gathers_little_serially,
        (
            *("Wires.send self._sockets[peer].sendmsg", "Wires.wait poll.poll"),
            *("Wires.read wire.recv_into", "NetworkNative.enter self.inner.enter"),
            "NetworkNative.done self.inner.done",
        ),
        environment=FLAT,
    ),
    "flat, products with headers": Scenario(
        scatters_little_serially,
        ("Wires.send self._sockets[peer].sendmsg", "Wires.read wire.recv_into"),
        environment=FLAT,
    ),
    "flat, bytes with headers, task by task": Scenario(
        gathers_little,
        (
            *("NetworkFlight.start self.native.launch", "NetworkFlight._unpack self.native.signal"),
            "NetworkNative.finish self.inner.finish",
        ),
        environment=FLAT,
    ),
    "flat, narrow wires": Scenario(
        gathers_over_narrow_wires,
        ("Wires.send self._sockets[peer].sendmsg", "Wires.flush self._sockets[peer].send"),
        environment=FLAT,
    ),
    "flat, transfers": Scenario(
        gathers_much,
        (
            *("Streams.send stream.send", "Streams.receive stream.recv_into"),
            "NetworkFlight._run self.native.signal",
            "NetworkNative.wait_doorbell self.inner.wait_doorbell",
            "NetworkNative.agree self._changed.wait",
        ),
        environment=FLAT,
    ),
    "flat, serial transfers": Scenario(
        gathers_much_serially,
        (
            "NetworkFlight._wait_until_sent self.changed.wait_for",
            "NetworkNative.wait self.inner.wait",
            "NetworkNative.finish flight.changed.wait_for",
        ),
        environment=FLAT,
    ),
    "flat, sums": Scenario(
        sums_much,
        ("NetworkFlight._wait_for self.native.wait", "NetworkNative.signal self.inner.signal"),
        environment=FLAT,
    ),
    "two levels": Scenario(
        gathers_much,
        (
            *("enter", "agree", "engine_copy", "engine_signal", "wait_doorbell", "done"),
            *("Wires.send self._sockets[peer].sendmsg", "Streams.send stream.send"),
        ),
        world=3,
        environment=TWO_LEVELS,
    ),
    "two levels, sums": Scenario(
        sums_much,
        ("signal", "engine_wait", "NetworkFlight._wait_for self.native.wait"),
        world=3,
        environment=TWO_LEVELS,
    ),
    "two levels, symmetric": Scenario(
        gathers_from_symmetric_memory,
        ("wait_released", "NetworkNative.wait_released self.inner.wait_released"),
        world=3,
        environment=TWO_LEVELS,
    ),
    "messages": Scenario(messages, ("message_post", "message_take", "message_wait"), QUICK, "weft"),
}

ALL = os.environ.get("WEFT_CHAOS") == "all"
DAYS = 8
"""In how many days `make test` comes to every case of which it takes some."""


def todays(cases: list) -> list:
    """All cases in `make chaos`, and in `make test` those whose turn it is."""
    today = datetime.date.today().toordinal()
    return cases if ALL else [case for at, case in enumerate(cases) if at % DAYS == today % DAYS]


def prepare(scenario: Scenario) -> None:
    """Has this rank join the group of a scenario, and sets its link."""
    if scenario.backend != "gloo":
        rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        again = dist.PrefixStore("again", store)
        dist.init_process_group(scenario.backend, store=again, rank=rank, world_size=2)
    weft.configure(link=scenario.link)


MOST = 15.0
"""Seconds for which ranks repeat a call: less than their deadline."""


def repeat(name: str) -> None:
    """Repeats the call of a scenario, until it raises or the time is up."""
    until = time.monotonic() + MOST
    while time.monotonic() < until:
        SCENARIOS[name].call()
