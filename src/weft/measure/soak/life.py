"""The processes of a life: ranks that come into being together, make bursts of calls, and end.

They are forked from a server that has torch imported, so that a new life is cheap. They end with
that server, and it ends with the process that soaks.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from weft.errors import Error
from weft.measure.soak.burst import Groups, Said, burst
from weft.measure.soak.places import PLACES, FabricPlace
from weft.measure.stopping import without_interrupts

DEADLINE = 30.0
"""The deadline of waits, in seconds: a hang becomes a Timeout, which is a fault here."""
_PR_SET_PDEATHSIG = 1


class Life:
    """The ranks of one life, and what they are told."""

    def __init__(self, place: FabricPlace, world: int) -> None:
        multiprocessing.set_forkserver_preload(["torch", "torch.distributed", __name__])
        context = multiprocessing.get_context("forkserver")
        self._stores = [_store()]
        self.pipes: dict[int, Connection] = {}
        self.processes: dict[int, Any] = {}
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world, self._stores[0].port, place.name)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            with without_interrupts():  # also the server from which ranks are forked
                process.start()
            theirs.close()
            self.pipes[rank], self.processes[rank] = ours, process

    @property
    def ranks(self) -> list[int]:
        """Those that were not killed."""
        return list(self.pipes)

    def tell(self, what: str, *arguments: Any) -> None:
        for pipe in self.pipes.values():
            pipe.send((what, arguments))

    def signal(self, rank: int, number: int) -> float:
        """Sends a signal to a rank; returns the moment."""
        moment = time.monotonic()
        os.kill(self.processes[rank].pid, number)
        return moment

    def hear(self, within: float, killed: int | None = None) -> dict[int, Said | None]:
        """The answers of all ranks; None of one that gave none. killed: one that may give none."""
        found: dict[int, Said | None] = {}
        until = time.monotonic() + within
        waiting = {pipe: rank for rank, pipe in self.pipes.items()}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    found[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    found[rank] = None
        found.update(dict.fromkeys(waiting.values()))
        if killed is not None:
            self.pipes.pop(killed).close()
            found.pop(killed)
        return found

    def form_again(self) -> None:
        """Has the ranks that are left form a new group. The old store stays: gloo cannot be stopped
        while it connects, and a thread of it may still wait for the address of a rank that died."""
        self._stores.append(_store())
        self.tell("form", self._stores[-1].port, self.ranks)

    def end(self) -> None:
        for pipe in self.pipes.values():
            pipe.close()
        for process in self.processes.values():
            process.kill()
            process.join()


def _store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


# -- inside a rank ---------------------------------------------------------------------------------


def _serve(
    pipe: Connection,
    rank: int,
    world: int,
    port: int,
    name: str,
) -> None:
    place = PLACES[name]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.freeze()
    os.environ.update(place.environment(rank, world), WEFT_DEADLINE=str(DEADLINE))
    torch.set_num_threads(1)
    place.load()
    groups: Groups | None = None

    def form(port: int, members: Sequence[int]) -> Said:
        nonlocal groups
        if dist.is_initialized():
            dist.destroy_process_group()
        store = TCPStore("127.0.0.1", port, None, False)
        here = members.index(rank)
        dist.init_process_group("gloo", store=store, rank=here, world_size=len(members))
        groups = Groups(place.device)
        return Said()

    def run(*arguments: Any) -> Said:
        assert groups is not None
        return burst(groups, *arguments)

    what, given = "form", (port, list(range(world)))
    while True:
        try:
            said = {"form": form, "burst": run}[what](*given)
        except Error as error:
            said = Said(error=f"{type(error).__name__}: {error}")
        except BaseException:
            said = Said(error=traceback.format_exc())
        try:
            pipe.send(said)
            what, given = pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            os._exit(0)
