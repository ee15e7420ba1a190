"""Calls in which ranks wait for each other in every way: what tests have ranks repeat while one of
them is stopped, killed or interrupted at a point."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

import weft
from weft import Mismatch

SLOW, QUICK = "20MB/s", "memory"
_kept: dict[str, torch.Tensor] = {}


@dataclass(frozen=True)
class Scenario:
    """A call that is repeated. link: of the ranks. points: of native/points.h, that it comes to.
    backend: of the group."""

    call: Callable[[], object]
    points: tuple[str, ...]
    link: str = QUICK
    backend: str = "gloo"


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
    "scatter": Scenario(scatters_by_engines, ("signal", "engine_wait", "wait"), SLOW),
    "direct": Scenario(scatters_in_place, ("hold", "signal", "wait_doorbell"), SLOW),
    "serial gather": Scenario(
        gathers_serially,
        (*CALL[::2], "announce", "channel_agree", "channel_post", "channel_take", "channel_move"),
    ),
    "serial sum": Scenario(
        sums_serially, ("enter", "channel_agree", "channel_move", "channel_finish"), "200MB/s"
    ),
    "few rows": Scenario(few_rows, (*CALL, "kernel_wait", "kernel_signal")),
    "few rows, paced": Scenario(few_rows, ("kernel_release",), "2MB/s"),
    "small sum": Scenario(small_sum, ("announce", "channel_agree", "channel_finish")),
    "small sum, paced": Scenario(small_sum, ("channel_deliver",), "1MB/s"),
    "large sum": Scenario(
        large_sum, ("channel_post", "channel_take", "channel_move", "channel_finish")
    ),
    "gather in place": Scenario(gathers_in_place, ("channel_release", "channel_finish")),
    "disagree": Scenario(disagree, ("channel_say", "channel_hear")),
    "messages": Scenario(messages, ("message_post", "message_take", "message_wait"), QUICK, "weft"),
}

MOST = 15.0
"""Seconds for which ranks repeat a call: less than their deadline."""


def repeat(name: str) -> None:
    """Repeats the call of a scenario, until it raises or the time is up."""
    until = time.monotonic() + MOST
    while time.monotonic() < until:
        SCENARIOS[name].call()
