"""What tests of lost ranks share: how soon others must know, and that they can go on afterwards."""

from __future__ import annotations

import gc
import os

import torch.distributed as dist
from rank_pools import PATIENCE
from ranks import check_call

WITHIN = 4.0 * min(PATIENCE, 2.0)
"""Seconds after the death of a rank in which every other rank must know: a twentieth is usual, and
a machine that is busy with other things may take long. Calls last ten times as long, and deadlines
five times, so that nothing but hearing of it can end them in time."""


def quick_call(schedule: str) -> None:
    check_call(8, 3, 4, schedule=schedule)


def warm_up() -> list[str]:
    """Makes the group's fabric, and says what is open now."""
    check_call(8, 3, 4, schedule="adaptive@dma")
    return open_files()


def open_files() -> list[str]:
    """What the file descriptors of this process point to."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return sorted(found)


def survive(port: int, members: list[int]) -> list[str]:
    """The survivors form a new group and call there; gives the open files afterwards."""
    rank = members.index(dist.get_rank())
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(members))
    for name in ("adaptive@dma", "adaptive@direct", "serial@cores"):
        check_call(9, 4, 6, schedule=name)
    gc.collect()  # errors that were caught hold the old group in their traces
    return open_files()


def check_survivors(pool, members: list[int]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    job = pool.start(survive, store.port, members, only=members)
    for files in job.values():
        assert sum("memfd:weft" in file for file in files) == 1, "the old heap is closed"
        assert sum("pidfd" in file for file in files) <= len(members)
