"""Point-to-point transfers between ranks: what the group fabric needs of torch.distributed.

weft opens a process group of its own beside the caller's (as MPI libraries duplicate a
communicator): its messages can never meet the caller's, and when it fails the caller's group still
works. Transfers are asynchronous, and progress while compute runs: gloo's own threads move the
bytes of everything that is posted.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from weft.errors import Unsupported
from weft.fabric.group.responsive import become_responsive

ABORT_TAG = 2**31 - 1
_FOREVER = timedelta(days=10_000)
_CONNECT_WAITS = 5
"""How often gloo waits for its timeout until it gives up to be connected."""


class Posted(Protocol):
    """A transfer under way."""

    def wait(self, timeout: timedelta = ...) -> bool: ...


class Group(Protocol):
    """What is used of a process group; a `dist.ProcessGroup` and each backend of one has it."""

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> Posted: ...  # noqa: N803
    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> Posted: ...  # noqa: N803


class Transport:
    """The messages of one rank. A message has a peer and a tag; a receive may be larger than what
    comes. After `abort`, here or on a peer, everything under way fails on both."""

    def __init__(self, group: Group, rank: int, world: int) -> None:
        self._group = group
        self._peers = [peer for peer in range(world) if peer != rank]
        self._aborting = threading.Lock()
        self.aborted = False

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Posted:
        return self._group.send([tensor], peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Posted:
        return self._group.recv([tensor], peer, tag)

    def abort(self) -> None:
        """Closes all connections: what waits here fails at once, and what waits on a peer as soon
        as it hears of it."""
        with self._aborting:
            if self.aborted:
                return
            self.aborted = True
            # A transfer that passes its deadline is gloo's one way to close its connections.
            # One to a peer that is gone fails at once and closes nothing else, so all are tried.
            nothing = torch.empty(1, dtype=torch.uint8)
            for peer in self._peers:
                with suppress(RuntimeError):
                    self.receive(nothing, peer, ABORT_TAG).wait(timedelta(milliseconds=1))


def wait(work: Posted, seconds: float | None = None) -> None:
    """Waits for a transfer; RuntimeError if it fails or takes longer."""
    allowed = _FOREVER if seconds is None else timedelta(seconds=max(seconds, 1e-3))
    work.wait(allowed)


def connect_seconds(deadline: float) -> float:
    """How long opening a transport may take: a deadline, but not too short to connect in."""
    return max(deadline, 10.0)


def open_transport(group: dist.ProcessGroup, name: str, deadline: float) -> Transport:
    """A transport of all ranks of a group, which all must ask for under the same name."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    backend = _cpu_backend(group)
    if backend != "gloo" and not _is_accelerator(backend):
        return Transport(group, rank, world)  # e.g. mpi: it has its own way between machines
    store = dist.distributed_c10d._get_process_group_store(group)
    made: list[ProcessGroupGloo | RuntimeError] = []

    def make() -> None:
        # gloo's threads come from this one, and are as responsive: they have little to do, and
        # each time they wait for compute to leave the core the link stands still.
        become_responsive()
        try:
            limit = timedelta(seconds=connect_seconds(deadline) / _CONNECT_WAITS)
            made.append(ProcessGroupGloo(PrefixStore(name, store), rank, world, limit))
        except RuntimeError as failure:
            made.append(failure)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    own = made[0]
    if isinstance(own, RuntimeError):
        raise Unsupported(
            f"has no way over the network to all other ranks ({_short(own)}); see whether its "
            "host name resolves to an address that they reach, or name the interface with "
            "GLOO_SOCKET_IFNAME"
        )
    return Transport(own, rank, world)  # type: ignore[arg-type]


def _cpu_backend(group: dist.ProcessGroup) -> str:
    """The backend that carries CPU tensors of a group."""
    try:
        return str(group._get_backend(torch.device("cpu")).name()).lower()
    except RuntimeError:  # e.g. a group of nccl alone
        return "gloo"


def _is_accelerator(backend: str) -> bool:
    return backend in ("nccl", "rccl", "xccl", "hccl")


def _short(failure: Exception, most: int = 120) -> str:
    lines: Sequence[str] = str(failure).strip().splitlines() or [type(failure).__name__]
    text = lines[0]
    return text if len(text) <= most else text[: most - 3] + "..."
