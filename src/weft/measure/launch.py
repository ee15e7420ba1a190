"""Starts ranks on this machine, runs a function on each, and returns their results.

Nothing is left behind: ranks end with the process that started them, and a rank that does not
end by itself is killed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from weft.errors import Error
from weft.measure.hosts import STORE_PORT, Hosts, Place

Report = Callable[[float, str], None]
"""A progress callback: the share that is done (0 to 1), and a text."""

_PR_SET_PDEATHSIG = 1


@dataclass(eq=False)  # not frozen: pickle sets the fields of an exception from another process
class RankFailed(Exception):
    """A rank raised an exception that is not a weft error: a bug, shown with its traceback."""

    rank: int
    trace: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed:\n{self.trace}"


def launch(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    threads: int = 1,
    pin: bool = True,
    hosts: Hosts | None = None,
    report: Report | None = None,
) -> list[Any]:
    """Runs `function(report, *arguments)` on every rank of a new gloo group. Returns the results.

    threads: compute threads per rank. pin: whether each rank is pinned to its share of the cores.
    hosts: emulated hosts, over which the ranks are distributed evenly (None: this machine).
    report: receives the progress of rank 0.
    """
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    places = [
        None if hosts is None else hosts.place(rank * hosts.count // world) for rank in range(world)
    ]
    context = multiprocessing.get_context("spawn")
    pipes: dict[Connection, int] = {}
    processes = []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        cores = cores_of(rank, world) if pin else None
        process = context.Process(
            target=_rank_main,
            args=(
                rank,
                world,
                store.port,
                theirs,
                os.getpid(),
                cores,
                threads,
                places[rank],
                function,
                arguments,
            ),
            daemon=True,
        )
        process.start()
        theirs.close()
        pipes[ours] = rank
        processes.append(process)
    try:
        return _collect(world, pipes, report)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


all_gather_flat: Callable[[torch.Tensor, torch.Tensor], Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
"""torch's all-gather into one tensor, whose name depends on the version of torch."""


def _collect(world: int, pipes: dict[Connection, int], report: Report | None) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, BaseException] = {}
    waited_for_others: float | None = None
    while len(results) + len(failures) < world and pipes:
        for ready in wait(list(pipes), timeout=1.0):
            assert isinstance(ready, Connection)
            rank = pipes[ready]
            try:
                kind, value = ready.recv()
            except EOFError:
                kind, value = "failed", Error(f"rank {rank} exited without an error message")
            if kind == "report":
                if report is not None:
                    report(*value)
                continue
            del pipes[ready]
            if kind == "result":
                results[rank] = value
            else:
                failures[rank] = value
                waited_for_others = waited_for_others or time.monotonic()
        if waited_for_others is not None and time.monotonic() - waited_for_others > 3.0:
            break
    if failures:
        own_errors = [f for f in failures.values() if isinstance(f, Error)]
        bugs = [f for f in failures.values() if not isinstance(f, Error)]
        raise (bugs or own_errors)[0]
    return [results[rank] for rank in range(world)]


def _rank_main(
    rank: int,
    world: int,
    port: int,
    pipe: Connection,
    parent: int,
    cores: list[int] | None,
    threads: int,
    place: Place | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and ends its ranks
    if cores is not None:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)

    def report(share: float, text: str) -> None:
        if rank == 0:
            pipe.send(("report", (share, text)))

    try:
        store = join(place, rank, port)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        result = function(report, *arguments)
        dist.barrier()
        pipe.send(("result", result))
    except Error as error:
        pipe.send(("failed", error))
    except BaseException:
        import traceback

        pipe.send(("failed", RankFailed(rank, traceback.format_exc())))
    finally:
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def join(place: Place | None, rank: int, port: int) -> TCPStore:
    """Moves this rank to its place, and returns the store of the new group.

    With emulated hosts, rank 0 runs the store, as with torchrun. Otherwise the process that started
    the ranks runs it.
    """
    if place is None:
        return TCPStore("127.0.0.1", port, None, False)
    place.enter()
    return TCPStore(place.store, STORE_PORT, None, rank == 0, wait_for_workers=False)


def cores_of(rank: int, world: int) -> list[int]:
    """The rank's share of the cores: its own cores if there are enough, else one core in turn."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < world:
        return [cores[rank % len(cores)]]
    return cores[rank * len(cores) // world : (rank + 1) * len(cores) // world]
